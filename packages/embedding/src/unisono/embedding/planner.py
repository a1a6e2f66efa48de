"""plan_tables: a layout for each table, chosen by what it costs, and a report of why.

The planner weighs the options of each table (sharding/cost.py), then packs them: the tables with the most load or memory come
first, each gets the cheapest option that leaves its ranks below a limit, and several limits are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group
from unisono.embedding.optimizers import Rule, rules_by_table, rules_error
from unisono.embedding.ragged import Ragged
from unisono.embedding.sharding.cost import (
    Demand,
    Prices,
    ShardingOption,
    can_pool,
    count_demands,
    expect_demand,
    list_options,
    set_prices,
)
from unisono.embedding.sharding.layouts import Answers, Layout
from unisono.embedding.table import Table

_FEW = 16  # up to this number, ranks are listed one by one
_UNLIMITED = 2**62  # more than any rank has
_NEAR = 1.05  # loads whose ratio is below this count as equal
# Limits of a rank's load, as multiples of the mean: a table above is cut; 0 cuts all.
_LIMITS = (None, 1.5, 1.2, 1.1, 1.0, 0.0)
_EVENNESS = (1.1, 1.2, 1.5)  # limits of memory, as multiples of the mean, that are taken if they cost almost nothing
_CACHES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # of tables in host memory, as fractions of their rows
_SMALL = 0.05  # a table below this fraction of the mean load and memory is not cut


@dataclass(frozen=True)
class PlannedTable:
    """One table of a plan."""

    name: str
    rows: int
    dim: int
    layout: Layout
    answers: Answers
    sent: int  # bytes a step, on average over ranks
    memory: int  # bytes on the device of the rank that holds most of it
    host_memory: int  # bytes in the host memory of that rank
    why: str


@dataclass(frozen=True)
class Plan:
    """A layout for each table, for one number of ranks. print(plan) explains it.

    `memory`, `host_memory`, `sent` and `load` have a number for each rank: bytes held on its device and in host memory; bytes
    sent in a step, forward and backward; and the estimate by which ranks are kept equally busy, in bytes that could travel
    meanwhile.
    """

    layouts: dict[str, Layout]
    tables: tuple[PlannedTable, ...]
    memory: tuple[int, ...]
    host_memory: tuple[int, ...]
    sent: tuple[int, ...]
    load: tuple[int, ...]

    def __str__(self) -> str:
        """Aligned text: a line for each table, then a line for each rank."""
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
        """What print shows, as dicts by the names of the columns: one list for the tables, one for the ranks."""
        tables, ranks = (
            [dict(zip(header, row, strict=True)) for row in rows]
            for header, rows in (self._describe_tables(), self._describe_ranks())
        )
        return tables, ranks

    def _describe_tables(self) -> tuple[list[str], list[list[str]]]:
        header = ["table", "rows x dim", "layout", "answers", "sent by a rank", "memory of a rank", "why"]
        return header, [
            [t.name, f"{t.rows:,} x {t.dim}", str(t.layout), t.answers, _bytes(t.sent), f"<= {_bytes(t.memory)}", t.why]
            for t in self.tables
        ]

    def _describe_ranks(self) -> tuple[list[str], list[list[str]]]:
        named = {"memory": self.memory, "host memory": self.host_memory, "sent": self.sent, "load": self.load}
        if not any(self.host_memory):
            del named["host memory"]
        columns = list(named.values())
        if len(self.memory) <= _FEW:
            rows = [[f"rank {rank}", *map(_bytes, line)] for rank, line in enumerate(zip(*columns, strict=True))]
        else:
            rows = [
                ["most", *(_bytes(max(column)) for column in columns)],
                ["mean", *(_bytes(sum(column) // len(column)) for column in columns)],
                ["least", *(_bytes(min(column)) for column in columns)],
            ]
        return [f"{len(self.memory)} rank{'s' * (len(self.memory) > 1)}", *named], rows


def plan_tables(
    tables: Sequence[Table],
    world_size: int,
    *,
    batch_size: int = 1024,
    sample: Mapping[str, Ragged] | None = None,
    memory_per_rank: int | None = None,
    host_memory_per_rank: int | None = None,
    optimizer: Rule | Mapping[str, Rule] | None = None,
    dtype: torch.dtype = torch.float32,
    wire_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Plan:
    """Choose a layout for each table, such that the busiest of `world_size` ranks sends and computes as little as possible.

    A table lies whole on one rank if that gives no rank more than its share, and is answered by rows or by sums of bags,
    whichever costs less. Other tables are cut into rows or columns. The order of the tables does not matter.
    `print(plan)` shows the layout, bytes, memory and reason of each table, and the totals of each rank.

    Args:
        tables: The tables to plan for.
        world_size: The number of ranks to plan for, which need not exist yet.
        batch_size: The bags of a feature on one rank in one step.
        sample: A batch of this rank, with any number of bags, in which ids are counted. Without it, a bag is expected to have
            table.ids_per_bag ids that are evenly drawn, which makes as many different rows as there can be.
        memory_per_rank: The bytes that a rank has for weights and the state of `optimizer`; without optimizer, for weights
            and dense gradients (sparse ones need less; the state of an optimizer of torch is not known here). None: no limit;
            memory is still shared out evenly if that costs next to nothing.
        host_memory_per_rank: If the tables do not fit into `memory_per_rank`, those that are used least for their size stay in
            host memory, of which a rank has these bytes, with caches as large as fit on the device (Layout.in_host_memory).
            Needs an optimizer whose steps are in the backward (no sparse=True). None: no table does.
        optimizer: The optimizer of all tables, or a dict with one for each; its state takes memory.
        dtype, wire_dtype: Of the weights, and of rows that travel.
        group: With a sample, if the group has `world_size` ranks, more than one: all of them must call with a sample, and get
            the same plan, made for the mean over their samples. In all other cases nothing is communicated: a laptop can make
            a plan for 512 ranks.

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
    if error := rules_error(optimizer, names):
        raise ValueError(f"plan_tables: {error}")
    options = (
        f"world_size={world_size}, {batch_size=}, {memory_per_rank=}, {host_memory_per_rank=}, "
        f"optimizer={rules_by_table(optimizer, names)}, {dtype=}, {wire_dtype=}"
    )
    demands = None
    if sample is not None:
        same = f"{list(tables)}, {options}"
        demands = count_demands(tables, sample, batch_size=batch_size, world_size=world_size, same=same, group=group)
    demands = demands or [expect_demand(table, batch_size) for table in tables]

    prices = [
        set_prices(world_size, optimizer=rule, dtype=dtype, wire_dtype=wire_dtype) for rule in rules_by_table(optimizer, names)
    ]
    choices = [list_options(*each) for each in zip(tables, demands, prices, strict=True)]
    by_name = sorted(range(len(tables)), key=lambda k: names[k])
    placed = _pack(choices, by_name, world_size, memory_per_rank)
    totals = RankTotals.of(placed, world_size)
    if memory_per_rank is not None and int(totals.memory.max()) > memory_per_rank and host_memory_per_rank and optimizer:

        def move(table: int, cache: float) -> list[ShardingOption]:
            options = [option for option in choices[table] if option.is_spread] or choices[table]
            return [option.in_host_memory(cache, tables[table], demands[table], prices[table]) for option in options]

        order = sorted(by_name, key=lambda k: demands[k].unique / max(1, int(choices[k][0].memory.sum())))
        placed = _pack_with_host_memory(choices, move, order, world_size, memory_per_rank)
        totals = RankTotals.of(placed, world_size)
    if memory_per_rank is not None and (least := int(totals.memory.max())) > memory_per_rank:
        held = [int(next(option for option in options if option.is_whole).memory) for options in choices]
        raise ValueError(
            f"plan_tables: the tables need {_bytes(sum(held))}, and {world_size} x memory_per_rank={memory_per_rank} "
            f"is {_bytes(world_size * memory_per_rank)}; the largest table is {names[held.index(max(held))]!r} with "
            f"{_bytes(max(held))}; memory_per_rank must be at least {least}"
            f"{'' if host_memory_per_rank else ', or host_memory_per_rank say how much may stay in host memory'}"
        )
    held_by_host = _held_by_host(tables, placed, prices, world_size)
    host_totals = sum(held_by_host, torch.zeros_like(totals.memory))
    if host_memory_per_rank is not None and (most := int(host_totals.max())) > host_memory_per_rank:
        raise ValueError(
            f"plan_tables: {host_memory_per_rank=} is not enough for the tables that do not fit on the devices; it must be at "
            f"least {most}"
        )
    planned = [
        _report(t, d, p, int(host.max()), world_size)
        for t, d, p, host in zip(tables, demands, placed, held_by_host, strict=True)
    ]
    return Plan(
        {table.name: table.layout for table in planned},
        tuple(planned),
        tuple(totals.memory.tolist()),
        tuple(host_totals.tolist()),
        tuple(totals.sent.tolist()),
        tuple(totals.load.tolist()),
    )


