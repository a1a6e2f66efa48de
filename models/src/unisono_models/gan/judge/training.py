"""The training of a judge."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.images import Images
from unisono_models.gan.judge.network import Judge
from unisono_models.gan.source import Source
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import uniform
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import learning_rate_factor

SEED = 0  # not the run's: figures of runs with different seeds are by one judge
_RATE = 4e-3
_WARMUP = 0.1
_SHIFT = 1 / 16  # of the side, at most
_TILE = 500  # test pictures at a time


def train_judge(judge: Judge, source: Source, config: EvaluationConfig, heartbeat: Watchdog | None = None) -> float:
    """Draw the judge's weights and train them on source.train; returns its accuracy on source.test, NaN if that is empty.

    By one process alone, and not by shares: a thousand steps make another judge of another rounding, and figures are to be the
    same on any number of ranks. Pictures are shifted at random by up to a sixteenth of their side, with their edges drawn out.
    The scale of the features, and so of distances between them, grows with the steps: figures of judges that were trained
    for different numbers of steps do not compare.
    """
    judge.start(SEED)
    weight = next(judge.parameters())
    order = StepSampler(len(source.train), config.judge_batch, SEED)
    optimizer = Adam(judge.parameters(), lr=_RATE)
    for step in range(config.judge_steps):
        places = order.at(step)
        pictures = source.train.floats(places, dtype=weight.dtype, device=weight.device)
        pictures, targets = _pose(judge, pictures, source.train, places, uniform(SEED, "turn", step, places))
        logits = judge(_shift(pictures, uniform(SEED, "shift", step, places.to(weight.device), (2,))))
        F.cross_entropy(logits, targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = _RATE * learning_rate_factor(step, config.judge_steps, warmup=_WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        if heartbeat is not None:
            heartbeat.beat()
    return _measure(judge, source.test)


@torch.no_grad()
def _measure(judge: Judge, images: Images) -> float:
    """Part of the pictures that are taken for what they are, or of all quarter-turns of them."""
    weight = next(judge.parameters())
    right = total = 0
    for places in torch.arange(len(images)).split(_TILE):
        for turn in (0.0,) if judge.classes else (0.0, 0.25, 0.5, 0.75):
            pictures = images.floats(places, dtype=weight.dtype, device=weight.device)
            pictures, targets = _pose(judge, pictures, images, places, torch.full((len(places),), turn))
            right += int((judge(pictures).argmax(1) == targets).sum())
            total += len(places)
    return right / total if total else math.nan


def _pose(judge: Judge, pictures: Tensor, images: Images, places: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures as the judge sees them, and what it is to say: their labels, or the quarters in `turns`, from 0 to 1."""
    if judge.classes:
        if images.labels is None:
            raise ValueError("train_judge: a judge of classes needs labels, these pictures have none")
        return pictures, images.labels[places].to(pictures.device)
    quarters = (turns * 4).long().to(pictures.device)
    turned = torch.stack([pictures.rot90(quarter, (2, 3)) for quarter in range(4)])
    return turned[quarters, torch.arange(len(pictures), device=pictures.device)], quarters


def _shift(pictures: Tensor, parts: Tensor) -> Tensor:
    """Pictures moved by whole pixels, down and across as `parts` (n, 2) from 0 to 1 say; edges are drawn out."""
    size, rows = pictures.shape[2], torch.arange(len(pictures), device=pictures.device)
    most = round(size * _SHIFT)
    if not most or not len(pictures):
        return pictures
    padded = F.pad(pictures, (most,) * 4, mode="replicate")
    first = (parts * (2 * most + 1)).long()
    cells = first[:, :, None] + torch.arange(size, device=pictures.device)
    moved = padded[rows[:, None, None], :, cells[:, 0, :, None], cells[:, 1, None, :]]
    return moved.movedim(3, 1)
