"""IdSlots: what one rank stores of one or more IdMaps, and how ids find their slots there and get rows.

From the top down: IdSlots decides which ids get rows; _HashTable finds the slot of an id; DistinctIds are those of a batch. All
maps are handled together, each id with the number of its map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.groups import GroupRanks
from unisono.embedding.hashing import splitmix64
from unisono.embedding.sharding.layouts import chunk, chunk_size

Eviction = Literal["least_recent", "least_frequent"]
_EMPTY, _REMOVED = -1, -2  # instead of a slot; a search goes on past a removed one
_CELLS_PER_SLOT = 2
MOST_SLOTS = 2**31 // _CELLS_PER_SLOT - 1  # so that a product with 32 bits of a hash stays within 63
_NEVER = 2**63 - 1
_FIELDS = ("ids", "counts", "calls", "rows")


class MapOptions(NamedTuple):
    """The arguments of an IdMap."""

    capacity: int
    threshold: int
    eviction: Eviction | None
    candidates: int
    shards: int

    @property
    def row_slots(self) -> int:
        """How many ids with rows a shard can store: its share, and eight standard deviations of what hashes give it more."""
        rows = self.capacity - 1
        share = -(-rows // self.shards)
        return min(rows, share + 8 * math.isqrt(share) + 8)

    @property
    def width(self) -> int:
        """The slots of a shard: first those of ids with rows, then those of candidates."""
        return self.row_slots + -(-self.candidates // self.shards)


class IdSlots:
    """What one rank stores of `maps`: a range of the shards of each.

    Each slot has an id, its count, the call (from 1 on) in which it was last seen, and its row, which is 0 for candidates; if
    the count is 0, the slot is free. The slots of a shard for ids with rows are taken in ascending order and never become free
    again: an evicted id hands over its slot with its row.
    """

    def __init__(self, maps: Sequence[MapOptions], device: torch.device | None) -> None:
        self.maps = list(maps)
        self.calls = [0] * len(maps)  # of each map in training mode
        self.taken = torch.zeros(sum(m.shards for m in maps), dtype=torch.int64, device=device)
        """For each shard of each map, the rows that it has taken: the same on all ranks."""
        self.world_size = 0  # not known yet
        self._allocate(rank=0, world_size=0)

    def _allocate(self, rank: int, world_size: int) -> None:
        device = self.taken.device
        self.runs = [range(*chunk(m.shards, world_size, rank)) if world_size else range(0) for m in self.maps]
        self._ends = list(accumulate(len(run) * m.width for run, m in zip(self.runs, self.maps, strict=True)))
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            self._stored = {name: torch.zeros(self._ends[-1], dtype=torch.int64, device=device) for name in _FIELDS}
        self._rank, self.world_size = rank, world_size
        self.forget_index()

    def stored(self, number: int) -> dict[str, Tensor]:
        """This rank's shards of one map: views of shape (shards, width)."""
        shape = (len(self.runs[number]), self.maps[number].width)
        end = self._ends[number]
        return {name: x[end - shape[0] * shape[1] : end].view(shape) for name, x in self._stored.items()}

    def taken_by(self, number: int) -> Tensor:
        """For each shard of one map, the rows that it has taken: a view."""
        first = sum(m.shards for m in self.maps[:number])
        return self.taken[first : first + self.maps[number].shards]

    def hold(self, ranks: GroupRanks) -> str:
        """Make room for this rank's shards, now that the ranks are known; or say what is wrong."""
        if ranks.size == self.world_size:
            return ""
        filled = any(self.calls)
        if filled and self.world_size != 1:
            return f"it was filled on another number of ranks than {ranks.size}; make a new one and load its state_dict"
        before = [self.stored(k) for k in range(len(self.maps))] if filled else []
        self._allocate(ranks.rank, ranks.size)
        for k, (whole, run) in enumerate(zip(before, self.runs if filled else [], strict=True)):
            self.fill(k, {name: x[run.start : run.stop] for name, x in whole.items()}, self.maps[k])
        return ""

    def grow(self, number: int, options: MapOptions) -> None:
        """Give a map more rows and candidates. Its ids keep their slots and rows."""
        before, options_before = [self.stored(k) for k in range(len(self.maps))], list(self.maps)
        self.maps[number] = options
        self._allocate(self._rank, self.world_size)
        for k, (stored, old) in enumerate(zip(before, options_before, strict=True)):
            self.fill(k, stored, old)

    def fill(self, number: int, given: Mapping[str, Tensor], saved: MapOptions) -> None:
        """Copy this rank's shards of one map, which had the options `saved`: as many rows and candidates as now, or fewer."""
        first = self.maps[number].row_slots
        for name, x in self.stored(number).items():
            filled = torch.zeros_like(x)  # `given` may be `x` itself, as state_dict() has it
            filled[:, : saved.row_slots] = given[name][:, : saved.row_slots]
            filled[:, first : first + saved.width - saved.row_slots] = given[name][:, saved.row_slots :]
            x.copy_(filled)
        self.forget_index()

    def forget_index(self) -> None:
        """Call it after what is stored, or its device, has changed."""
        self._table: _HashTable | None = None  # made from what is stored when it is needed
        self._constants: _Constants | None = None

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        moved = {name: change(x) for name, x in self._stored.items()}
        if any(moved[name] is not x for name, x in self._stored.items()) or change(self.taken) is not self.taken:
            self._stored, self.taken = moved, change(self.taken)
            self.forget_index()

    def owners(self, batch: DistinctIds, world_size: int) -> Tensor:
        """The rank that stores each id."""
        sizes = torch.tensor([chunk_size(m.shards, world_size) for m in self.maps], device=batch.ids.device)
        shards = _divide_range(batch.hashes, self._constant().shards.index_select(0, batch.maps))
        return shards // sizes.index_select(0, batch.maps)

    def look_up(self, batch: DistinctIds) -> Tensor:
        """The rows of ids that belong to these shards; 0 for ids that have none."""
        return self._rows_of(self._index().find(batch.hashes, batch.maps))

    def admit(self, batch: DistinctIds, training: Sequence[bool], gather: Callable[[Tensor], Tensor]) -> Admitted:
        """Look up the ids; before, in maps that are `training`, count them and admit those that have reached the threshold.

        `gather` concatenates the numbers of all ranks.
        """
        constant = self._constant()
        _, counts, calls, rows = self._stored.values()
        slots = self._index().find(batch.hashes, batch.maps)
        counted = torch.tensor(training, device=slots.device).index_select(0, batch.maps)
        known = ((slots >= 0) & counted).nonzero().squeeze(1)
        held = slots.index_select(0, known)
        counts.index_add_(0, held, batch.counts.index_select(0, known))
        now = torch.tensor(self.calls, device=slots.device)
        calls.index_copy_(0, held, now.index_select(0, batch.maps.index_select(0, known)))
        batch = batch._replace(counts=batch.counts.index_copy(0, known, counts.index_select(0, held)))

        new = (counted & (self._rows_of(slots) == 0)).nonzero().squeeze(1)
        thresholds = constant.threshold.index_select(0, batch.maps.index_select(0, new))
        ready = new[batch.counts.index_select(0, new) >= thresholds]
        queue = self._queue(batch, ready)
        grants = self._grant(gather(queue.wanted).index_select(0, constant.gathered_order))
        granted, first_slot, first_row = (x[constant.own_shards] for x in grants[:3])
        first_slots = (constant.starts + first_slot).index_select(0, queue.shard)
        targets = torch.where(queue.turn < granted.index_select(0, queue.shard), first_slots + queue.turn, -1)
        fresh = (targets >= 0).nonzero().squeeze(1)
        fresh_rows = first_row.index_select(0, queue.shard) + queue.turn
        rows.index_copy_(0, targets.index_select(0, fresh), fresh_rows.index_select(0, fresh))
        for k in grants.short:
            area = range(self.maps[k].row_slots)
            self._give_up(k, area, queue._replace(turn=queue.turn - granted[queue.shard]), first_slot, targets)
        evicted = self._put(batch, queue.which, targets, slots, now)
        if any(m.candidates for m in self.maps):
            left = new[slots[new] < 0]
            queue = self._queue(batch, left[constant.candidate_slots[batch.maps[left]] > 0])
            targets = torch.full_like(queue.turn, -1)
            for k in queue.maps_of(constant):
                area = range(self.maps[k].row_slots, self.maps[k].width)
                self._give_up(k, area, queue, None, targets)
            self._put(batch, queue.which, targets, slots, now)
        shard = torch.searchsorted(constant.starts, evicted, right=True) - 1
        return Admitted(self._rows_of(slots), rows[evicted], constant.map_of_shard[shard], bool(grants.short))

    def _queue(self, batch: DistinctIds, which: Tensor) -> _Queue:
        """Let `which` of the ids queue up in their shards: the higher count comes first, then the smaller id."""
        constant = self._constant()
        which = which.index_select(0, batch.ids.index_select(0, which).argsort())
        maps, hashes, counts = (x.index_select(0, which) for x in (batch.maps, batch.hashes, batch.counts))
        shard = _divide_range(hashes, constant.shards.index_select(0, maps)) + constant.first_shard.index_select(0, maps)
        wanted = shard.bincount(minlength=len(constant.starts))
        most = counts.max() if counts.numel() else 0
        order = (shard * (most + 1) + (most - counts)).argsort(stable=True)
        shard = shard.index_select(0, order)
        earlier = (wanted.cumsum(0) - wanted).index_select(0, shard)
        turn = torch.arange(which.numel(), device=which.device) - earlier
        return _Queue(which.index_select(0, order), shard, turn, wanted)

    def _grant(self, wanted: Tensor) -> _Grants:
        """Share out the free rows of each map among its shards, given how many each of all shards wants. Takes them."""
        constant = self._constant()
        taken = self.taken.clone()
        granted = torch.minimum(wanted, constant.room - taken)
        by_map = torch.zeros((2, len(self.maps)), dtype=torch.int64, device=taken.device)
        by_map.index_add_(1, constant.map_of_all_shards, torch.stack((taken, granted)))
        taken_by_map, granted_by_map = by_map
        free = constant.rows - taken_by_map
        for k in (granted_by_map > free).nonzero().squeeze(1).tolist():
            part = constant.map_of_all_shards == k
            granted[part] = _share_out(int(free[k]), taken[part], granted[part])
            granted_by_map[k] = granted[part].sum()
        earlier = granted.cumsum(0) - granted - (granted_by_map.cumsum(0) - granted_by_map)[constant.map_of_all_shards]
        self.taken += granted
        short = constant.map_of_all_shards[wanted > granted].unique().tolist()
        first_rows = 1 + taken_by_map[constant.map_of_all_shards] + earlier
        return _Grants(granted, taken, first_rows, [k for k in short if self.maps[k].eviction])

    def _give_up(self, number: int, area: range, queue: _Queue, used: Tensor | None, targets: Tensor) -> None:
        """Write to `targets` slots of one map for those in the queue that have none: free ones, then those of evicted ids.

        `area`: the columns to choose from; `used`: for each shard how many of them, from the first on; None: all. An id's turn
        is counted from the first in its shard that has no slot yet.
        """
        constant, options = self._constant(), self.maps[number]
        shards = (constant.map_of_shard == number).nonzero().squeeze(1)
        mine = ((constant.map_of_shard[queue.shard] == number) & (targets < 0)).nonzero().squeeze(1)
        if not mine.numel():
            return
        shard, turn = queue.shard[mine] - shards[0], queue.turn[mine]
        wanted = shard.bincount(minlength=len(shards))
        stored = {name: x[:, area.start : area.stop] for name, x in self.stored(number).items()}
        eviction = options.eviction if area.start == 0 else "least_recent"
        places, had = _choose(stored, wanted, None if used is None else used[shards], self.calls[number], eviction)
        served = turn < had[shard]
        mine, shard, turn = mine[served], shard[served], turn[served]
        targets[mine] = constant.starts[shards][shard] + area.start + places[shard, turn]

    def _put(self, batch: DistinctIds, which: Tensor, targets: Tensor, slots: Tensor, now: Tensor) -> Tensor:
        """Store `which` of the ids in the slots `targets`, unless these are -1. Returns the slots that had another id."""
        served = (targets >= 0).nonzero().squeeze(1)
        which, targets = which.index_select(0, served), targets.index_select(0, served)
        if not which.numel():
            return which
        ids, counts, calls, _ = self._stored.values()
        maps, table, constant = batch.maps.index_select(0, which), self._index(), self._constant()
        left = slots.index_select(0, which)
        left = left[left >= 0]  # by candidates that move to their rows
        evicted = targets[calls.index_select(0, targets) > 0]
        gone = torch.cat([left, evicted])
        if gone.numel():
            shard = torch.searchsorted(constant.starts, gone, right=True) - 1
            table.remove(splitmix64(ids[gone]), constant.map_of_shard[shard])
            for x in (ids, counts, calls):
                x.index_fill_(0, left, 0)
        ids.index_copy_(0, targets, batch.ids.index_select(0, which))
        counts.index_copy_(0, targets, batch.counts.index_select(0, which))
        calls.index_copy_(0, targets, now.index_select(0, maps))
        table.insert(batch.hashes.index_select(0, which), maps, targets)
        slots.index_copy_(0, which, targets)
        return evicted

    def _rows_of(self, slots: Tensor) -> Tensor:
        if not self._stored["rows"].numel():
            return torch.zeros_like(slots)
        return self._stored["rows"].index_select(0, slots.clamp(min=0)).where(slots >= 0, 0)

    def _constant(self) -> _Constants:
        if self._constants is None:
            with torch.inference_mode(False):
                self._constants = self._make_constants(self.taken.device)
        return self._constants

    def _make_constants(self, device: torch.device) -> _Constants:
        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        maps, numbers = self.maps, range(len(self.maps))
        world_size = max(1, self.world_size)
        first_of_all = [0, *accumulate(m.shards for m in maps)]
        runs_by_rank = [[range(*chunk(m.shards, world_size, rank)) for m in maps] for rank in range(world_size)]
        gathered = [first_of_all[k] + s for runs in runs_by_rank for k, run in enumerate(runs) for s in run]
        first_shard: list[int] = []
        starts: list[int] = []
        first_slot = 0
        for m, run in zip(maps, self.runs, strict=True):
            first_shard.append(len(starts) - run.start)
            starts += [first_slot + i * m.width for i in range(len(run))]
            first_slot += len(run) * m.width
        return _Constants(
            shards=tensor([m.shards for m in maps]),
            threshold=tensor([m.threshold for m in maps]),
            rows=tensor([m.capacity - 1 for m in maps]),
            candidate_slots=tensor([m.width - m.row_slots for m in maps]),
            first_shard=tensor(first_shard),
            starts=tensor(starts),
            map_of_shard=tensor([k for k in numbers for _ in self.runs[k]]),
            own_shards=tensor([first_of_all[k] + s for k in numbers for s in self.runs[k]]),
            map_of_all_shards=tensor([k for k in numbers for _ in range(maps[k].shards)]),
            room=tensor([m.row_slots for m in maps for _ in range(m.shards)]),
            gathered_order=tensor(gathered).argsort(),
            gathered_sizes=[sum(map(len, runs)) for runs in runs_by_rank],
        )

    @property
    def gathered_sizes(self) -> list[int]:
        """How many shards each rank has."""
        return self._constant().gathered_sizes

    def _index(self) -> _HashTable:
        if self._table is None:
            with torch.inference_mode(False):
                ids, counts, _, _ = self._stored.values()
                used = (counts > 0).nonzero().squeeze(1)
                shard = torch.searchsorted(self._constant().starts, used, right=True) - 1
                self._table = _HashTable(self.maps, self.runs, ids.device)
                self._table.insert(splitmix64(ids[used]), self._constant().map_of_shard[shard], used)
        return self._table


