"""A small GAN in float64, a global batch, and the losses and gradients of any split of it over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.dataparallel import sync_gradients
from unisono_models.gan.config import AugmentConfig, LossConfig, ModelConfig
from unisono_models.gan.data.augment import NUMBERS
from unisono_models.gan.data.loader import Batch
from unisono_models.gan.loss import GAN

ROWS, CLASSES, WIDTH = 64, 5, 6
SMALL = {"noise": 8, "generator": (8, 4), "discriminator": (8, 4), "embedding": 8}

# name: (fields of ModelConfig, fields of LossConfig, weight of the penalties)
CASES: dict[str, tuple[dict[str, object], dict[str, object], float]] = {
    "paired": ({}, {}, 3.0),
    "all pairs, groups of 3": ({"stddev_group": 3}, {"kind": "all_pairs"}, 3.0),  # of 64: the last group has one row
    "non-saturating, r1, groups of 25": ({"stddev_group": 25}, {"kind": "non_saturating", "penalty": "r1"}, 3.0),
    "hinge, r2, one group": ({"stddev_group": 100}, {"kind": "hinge", "penalty": "r2"}, 3.0),
    "unconditional, groups of 2": ({"condition": "none", "stddev_group": 2}, {}, 3.0),
    "no groups, no penalty": ({"stddev_group": 0}, {"penalty": "none"}, 3.0),
    "labels that do not match": ({}, {"matching": 0.7}, 0.0),
    "vectors that do not match": ({"condition": "vector"}, {"matching": 0.7, "kind": "hinge"}, 0.0),
    "contrast of classes": ({}, {"contrast": 0.5}, 0.0),
    "contrast with vectors": ({"condition": "vector"}, {"contrast": 0.5}, 0.0),
    "all terms": ({"stddev_group": 3}, {"kind": "all_pairs", "matching": 0.7, "contrast": 0.5}, 3.0),
    "all terms, vectors": (
        {"condition": "text", "stddev_group": 5},
        {"kind": "non_saturating", "matching": 0.7, "contrast": 0.5},
        3.0,
    ),
    "shifted and recoloured": ({}, {}, 3.0),
}
AUGMENTS = {"shifted and recoloured": AugmentConfig(shift=0.25, colour=0.5)}


def make_gan(case: str) -> GAN:
    """Build the GAN of a case with the same weights on every rank. No weight is zero, as some are in a new network."""
    model, loss, _ = CASES[case]
    config = ModelConfig(**SMALL, **model)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    conditions = {"class": CLASSES, "none": 0}.get(config.condition, WIDTH)
    losses = LossConfig(**loss)  # type: ignore[arg-type]
    gan = GAN(config, losses, size=8, channels=1, conditions=conditions, augment=AUGMENTS.get(case)).double()
    for parameter in gan.parameters():
        fan = max(1, parameter[0].numel())
        parameter.data.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * fan**-0.5)
    return gan


def make_batch(condition: str, step: int = 0) -> Batch:
    """Make the global batch of `step`."""
    random = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(CLASSES, (ROWS,), generator=random)
    vectors = torch.randn(CLASSES, WIDTH, generator=random, dtype=torch.float64)
    return Batch(
        images=torch.rand(ROWS, 1, 8, 8, generator=random, dtype=torch.float64) * 2 - 1,
        condition={"class": ids, "none": None}.get(condition, vectors[ids]),
        ids=None if condition == "none" else ids,
        noise=torch.randn(ROWS, 8, generator=random, dtype=torch.float64),
        sizes=(ROWS,),
        shift=17 + step,
        real_changes=torch.rand(ROWS, NUMBERS, generator=random, dtype=torch.float64),
        fake_changes=torch.rand(ROWS, NUMBERS, generator=random, dtype=torch.float64),
    )


def rows_of_rank(batch: Batch, sizes: Sequence[int]) -> Batch:
    """Return this rank's rows of the global batch, or of its first sum(sizes) rows."""
    rank = 0 if len(sizes) == 1 else dist.get_rank()
    first = sum(sizes[:rank])
    rows = slice(first, first + sizes[rank])
    condition, ids = (None if x is None else x[rows] for x in (batch.condition, batch.ids))
    changes = (x[rows] for x in (batch.real_changes, batch.fake_changes) if x is not None)
    return Batch(batch.images[rows], condition, ids, batch.noise[rows], tuple(sizes), batch.shift, *changes)


LossesAndGradients = tuple[dict[str, float], dict[str, Tensor]]
Change = Callable[[GAN], None]


def losses_and_gradients(
    case: str, sizes: Sequence[int] = (ROWS,), change: Change | None = None, gamma: float | None = None
) -> LossesAndGradients:
    """Return the losses of both networks, and their gradients averaged over the ranks.

    change: a function that changes the GAN before.
    gamma: weight of the penalties. The default is that of the case.
    """
    gan = make_gan(case)
    gamma = CASES[case][2] if gamma is None else gamma
    if change is not None:
        change(gan)
    batch = rows_of_rank(make_batch(gan.generator.config.condition), sizes)
    fakes = gan.generator(batch.noise, batch.condition)
    values = {}
    gradients = {}
    for name, network, losses in (
        ("discriminator", gan.discriminator, gan.discriminator_loss(batch, fakes, gamma=gamma)),
        ("generator", gan.generator, gan.generator_loss(batch, fakes)),
    ):
        values |= {f"{name} {kind}": float(value.detach()) for kind, value in losses.items()}
        losses["loss"].backward()
        sync_gradients(network.parameters())
        gradients |= gradients_of(network, name)
    return values, gradients


def gradients_of(network: nn.Module, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": p.grad for key, p in network.named_parameters() if p.grad is not None}


@lru_cache
def one_process(case: str, change: Change | None = None, gamma: float | None = None, rows: int = ROWS) -> LossesAndGradients:
    """Return losses_and_gradients of this process with the whole batch."""
    return losses_and_gradients(case, (rows,), change=change, gamma=gamma)


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor], network: str = "") -> float:
    """Return the largest error of the tensors of `network`, relative to the expected norm (at least 1/1000 of that of all)."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if name.startswith(network)]
    whole = torch.stack([expected[name].norm() for name in names]).norm()
    return max(float((found[name] - expected[name]).norm() / max(expected[name].norm(), 1e-3 * whole)) for name in names)
