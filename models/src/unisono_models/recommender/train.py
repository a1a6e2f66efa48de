"""Train the recommender: torchrun --nproc-per-node N -m unisono_models.recommender train [RECIPE] [--field VALUE …]"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.config import Config, OptimizerConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.dataset import build_datasets, prefetch
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.loss import TrainingModule, build_training_module
from unisono_models.recommender.recipes import RECIPES
from unisono_models.recommender.report import write_run_report
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.randomness import derive_seed
from unisono_models.training.schedule import learning_rate_factor


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    if config.parallel.kind != "ddp":
        raise ValueError(f"parallel.kind={config.parallel.kind}: a recommender has ddp only: its plan spreads the tables")
    with start_session(config, model="recommender", recipe=recipe) as session:
        train(config, session)


def train(config: Config, session: Session) -> None:
    """Train one run, from its data to its report."""
    ranks, watchdog = session.ranks, session.watchdog
    seed, dtype = config.run.seed, parameter_dtype(config.parallel)
    source = build_datasets(config.data, seed=seed, ranks=ranks)
    watchdog.beat()

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    learner = build_training_module(config, source, dtype=dtype, device=ranks.device)
    dense = list(learner.dense_parameters())
    model = parallelize(learner, config.parallel, ranks) if dense else learner  # DDP refuses to have nothing to do
    optimizers = {"dense": make_optimizer(learner, config.optimizer)} if dense else {}
    evaluator = Evaluator(learner, source, ranks, watchdog, dtype, max_broken=config.data.max_broken)

    with TrainingLoop(session, model, optimizers) as loop:
        if loop.first_step and loop.state["data"] != source.fingerprint:
            raise ValueError(f"{config.data.source} is not what the run began with: its rows have other meanings now")
        skipped = SkipReport(before=loop.state.get("skipped"), what="rows", place="line")
        if not loop.first_step and source.ratings is not None and ranks.first:  # every rank has read all of it
            skipped.count(source.ratings.read, source.ratings.skipped)
        skipped.check(config.data.max_broken)
        count = f"{source.train.rows:,} rows, {loop.steps:,} steps of {config.data.batch:,} on {ranks.size} ranks"
        loop.say(f"{session.directory.path}: {count}")
        for note in source.notes:
            loop.say(note)
        shares = prefetch(
            lambda step: source.train.batch(step, ranks.rank, ranks.size).to(ranks.device, dtype),
            loop.first_step,
            loop.last_step,
        )
        for step in loop:
            batch, following = next(shares)
            if source.ratings is None:
                skipped.add(batch)
            rate = set_learning_rates(learner, optimizers, config, step)
            learner.train()
            with autocast_context(config.parallel, ranks):
                if loop.just_resumed and dense:
                    rehearse(model, optimizers, batch, step)
                losses = model(batch, step=step)
            if config.tables.prefetch and following is not None:
                learner.prefetch(following)
            losses["loss"].backward()  # the tables take their step here
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            loop.log({**losses, "lr": rate}, samples=source.train.size_of(step))

            if loop.evaluation_due:
                loop.record(evaluator("valid"))
            if loop.checkpoint_due:
                score = loop.first_metric if source.valid.rows else None
                loop.save({"skipped": skipped.summary(), "data": source.fingerprint}, score=score)
            if source.ratings is None and (loop.stopping or loop.log_due):
                skipped.check(config.data.max_broken)
        if not loop.finished:
            return
        valid_metrics = loop.final_metrics(lambda: evaluator("valid"))
        test_metrics = loop.record(evaluator("test"))  # once, at the end: nothing is chosen by it
    write_run_report(session.directory, config, evaluator, {**valid_metrics, **test_metrics}, skipped)


def make_optimizer(learner: TrainingModule, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW on all that is not in a table. No weight decay for vectors and scalars."""
    dense = list(learner.dense_parameters())
    groups = [
        {"params": [p for p in dense if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in dense if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2))


def set_learning_rates(learner: TrainingModule, optimizers: dict[str, torch.optim.AdamW], config: Config, step: int) -> float:
    """Those of `step`, for tables and the rest; the latter is returned."""
    part = learning_rate_factor(step, config.run.steps, warmup=config.optimizer.warmup, final=config.optimizer.final)
    tables = learner.tables.collection.optimizer
    assert tables is not None
    for optimizer, rate in [(tables, config.tables.lr), *((each, config.optimizer.lr) for each in optimizers.values())]:
        for group in optimizer.param_groups:
            group["lr"] = rate * part
    return config.optimizer.lr * part


def rehearse(model: torch.nn.Module, optimizers: dict[str, torch.optim.AdamW], batch: Batch, step: int) -> None:
    """DDP arranges its buckets, by which sums are rounded, in its first backward. Here it does so before a resumed step.

    The tables, whose optimizer steps in the backward, are left out.
    """
    model(batch, step=step, frozen_tables=True)["loss"].backward()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
