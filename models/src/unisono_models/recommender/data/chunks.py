"""Blocks: data too large for memory, in runs of rows, and the order in which steps go through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono.embedding.hashing import splitmix64
from unisono_models.recommender.data.batch import Batch, Ids, empty_batch
from unisono_models.recommender.data.features import Feature
from unisono_models.training.randomness import make_generator


class Chunks(Protocol):
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


class ChunkOrder:
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


IdEncoding = Literal["hashed", "mapped"]


class StreamingDataset:
    """Rows of some blocks: in random order, a batch for each step, to train; in their own order, to evaluate.

    chosen: int64, which of the blocks, in any order; None: all.
    features: those that the blocks were opened with.
    ids: "hashed": an id becomes a row of the feature's table, 1 + its hash modulo (rows - 1), a blank row 0; ids may share one.
    "mapped": ids stay as the files have them, for an IdMap.
    batch: rows of a step, over all ranks. seed: what the order of each epoch is drawn from.

    To resume, ask for the step that comes next: there is no other state, and the number of ranks may change.

    Example:
        blocks = CriteoBlocks(paths, features, index=index_lines(paths))
        train, valid, test = hold_out(blocks, 0.01, seed=0)
        stream = Stream(blocks, train, features=features, ids="hashed", batch=4096, seed=0)
        stream.batch(17, rank, size)  ->  this rank's rows of step 17
    """

    def __init__(
        self,
        blocks: Chunks,
        chosen: Tensor | None = None,
        *,
        features: Sequence[Feature],
        ids: IdEncoding,
        batch: int,
        seed: int,
    ) -> None:
        if ids not in ("hashed", "mapped"):
            raise ValueError(f"Stream: ids={ids!r} must be 'hashed' or 'mapped'")
        if ids == "hashed" and (open_ended := [f.name for f in features if f.kind != "number" and f.rows < 2]):
            raise ValueError(
                f"Stream: features: {', '.join(open_ended)}: ids='hashed' needs the number of rows, as NAME:KIND:ROWS"
            )
        sizes = blocks.sizes
        chosen = torch.arange(len(sizes)) if chosen is None else chosen.sort().values
        if len(chosen) and (chosen[0] < 0 or chosen[-1] >= len(sizes) or (chosen.diff() == 0).any()):
            raise ValueError(
                f"Stream: chosen: expected different numbers from 0 to {len(sizes) - 1}, got {chosen.tolist()[:20]}"
            )
        self._blocks, self._chosen = blocks, chosen
        self._features, self._ids = tuple(features), ids
        self.rows = int(sizes[chosen].sum())
        """Of all ranks, bad ones included."""
        groups = None if blocks.groups is None else blocks.groups[chosen]
        self._shuffled = ChunkOrder(sizes[chosen], batch=batch, seed=seed, groups=groups)
        self._in_order = ChunkOrder(sizes[chosen], batch=batch, seed=seed, shuffle=False)

    def size_of(self, step: int) -> int:
        """The number of rows of `step`, over all ranks, bad ones included."""
        return self._shuffled.size_of(step)

    def batch(self, step: int, rank: int, size: int) -> Batch:
        """The rows of `step` that belong to `rank` of `size`; perhaps none.

        Raises: ValueError if the stream has no rows at all.
        """
        return self._read(self._shuffled.parts(step, rank, size))

    def scan(self, rank: int, size: int, rows: int = 8192) -> Iterator[Batch]:
        """All rows of `rank` of `size`, in order: one contiguous share of them, `rows` at a time.

        On every rank there are as many batches, at least one, the last ones perhaps empty: models communicate in each.
        """
        if rows < 1:
            raise ValueError(f"Stream.scan: rows={rows} must be at least 1")
        first, last = share(self.rows, rank, size)
        longest = share(self.rows, 0, size)[1]
        for place in range(first, first + max(longest, 1), rows):
            yield self._read(self._in_order.cut(place, min(place + rows, last), epoch=0))

    def _read(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        if not parts:
            return empty_batch(self._features)
        batch = Batch.join([self._blocks.read(int(self._chosen[block]), start, stop) for block, start, stop in parts])
        if self._ids == "mapped":
            return batch
        rows = {feature.name: feature.rows for feature in self._features if feature.kind != "number"}
        return replace(batch, ids={name: hash_ids(ids, rows=rows[name]) for name, ids in batch.ids.items()})


def hash_ids(ids: Ids, *, rows: int) -> Ids:
    """A row of a table for each id, 1 to rows - 1, the same everywhere; of -1, which stands for a blank, row 0.

    Example:
        >>> hash_ids(torch.tensor([17, 18, -1]), rows=1000)
        tensor([615, 497,   0])
    """
    if isinstance(ids, Ragged):
        return ids._replace(values=_hash(ids.values, rows))
    return _hash(ids, rows)


def _hash(ids: Tensor, rows: int) -> Tensor:
    return torch.where(ids == -1, 0, 1 + splitmix64(ids) % (rows - 1))