def _held_by_host(
    tables: Sequence[Table], placed: Sequence[PlacedOption], prices: Sequence[Prices], world_size: int
) -> list[Tensor]:
    """The bytes of each table in the host memory of each rank."""
    found = []
    for table, (option, ranks, _), own in zip(tables, placed, prices, strict=True):
        held = torch.zeros(world_size, dtype=torch.int64, device="cpu")
        if option.host_memory is not None:
            held[ranks] = own.bytes_held(*option.layout.chunk_shapes(table.rows, table.dim, len(option.load)))
        found.append(held)
    return found


def _report(table: Table, demand: Demand, placed: PlacedOption, host_memory: int, world_size: int) -> PlannedTable:
    option = placed.option
    sent = option.sent_by_all + int(option.sent.sum()) // world_size
    why = "; ".join(filter(None, (placed.why, _explain_answers(table, demand, option.answers))))
    layout = option.place(placed.ranks.tolist()).assign_ranks(world_size)
    memory = int(option.memory.max())
    return PlannedTable(table.name, table.rows, table.dim, layout, option.answers, sent, memory, host_memory, why)


def _explain_answers(table: Table, demand: Demand, answers: Answers) -> str:
    if not can_pool(table, demand):
        return f"{demand.unique:,} rows, which their owner cannot sum"
    counts = [f"{demand.bags:,} bags", f"{demand.unique:,} rows"]
    return ", ".join(counts if answers == "bags" else reversed(counts))


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class PlacedOption(NamedTuple):
    """An option that has ranks."""

    option: ShardingOption
    ranks: Tensor  # of its chunks
    why: str  # why it is not the cheapest option; "" if it is


