"""Train the recommender: torchrun --nproc-per-node N -m unisono_models.recommender train [RECIPE] [--field VALUE …]"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.config import Config, OptimizerConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.dataset import build_datasets, prefetch
from unisono_models.recommender.data.describe import describe_data
from unisono_models.recommender.data.sequences import train_on_sequences
from unisono_models.recommender.early_stopping import EarlyStopping
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.loss import TrainingModule, build_training_module
from unisono_models.recommender.protocols import apply_protocol, check_labels, complete_config
from unisono_models.recommender.recipes import RECIPES
from unisono_models.recommender.report import write_run_report
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import autocast_context, parallelize, parameter_dtype
from unisono_models.training.errors import UserError
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.phases import phase
from unisono_models.training.randomness import derive_seed
from unisono_models.training.schedule import learning_rate_factor


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    config = apply_protocol(config)
    check_settings(config)
    with start_session(config, model="recommender", recipe=recipe) as session:
        train(config, session)


def train(config: Config, session: Session) -> None:
    """Train one run, from its data to its report."""
    ranks, watchdog = session.ranks, session.watchdog
    dtype = parameter_dtype(config.parallel)
    datasets = build_datasets(config.data, seed=config.run.seed, ranks=ranks)
    check_labels(config, datasets)
    given, config = config, complete_config(config, datasets)
    if config.model.kind == "sasrec":
        datasets = train_on_sequences(datasets, length=config.model.length, seed=config.run.seed)
    streamed = datasets.ratings is None
    watchdog.beat()

    torch.manual_seed(derive_seed(config.run.seed, "weights"))  # the same weights on every rank
    module = build_training_module(config, datasets, dtype=dtype, device=ranks.device)
    dense = list(module.dense_parameters())
    model = parallelize(module, config.parallel, ranks) if dense else module  # DDP needs at least one parameter
    optimizers = {"dense": make_optimizer(module, config.optimizer)} if dense else {}
    evaluator = Evaluator(
        module, datasets, ranks, watchdog, dtype, max_broken=config.data.max_broken, repeats=config.evaluation.repeats
    )

    with TrainingLoop(session, model, optimizers) as loop:
        fingerprint = datasets.fingerprint
        if loop.first_step and loop.state["data"] != fingerprint:
            raise UserError(
                f"--data.source {config.data.source} has changed since the run began: its ids and rows mean something else "
                "now. Start a new run: --run.dir"
            )
        skipped = SkipReport(before=loop.state.get("skipped"), what="rows", place=datasets.place)
        if datasets.ratings is not None and not loop.first_step and ranks.first:  # every rank has read the same rows
            skipped.count(datasets.ratings.read, datasets.ratings.skipped)
        skipped.check(config.data.max_broken)
        rows = f"{datasets.train.rows:,} rows, {loop.steps:,} steps of {config.data.batch:,} on {ranks.described}"
        loop.say(f"{session.directory.path}: {rows}")
        notes = [*describe_data(config, given, datasets), *datasets.notes]
        for note in [*notes, *([skipped.report()] if not streamed else [])]:
            loop.say(note)
        stopping = EarlyStopping(config.evaluation.patience, state=loop.state.get("stopping"))
        batches = prefetch(
            lambda step: datasets.train.batch(step, ranks.rank, ranks.world_size).to(ranks.device, dtype),
            loop.first_step,
            loop.last_step,
        )
        for step in loop:
            batch, next_batch = next(batches)
            if streamed:
                skipped.add(batch)
            lr = set_learning_rates(module, optimizers, config, step)
            module.train()
            if loop.just_resumed and dense:
                with autocast_context(config.parallel, ranks):
                    arrange_ddp_buckets(model, optimizers, batch, step)
            losses = train_step(model, module, optimizers, batch, config, ranks, step=step, next_batch=next_batch)
            loop.log({**losses, "lr": lr}, samples=datasets.train.size_of(step))

            if loop.evaluation_due:
                name, value = next(iter(loop.record(evaluator("valid")).items()))
                if stopping.update(value):
                    loop.finish_early(f"{name} has not improved in {stopping.since} evaluations")
            if loop.checkpoint_due:
                score = loop.first_metric if datasets.valid.rows else None
                state = {"skipped": skipped.summary(), "data": fingerprint, "stopping": stopping.state}
                loop.save(state, score=score)
            if streamed and (loop.stopping or loop.log_due):
                skipped.check(config.data.max_broken)
        batches.close()  # ends the thread that reads ahead
        if not loop.finished:
            return
        metrics = dict(loop.final_metrics(lambda: evaluator("valid")))
        if config.evaluation.patience and (best_step := loop.load_best()) is not None:
            loop.say(f"the weights after step {best_step:,} are tested and exported: the best by validation")
            metrics = {**evaluator("valid"), "best_step": float(best_step)}
        metrics |= loop.record(evaluator("test"))  # once, at the end: nothing is chosen by it
    write_run_report(session.directory, config, evaluator, metrics, skipped, notes)


def train_step(
    model: nn.Module,
    module: TrainingModule,
    optimizers: Mapping[str, torch.optim.Optimizer],
    batch: Batch,
    config: Config,
    ranks: Ranks,
    *,
    step: int,
    next_batch: Batch | None = None,
) -> dict[str, Tensor]:
    """Take one step with this rank's `batch`, and return its losses. `model`: `module` as DDP wraps it."""
    with autocast_context(config.parallel, ranks), phase("forward"):
        losses: dict[str, Tensor] = model(batch, step=step)
    if config.tables.prefetch and next_batch is not None:
        module.prefetch(next_batch)
    with phase("backward"):
        losses["loss"].backward()  # the optimizer of the tables steps in here
    with phase("optimizer"):
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    return losses


