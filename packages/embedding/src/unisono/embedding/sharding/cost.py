"""What a layout costs each rank: bytes that travel, work in memory, bytes held. The planner chooses by it.

A layout class says into how many chunks it may cut a table and which shapes they have. The cost follows from that and from
the demand: how many ids, bags and different rows a rank's batch has, counted in a sample or expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group, process_group, resolve_group, small_message_device
from unisono.embedding.optimizers import RowwiseAdagrad, Rule
from unisono.embedding.ragged import Ragged, ragged_error
from unisono.embedding.sharding.layouts import LAYOUTS, Answers, HostMemory, Layout
from unisono.embedding.table import Table

_ID = 4  # bytes of a row number that travels
_SORT = 512  # bytes of memory that could be read while one id is sorted and its row is found: measured on CPUs
_MEMORY = 8  # bytes of memory that are read or written while one travels: measured on CPUs, with gloo
_SLOT = 16  # bytes that are held for each row in a cache: which one it is, and when it was used
_CUT = 1.01  # a table is not cut to save less than that


class Demand(NamedTuple):
    """What one rank requests from one table in one step, over all features of the table."""

    ids: int
    bags: int
    unique: int  # different ids
    weighted: bool = False  # ids have weights
    learned: bool = False  # and the weights get gradients


def expect_demand(table: Table, batch_size: int) -> Demand:
    """Expect ids that are drawn evenly from all rows: no other distribution has as many different ones."""
    bags = batch_size * len(table.features)
    ids = bags * table.ids_per_bag
    return Demand(round(ids), bags, round(expect_unique(ids, table.rows)))


def expect_unique(ids: float, rows: int) -> float:
    """How many rows are hit by `ids` even draws from `rows`."""
    if rows <= 1:
        return min(rows, ids)
    return -rows * math.expm1(ids * math.log1p(-1 / rows))


def count_demands(
    tables: Sequence[Table], sample: Mapping[str, Ragged], *, batch_size: int, world_size: int, same: str, group: Group
) -> list[Demand] | None:
    """The mean over ranks of the demand of their samples, for a batch of `batch_size`; None if all samples are empty.

    The ranks of the group communicate if there are `world_size` of them; otherwise this rank's sample stands for all.
    """
    ranks = resolve_group(group)
    together = ranks.size == world_size > 1
    error = _sample_error(tables, sample)
    if error and not together:
        raise ValueError(f"plan_tables: {error}")
    if together:
        rule = "All ranks must ask for a plan of the same tables with the same options; samples may differ."
        words = f"plan_tables({same})"
        validate_across_ranks(
            "plan_tables", ranks, same=words, numbers=(), words=lambda: words, device=None, rule=rule, problem=error
        )
    numbers = _count(tables, sample, batch_size)
    if together:
        device = small_message_device(process_group(ranks), None)
        numbers = all_reduce(torch.tensor(numbers, dtype=torch.int64, device=device), group=as_group(ranks)).tolist()
    samples, *sums = numbers
    if not samples:
        return None
    found = []
    for k in range(0, len(sums), 5):
        ids, bags, unique = ((2 * n + samples) // (2 * samples) for n in sums[k : k + 3])
        found.append(Demand(ids, bags, unique, bool(sums[k + 3]), bool(sums[k + 4])))
    return found


def _sample_error(tables: Sequence[Table], sample: Mapping[str, Ragged]) -> str:
    for feature in (name for table in tables for name in table.features):
        if feature not in sample:
            return f"sample has no feature {feature!r}; it has {', '.join(sample) or 'none'}"
        if error := ragged_error(f"feature {feature!r} of the sample", sample[feature]):
            return error
    return ""


def _count(tables: Sequence[Table], sample: Mapping[str, Ragged], batch_size: int) -> list[int]:
    """Whether there is anything to count, and five numbers for each table. A batch has as many bags as its longest feature."""
    longest = max((sample[name].offsets.numel() - 1 for table in tables for name in table.features), default=0)
    scale = batch_size / max(longest, 1)
    numbers = [int(longest > 0)]
    for table in tables:
        features = [sample[name] for name in table.features]
        ids = torch.cat([_requested(table, bags.values) for bags in features])
        counts = torch.unique(ids, return_counts=True)[1].to("cpu", torch.float64)
        numbers += [
            round(ids.numel() * scale),
            round(sum(bags.offsets.numel() - 1 for bags in features) * scale),
            round(scale_unique(counts, scale, table.rows)),
            int(any(bags.weights is not None for bags in features)),
            int(any(bags.weights is not None and bags.weights.requires_grad for bags in features)),
        ]
    return numbers


def _requested(table: Table, ids: Tensor) -> Tensor:
    """Padding is not looked up, unless it has to be renormalised or is an output of its own."""
    if table.padding_idx is None or table.mode is None or table.max_norm is not None:
        return ids.to(torch.int64)
    return ids[ids != table.padding_idx].to(torch.int64)


def scale_unique(counts: Tensor, scale: float, rows: int) -> float:
    """How many different ids a batch has that is `scale` times a sample in which they occur `counts` times.

    A smaller batch has the mean over all parts of the sample of that size. A larger one goes on growing as the sample did from
    its half to its whole (Heaps' law, which holds for frequencies by Zipf's), but never faster than the number of ids.
    """
    unique, total = counts.numel(), float(counts.sum())
    if scale <= 1 or unique == 0:
        return _thin(counts, scale)
    exponent = math.log2(unique / _thin(counts, 0.5))
    grown: float = unique * scale**exponent
    return min(grown, unique + total * (scale - 1), max(rows, unique))


def _thin(counts: Tensor, share: float) -> float:
    """Return the expected number of distinct ids in a random fraction `share` of the look-ups."""
    return float((1 - (1 - share) ** counts).sum())


class Prices(NamedTuple):
    """What does not depend on the table."""

    world_size: int
    number: int  # bytes of a number in memory
    wire: int  # bytes of a number that travels
    held: int  # bytes held for each number of a weight: it, its state, its gradient
    held_by_row: int  # bytes held for each row in addition
    exchanges_squares: bool  # the chunks of columns exchange the squares of their rows

    def bytes_held(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The bytes of chunks of a table, with the state of its optimizer."""
        return rows * (columns * self.held + self.held_by_row)


