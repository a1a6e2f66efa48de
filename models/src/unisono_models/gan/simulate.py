"""The training of the GAN for the simulation: real networks and losses, and images without data."""

from itertools import count

import torch

from unisono_models.gan.config import Config
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.data.loader import BatchLoader
from unisono_models.gan.loss import GAN
from unisono_models.gan.train import TrainStep
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.phases import phase
from unisono_models.training.sampler import StepSampler
from unisono_models.training.simulate.training import SimulatedTraining, draw_integers

_CLASSES = {"mnist-5k": 10, "emoji": 9}
_TEXT_FEATURES = 384  # of MiniLM


def build_training(config: Config, ranks: Ranks) -> SimulatedTraining:
    """Build the networks, and a step on this rank's share of the batch, as train.py does. The step has penalties, if any do."""
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    condition, batch = config.model.condition, config.data.batch
    classes = _CLASSES.get(config.data.source, 10)
    channels = 3 if config.data.colour else 1
    conditions = {"class": classes, "none": 0}.get(condition, _TEXT_FEATURES)
    images = ImageDataset(
        torch.zeros(batch, channels, config.data.size, config.data.size, dtype=torch.uint8),
        draw_integers(0, classes, batch),
        classes=tuple(map(str, range(classes))),
        vectors=torch.zeros(batch, conditions) if condition in ("vector", "text") else None,
    )
    shapes = {"size": config.data.size, "channels": channels, "conditions": conditions}
    gan = GAN(config.model, config.loss, **shapes, augment=config.augment).to(ranks.device, dtype)
    train_step = TrainStep(gan, config)
    sampler = StepSampler(batch, batch, config.run.seed)
    batches = BatchLoader(images, condition, sampler, config.model.noise, config.run.seed, ranks, dtype, config.augment)
    seen = count(1)

    def step() -> object:
        with phase("data"):
            data = batches.at(0)
        return train_step(data, step=0, seen=next(seen) * batch)

    notes = []
    if condition == "class" and config.data.source not in _CLASSES:
        notes.append(f"the number of classes is unknown without the data: {classes} are assumed")
    if condition in ("vector", "text"):
        notes.append(f"the condition is a vector of {conditions} numbers")
    if config.loss.penalty != "none" and config.loss.penalty_every > 1:
        notes.append(f"the step is one with penalties, which are one of --loss.penalty-every {config.loss.penalty_every}")
    return SimulatedTraining(gan, list(train_step.optimizers.values()), step, notes=tuple(notes))