class Admitted(NamedTuple):
    rows: Tensor  # of the ids of the batch
    reassigned: Tensor  # rows of these shards that went to another id
    reassigned_maps: Tensor  # the maps of these rows
    any_reassigned: bool  # on any rank, perhaps


class _Constants(NamedTuple):
    """Numbers that follow from the options and the ranks, as tensors."""

    # for each map
    shards: Tensor
    threshold: Tensor
    rows: Tensor
    candidate_slots: Tensor  # of a shard
    first_shard: Tensor  # to be added to a shard's number in its map: its number among all shards of this rank
    # for each shard of this rank
    starts: Tensor  # its first slot
    map_of_shard: Tensor
    own_shards: Tensor  # its number among all shards of all ranks
    # for each shard of all ranks, map by map
    map_of_all_shards: Tensor
    room: Tensor  # slots for ids with rows
    gathered_order: Tensor  # where its number is if each rank gives those of its shards
    gathered_sizes: list[int]  # how many each rank gives


class _Queue(NamedTuple):
    """Ids that want slots, in the order of their shards."""

    which: Tensor  # index into the batch
    shard: Tensor  # among those of this rank
    turn: Tensor  # place in the queue of the shard, from 0 on
    wanted: Tensor  # for each shard, the length of its queue

    def maps_of(self, constant: _Constants) -> list[int]:
        found: list[int] = constant.map_of_shard[self.wanted > 0].unique().tolist()
        return found


