"""What a layout costs, rank by rank: bytes that travel, work in memory, bytes held. By this the planner chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.layouts import Answers, Kind, Layout, chunk_size
from unisono.embedding.optimizers import RowwiseAdagrad, Rule
from unisono.embedding.planning.demands import Demand
from unisono.embedding.tables import Table

_ID = 4  # bytes of a row number that travels
_SORT = 512  # bytes of memory that could be read while one id is sorted and its row is found: measured on CPUs
_MEMORY = 8  # bytes of memory that are read or written while one travels: measured on CPUs, with gloo
_CUT = 1.01  # a table is not cut to save less than that


class Prices(NamedTuple):
    """What does not depend on the table."""

    world_size: int
    number: int  # bytes of a number in memory
    wire: int  # bytes of a number that travels
    held: int  # bytes held for each number of a weight: it, its state, its gradient
    held_by_row: int  # and for each row besides
    shares_squares: bool  # columns tell each other the squares of their rows


def set_prices(world_size: int, *, optimizer: Rule | None, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> Prices:
    probe = torch.empty((1, 1), dtype=dtype, device="meta")
    states = [probe] if optimizer is None else list(optimizer.states(probe).values())  # without: a gradient like the weight
    held = {ndim: sum(x.dtype.itemsize for x in (probe, *states) if x.ndim == ndim) for ndim in (1, 2)}
    wire = dtype if wire_dtype is None else wire_dtype
    return Prices(world_size, dtype.itemsize, wire.itemsize, held[2], held[1], isinstance(optimizer, RowwiseAdagrad))


@dataclass(frozen=True)
class Option:
    """A way to lay out one table, before its pieces have ranks. Piece i lies on the i-th of `len(load)` ranks.

    `load` is in bytes that travel: half of what a rank sends and receives, and its work in memory. Every rank has
    `load_of_all`, for it asks; the ranks of the pieces have theirs besides. So it is with `sent`.
    """

    kind: Kind
    answers: Answers
    load_of_all: int
    load: Tensor
    sent_by_all: int
    sent: Tensor
    memory: Tensor
    total_load: int  # of all ranks

    def place(self, ranks: list[int]) -> Layout:
        if self.kind == "table":
            return Layout.table(ranks[0], answers=self.answers)
        return Layout.row(ranks) if self.kind == "row" else Layout.column(ranks, answers=self.answers)


def list_options(table: Table, demand: Demand, prices: Prices) -> list[Option]:
    """All that can run, the least load first: whole, in rows over all ranks, in columns over some.

    A grid sends the rows that a row layout does, and more ids; copies send world_size / 2 times as many gradients in the
    backward as a row layout sends rows and gradients: neither is ever cheaper.
    """
    found = []
    for kind, parts in _list_cuts(table, prices.world_size):
        if kind != "row" and can_sum(table, demand):
            found.append(_weigh(table, demand, prices, kind, parts, "bags"))
        if kind != "column" or table.rows < prices.world_size:  # else the row layout sends the same rows and fewer ids
            found.append(_weigh(table, demand, prices, kind, parts, "rows"))
    return sorted(found, key=lambda option: option.total_load * (1 if option.kind == "table" else _CUT))


def can_sum(table: Table, demand: Demand) -> bool:
    """Whether an owner may answer with sums of bags, as the engine has it."""
    return table.summable and not demand.learned


def _list_cuts(table: Table, world_size: int) -> Iterator[tuple[Kind, int]]:
    yield "table", 1
    if world_size == 1:
        return
    if table.rows > 1:
        yield "row", world_size
    if table.max_norm is not None and table.norm_type == float("inf"):
        return  # such a norm needs whole rows
    parts = sorted({world_size, *(2**k for k in range(1, world_size.bit_length()))})
    for n in parts:
        if n <= table.dim and -(-table.dim // chunk_size(table.dim, n)) == n:  # no piece is empty
            yield "column", n


def _weigh(table: Table, demand: Demand, prices: Prices, kind: Kind, parts: int, answers: Answers) -> Option:
    ranks, columns = prices.world_size, parts if kind == "column" else 1
    heights = _cut(table.rows, parts if kind == "row" else 1).expand(parts)
    widths = _cut(table.dim, columns).expand(parts)
    unique = heights * (demand.unique / max(table.rows, 1))  # of one rank, of each piece
    changed = torch.minimum(unique * ranks, heights.to(unique.dtype))
    if answers == "rows":
        looked_up, answered, asking = unique, unique, unique * _ID
    else:
        bits = _ID + max(4, prices.number) * demand.weighted
        looked_up, answered = torch.full_like(unique, demand.ids), torch.full_like(unique, demand.bags)
        asking = looked_up * bits + answered * _ID
    moved = answered * widths * prices.wire  # one rank's answers, in the forward; as much comes back in the backward
    between = changed * 4 * (columns - 1) * (prices.shares_squares + (table.max_norm is not None))
    work = ranks * looked_up * (2 * widths * prices.number + _SORT) + changed * 2 * widths * prices.number

    # Every rank asks every piece; the owner of a piece does not send for it, but to all others.
    one = demand.unique if answers == "rows" else demand.bags
    moved_to_one = one * table.dim * prices.wire
    asking_of_one = columns * (one * _ID if answers == "rows" else float(asking[0]))
    work_of_one = demand.ids * (2 * table.dim * prices.number + _SORT) if answers == "rows" else 0
    sent = (ranks - 1) * moved - (asking + moved) + between
    received = (ranks - 1) * (asking + moved) - moved + between
    load = _as_integers((sent + received) / 2 + work / _MEMORY)
    load_of_all = round(asking_of_one / 2 + moved_to_one + work_of_one / _MEMORY)
    return Option(
        kind=kind,
        answers=answers,
        load_of_all=load_of_all,
        load=load,
        total_load=load_of_all * ranks + int(load.sum()),
        sent_by_all=round(asking_of_one + moved_to_one),
        sent=_as_integers(sent),
        memory=heights * (widths * prices.held + prices.held_by_row),
    )


def _cut(length: int, parts: int) -> Tensor:
    """How long the chunks are."""
    edges = torch.arange(parts + 1, device="cpu") * chunk_size(length, parts)
    return edges.clamp_(max=length).diff()


def _as_integers(x: Tensor) -> Tensor:
    """Their sums are the same in any order: all ranks must come to the same plan, whatever their processors."""
    return x.round().to(torch.int64)
