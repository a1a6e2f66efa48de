"""Train the GAN: torchrun --nproc-per-node N -m unisono_models.gan.train [RECIPE] [--field VALUE …]"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.optim import Adam

from unisono.dataparallel import GradientSync
from unisono_models.gan.config import Config, OptimizerConfig
from unisono_models.gan.evaluation import Evaluator, check_counts
from unisono_models.gan.game.batches import Batches
from unisono_models.gan.game.objective import Game
from unisono_models.gan.judge.kept import ready_judge
from unisono_models.gan.networks.moving_average import start_average, update_average
from unisono_models.gan.outcome import conclude, write_frame
from unisono_models.gan.pictures.generating import generate_like
from unisono_models.gan.recipes import RECIPES
from unisono_models.gan.source import open_source
from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import derive_seed
from unisono_models.training.run.log import RunLog
from unisono_models.training.run.preemption import StopSignal
from unisono_models.training.run.run_directory import open_run
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import is_due, learning_rate_factor


def main(args: Sequence[str] | None = None) -> None:
    recipe, config = RECIPES.choose(args)
    timeout = config.run.timeout
    with start_ranks(timeout=timeout) as ranks, StopSignal() as stopping, Watchdog(ranks, timeout=timeout) as heartbeat:
        train(recipe, config, ranks, stopping, heartbeat)


def train(recipe: str, config: Config, ranks: Ranks, stopping: StopSignal, heartbeat: Watchdog) -> None:
    """One run, from its data to its report."""
    run = open_run(config, model="gan", recipe=recipe, ranks=ranks)
    seed, steps, kind = config.run.seed, config.run.steps, config.model.condition
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    source = open_source(config.data, condition=kind, ranks=ranks, beat=heartbeat.beat)
    check_counts(source, config.evaluation)

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    game = Game(config.model, config.loss, **source.shapes(kind)).to(ranks.device, dtype)
    average = start_average(game.generator)
    networks = {"discriminator": game.discriminator, "generator": game.generator}
    optimizers = {name: make_optimizer(network, config.optimizer) for name, network in networks.items()}
    syncs = {name: GradientSync(network.parameters()) for name, network in networks.items()}
    judge = ready_judge(run.path / "judge.safetensors", source, config.evaluation, ranks, heartbeat)
    evaluator = Evaluator(source, judge, ranks, heartbeat, config.evaluation, conditional=kind != "none")
    order = StepSampler(len(source.train), config.data.batch, seed)
    batches = Batches(source.train, kind, order, config.model.noise, seed, ranks, dtype)
    produce = partial(generate_like, average, source.train, seed=seed)

    def play(name: str, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A step of one network, by the gradients of all ranks."""
        losses.pop("loss").backward()
        syncs[name]()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return {f"loss/{name}": losses.pop("play"), **{f"{name}/{term}": value for term, value in losses.items()}}

    with Checkpoints(run.checkpoints, keep=config.checkpoint.keep, timeout=config.run.timeout) as checkpoints:
        first, state = checkpoints.load(game, optimizers, extra={"average": average}) or (0, {})
        if first and state["data"] != source.fingerprint:
            raise ValueError(f"{config.data.source} is not what the run began with: its pictures are others now")
        last, figures = steps if config.run.stop_after is None else min(steps, config.run.stop_after), None
        with RunLog(run, ranks, steps=steps, first_step=first, log_every=config.run.log_every) as log:
            done, seen = first, state.get("seen", 0)
            log.say(f"{run.path}: {len(source.train):,} pictures, {steps:,} steps of {order.batch} on {ranks.size} ranks")
            for note in source.notes:
                log.say(note)
            log.say(f"continuing at step {first:,}" if first else f"judge: {judge.accuracy:.1%} of the test pictures right")
            if not first:
                write_frame(run, average, source, step=0, seed=seed)
            for step in range(first, last):
                batch = batches.at(step)
                part = learning_rate_factor(step, steps, warmup=config.optimizer.warmup, final=config.optimizer.final)
                for optimizer in optimizers.values():
                    for group in optimizer.param_groups:
                        group["lr"] = config.optimizer.lr * part
                gamma = gamma_of(config, step)
                fakes = game.generator(batch.noise, batch.condition)
                shown = play("discriminator", game.discriminator_step(batch, fakes, gamma=gamma))
                shown |= play("generator", game.generator_step(batch, fakes))
                seen += sum(batch.sizes)
                update_average(
                    average, game.generator, pictures=sum(batch.sizes), seen=seen, half_life=config.optimizer.half_life
                )
                heartbeat.beat(step + 1)
                log.step(step, {**shown, "lr": config.optimizer.lr * part}, samples=sum(batch.sizes))

                done, figures = step + 1, None
                stop = stopping.agreed() or done == last < steps
                looks = (config.run.log_every, config.run.evaluate_every, config.checkpoint.every)
                if stop or done == steps or any(is_due(done, every) for every in looks):
                    check_finite(shown, step)  # here, since to look at every step would make the host wait
                if done == steps or is_due(done, config.evaluation.pictures_every):
                    write_frame(run, average, source, step=done, seed=seed)
                if done == steps or is_due(done, config.run.evaluate_every):
                    figures = evaluator(produce)
                    log.evaluation(step, figures)
                if stop or done == steps or figures or is_due(done, config.checkpoint.every):
                    log.flush()
                    kept = {"seen": seen, "data": source.fingerprint}
                    checkpoints.save(done, game, optimizers, kept, extra={"average": average})
                if stop:
                    break
            saved = checkpoints.wait()
            if done < steps:
                if not saved:
                    raise SystemExit(f"stopped after step {done:,} of {steps:,}, which could not be saved")
                log.say(f"stopped after step {done:,} of {steps:,}; the same command goes on from there")
                return
            if figures is None:  # an earlier start came as far as this
                figures = evaluator(produce)
                log.evaluation(steps - 1, figures)
        conclude(run, config, average, source, evaluator, figures)


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


if __name__ == "__main__":
    main()