class _Grants(NamedTuple):
    """For each of all shards:"""

    granted: Tensor  # how many free rows it gets
    first_slots: Tensor  # its first free slot
    first_rows: Tensor  # the first of these rows
    short: list[int]  # maps that have to evict ids


def _share_out(free: int, taken: Tensor, wanted: Tensor) -> Tensor:
    """Give `free` rows to shards that want more, such that afterwards they have as even numbers as possible."""
    low, high = 0, int((taken + wanted).max())
    while low < high:  # the highest level up to which all can be filled
        level = (low + high + 1) // 2
        low, high = (level, high) if int((level - taken).clamp(min=0).minimum(wanted).sum()) <= free else (low, level - 1)
    granted = (low - taken).clamp(min=0).minimum(wanted)
    more = ((granted < wanted) & (taken + granted == low)).nonzero().squeeze(1)[: free - int(granted.sum())]
    return granted.index_add(0, more, torch.ones_like(more))


def _choose(
    stored: Mapping[str, Tensor], wanted: Tensor, used: Tensor | None, call: int, eviction: Eviction | None
) -> tuple[Tensor, Tensor]:
    """For each shard, places in the order in which they are given away; and how many there are, at most as `wanted`."""
    counts, calls = stored["counts"], stored["calls"]
    columns = torch.arange(calls.shape[1], device=calls.device)
    # Each place has a different key: free ones come first, then the least recent, then the lower place. Ids of the present
    # call come last and stay where they are.
    key = calls * len(columns) + columns
    if used is not None:
        key.masked_fill_(columns >= used[:, None], _NEVER)
    kept = key >= call * len(columns)
    had = torch.minimum(wanted, len(columns) - kept.sum(1))
    most = int(had.max())
    if eviction == "least_recent" or not most:
        return key.topk(most, largest=False).indices, had
    counts = counts.masked_fill(kept, _NEVER)
    limit = counts.topk(most, largest=False).values.gather(1, (had - 1).clamp(min=0).unsqueeze(1))
    # All below the limit are evicted, and of those at the limit the first by their key.
    key = torch.where(counts < limit, key - _NEVER, key.masked_fill_(counts > limit, _NEVER))
    chosen = key.topk(most, largest=False).indices
    return chosen.gather(1, counts.gather(1, chosen).argsort(dim=1, stable=True)), had


