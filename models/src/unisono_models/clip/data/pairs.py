"""What the learner asks of a data set: pictures with captions, read by their place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from unisono_models.datasets.skip_report import SkippedSample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
    skipped: tuple[SkippedSample, ...] = ()
    """Those left out. They travel with the batch, so that they are counted whichever process has read it."""

    def __len__(self) -> int:
        return len(self.captions)


class Pairs(Protocol):
    """A data set of pairs with random access, so that every rank can take its share of a global order."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        ...


class CaptionedPairs(Pairs, Protocol):
    """Pairs whose captions and concepts can be had without their pictures: what splits and tokenizers need."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found damaged or odd at opening, one line each."""
        ...

    def captions(self, indices: Sequence[int]) -> list[str]:
        """The captions at `indices`, one for each; empty where `read` would skip the row for want of one."""
        ...

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The concepts at `indices`, one for each."""
        ...
