"""What training and evaluation ask of a part of the data, wherever it lies; and one that lies in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.ratings import Ratings
from unisono_models.training.sampler import StepSampler


class Part(Protocol):
    """Rows of one global order, of which each rank takes a share. The batch of a step depends on the seed alone."""

    @property
    def rows(self) -> int: ...

    def size_of(self, step: int) -> int:
        """The number of rows of a step of training, over all ranks, bad ones included."""
        ...

    def batch(self, step: int, rank: int, size: int) -> Batch:
        """The rows of a step of training that belong to `rank` of `size`."""
        ...

    def scan(self, rank: int, size: int, rows: int = 8192) -> Iterator[Batch]:
        """The rows of `rank` of `size`, in order, in as many batches on every rank: a model communicates in each."""
        ...


class MemoryPart:
    """Some of the rows of Ratings, by number."""

    def __init__(self, ratings: Ratings, numbers: Tensor, *, batch: int, seed: int) -> None:
        self.ratings, self.numbers = ratings, numbers
        self._order = StepSampler(len(numbers), batch, seed) if len(numbers) else None

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def size_of(self, step: int) -> int:
        return len(self._order.at(step)) if self._order else 0

    def batch(self, step: int, rank: int, size: int) -> Batch:
        if self._order is None:
            raise ValueError("MemoryPart: there are no rows to learn from")
        return self.ratings.batch(self.numbers[self._order.share(step, rank, size)])

    def scan(self, rank: int, size: int, rows: int = 8192) -> Iterator[Batch]:
        for share in shares(len(self.numbers), rank, size, rows):
            yield self.ratings.batch(self.numbers[share])


def shares(count: int, rank: int, size: int, rows: int) -> list[Tensor]:
    """The places, out of `count`, that belong to `rank` of `size`, in as many pieces on every rank, of about `rows` at most.

    Example:
        >>> [len(piece) for piece in shares(10, 1, 2, 3)], [len(piece) for piece in shares(1, 1, 2, 3)]
        ([3, 2], [0])
    """
    mine = torch.arange(count).tensor_split(size)[rank]
    longest = math.ceil(count / size)
    return list(mine.tensor_split(max(1, math.ceil(longest / rows))))
