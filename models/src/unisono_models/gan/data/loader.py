"""A rank's share of a step: real pictures, conditions and noise, a function of (seed, step) and the place in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unisono_models.gan.config import Condition
from unisono_models.gan.data.images import Images
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.randomness import derive_seed, normal
from unisono_models.training.sampler import StepSampler


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's rows of the global batch of a step."""

    images: Tensor
    """(n, channels, size, size) between -1 and 1."""
    condition: Tensor | None
    """(n,) labels or (n, d) vectors: of the pictures, and of the fakes that are made in the same place."""
    ids: Tensor | None
    """(n,): the same number for the same condition."""
    noise: Tensor
    """(n, noise)"""
    sizes: tuple[int, ...]
    """Rows on every rank."""
    shift: int
    """How far off in the global batch the condition is taken from that does not match. At least 1, if there are two rows."""


@dataclass(frozen=True)
class BatchLoader:
    """What rank `rank` of `size` gets in each step: slices of one global batch, whatever the number of ranks."""

    images: Images
    kind: Condition
    order: StepSampler
    noise: int
    seed: int
    ranks: Ranks
    dtype: torch.dtype = torch.float32

    def at(self, step: int) -> Batch:
        """The share of `step`."""
        whole = self.order.at(step)
        shares = whole.tensor_split(self.ranks.size)
        sizes = tuple(len(share) for share in shares)
        mine, first = shares[self.ranks.rank], sum(sizes[: self.ranks.rank])
        places = torch.arange(first, first + len(mine), device=self.ranks.device)
        return Batch(
            images=self.images.floats(mine, dtype=self.dtype, device=self.ranks.device),
            condition=condition_of(self.images, mine, kind=self.kind, device=self.ranks.device, dtype=self.dtype),
            ids=None if self._ids is None else self._ids[mine].to(self.ranks.device),
            noise=normal(self.seed, "noise", step, places, (self.noise,)).to(self.dtype),
            sizes=sizes,
            shift=1 + derive_seed(self.seed, "matching", step) % max(1, len(whole) - 1),
        )

    @cached_property
    def _ids(self) -> Tensor | None:
        if self.kind == "none":
            return None
        if self.kind == "class" or self.images.vectors is None:
            return self.images.labels
        ids: Tensor = torch.unique(self.images.vectors, dim=0, return_inverse=True)[1]
        return ids


def condition_of(
    images: Images, places: Tensor, *, kind: Condition, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """The condition of the pictures at `places`: labels, vectors or None. Raises: ValueError if there is none of that kind."""
    if kind == "none":
        return None
    held = images.labels if kind == "class" else images.vectors
    if held is None:
        raise ValueError(f"condition_of: kind={kind!r}, but the pictures have no {'labels' if kind == 'class' else 'vectors'}")
    return held[places.to(held.device)].to(device) if kind == "class" else held[places.to(held.device)].to(device, dtype)
