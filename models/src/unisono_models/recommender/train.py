"""Train the recommender: torchrun --nproc-per-node N -m unisono_models.recommender.train [RECIPE] [--field VALUE …]"""

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
from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import derive_seed
from unisono_models.training.run.log import RunLog
from unisono_models.training.run.preemption import StopSignal
from unisono_models.training.run.run_directory import open_run
from unisono_models.training.schedule import is_due, learning_rate_factor


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    timeout = config.run.timeout
    with start_ranks(timeout=timeout) as ranks, StopSignal() as stopping, Watchdog(ranks, timeout=timeout) as heartbeat:
        train(recipe, config, ranks, stopping, heartbeat)


def train(recipe: str, config: Config, ranks: Ranks, stopping: StopSignal, heartbeat: Watchdog) -> None:
    """One run, from its data to its report."""
    if config.parallel.kind != "ddp":
        raise ValueError(f"parallel.kind={config.parallel.kind}: a recommender has ddp only: its plan spreads the tables")
    run = open_run(config, model="recommender", recipe=recipe, ranks=ranks)
    seed, steps, dtype = config.run.seed, config.run.steps, parameter_dtype(config.parallel)
    source = build_datasets(config.data, seed=seed, ranks=ranks)
    heartbeat.beat()

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    learner = build_training_module(config, source, dtype=dtype, device=ranks.device)
    dense = list(learner.dense_parameters())
    model = parallelize(learner, config.parallel, ranks) if dense else learner  # DDP refuses to have nothing to do
    optimizers = {"dense": make_optimizer(learner, config.optimizer)} if dense else {}
    evaluator = Evaluator(learner, source, ranks, heartbeat, dtype, max_broken=config.data.max_broken)

    with Checkpoints(run.checkpoints, keep=config.checkpoint.keep, timeout=config.run.timeout) as checkpoints:
        first, state = checkpoints.load(model, optimizers) or (0, {})
        meaning = source.fingerprint
        if first and state["data"] != meaning:
            raise ValueError(f"{config.data.source} is not what the run began with: its rows have other meanings now")
        skipped = SkipReport(before=state.get("skipped"), what="rows", place="line")
        if not first and source.ratings is not None and ranks.first:  # every rank has read all of it
            skipped.count(source.ratings.read, source.ratings.skipped)
        skipped.check(config.data.max_broken)
        last, figures = steps if config.run.stop_after is None else min(steps, config.run.stop_after), None
        shares = prefetch(lambda step: source.train.batch(step, ranks.rank, ranks.size).to(ranks.device, dtype), first, last)
        with RunLog(run, ranks, steps=steps, first_step=first, log_every=config.run.log_every) as log:
            done = first
            log.say(f"{run.path}: {source.train.rows:,} rows, {steps:,} steps of {config.data.batch:,} on {ranks.size} ranks")
            for note in source.notes:
                log.say(note)
            if first:
                log.say(f"continuing at step {first:,}")
            for step, (batch, following) in enumerate(shares, first):
                learner.train()
                if source.ratings is None:
                    skipped.add(batch)
                rate = set_learning_rates(learner, optimizers, config, step)
                with autocast_context(config.parallel, ranks):
                    if step == first > 0 and dense:
                        rehearse(model, optimizers, batch, step)
                    losses = model(batch, step=step)
                if config.tables.prefetch and following is not None:
                    learner.prefetch(following)
                losses["loss"].backward()  # the tables take their step here
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
                heartbeat.beat(step + 1)
                log.step(step, {**losses, "lr": rate}, samples=source.train.size_of(step))

                done, figures = step + 1, None
                stop = stopping.agreed() or done == last < steps
                if done == steps or is_due(done, config.run.evaluate_every):
                    figures = evaluator("valid")
                    log.evaluation(step, figures)
                if stop or done == steps or figures or is_due(done, config.checkpoint.every):
                    log.flush()
                    score = figures[next(iter(figures))] if figures and source.valid.rows else None
                    kept = {"skipped": skipped.summary(), "data": meaning}
                    checkpoints.save(done, model, optimizers, kept, score=score)
                if source.ratings is None and (stop or is_due(done, config.run.log_every)):
                    skipped.check(config.data.max_broken)
                if stop:
                    break
            saved = checkpoints.wait()
            if done < steps:
                if not saved:
                    raise SystemExit(f"stopped after step {done:,} of {steps:,}, which could not be saved")
                log.say(f"stopped after step {done:,} of {steps:,}; the same command goes on from there")
                return
            if figures is None:  # an earlier start came as far as this
                figures = evaluator("valid")
                log.evaluation(steps - 1, figures)
            tested = evaluator("test")  # once, at the end: nothing is chosen by it
            log.evaluation(steps - 1, tested)
        write_run_report(run, config, evaluator, {**figures, **tested}, skipped)


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


if __name__ == "__main__":
    main()