def set_prices(world_size: int, *, optimizer: Rule | None, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> Prices:
    probe = torch.empty((1, 1), dtype=dtype, device="meta")
    states = [probe] if optimizer is None else list(optimizer.states(probe).values())  # without: a gradient like the weight
    held = {ndim: sum(x.dtype.itemsize for x in (probe, *states) if x.ndim == ndim) for ndim in (1, 2)}
    wire = dtype if wire_dtype is None else wire_dtype
    return Prices(world_size, dtype.itemsize, wire.itemsize, held[2], held[1], isinstance(optimizer, RowwiseAdagrad))


@dataclass(frozen=True)
class ShardingOption:
    """A way to lay out one table, before its chunks have ranks. Chunk i lies on the i-th of `len(load)` ranks.

    `load` is in bytes that travel: half of what a rank sends and receives, and its work in memory. Every rank has
    `load_of_all`, since it requests; a rank with a chunk has the chunk's `load` in addition. The same holds for `sent`.
    """

    layout: type[Layout]
    answers: Answers
    load_of_all: int
    load: Tensor
    sent_by_all: int
    sent: Tensor
    memory: Tensor  # on the device
    total_load: int  # of all ranks
    host_memory: HostMemory | None = None

    @property
    def is_spread(self) -> bool:
        """Whether the rows are cut into chunks."""
        return self.layout.cut_dim == 0

    @property
    def is_whole(self) -> bool:
        return len(self.load) == 1

    def place(self, ranks: list[int]) -> Layout:
        return self.layout(tuple(ranks), self.answers if self.layout.owners_can_pool else None, self.host_memory)

    def in_host_memory(self, cache: float, table: Table, demand: Demand, prices: Prices) -> ShardingOption:
        """The same, with the rows in host memory. Rows that are not in the cache are copied in and out, as if they travelled.

        The cache holds the rows of a step at least. Without a better guess, the fraction of the rows that are in it is the
        fraction of the look-ups that find them there.
        """
        rows, widths = self.layout.chunk_shapes(table.rows, table.dim, len(self.load))
        bytes_of_row = prices.bytes_held(torch.ones_like(widths), widths)
        needed = torch.minimum(rows * (demand.unique / max(table.rows, 1)) * prices.world_size, rows.to(torch.float64)).ceil()
        slots = torch.maximum((rows * cache).ceil(), needed)
        load = self.load + _as_integers(needed * (1 - cache) * 2 * bytes_of_row)
        return replace(
            self,
            load=load,
            total_load=self.total_load + int((load - self.load).sum()),
            memory=_as_integers(slots * (bytes_of_row + _SLOT) + (rows + 1) * _ID + _SLOT),
            host_memory=HostMemory(cache),
        )


def list_options(table: Table, demand: Demand, prices: Prices) -> list[ShardingOption]:
    """All layouts that can run, the least load first; a whole table comes before a cut one of the same load."""
    found = []
    for layout in LAYOUTS.values():
        for chunks in layout.chunk_counts(table, prices.world_size):
            if layout.owners_can_pool and can_pool(table, demand):
                found.append(_weigh(table, demand, prices, layout, chunks, "bags"))
            if layout.may_send_rows(table, prices.world_size):
                found.append(_weigh(table, demand, prices, layout, chunks, "rows"))
    return sorted(found, key=lambda option: (option.total_load * (1 if option.is_whole else _CUT), not option.is_whole))


def can_pool(table: Table, demand: Demand) -> bool:
    """Whether an owner may answer with sums of bags, by the same rule as the look-up."""
    return table.owners_can_pool and not demand.learned


def _weigh(table: Table, demand: Demand, prices: Prices, layout: type[Layout], chunks: int, answers: Answers) -> ShardingOption:
    ranks = prices.world_size
    columns = chunks if layout.cut_dim == 1 else 1
    heights, widths = layout.chunk_shapes(table.rows, table.dim, chunks)
    unique = heights * (demand.unique / max(table.rows, 1))  # that one rank requests from each chunk
    changed = torch.minimum(unique * ranks, heights.to(unique.dtype))
    if answers == "rows":
        looked_up, answered, requested = unique, unique, unique * _ID
    else:
        bytes_of_id = _ID + max(4, prices.number) * demand.weighted
        looked_up, answered = torch.full_like(unique, demand.ids), torch.full_like(unique, demand.bags)
        requested = looked_up * bytes_of_id + answered * _ID
    moved = answered * widths * prices.wire  # one rank's responses, in the forward; as much comes back in the backward
    between = changed * 4 * (columns - 1) * (prices.exchanges_squares + (table.max_norm is not None))
    work = ranks * looked_up * (2 * widths * prices.number + _SORT) + changed * 2 * widths * prices.number

    # Every rank requests from every chunk; the owner of a chunk does not send for it, but to all others.
    one = demand.unique if answers == "rows" else demand.bags
    moved_to_one = one * table.dim * prices.wire
    requested_by_one = columns * (one * _ID if answers == "rows" else float(requested[0]))
    work_of_one = demand.ids * (2 * table.dim * prices.number + _SORT) if answers == "rows" else 0
    sent = (ranks - 1) * moved - (requested + moved) + between
    received = (ranks - 1) * (requested + moved) - moved + between
    load = _as_integers((sent + received) / 2 + work / _MEMORY)
    load_of_all = round(requested_by_one / 2 + moved_to_one + work_of_one / _MEMORY)
    return ShardingOption(
        layout=layout,
        answers=answers,
        load_of_all=load_of_all,
        load=load,
        total_load=load_of_all * ranks + int(load.sum()),
        sent_by_all=round(requested_by_one + moved_to_one),
        sent=_as_integers(sent),
        memory=prices.bytes_held(heights, widths),
    )


def _as_integers(x: Tensor) -> Tensor:
    """Round: sums of integers are the same in any order, so all ranks make the same plan, whatever their processors."""
    return x.round().to(torch.int64)
