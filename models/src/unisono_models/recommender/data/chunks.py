"""Data that is too large for memory: it is read in chunks of rows, in an order that depends on the seed alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono.embedding.hashing import splitmix64
from unisono_models.recommender.data.batch import Batch, Ids, empty_batch
from unisono_models.recommender.data.features import Feature
from unisono_models.training.distributed.launch import shard_range
from unisono_models.training.randomness import make_generator

IdEncoding = Literal["hashed", "mapped"]


class Chunks(Protocol):
    """Rows in chunks. Each chunk can be read without the chunks before it."""

    @property
    def sizes(self) -> Tensor:
        """int64 (chunks,): the rows of each chunk, bad rows included."""

    @property
    def groups(self) -> Tensor | None:
        """int64 (chunks,): chunks with the same number can only be read together. None: each chunk is read alone."""

    def read(self, chunk: int, start: int, stop: int) -> Batch:
        """Read rows `start` to `stop` of a chunk, with ids as the files have them: any int64, and -1 for a blank.

        `index` of the batch counts rows over all chunks. Bad rows are in `skipped`, with the name of their file and their
        line or row in it, counted from 1.
        """


class ChunkOrder:
    """Epochs of all rows: the chunks in random order, cut into batches. The last batch of an epoch may be shorter.

    The rows of a step depend only on (sizes, batch, seed, step), and each rank takes a share of them. Rows within a chunk stay
    together, so small chunks mix better. Memory: some bytes for each chunk.

    Args:
        sizes: int64 (chunks,), the rows of each chunk. A chunk may be empty.
        shuffle: False keeps the chunks in order, in every epoch.
        groups: int64 (chunks,). Chunks with the same number follow each other, in random order. None mixes all chunks.

    Example:
        >>> order = ChunkOrder(torch.tensor([3, 2, 3]), batch=5, seed=0, shuffle=False)
        >>> order.slices(0, 0, 1), order.slices(1, 0, 1), order.steps_per_epoch
        ([(0, 0, 3), (1, 0, 2)], [(2, 0, 3)], 2)
        >>> [order.slices(0, rank, 2) for rank in range(2)]
        [[(0, 0, 3)], [(1, 0, 2)]]
    """

    def __init__(self, sizes: Tensor, *, batch: int, seed: int, shuffle: bool = True, groups: Tensor | None = None) -> None:
        if batch < 1:
            raise ValueError(f"ChunkOrder: batch={batch} must be at least 1")
        if sizes.dtype != torch.int64 or sizes.ndim != 1 or (sizes < 0).any():
            raise ValueError(
                f"ChunkOrder: sizes: expected int64 (chunks,), none negative, got {sizes.dtype} {tuple(sizes.shape)}"
            )
        if groups is not None and groups.shape != sizes.shape:
            raise ValueError(
                f"ChunkOrder: groups: expected the shape of sizes, {tuple(sizes.shape)}, got {tuple(groups.shape)}"
            )
        self.rows = int(sizes.sum())
        self._sizes = sizes
        self._groups = groups
        self._batch = batch
        self._seed = seed
        self._shuffle = shuffle
        self._cached_epoch: tuple[int, Tensor, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self._batch)

    def size_of(self, step: int) -> int:
        """The number of rows of a step, over all ranks."""
        return min(self._batch, self.rows - step % max(self.steps_per_epoch, 1) * self._batch)

    def slices(self, step: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """The rows of a step that belong to `rank`, as (chunk, start, stop). There are none if the step has too few rows.

        Ranks have contiguous shares that differ by one row at most.
        """
        if not self.rows:
            raise ValueError(f"ChunkOrder.slices: step={step}: there are {len(self._sizes)} chunks without any row")
        if not 0 <= rank < world_size:
            raise ValueError(f"ChunkOrder.slices: rank={rank} must be at least 0 and less than world_size={world_size}")
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self._batch
        share = shard_range(self.size_of(step), rank, world_size)
        return self.cut(first + share.start, first + share.stop, epoch=epoch)

    def cut(self, start: int, stop: int, *, epoch: int) -> list[tuple[int, int, int]]:
        """Rows `start` to `stop` of an epoch, as (chunk, start, stop)."""
        if start >= stop:
            return []
        chunks, ends = self._epoch(epoch)
        first, last = torch.searchsorted(ends, torch.tensor([start, stop - 1]), right=True).tolist()
        chunks, ends = chunks[first : last + 1], ends[first : last + 1]
        begins = ends - self._sizes[chunks]
        starts = (start - begins).clamp(min=0)
        stops = ends.clamp(max=stop) - begins
        slices = zip(chunks.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return [(chunk, first_row, last_row) for chunk, first_row, last_row in slices if first_row < last_row]

    def _epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The chunks in the order of an epoch, and the number of rows up to the end of each."""
        epoch = epoch if self._shuffle else 0
        cached = self._cached_epoch
        if cached is None or cached[0] != epoch:
            chunks = self._shuffled(epoch) if self._shuffle else torch.arange(len(self._sizes))
            cached = epoch, chunks, self._sizes[chunks].cumsum(0)
            self._cached_epoch = cached  # one assignment: another thread may read it meanwhile
        return cached[1], cached[2]

    def _shuffled(self, epoch: int) -> Tensor:
        random = make_generator(self._seed, "order", epoch)
        chunks = torch.randperm(len(self._sizes), generator=random)
        if self._groups is not None and len(chunks):
            group_order = torch.randperm(int(self._groups.max()) + 1, generator=random)
            chunks = chunks[group_order[self._groups[chunks]].argsort(stable=True)]
        return chunks