class DistinctIds(NamedTuple):
    """The different ids of each map in a batch, map by map, in the order of their hashes: those of a shard are neighbours."""

    ids: Tensor
    hashes: Tensor
    counts: Tensor
    maps: Tensor  # the number of the map of each
    inverse: Tensor  # for each id of the batch, its index among them


def distinct_ids(ids: Tensor, lengths: Sequence[int], counts: Tensor | None = None) -> DistinctIds:
    """`lengths`: how many of the ids belong to each map. `counts`: how often each of the ids counts; None: once."""
    hashes, order = _sort_parts(splitmix64(ids), lengths)
    new = torch.ones_like(hashes, dtype=torch.bool)
    torch.ne(hashes[1:], hashes[:-1], out=new[1:])
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True) if length]
    new[torch.tensor(starts, dtype=torch.int64, device=ids.device)] = True
    first = new.nonzero().squeeze(1)
    inverse = torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)
    if counts is None:
        counts = first.diff(append=first.new_tensor([ids.numel()]))
    else:
        counts = torch.zeros_like(first).index_add_(0, inverse, counts)
    ends = torch.tensor(list(accumulate(lengths)), dtype=torch.int64, device=ids.device)
    maps = torch.searchsorted(ends, first, right=True)
    return DistinctIds(ids.index_select(0, order.index_select(0, first)), hashes.index_select(0, first), counts, maps, inverse)


