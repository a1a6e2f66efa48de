"""Which samples each step has: one order for all ranks, which depends on the seed only. Each rank takes its share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from unisono_models.training.randomness import make_generator


@dataclass(frozen=True, eq=False)
class StepSampler:
    """Random batches of `batch` out of `samples` samples, by step. The last batch of an epoch is shorter, not dropped.

    It has no state: a run that continues at some step gets the samples that it would have got without the interruption.

    `weights`: how often each sample appears in an epoch, relative to the others, from 0 to 1. None: once each. With weights an
    epoch has about as many samples as they add up to, in whole batches.

    Example:
        >>> sampler = StepSampler(samples=10, batch=4, seed=0)
        >>> [len(sampler.at(step)) for step in range(4)]
        [4, 4, 2, 4]
        >>> sorted(torch.cat([sampler.at(step) for step in range(3)]).tolist()) == list(range(10))
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
        """Return the indices of the samples of `step`, for all ranks together."""
        epoch, batch = self._place(step)
        return _epoch(self, epoch)[batch * self.batch : (batch + 1) * self.batch]

    def share(self, step: int, rank: int, size: int) -> Tensor:
        """Return the indices of the samples of `step` for `rank` of `size`: contiguous, as even as possible, perhaps none."""
        return self.at(step).tensor_split(size)[rank]

    @property
    def per_epoch(self) -> int:
        """The number of samples in an epoch."""
        if self.weights is None:
            return self.samples
        return max(1, round(sum(self.weights) / self.batch)) * self.batch

    def _place(self, step: int) -> tuple[int, int]:
        return divmod(step, -(-self.per_epoch // self.batch))


@lru_cache(maxsize=2)
def _epoch(sampler: StepSampler, epoch: int) -> Tensor:
    random = make_generator(sampler.seed, "order", epoch)
    shuffled = torch.randperm(sampler.samples, generator=random)
    if sampler.weights is None:
        return shuffled
    # Systematic sampling: points at equal distances on a line on which each sample is as long as its weight.
    ends = torch.tensor(sampler.weights, dtype=torch.float64)[shuffled].cumsum(0)
    points = torch.arange(sampler.per_epoch) + torch.rand((), generator=random, dtype=torch.float64)
    found = torch.searchsorted(ends, points * (ends[-1] / sampler.per_epoch), right=True).clamp(max=sampler.samples - 1)
    return shuffled[found[torch.randperm(len(found), generator=random)]]
