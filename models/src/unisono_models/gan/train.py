"""Train the GAN: torchrun --nproc-per-node N -m unisono_models.gan train [RECIPE] [--field VALUE …]"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from unisono.dataparallel import GradientSync
from unisono_models.gan.config import Config, OptimizerConfig
from unisono_models.gan.data.dataset import build_datasets
from unisono_models.gan.data.loader import Batch, BatchLoader
from unisono_models.gan.evaluate import Evaluator, describe_small_sets, validate_counts
from unisono_models.gan.feature_extractor import FILE, load_or_train_feature_extractor
from unisono_models.gan.loss import GAN
from unisono_models.gan.model.generator import start_average, update_average
from unisono_models.gan.model.sampling import generate_for_evaluation
from unisono_models.gan.recipes import RECIPES
from unisono_models.gan.report import save_sample_grid, write_run_report
from unisono_models.training.errors import UserError
from unisono_models.training.loop import Session, TrainingLoop, start_session
from unisono_models.training.phases import phase
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
    seed = config.run.seed
    condition = config.model.condition
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    datasets = build_datasets(config.data, condition=condition, ranks=ranks, beat=watchdog.beat)
    validate_counts(datasets, config.evaluation)

    torch.manual_seed(derive_seed(seed, "weights"))  # the same weights on every rank
    gan = GAN(config.model, config.loss, **datasets.shapes(condition), augment=config.augment).to(ranks.device, dtype)
    train_step = TrainStep(gan, config)
    average = train_step.average
    extractor = load_or_train_feature_extractor(run.path / FILE, datasets, config.evaluation, ranks, watchdog)
    evaluator = Evaluator(datasets, extractor, ranks, watchdog, config.evaluation, conditional=condition != "none")
    sampler = StepSampler(len(datasets.train), config.data.batch, seed)
    batches = BatchLoader(datasets.train, condition, sampler, config.model.noise, seed, ranks, dtype, config.augment)
    generate = partial(generate_for_evaluation, average, datasets.train, seed=seed)

    with TrainingLoop(session, gan, train_step.optimizers, extra={"average": average}) as loop:
        if loop.first_step and loop.state["data"] != datasets.fingerprint:
            raise UserError(
                f"--data.source {config.data.source} has other images now than when the run began. Restore them, or begin "
                "another run in another --run.dir"
            )
        seen = loop.state.get("seen", 0)
        loop.say(
            f"{run.path}: {len(datasets.train):,} images, {loop.steps:,} steps, global batch of {sampler.batch:,}, "
            f"{ranks.described}"
        )
        for note in (*datasets.notes, *describe_small_sets(datasets, config.evaluation)):
            loop.say(note)
        if not loop.first_step:
            loop.say(f"accuracy of the feature extractor on the test set: {extractor.accuracy:.1%}")
            save_sample_grid(run, average, datasets, step=0, seed=seed)
        for step in loop:
            with phase("data"):
                batch = batches.at(step)
            lr = set_learning_rate(train_step.optimizers, config, step)
            batch_size = sum(batch.sizes)
            seen += batch_size
            losses = train_step(batch, step=step, seen=seen)
            loop.log({**losses, "lr": lr}, samples=batch_size)

            if loop.finished or is_due(loop.done, config.evaluation.images_every):
                save_sample_grid(run, average, datasets, step=loop.done, seed=seed)
            if loop.evaluation_due:
                loop.record(evaluator(generate))
            if loop.checkpoint_due:
                loop.save({"seen": seen, "data": datasets.fingerprint})
        if not loop.finished:
            return
        metrics = loop.final_metrics(lambda: evaluator(generate))
    write_run_report(run, config, average, datasets, evaluator, metrics)


class TrainStep:
    """Takes the steps: the discriminator's, the generator's, and that of the moving average of the generator's weights."""

    def __init__(self, gan: GAN, config: Config) -> None:
        networks = {"discriminator": gan.discriminator, "generator": gan.generator}
        self.gan, self.config = gan, config
        self.average = start_average(gan.generator)
        self.optimizers = {name: make_optimizer(network, config.optimizer) for name, network in networks.items()}
        self._syncs = {name: GradientSync(network.parameters()) for name, network in networks.items()}

    def __call__(self, batch: Batch, *, step: int, seen: int) -> dict[str, Tensor]:
        """Take one step with this rank's `batch`, and return its losses. `seen`: the training images so far, these included."""
        gan, config = self.gan, self.config
        with phase("forward"):
            fakes = gan.generator(batch.noise, batch.condition)
            judged = gan.discriminator_loss(batch, fakes, gamma=penalty_weight(config, step))
        losses = self._update("discriminator", judged)
        with phase("forward"):
            judged = gan.generator_loss(batch, fakes)
        losses |= self._update("generator", judged)
        with phase("optimizer"):
            half_life = config.optimizer.half_life
            update_average(self.average, gan.generator, batch=sum(batch.sizes), seen=seen, half_life=half_life)
        return losses

    def _update(self, name: str, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take a step with one of the networks, with the gradients of all ranks."""
        with phase("backward"):
            losses.pop("loss").backward()
        with phase("sync"):
            self._syncs[name]()
        with phase("optimizer"):
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()
        return {f"loss/{name}": losses.pop("adversarial"), **{f"{name}/{term}": loss for term, loss in losses.items()}}


def make_optimizer(network: torch.nn.Module, config: OptimizerConfig) -> Adam:
    betas = (float(config.beta1), float(config.beta2))  # Adam rejects integers
    return Adam(network.parameters(), lr=config.lr, betas=betas, eps=1e-8)


def set_learning_rate(optimizers: dict[str, Adam], config: Config, step: int) -> float:
    """Set the learning rate of `step` in both optimizers, and return it."""
    factor = learning_rate_factor(step, config.run.steps, warmup=config.optimizer.warmup, final=config.optimizer.final)
    lr = config.optimizer.lr * factor
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = lr
    return lr


def penalty_weight(config: Config, step: int) -> float:
    """Return the weight of the penalties in `step`; 0 in steps without penalties, which the others make up for."""
    if config.loss.penalty == "none" or not is_due(step, config.loss.penalty_every):
        return 0.0
    part = learning_rate_factor(step, config.run.steps)
    return config.loss.penalty_every * (config.loss.gamma_final + (config.loss.gamma - config.loss.gamma_final) * part)
