"""Train the GAN: torchrun --nproc-per-node N -m unisono_models.gan train [RECIPE] [--field VALUE …]"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.optim import Adam

from unisono.dataparallel import GradientSync
from unisono_models.gan.config import Config, OptimizerConfig
from unisono_models.gan.data.dataset import build_datasets
from unisono_models.gan.data.loader import BatchLoader
from unisono_models.gan.evaluate import Evaluator, validate_counts
from unisono_models.gan.feature_extractor import load_or_train_feature_extractor
from unisono_models.gan.loss import GAN
from unisono_models.gan.model.generator import start_average, update_average
from unisono_models.gan.model.sampling import generate_for_evaluation
from unisono_models.gan.recipes import RECIPES
from unisono_models.gan.report import save_sample_grid, write_run_report
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.randomness import derive_seed
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import is_due, learning_rate_factor


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    with start_session(config, model="gan", recipe=recipe) as session:
        train(config, session)


def train(config: Config, session: Session) -> None:
    """Train one run, from its data to its report."""
    run, ranks, watchdog = session.directory, session.ranks, session.watchdog
    seed, kind = config.run.seed, config.model.condition
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    source = build_datasets(config.data, condition=kind, ranks=ranks, beat=watchdog.beat)
    validate_counts(source, config.evaluation)

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    game = GAN(config.model, config.loss, **source.shapes(kind)).to(ranks.device, dtype)
    average = start_average(game.generator)
    networks = {"discriminator": game.discriminator, "generator": game.generator}
    optimizers = {name: make_optimizer(network, config.optimizer) for name, network in networks.items()}
    syncs = {name: GradientSync(network.parameters()) for name, network in networks.items()}
    judge = load_or_train_feature_extractor(run.path / "judge.safetensors", source, config.evaluation, ranks, watchdog)
    evaluator = Evaluator(source, judge, ranks, watchdog, config.evaluation, conditional=kind != "none")
    sampler = StepSampler(len(source.train), config.data.batch, seed)
    batches = BatchLoader(source.train, kind, sampler, config.model.noise, seed, ranks, dtype)
    produce = partial(generate_for_evaluation, average, source.train, seed=seed)

    def update(name: str, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take a step with one of the networks, by the gradients of all ranks."""
        losses.pop("loss").backward()
        syncs[name]()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return {f"loss/{name}": losses.pop("play"), **{f"{name}/{term}": value for term, value in losses.items()}}

    with TrainingLoop(session, game, optimizers, extra={"average": average}) as loop:
        if loop.first_step and loop.state["data"] != source.fingerprint:
            raise ValueError(f"{config.data.source} is not what the run began with: its pictures are others now")
        seen = loop.state.get("seen", 0)
        count = f"{len(source.train):,} pictures, {loop.steps:,} steps of {sampler.batch} on {ranks.size} ranks"
        loop.say(f"{run.path}: {count}")
        for note in source.notes:
            loop.say(note)
        if not loop.first_step:
            loop.say(f"judge: {judge.accuracy:.1%} of the test pictures right")
            save_sample_grid(run, average, source, step=0, seed=seed)
        for step in loop:
            batch = batches.at(step)
            rate = set_learning_rates(optimizers, config, step)
            fakes = game.generator(batch.noise, batch.condition)
            losses = update("discriminator", game.discriminator_step(batch, fakes, gamma=gamma_of(config, step)))
            losses |= update("generator", game.generator_step(batch, fakes))
            samples = sum(batch.sizes)
            seen += samples
            update_average(average, game.generator, pictures=samples, seen=seen, half_life=config.optimizer.half_life)
            loop.log({**losses, "lr": rate}, samples=samples)

            if loop.log_due or loop.evaluation_due or loop.checkpoint_due:
                check_finite(losses, step)  # not at every step, where it would make the host wait
            if loop.finished or is_due(loop.done, config.evaluation.pictures_every):
                save_sample_grid(run, average, source, step=loop.done, seed=seed)
            if loop.evaluation_due:
                loop.record(evaluator(produce))
            if loop.checkpoint_due:
                loop.save({"seen": seen, "data": source.fingerprint})
        if not loop.finished:
            return
        metrics = loop.final_metrics(lambda: evaluator(produce))
    write_run_report(run, config, average, source, evaluator, metrics)


def set_learning_rates(optimizers: dict[str, Adam], config: Config, step: int) -> float:
    """Give both optimizers the learning rate of `step`, and return it."""
    factor = learning_rate_factor(step, config.run.steps, warmup=config.optimizer.warmup, final=config.optimizer.final)
    rate = config.optimizer.lr * factor
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rate


def make_optimizer(network: torch.nn.Module, config: OptimizerConfig) -> Adam:
    """Adam, whose betas must be floats."""
    return Adam(network.parameters(), lr=config.lr, betas=(float(config.beta1), float(config.beta2)), eps=1e-8)


def check_finite(losses: dict[str, torch.Tensor], step: int) -> None:
    """Raises: FloatingPointError, alike on all ranks, if one of the global `losses` is not a finite number."""
    if wrong := [name for name, value in losses.items() if not value.isfinite()]:
        raise FloatingPointError(
            f"step {step:,}: {', '.join(wrong)} is not finite: the training has diverged. Begin another run with a lower "
            "--optimizer.lr or a higher --loss.gamma"
        )


def gamma_of(config: Config, step: int) -> float:
    """The weight of the penalties in `step`: 0 where none is due, else as many times as steps go by without."""
    if config.loss.penalty == "none" or not is_due(step, config.loss.penalty_every):
        return 0.0
    part = learning_rate_factor(step, config.run.steps)
    return config.loss.penalty_every * (config.loss.gamma_final + (config.loss.gamma - config.loss.gamma_final) * part)
