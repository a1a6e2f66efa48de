"""The order of samples: one for the whole job, of which each rank takes a share. A step's samples depend on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unisono_models.training.randomness import make_generator


@dataclass(frozen=True, eq=False)
class StepSampler:
    """Epochs of `samples` samples in random order, cut into batches. The last batch of an epoch is shorter, not dropped.

    `weights`: how often each sample comes in an epoch, relative to the others; None: once each. An epoch then has about as
    many samples as they add up to, and whole batches only.

    Example:
        >>> order = StepSampler(samples=10, batch=4, seed=0)
        >>> [len(order.at(step)) for step in range(4)]
        [4, 4, 2, 4]
        >>> sorted(torch.cat([order.at(step) for step in range(3)]).tolist()) == list(range(10))
        True
    """

    samples: int
    batch: int
    seed: int
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1:
            raise ValueError(f"StepSampler: samples={self.samples} and batch={self.batch}: both must be at least 1")
        if self.weights is not None and (len(self.weights) != self.samples or min(self.weights) < 0 or max(self.weights) > 1):
            raise ValueError(f"StepSampler: weights: expected {self.samples} numbers from 0 to 1, got {len(self.weights)}")

    def epoch_of(self, step: int) -> int:
        return self._place(step)[0]

    def at(self, step: int) -> Tensor:
        """The samples of `step`, over all ranks."""
        epoch, batch = self._place(step)
        return _epoch(self, epoch)[batch * self.batch : (batch + 1) * self.batch]

    def share(self, step: int, rank: int, size: int) -> Tensor:
        """The samples of `step` that belong to `rank` of `size`: contiguous, as even as it goes; none if there are too few."""
        return self.at(step).tensor_split(size)[rank]

    @property
    def per_epoch(self) -> int:
        """Samples in an epoch."""
        if self.weights is None:
            return self.samples
        return max(1, round(sum(self.weights) / self.batch)) * self.batch

    def _place(self, step: int) -> tuple[int, int]:
        return divmod(step, -(-self.per_epoch // self.batch))


@lru_cache(maxsize=2)
def _epoch(order: StepSampler, epoch: int) -> Tensor:
    random = make_generator(order.seed, "order", epoch)
    shuffled = torch.randperm(order.samples, generator=random)
    if order.weights is None:
        return shuffled
    # Systematic sampling: points at even distances on a line where each sample has its weight as length.
    ends = torch.tensor(order.weights, dtype=torch.float64)[shuffled].cumsum(0)
    points = torch.arange(order.per_epoch) + torch.rand((), generator=random, dtype=torch.float64)
    found = torch.searchsorted(ends, points * (ends[-1] / order.per_epoch), right=True).clamp(max=order.samples - 1)
    return shuffled[found[torch.randperm(len(found), generator=random)]]
