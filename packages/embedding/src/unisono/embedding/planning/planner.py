"""A layout for each table, chosen by what it costs; and an account of why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.collectives import Group
from unisono.embedding.layouts import Answers, Layout
from unisono.embedding.optimizers import Rule
from unisono.embedding.planning.demands import Demand, count_demands, expect_demand
from unisono.embedding.planning.footprints import can_sum, list_options, set_prices
from unisono.embedding.planning.packing import Placed, pack, weigh
from unisono.embedding.ragged import Ragged
from unisono.embedding.tables import Table

_FEW = 16  # ranks that are listed one by one


@dataclass(frozen=True)
class PlannedTable:
    """One table of a plan."""

    name: str
    rows: int
    dim: int
    layout: Layout
    answers: Answers
    sent: int  # bytes a step, on average over ranks
    memory: int  # bytes, on the rank that holds most of it
    why: str


@dataclass(frozen=True)
class Plan:
    """A layout for each table, for one number of ranks. print(plan) explains it.

    `memory`, `sent` and `load` have a number for each rank: bytes held; bytes sent in a step, forward and backward; and the
    estimate by which ranks are kept equally busy, in bytes that could travel meanwhile.
    """

    layouts: dict[str, Layout]
    tables: tuple[PlannedTable, ...]
    memory: tuple[int, ...]
    sent: tuple[int, ...]
    load: tuple[int, ...]

    def __str__(self) -> str:
        """Aligned text: a line for each table, below it one for each rank."""
        parts = []
        for header, rows in (self._describe_tables(), self._describe_ranks()):
            lines = [header, *rows]
            widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
            parts.append("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines))
        return "\n\n".join(parts)

    def to_markdown(self) -> str:
        parts = []
        for header, rows in (self._describe_tables(), self._describe_ranks()):
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts)

    def to_rows(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """The same as rows, by the names of their columns: those of the tables, and those of the ranks."""
        tables, ranks = (
            [dict(zip(header, row, strict=True)) for row in rows]
            for header, rows in (self._describe_tables(), self._describe_ranks())
        )
        return tables, ranks

    def _describe_tables(self) -> tuple[list[str], list[list[str]]]:
        header = ["table", "rows x dim", "layout", "answers", "sent by a rank", "memory of a rank", "why"]
        return header, [
            [t.name, f"{t.rows:,} x {t.dim}", _name(t.layout), t.answers, _bytes(t.sent), f"<= {_bytes(t.memory)}", t.why]
            for t in self.tables
        ]

    def _describe_ranks(self) -> tuple[list[str], list[list[str]]]:
        columns = (self.memory, self.sent, self.load)
        if len(self.memory) <= _FEW:
            rows = [[f"rank {rank}", *map(_bytes, line)] for rank, line in enumerate(zip(*columns, strict=True))]
        else:
            rows = [
                ["most", *(_bytes(max(column)) for column in columns)],
                ["mean", *(_bytes(sum(column) // len(column)) for column in columns)],
                ["least", *(_bytes(min(column)) for column in columns)],
            ]
        return [f"{len(self.memory)} rank{'s' * (len(self.memory) > 1)}", "memory", "sent", "load"], rows


def plan_tables(
    tables: Sequence[Table],
    world_size: int,
    *,
    batch_size: int = 1024,
    sample: Mapping[str, Ragged] | None = None,
    memory_per_rank: int | None = None,
    optimizer: Rule | None = None,
    dtype: torch.dtype = torch.float32,
    wire_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Plan:
    """A layout for each table, such that the busiest of `world_size` ranks has as little to send and to do as can be.

    Whole tables where they leave no rank with more than its share, answered by rows or by sums of bags, whichever costs
    less; others cut into rows or columns. The order of the tables does not matter.

    Args:
        batch_size: Bags of a feature, on a rank and in a step.
        sample: A batch of this rank, of any number of bags, in which ids are counted; without, a bag is taken to have
            table.ids_per_bag ids that are evenly drawn, which makes for as many different rows as there can be.
        memory_per_rank: Bytes that a rank has for weights and the state of `optimizer`; without optimizer, for weights and
            dense gradients (sparse ones need less; the state of an optimizer of torch is not known here). None: any number;
            memory is still shared out evenly if that costs next to nothing.
        group: With a sample, if the group has `world_size` ranks, more than one: all of them must call with a sample, and
            have the same plan, made for the mean over their samples. In all other cases nothing is communicated: a plan for
            512 ranks can be made on a laptop.

    Raises ValueError if memory does not suffice, with the memory_per_rank that would.

    Example:
        >>> tables = [Table("user", 10**6, 64, ids_per_bag=20), Table("item", 10**6, 64, ids_per_bag=18), Table("day", 7, 64)]
        >>> {name: (str(layout), layout.answers) for name, layout in plan_tables(tables, 2).layouts.items()}
        {'user': ('table on 1', 'bags'), 'item': ('table on 0', 'bags'), 'day': ('table on 0', 'rows')}
    """
    names = [table.name for table in tables]
    if world_size < 1 or batch_size < 0 or len(set(names)) < len(names):
        given = f"world_size={world_size}, batch_size={batch_size}, tables {names}"
        raise ValueError(f"plan_tables: needs one rank at least, a batch and different names for all tables; got {given}")
    options = f"world_size={world_size}, {batch_size=}, {memory_per_rank=}, {optimizer=}, {dtype=}, {wire_dtype=}"
    demands = None
    if sample is not None:
        same = f"{list(tables)}, {options}"
        demands = count_demands(tables, sample, batch_size=batch_size, world_size=world_size, same=same, group=group)
    demands = demands or [expect_demand(table, batch_size) for table in tables]

    prices = set_prices(world_size, optimizer=optimizer, dtype=dtype, wire_dtype=wire_dtype)
    choices = [list_options(table, demand, prices) for table, demand in zip(tables, demands, strict=True)]
    by_name = sorted(range(len(tables)), key=lambda k: names[k])
    placed = pack(choices, by_name, world_size, memory_per_rank)
    totals = weigh(placed, world_size)
    if memory_per_rank is not None and (least := int(totals.memory.max())) > memory_per_rank:
        held = [int(next(option for option in options if option.kind == "table").memory) for options in choices]
        raise ValueError(
            f"plan_tables: the tables need {_bytes(sum(held))}, and {world_size} x memory_per_rank={memory_per_rank} "
            f"is {_bytes(world_size * memory_per_rank)}; the largest table is {names[held.index(max(held))]!r} with "
            f"{_bytes(max(held))}; memory_per_rank={least} would do"
        )
    planned = [_describe(t, d, p, world_size) for t, d, p in zip(tables, demands, placed, strict=True)]
    return Plan(
        {table.name: table.layout for table in planned},
        tuple(planned),
        tuple(totals.memory.tolist()),
        tuple(totals.sent.tolist()),
        tuple(totals.load.tolist()),
    )


def _describe(table: Table, demand: Demand, placed: Placed, world_size: int) -> PlannedTable:
    option = placed.option
    sent = option.sent_by_all + int(option.sent.sum()) // world_size
    why = "; ".join(filter(None, (placed.why, _explain_answers(table, demand, option.answers))))
    layout = option.place(placed.ranks.tolist()).settle(world_size)
    return PlannedTable(table.name, table.rows, table.dim, layout, option.answers, sent, int(option.memory.max()), why)


def _explain_answers(table: Table, demand: Demand, answers: Answers) -> str:
    rows, bags = f"{demand.unique:,} rows", f"{demand.bags:,} bags"
    if answers == "bags":
        return f"{bags}, {rows}"
    if not can_sum(table, demand):
        return f"{rows}, which cannot be summed by their owner"
    return f"{rows}, {bags}"


def _name(layout: Layout) -> str:
    return f"{layout} on {len(layout.placed[0])}" if layout.kind == "column" else str(layout)


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