def _sort_parts(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sort each part of `x` for itself. Returns the sorted numbers, and where each was in `x`."""
    if len(lengths) == 1:
        return x.sort()
    values, orders, start = torch.empty_like(x), torch.empty_like(x), 0
    for length in lengths:
        part = slice(start, start + length)
        torch.sort(x[part], out=(values[part], orders[part]))
        orders[part] += start
        start += length
    return values, orders


def _divide_range(hashes: Tensor, parts: Tensor) -> Tensor:
    """Which of `parts` equal ranges of the 2^64 hashes each hash is in. It rises with the hash."""
    return (hashes >> 32).add_(2**31).mul_(parts) >> 32


class _HashTable:
    """Finds the slot of a hash in a map, for the hashes of the shards `runs` of `maps`.

    Open addressing with linear probing, each map in cells of its own, at most half full. The first cell of a hash rises with
    the hash, so that a sorted batch reads memory in order. The cell of an entry depends on what came before; the result of a
    search does not.
    """

    def __init__(self, maps: Sequence[MapOptions], runs: Sequence[range], device: torch.device) -> None:
        sizes = [len(run) * m.width * _CELLS_PER_SLOT for m, run in zip(maps, runs, strict=True)]
        ends = list(accumulate(sizes))
        skipped = [run.start * m.width * _CELLS_PER_SLOT for m, run in zip(maps, runs, strict=True)]
        # For each map: its cells on all ranks, what leads from those to the cells here, its last cell here, and its cells here
        self._all_cells = torch.tensor([m.shards * m.width * _CELLS_PER_SLOT for m in maps], device=device)
        self._shift = torch.tensor([e - n - k for e, n, k in zip(ends, sizes, skipped, strict=True)], device=device)
        self._ends, self._sizes = torch.tensor(ends, device=device), torch.tensor(sizes, device=device)
        self._used = torch.zeros_like(self._sizes)  # cells that are not empty, at most
        self._hashes = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        dtype = torch.int32 if ends[-1] // _CELLS_PER_SLOT < 2**31 else torch.int64
        self._slots = torch.full((ends[-1],), _EMPTY, dtype=dtype, device=device)

    def find(self, hashes: Tensor, maps: Tensor) -> Tensor:
        """The slots of the hashes, int64; -1 for hashes that are not in the table."""
        cells = self._locate(hashes, maps)
        if not cells.numel():
            return cells
        return self._slots.index_select(0, cells.clamp(min=0)).to(torch.int64).where(cells >= 0, -1)

    def insert(self, hashes: Tensor, maps: Tensor, slots: Tensor) -> None:
        """Add different hashes, none of which is in the table, with different slots."""
        added = maps.bincount(minlength=len(self._sizes))
        if bool((self._used + added > self._sizes * 3 // 4).any()):
            self._sweep()
        self._used += added
        slots, cells = slots.to(self._slots.dtype), self._home(hashes, maps)
        while hashes.numel():
            free = (self._slots.index_select(0, cells) < 0).nonzero().squeeze(1)
            self._slots.index_copy_(0, cells.index_select(0, free), slots.index_select(0, free))  # of several, one gets a cell
            won = self._slots.index_select(0, cells) == slots
            placed = won.nonzero().squeeze(1)
            self._hashes.index_copy_(0, cells.index_select(0, placed), hashes.index_select(0, placed))
            lost = (~won).nonzero().squeeze(1)
            hashes, slots, cells, maps = (x.index_select(0, lost) for x in (hashes, slots, cells, maps))
            cells = self._next(cells, maps)

    def remove(self, hashes: Tensor, maps: Tensor) -> None:
        """Remove hashes that are in the table."""
        self._slots.index_fill_(0, self._locate(hashes, maps), _REMOVED)

    def _locate(self, hashes: Tensor, maps: Tensor) -> Tensor:
        """The cells that hold the hashes, or -1."""
        cells = self._home(hashes, maps)
        found, searched = torch.full_like(cells, -1), torch.arange(cells.numel(), device=cells.device)
        while cells.numel():
            slots = self._slots.index_select(0, cells)
            hit = (self._hashes.index_select(0, cells) == hashes) & (slots >= 0)
            found.index_copy_(0, searched, cells.where(hit, -1))
            left = ((slots != _EMPTY) & ~hit).nonzero().squeeze(1)
            hashes, cells, searched, maps = (x.index_select(0, left) for x in (hashes, cells, searched, maps))
            cells = self._next(cells, maps)
        return found

    def _home(self, hashes: Tensor, maps: Tensor) -> Tensor:
        return _divide_range(hashes, self._all_cells.index_select(0, maps)).add_(self._shift.index_select(0, maps))

    def _next(self, cells: Tensor, maps: Tensor) -> Tensor:
        """The cell after each, or the first one of its map after the last one."""
        cells = cells + 1
        return cells - self._sizes.index_select(0, maps).where(cells == self._ends.index_select(0, maps), 0)

    def _sweep(self) -> None:
        """Make removed cells empty again: fill the table anew."""
        live = (self._slots >= 0).nonzero().squeeze(1)
        hashes, slots = self._hashes[live], self._slots[live]
        self._slots.fill_(_EMPTY)
        self._used.zero_()
        self.insert(hashes, torch.searchsorted(self._ends, live, right=True), slots)