class RankTotals:
    """What each rank has so far."""

    def __init__(self, world_size: int, load: int = 0) -> None:
        self.load = torch.full((world_size,), load, dtype=torch.int64, device="cpu")
        self.sent = torch.zeros_like(self.load)
        self.memory = torch.zeros_like(self.load)

    @classmethod
    def of(cls, placed: Sequence[PlacedOption], world_size: int) -> RankTotals:
        totals = cls(world_size)
        for option, ranks, _ in placed:
            totals.add(option, ranks)
        return totals

    def add(self, option: ShardingOption, ranks: Tensor) -> None:
        self.load += option.load_of_all
        self.load[ranks] += option.load
        self.sent += option.sent_by_all
        self.sent[ranks] += option.sent
        self.memory[ranks] += option.memory

    def find_room(self, option: ShardingOption, cap: int) -> tuple[int, Tensor] | None:
        """Find neighbouring ranks whose load would be the least with this option; also return the highest load among them."""
        parts = len(option.load)
        blocks = len(self.load) // parts
        load = (self.load[: blocks * parts].view(blocks, parts) + (option.load + option.load_of_all)).amax(1)
        memory = (self.memory[: blocks * parts].view(blocks, parts) + option.memory).amax(1)
        load = load.masked_fill_(memory > cap, _UNLIMITED)
        least = int(load.min())
        if least == _UNLIMITED:
            return None
        block = int(memory.masked_fill_(load > least, _UNLIMITED).argmin())
        return least, torch.arange(block * parts, (block + 1) * parts, device="cpu")


