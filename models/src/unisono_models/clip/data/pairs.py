"""What the learner asks of a data set: pictures with captions, read by their place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PairBatch:
    """Some pairs, in the order asked for. Broken ones are left out, so there may be fewer than asked for, or none."""

    images: Tensor
    """uint8, (n, 3, size, size), RGB."""
    captions: list[str]
    concepts: Tensor
    """int64, (n,): pairs with the same number show the same thing, and are no negatives of each other."""
    index: Tensor
    """int64, (n,): the place in the whole data set, which randomness goes by."""


class Pairs(Protocol):
    """A data set of pairs with random access, so that every rank can take its share of a global order."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        ...