def check_settings(config: Config) -> None:
    """Check what the settings alone can tell. Raises: UserError."""
    if config.parallel.kind != "ddp":
        raise UserError(f"--parallel.kind {config.parallel.kind}: must be ddp. The tables are sharded by --tables.plan")
    if config.model.kind == "sasrec" and config.data.split not in ("time", "leave_one_out"):
        raise UserError(
            f"--data.split {config.data.split}: sasrec would learn from what comes after the test. Choose leave_one_out or time"
        )
    if config.evaluation.patience and not config.run.evaluate_every:
        raise UserError(
            f"--evaluation.patience {config.evaluation.patience} counts evaluations, and there are none before the end: set "
            "--run.evaluate-every to a number of steps"
        )
    if config.evaluation.patience and not config.data.parts[1]:
        raise UserError(
            f"--evaluation.patience {config.evaluation.patience} needs rows to validate with: --data.parts has none"
        )


def make_optimizer(module: TrainingModule, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW for all parameters outside of the tables. Vectors and scalars have no weight decay."""
    dense = list(module.dense_parameters())
    groups = [
        {"params": [p for p in dense if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in dense if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2))


def set_learning_rates(module: TrainingModule, optimizers: dict[str, torch.optim.AdamW], config: Config, step: int) -> float:
    """Set the learning rates of a step, for the tables and for the dense parameters. Return the latter."""
    factor = learning_rate_factor(step, config.run.steps, warmup=config.optimizer.warmup, final=config.optimizer.final)
    table_optimizer = module.tables.collection.optimizer
    assert table_optimizer is not None
    for group in table_optimizer.param_groups:
        group["lr"] = config.tables.lr * factor
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * factor
    return config.optimizer.lr * factor


def arrange_ddp_buckets(model: torch.nn.Module, optimizers: dict[str, torch.optim.AdamW], batch: Batch, step: int) -> None:
    """Run a backward whose gradients are dropped, before a resumed step.

    DDP arranges its buckets in its first backward, and they decide how sums are rounded. The tables are frozen here, because
    their optimizer would step in the backward.
    """
    model(batch, step=step, frozen_tables=True)["loss"].backward()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
