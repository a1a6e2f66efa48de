"""A stream: what training and evaluation read, from blocks on disk. A step's rows depend on the seed alone, not on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono.embedding.hashing import splitmix64
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.blocks import BlockOrder, Blocks, empty_batch, share
from unisono_models.recommender.features import Feature
from unisono_models.training.randomness import make_generator

RowsOf = Literal["hashed", "mapped"]


class Stream:
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
        blocks: Blocks,
        chosen: Tensor | None = None,
        *,
        features: Sequence[Feature],
        ids: RowsOf,
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
        self._shuffled = BlockOrder(sizes[chosen], batch=batch, seed=seed, groups=groups)
        self._in_order = BlockOrder(sizes[chosen], batch=batch, seed=seed, shuffle=False)

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


def hold_out(blocks: Blocks, part: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks to train on, to validate with and to test with: int64, sorted, none in two of them.

    part: of the rows, about, for validation, and as many for the test: at least a block each. 0: all is for training. Whole
    groups of blocks are held out if this part is one or more of them, or to validate would be to read all the data. Empty
    blocks are in none of the three.

    Raises: ValueError if there are too few blocks.
    """
    if not 0 <= part < 0.5:
        raise ValueError(f"hold_out: part={part} must be at least 0 and less than 0.5")
    filled = blocks.sizes.nonzero().squeeze(1)
    if part == 0:
        return filled, filled[:0], filled[:0]
    unit = torch.arange(len(filled))
    if blocks.groups is not None:
        groups, of_block = blocks.groups[filled].unique(return_inverse=True)
        unit = of_block if part * len(groups) >= 1 else unit
    place = torch.randperm(int(unit.max()) + 1 if len(unit) else 0, generator=make_generator(seed, "hold out"))[unit]
    ends = torch.zeros(len(place.unique()), dtype=torch.int64).index_add_(0, place, blocks.sizes[filled]).cumsum(0)
    rows = int(ends[-1]) if len(ends) else 0
    target = max(1, round(part * rows))
    first = int(torch.searchsorted(ends, target)) + 1
    second = int(torch.searchsorted(ends, int(ends[first - 1]) + target)) + 1 if first < len(ends) else len(ends)
    if second >= len(ends):
        raise ValueError(
            f"hold_out: part={part}: {len(ends)} blocks with {rows:,} rows are too few to hold out some for validation and "
            "some for the test: make smaller blocks (data.block), or hold out less"
        )
    return filled[place >= second], filled[place < first], filled[(place >= first) & (place < second)]