def _pack(
    choices: Sequence[Sequence[ShardingOption]], order: Sequence[int], world_size: int, memory_per_rank: int | None
) -> list[PlacedOption]:
    """Choose an option for each table, and its ranks. `order`: the tables; it decides between equal ones.

    If memory does not suffice, the result is the one that comes nearest to it.
    """
    mean = max(1, -(-sum(options[0].total_load for options in choices) // world_size))
    whole = [[option for option in options if option.is_whole] or options for options in choices]
    held = [int(options[0].memory.sum()) for options in whole]
    even = max(1, -(-sum(held) // world_size))
    sizes = [max(int(options[0].load.sum()) / mean, h / even) for options, h in zip(whole, held, strict=True)]
    order = sorted(order, key=lambda table: -sizes[table])
    cap = _UNLIMITED if memory_per_rank is None else memory_per_rank
    worth_trying = [every if size > _SMALL else uncut for every, uncut, size in zip(choices, whole, sizes, strict=True)]
    tried: list[tuple[int, list[PlacedOption]]] = []
    bounds = [int(part * even) for part in _EVENNESS]
    for room in [*(bound for bound in bounds if bound < cap), cap]:
        short = "no rank has room for it whole" if room == cap else "balances memory"
        for limit in _LIMITS:
            found = _try(worth_trying, order, world_size, room, short, _UNLIMITED if limit is None else int(limit * mean))
            tried += [] if found is None else [found]
            if found is not None and found[0] <= _NEAR * mean:
                return found[1]
    if not tried:
        return _pack_tightly(choices, sorted(order, key=lambda table: -held[table]), world_size)
    least = min(load for load, _ in tried)
    return next(found for load, found in tried if load <= _NEAR * least)


def _try(
    choices: Sequence[Sequence[ShardingOption]], order: Sequence[int], world_size: int, cap: int, short: str, limit: int
) -> tuple[int, list[PlacedOption]] | None:
    """Give each table the cheapest option that leaves its ranks below the limit, or else the one with the least load.

    Returns the load of the busiest rank, too; None if memory does not suffice. `short`: the reason to report if a table is cut
    for lack of room.
    """
    totals = RankTotals(world_size, sum(options[0].load_of_all for options in choices))
    placed: dict[int, PlacedOption] = {}
    for table in order:
        options = choices[table]
        totals.load -= options[0].load_of_all  # until now, all tables counted as if they had their cheapest option
        best: tuple[int, PlacedOption] | None = None
        why = ""
        for option in options:
            found = totals.find_room(option, cap)
            if found is None:
                why = why or short
            elif best is None or found[0] < best[0]:
                best = found[0], PlacedOption(option, found[1], why)
            if best is not None and best[0] <= limit:
                break
            why = why or "too much work for one rank"
        if best is None:
            return None
        placed[table] = best[1]
        totals.add(best[1].option, best[1].ranks)
    return int(totals.load.max()), [placed[table] for table in range(len(choices))]


def _pack_with_host_memory(
    choices: Sequence[Sequence[ShardingOption]],
    move: Callable[[int, float], list[ShardingOption]],
    order: Sequence[int],
    world_size: int,
    memory_per_rank: int,
) -> list[PlacedOption]:
    """Move as few tables as suffice into host memory, in this order, with caches as large as fit; all if none suffice.

    `move`: the options of a table in host memory, with a cache of this fraction of its rows.
    """

    def pack(count: int, cache: float) -> list[PlacedOption]:
        moved = set(order[:count])
        options = [move(k, cache) if k in moved else choices[k] for k in range(len(choices))]
        placed = _pack(options, order, world_size, memory_per_rank)
        return [p._replace(why="the tables do not fit on the devices") if k in moved else p for k, p in enumerate(placed)]

    def fits(placed: list[PlacedOption]) -> bool:
        return int(RankTotals.of(placed, world_size).memory.max()) <= memory_per_rank

    least = bisect_left(range(len(order)), True, lo=1, key=lambda count: fits(pack(count, _CACHES[-1])))
    return next(filter(fits, (pack(least, cache) for cache in _CACHES)), pack(least, _CACHES[-1]))


def _pack_tightly(choices: Sequence[Sequence[ShardingOption]], order: Sequence[int], world_size: int) -> list[PlacedOption]:
    """Cut every table into chunks as small as possible, and put them where the least memory is used."""
    totals = RankTotals(world_size)
    placed: dict[int, PlacedOption] = {}
    for table in order:
        option = min(choices[table], key=lambda option: int(option.memory.max()))
        ranks = totals.memory.argsort(stable=True)[: len(option.load)]
        placed[table] = PlacedOption(option, ranks, "memory is short")
        totals.add(option, ranks)
    return [placed[table] for table in range(len(choices))]
