"""What a model gives to the simulation: one short function that builds its real training and a batch without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono_models.training.distributed.launch import Ranks


@dataclass(frozen=True)
class SimulatedTraining:
    """A training of one rank that can take a step. It is built inside `simulate_rank`, or on real ranks to compare."""

    module: nn.Module
    optimizers: Sequence[Optimizer]
    step: Callable[[], object]
    """Takes one step: makes this rank's batch, and calls the model's own train_step."""
    tables: Sequence[Tensor] = ()
    """Sharded tables and their optimizer states, as this rank holds them."""
    notes: tuple[str, ...] = ()
    """What the simulation had to assume about the data."""


class BuildTraining(Protocol):
    """Builds the training of a config for this rank. `ranks.device` is "cuda" without a GPU, and no tensor has data."""

    def __call__(self, config: Any, ranks: Ranks) -> SimulatedTraining: ...


def largest_share(batch: int, world_size: int) -> int:
    """Return the rows of the rank with the largest share of a batch, which is rank 0.

    Example:
        >>> largest_share(10, 4)
        3
    """
    return -(-batch // world_size)


def draw_integers(low: int, high: int, *shape: int) -> Tensor:
    """Draw integers from `low` to `high` - 1 on the CPU, the same in each call and each process."""
    random = torch.Generator().manual_seed(high)
    return torch.randint(low, high, shape, generator=random)
