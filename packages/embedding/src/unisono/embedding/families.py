"""Where every row of every table is: tables whose rows travel alike form a family, and a family numbers all its rows.

The rows of a family lie in `chunks`, each in one stack of memory: stack i is cut into columns, and column j of it lies on
rank ranks[i][j]. A *key* numbers the rows of all stacks, stack by stack, so that sorted keys are grouped by the rank that
has to be asked, and key - bases[i] is the row in the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.layouts import Box, Layout, chunk, chunk_size
from unisono.embedding.tables import Table


class Kinship(NamedTuple):
    """What the tables of a family have in common."""

    widths: tuple[int, ...]  # of each column
    ranks: tuple[tuple[int, ...], ...]  # ranks[i][j]; empty where every rank has a copy
    pooled: str | None  # "sum" (and mean), "max", or None
    by_frequency: bool
    max_norm: float | None
    norm_type: float


class Shard(NamedTuple):
    """A table's part of a stack."""

    table: int
    start: int  # its first row in the stack
    box: Box


@dataclass
class Family:
    kin: Kinship
    tables: list[int] = field(default_factory=list)
    stacks: list[list[Shard]] = field(default_factory=list)  # of each chunk; the columns of their boxes are those of column 0
    starts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # table -> (stack, first row) of each of its chunks
    paddings: list[list[int]] = field(default_factory=list)  # rows of each stack that get no gradient

    @property
    def replicated(self) -> bool:
        return not self.kin.ranks

    @property
    def columns(self) -> int:
        return len(self.kin.widths)

    @cached_property  # when all tables are in
    def heights(self) -> list[int]:
        """Rows of each stack."""
        return [sum(shard.box.shape[0] for shard in stack) for stack in self.stacks]

    @cached_property
    def bases(self) -> list[int]:
        """The first key of each stack, and the number of keys."""
        return [0, *accumulate(self.heights)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (i, j) for i, row in enumerate(self.kin.ranks) for j, rank in enumerate(row)}

    def place(self, rank: int) -> tuple[int, int] | None:
        """Which stack and which of its columns lie on `rank`."""
        return (0, 0) if self.replicated else self._places.get(rank)

    def owner(self, stack: int, column: int, rank: int) -> int:
        """Whom `rank` asks."""
        return rank if self.replicated else self.kin.ranks[stack][column]


class Address(NamedTuple):
    """How the ids of one table become keys: id + shifts[id // size]."""

    size: int
    shifts: tuple[int, ...]

    def keys(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if len(self.shifts) == 1:
            return torch.add(ids.to(dtype), self.shifts[0])
        shifts = torch.tensor(self.shifts, dtype=dtype, device=ids.device)
        return shifts.index_select(0, torch.div(ids, self.size, rounding_mode="floor")).add_(ids)


def form_families(tables: Sequence[Table], layouts: Sequence[Layout], world_size: int) -> list[Family]:
    """The same on every rank: it follows from the arguments alone."""
    families: dict[Kinship, Family] = {}
    for number, (table, layout) in enumerate(zip(tables, layouts, strict=True)):
        kin = _kinship(table, layout, world_size)
        if kin not in families:
            families[kin] = Family(kin)
            families[kin].stacks = [[] for _ in range(max(1, len(kin.ranks)))]
            families[kin].paddings = [[] for _ in families[kin].stacks]
        _add(families[kin], number, table, layout)
    return list(families.values())


def address_of(family: Family, table: int, rows: int) -> Address:
    bases, parts = family.bases, family.starts[table]
    size = chunk_size(rows, len(parts))
    return Address(size, tuple(bases[stack] + start - chunk(rows, len(parts), c)[0] for c, (stack, start) in enumerate(parts)))


def _kinship(table: Table, layout: Layout, world_size: int) -> Kinship:
    pooled = "sum" if table.mode == "mean" else table.mode
    widths: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    if layout.kind == "replicated":
        widths, ranks = (table.dim,), ()
    elif len(layout.placed[0]) == 1:  # whole rows: whatever the order, one stack on each rank
        widths, ranks = (table.dim,), tuple((rank,) for rank in range(world_size))
    else:
        edges = [chunk(table.dim, len(layout.placed[0]), j) for j in range(len(layout.placed[0]))]
        widths, ranks = tuple(end - start for start, end in edges), layout.placed
    return Kinship(widths, ranks, pooled, table.scale_grad_by_freq, table.max_norm, table.norm_type)


def _add(family: Family, number: int, table: Table, layout: Layout) -> None:
    family.tables.append(number)
    family.starts[number] = []
    parts = 1 if family.replicated else len(layout.placed)
    for c in range(parts):
        stack = layout.placed[c][0] if family.columns == 1 and not family.replicated else c
        row, row_end = chunk(table.rows, parts, c)
        above = family.stacks[stack][-1] if family.stacks[stack] else None
        start = 0 if above is None else above.start + above.box.shape[0]
        family.stacks[stack].append(Shard(number, start, Box(row, row_end, 0, family.kin.widths[0])))
        family.starts[number].append((stack, start))
        if table.padding_idx is not None and row <= table.padding_idx < row_end:
            family.paddings[stack].append(start + table.padding_idx - row)
