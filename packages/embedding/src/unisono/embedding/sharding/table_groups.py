"""Table groups: tables whose rows travel together, with one numbering of all their rows.

The rows of a group lie in group shards. If rows are whole, rank i holds group shard i, and the tables' shards lie in it one
below the other. If rows are cut into columns, there is one group shard, and ranks[j] holds column chunk j of it. If the tables
are replicated, every rank holds the only group shard. A *group row* numbers the rows of all group shards, one shard after the
other, so sorted group rows are grouped by the rank that holds them, and `group row - bases[i]` is the row in group shard i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.sharding.layouts import Box, HostMemory, Layout, chunk, chunk_size
from unisono.embedding.table import Table


class GroupKey(NamedTuple):
    """What the tables of a group have in common."""

    widths: tuple[int, ...]  # of each chunk of columns
    ranks: tuple[int, ...]  # of each chunk of columns, or, if rows are whole, of each group shard; empty: replicated
    pooling: str | None  # "sum" (and mean), "max", or None
    scale_grad_by_freq: bool
    max_norm: float | None
    norm_type: float
    rule: int  # the number of the optimizer's rule
    host_memory: HostMemory | None


class TableShard(NamedTuple):
    """A table's part of a group shard."""

    table: int
    start: int  # its first row in the group shard
    box: Box  # if there are several chunks of columns, that of the first


@dataclass
class TableGroup:
    key: GroupKey
    tables: list[int] = field(default_factory=list)
    shards: list[list[TableShard]] = field(default_factory=list)  # of each group shard
    starts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # table -> (shard, first row) of its row chunks
    padding_rows: list[list[int]] = field(default_factory=list)  # rows of each group shard that get no gradient

    @property
    def is_replicated(self) -> bool:
        return not self.key.ranks

    @property
    def columns(self) -> int:
        return len(self.key.widths)

    @cached_property  # when all tables are in
    def heights(self) -> list[int]:
        """The number of rows of each group shard."""
        return [sum(shard.box.shape[0] for shard in shards) for shards in self.shards]

    @cached_property
    def bases(self) -> list[int]:
        """The first group row of each group shard, and the number of group rows."""
        return [0, *accumulate(self.heights)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        cut = self.columns > 1
        return {rank: (0, k) if cut else (k, 0) for k, rank in enumerate(self.key.ranks)}

    def place(self, rank: int) -> tuple[int, int] | None:
        """The group shard on `rank`, and the chunk of columns; None: it holds nothing."""
        return (0, 0) if self.is_replicated else self._places.get(rank)

    def owner(self, shard: int, column: int, rank: int) -> int:
        """The rank from which `rank` requests a chunk of columns of a group shard: itself, if it has a copy."""
        return rank if self.is_replicated else self.key.ranks[column if self.columns > 1 else shard]


class RowNumbering(NamedTuple):
    """How the ids of one table become group rows: id + shifts[id // chunk_size]."""

    chunk_size: int
    shifts: tuple[int, ...]

    def to_group_rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if len(self.shifts) == 1:
            return torch.add(ids.to(dtype), self.shifts[0])
        if self.chunk_size >= 2**31:  # torch would cut it to 32 bits beside int32 ids, silently
            ids = ids.to(torch.int64)
        shifts = torch.tensor(self.shifts, dtype=dtype, device=ids.device)
        return shifts.index_select(0, torch.div(ids, self.chunk_size, rounding_mode="floor")).add_(ids)


def group_tables(
    tables: Sequence[Table], layouts: Sequence[Layout], world_size: int, rules: Sequence[int] | None = None
) -> list[TableGroup]:
    """Form the groups. They follow from the arguments alone, so they are the same on every rank.

    `rules`: the number of the rule of each table's optimizer; None: all tables have the same.
    """
    groups: dict[GroupKey, TableGroup] = {}
    for number, (table, layout) in enumerate(zip(tables, layouts, strict=True)):
        key = _group_key(table, layout, world_size, 0 if rules is None else rules[number])
        if key not in groups:
            shard_count = len(key.ranks) if len(key.widths) == 1 and key.ranks else 1
            groups[key] = TableGroup(key, shards=[[] for _ in range(shard_count)])
            groups[key].padding_rows = [[] for _ in range(shard_count)]
        _add_table(groups[key], number, table, layout)
    return list(groups.values())


def number_rows(groups: Sequence[TableGroup], tables: Sequence[Table]) -> list[RowNumbering]:
    """The numbering of each table's rows in its group."""
    found: dict[int, RowNumbering] = {}
    for group in groups:
        for number in group.tables:
            rows, starts = tables[number].rows, group.starts[number]
            firsts = [chunk(rows, len(starts), c)[0] for c in range(len(starts))]
            shifts = tuple(group.bases[shard] + start - first for (shard, start), first in zip(starts, firsts, strict=True))
            found[number] = RowNumbering(chunk_size(rows, len(starts)), shifts)
    return [found[number] for number in range(len(tables))]


def _group_key(table: Table, layout: Layout, world_size: int, rule: int) -> GroupKey:
    widths = layout.column_widths(table.dim)
    if layout.is_replicated:
        ranks: tuple[int, ...] = ()
    elif len(widths) == 1:  # whole rows: on whichever ranks they lie, each rank has one group shard
        ranks = tuple(range(world_size))
    else:
        ranks = layout.owners
    pooling = "sum" if table.mode == "mean" else table.mode
    return GroupKey(widths, ranks, pooling, table.scale_grad_by_freq, table.max_norm, table.norm_type, rule, layout.host_memory)


def _add_table(group: TableGroup, number: int, table: Table, layout: Layout) -> None:
    group.tables.append(number)
    group.starts[number] = []
    chunks = layout.row_chunks
    for c in range(chunks):
        shard = 0 if group.is_replicated or group.columns > 1 else layout.owners[c]
        row, row_end = chunk(table.rows, chunks, c)
        above = group.shards[shard][-1] if group.shards[shard] else None
        start = 0 if above is None else above.start + above.box.shape[0]
        group.shards[shard].append(TableShard(number, start, Box(row, row_end, 0, group.key.widths[0])))
        group.starts[number].append((shard, start))
        if table.padding_idx is not None and row <= table.padding_idx < row_end:
            group.padding_rows[shard].append(start + table.padding_idx - row)
