"""Blocks: data too large for memory, in runs of rows, and the order in which steps go through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.features import Feature
from unisono_models.training.randomness import make_generator


class Blocks(Protocol):
    """Rows in blocks, each of which can be read without those before it."""

    @property
    def sizes(self) -> Tensor:
        """int64 (blocks,): rows in each, bad ones included."""

    @property
    def groups(self) -> Tensor | None:
        """int64 (blocks,): to read one block is to read all those with the same number. None: each is read alone."""

    def read(self, block: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of a block, with ids as the files have them: any int64, -1 for none.

        index: rows of the blocks before plus the place in the block. Bad rows are in `skipped`, with the name of the file
        and, as their index, the line or row in it, counted from 1.
        """


class BlockOrder:
    """Epochs of all rows, block after block in random order, cut into batches. The last batch of an epoch is shorter.

    The rows of a step depend on (sizes, batch, seed) and the step alone; ranks take shares of them. Rows within a block stay
    together, so small blocks mix better. Kept in memory: some bytes for each block.

    sizes: int64 (blocks,), rows in each, also none. shuffle: False: the blocks in order, in every epoch.
    groups: int64 (blocks,): blocks with the same number follow each other, in random order. None: all are mixed.

    Example:
        >>> order = BlockOrder(torch.tensor([3, 2, 3]), batch=5, seed=0, shuffle=False)
        >>> order.parts(0, 0, 1), order.parts(1, 0, 1), order.steps_per_epoch
        ([(0, 0, 3), (1, 0, 2)], [(2, 0, 3)], 2)
        >>> [order.parts(0, rank, 2) for rank in range(2)]
        [[(0, 0, 3)], [(1, 0, 2)]]
    """

    def __init__(self, sizes: Tensor, *, batch: int, seed: int, shuffle: bool = True, groups: Tensor | None = None) -> None:
        if batch < 1:
            raise ValueError(f"BlockOrder: batch={batch} must be at least 1")
        if sizes.dtype != torch.int64 or sizes.ndim != 1 or (sizes < 0).any():
            raise ValueError(
                f"BlockOrder: sizes: expected int64 (blocks,), none negative, got {sizes.dtype} {tuple(sizes.shape)}"
            )
        self.rows = int(sizes.sum())
        if groups is not None and groups.shape != sizes.shape:
            raise ValueError(
                f"BlockOrder: groups: expected {len(sizes)} numbers, one for each block, got {tuple(groups.shape)}"
            )
        self._sizes, self._batch, self._seed, self._shuffle, self._groups = sizes, batch, seed, shuffle, groups
        self._last: tuple[int, Tensor, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self._batch)

    def size_of(self, step: int) -> int:
        """The number of rows of a step."""
        return min(self._batch, self.rows - step % max(self.steps_per_epoch, 1) * self._batch)

    def parts(self, step: int, rank: int, size: int) -> list[tuple[int, int, int]]:
        """The share of `rank` of `size` of the step's rows, as (block, start, stop): contiguous, as even as it goes.

        None if there are fewer rows than ranks before this one.
        """
        if not self.rows:
            raise ValueError(f"BlockOrder.parts: step={step}: there are {len(self._sizes)} blocks without any row")
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self._batch
        start, stop = share(self.size_of(step), rank, size)
        return self.cut(first + start, first + stop, epoch=epoch)

    def cut(self, start: int, stop: int, *, epoch: int) -> list[tuple[int, int, int]]:
        """Rows `start` to `stop` of an epoch, as (block, start, stop)."""
        if start >= stop:
            return []
        blocks, ends = self._epoch(epoch)
        first, last = torch.searchsorted(ends, torch.tensor([start, stop - 1]), right=True).tolist()
        numbers, stops = blocks[first : last + 1], ends[first : last + 1]
        starts = stops - self._sizes[numbers]
        found = zip(
            numbers.tolist(), (start - starts).clamp(min=0).tolist(), (stops.clamp(max=stop) - starts).tolist(), strict=True
        )
        return [part for part in found if part[1] < part[2]]  # a block may be empty

    def _epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The blocks in the order of an epoch, and how many rows there are up to the end of each."""
        epoch = epoch if self._shuffle else 0
        last = self._last
        if last is None or last[0] != epoch:
            count = len(self._sizes)
            random = make_generator(self._seed, "order", epoch)
            blocks = torch.randperm(count, generator=random) if self._shuffle else torch.arange(count)
            if self._shuffle and self._groups is not None and count:
                places = torch.randperm(int(self._groups.max()) + 1, generator=random)
                blocks = blocks[places[self._groups[blocks]].argsort(stable=True)]
            last = self._last = epoch, blocks, self._sizes[blocks].cumsum(0)  # set at once: threads may read ahead
        return last[1], last[2]


def share(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The first row of `rank` of `size`, and the one after its last, as torch.tensor_split divides them.

    Example:
        >>> [share(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    if not 0 <= rank < size:
        raise ValueError(f"share: rank={rank} must be at least 0 and less than size={size}")
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def empty_batch(features: Sequence[Feature], *, skipped: Sequence[SkippedSample] = ()) -> Batch:
    """No rows, of these features.

    Example:
        >>> empty_batch([Feature("I1", "number"), Feature("C1")]).numbers.shape
        torch.Size([0, 1])
    """
    none = torch.empty(0, dtype=torch.int64)
    columns = sum(feature.kind == "number" for feature in features)
    return Batch(
        {f.name: Ragged.from_lengths(none, none) if f.kind == "ids" else none for f in features if f.kind != "number"},
        numbers=torch.empty(0, columns),
        labels=torch.empty(0),
        index=none,
        skipped=tuple(skipped),
    )