class StreamingDataset:
    """A RowDataset (see dataset.py) that reads chunks: in random order to train, in file order to evaluate.

    To resume, ask for the next step: there is no other state, and the number of ranks may change.

    Args:
        chosen: int64, the numbers of the chunks to use, in any order. None uses all.
        features: The features that the chunks were opened with.
        ids: "hashed" turns an id into a row of the feature's table, 1 + its hash modulo (rows - 1), and a blank into row 0.
            Two ids may share a row. "mapped" leaves ids as the files have them, for an IdMap.
        batch: Rows of a step, over all ranks.
        seed: Decides the order of each epoch.

    Example:
        chunks = CriteoChunks(paths, features, index=index_lines(paths))
        train, valid, test = split_chunks(chunks, 0.01, seed=0)
        dataset = StreamingDataset(chunks, train, features=features, ids="hashed", batch=4096, seed=0)
        dataset.batch(17, rank, world_size)  ->  this rank's rows of step 17
    """

    def __init__(
        self,
        chunks: Chunks,
        chosen: Tensor | None = None,
        *,
        features: Sequence[Feature],
        ids: IdEncoding,
        batch: int,
        seed: int,
    ) -> None:
        if ids not in ("hashed", "mapped"):
            raise ValueError(f"StreamingDataset: ids={ids!r} must be 'hashed' or 'mapped'")
        if ids == "hashed" and (unsized := [f.name for f in features if f.kind != "number" and f.rows < 2]):
            raise ValueError(
                f"StreamingDataset: features: {', '.join(unsized)}: ids='hashed' needs the number of rows, as NAME:KIND:ROWS"
            )
        count = len(chunks.sizes)
        chosen = torch.arange(count) if chosen is None else chosen.sort().values
        if len(chosen) and (chosen[0] < 0 or chosen[-1] >= count or (chosen.diff() == 0).any()):
            raise ValueError(
                f"StreamingDataset: chosen: expected different numbers from 0 to {count - 1}, got {chosen.tolist()[:20]}"
            )
        self._chunks = chunks
        self._chosen = chosen
        self._features = tuple(features)
        self._ids = ids
        sizes = chunks.sizes[chosen]
        self.rows = int(sizes.sum())
        """The rows of all ranks, bad ones included."""
        groups = None if chunks.groups is None else chunks.groups[chosen]
        self._shuffled = ChunkOrder(sizes, batch=batch, seed=seed, groups=groups)
        self._in_order = ChunkOrder(sizes, batch=batch, seed=seed, shuffle=False)

    def size_of(self, step: int) -> int:
        return self._shuffled.size_of(step)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        return self._read(self._shuffled.slices(step, rank, world_size))

    def scan(self, rank: int, world_size: int, rows: int = 8192) -> Iterator[Batch]:
        if rows < 1:
            raise ValueError(f"StreamingDataset.scan: rows={rows} must be at least 1")
        share = shard_range(self.rows, rank, world_size)
        longest_share = len(shard_range(self.rows, 0, world_size))
        for start in range(share.start, share.start + max(longest_share, 1), rows):
            yield self._read(self._in_order.cut(start, min(start + rows, share.stop), epoch=0))

    def _read(self, slices: Sequence[tuple[int, int, int]]) -> Batch:
        if not slices:
            return empty_batch(self._features)
        batch = Batch.cat([self._chunks.read(int(self._chosen[chunk]), start, stop) for chunk, start, stop in slices])
        if self._ids == "mapped":
            return batch
        rows = {feature.name: feature.rows for feature in self._features if feature.kind != "number"}
        return replace(batch, ids={name: hash_ids(ids, rows=rows[name]) for name, ids in batch.ids.items()})


def hash_ids(ids: Ids, *, rows: int) -> Ids:
    """Hash each id to a row of a table, 1 to rows - 1; -1, which stands for a blank, to row 0. The same on every machine.

    Example:
        >>> hash_ids(torch.tensor([17, 18, -1]), rows=1000)
        tensor([615, 497,   0])
    """
    values = ids.values if isinstance(ids, Ragged) else ids
    hashed = torch.where(values == -1, 0, 1 + splitmix64(values) % (rows - 1))
    return ids._replace(values=hashed) if isinstance(ids, Ragged) else hashed
