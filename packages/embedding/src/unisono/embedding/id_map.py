"""IdMap: gives ids that are not known beforehand a row of an embedding table, with one map for all ranks.

From the top down: IdMap exchanges ids with the ranks that own them; _Slots holds one rank's share of the map and decides which
ids get rows; _HashTable finds the slot of an id.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from unisono.collectives import Group, all_gather, all_reduce, all_to_all_single
from unisono.collectives.autograd import disable_compile
from unisono.collectives.checks import describe
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata
from unisono.embedding.hashing import splitmix64
from unisono.embedding.sharding.layouts import chunk, chunk_size

Eviction = Literal["least_recent", "least_frequent"]
_EMPTY, _REMOVED = -1, -2  # instead of a slot; a search goes on past a removed one
_CELLS_PER_SLOT = 2
_MOST_SLOTS = 2**31 // _CELLS_PER_SLOT - 1  # so that a product with 32 bits of a hash stays within 63
_NEVER = 2**63 - 1


class IdMap(nn.Module):
    """Gives each id a row of its own as ids turn up: a vocabulary that grows with the data.

    `rows = id_map(ids)` takes ids of any integer dtype and shape, and returns rows of that shape, int64 in [0, capacity).
    **All unknown ids share row 0.** All ranks call together. In training mode ids are counted and admitted; in eval mode they
    are looked up and nothing changes. The result depends neither on the number of ranks nor on how the batch is split.

    Args:
        capacity: The number of rows, row 0 included.
        threshold: An id is admitted in the call in which its count, over all calls and ranks, reaches this number.
        eviction: Which id loses its row if none is free. None: no id, and new ids stay unknown. "least_recent": the id that was
            last seen the most calls ago. "least_frequent": the id with the lowest count; of several, the least recent one.
            Among equals the lower row goes first. An id of the present call keeps its row. An evicted id starts again from
            count 0.
        candidates: How many ids below the threshold are remembered with their counts; by default as many as there are rows.
            A new candidate replaces the one that was seen least recently, which starts again from 0.
        shards: Rows and candidates are divided over this many shards (at most one for each row), ids by their hash, and each
            rank stores a range of shards. Within a shard the id with the highest count (of several, the smallest id) is
            admitted first, to the lowest free row. A shard may be full while others have room: with R rows in each shard, about
            sqrt(R) of them may stay free. So give a small map few shards. More ranks than shards: some store nothing.

    `id_map.reassigned`: the rows that went from an old id to a new one in the last call, sorted, the same on all ranks. Reset
    them with `collection.reset_rows`.

    state_dict() does not depend on the number of ranks, so it loads on any other number. On several ranks it has DTensors, for
    torch.distributed.checkpoint; it loads whole tensors, too. A torch.save of one rank would have that rank's share only.

    Memory: 48 bytes for each row and candidate, over all ranks. Communication: one exchange of sizes, one of each rank's
    different ids, one of rows; with eviction, another of the reassigned rows.

    Backward: none; rows are integers.

    Example, with the ids of any number of ranks:
        >>> id_map = IdMap(capacity=100, shards=1, threshold=2)
        >>> id_map(torch.tensor([[-7, 10**18], [-7, 5]]))
        tensor([[1, 0],
                [1, 0]])
        >>> id_map(torch.tensor([5, 6]))
        tensor([2, 0])
    """

    def __init__(
        self,
        capacity: int,
        *,
        threshold: int = 1,
        eviction: Eviction | None = None,
        candidates: int | None = None,
        shards: int = 64,
        group: Group = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("capacity", capacity, 2), ("threshold", threshold, 1), ("shards", shards, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"IdMap: {name}={value!r} must be an integer, {least} or more")
        if eviction not in (None, "least_recent", "least_frequent"):
            raise ValueError(f"IdMap: eviction={eviction!r} is not one of None, 'least_recent', 'least_frequent'")
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1 or threshold == 1):
            raise ValueError(f"IdMap: {candidates=} must be a positive integer, and {threshold=} more than 1")
        self.capacity, self.threshold, self.eviction, self.group = capacity, threshold, eviction, group
        self.candidates = 0 if threshold == 1 else candidates or capacity - 1
        self.shards = min(shards, capacity - 1)
        self.reassigned = torch.empty(0, dtype=torch.int64, device=device)
        self._calls = 0  # in training mode
        # Not buffers: DDP would overwrite every rank's share with that of rank 0.
        self._slots = self._make_slots(range(0))
        if self.shards * self._slots.width > _MOST_SLOTS:
            raise ValueError(f"IdMap: {capacity=} with candidates={self.candidates} is more than {_MOST_SLOTS} together")

    @disable_compile
    def forward(self, ids: Tensor) -> Tensor:
        ranks = resolve_group(self.group)
        error = self._input_error(ids) or self._hold_shards(ranks)
        mine = _distinct_ids(torch.empty(0, dtype=torch.int64) if error else ids.reshape(-1).to(torch.int64))
        owners = _divide_range(mine.hashes, self.shards) // chunk_size(self.shards, ranks.size)
        send = owners.bincount(minlength=ranks.size).tolist()
        same = f"{self.extra_repr()}, training={self.training}, call {self._calls}"
        table = all_gather_metadata("IdMap", ids if error else mine.ids, 0, ranks, extra=send, same=same, problem=error)
        receive = [row[2 + ranks.rank] for row in table]

        theirs = mine
        if ranks.size > 1:
            leaving = torch.stack((mine.ids, mine.counts), 1) if self.training else mine.ids.unsqueeze(1)
            arrived = all_to_all_single(leaving, send_sizes=send, receive_sizes=receive, group=self.group)
            theirs = _distinct_ids(arrived[:, 0], arrived[:, 1] if self.training else None)
        self.reassigned = mine.ids.new_empty(0)
        if self.training:
            self._calls += 1
            rows, self.reassigned = self._slots.admit(
                theirs, call=self._calls, threshold=self.threshold, eviction=self.eviction
            )
        else:
            rows = self._slots.look_up(theirs)
        if ranks.size > 1:
            rows = rows.index_select(0, theirs.inverse)
            rows = all_to_all_single(rows, send_sizes=receive, receive_sizes=send, group=self.group)
            if self.training and self.eviction:
                self.reassigned = all_gather(self.reassigned, group=self.group)
        return rows.index_select(0, mine.inverse).view(ids.shape)

    @disable_compile
    def count(self) -> int:
        """Count the ids that have a row, over all ranks. All ranks call."""
        self._hold_shards_or_raise()
        return int(all_reduce((self._slots.stored["counts"][:, : self._slots.in_rows] > 0).sum(), group=self.group))

    def extra_repr(self) -> str:
        return (
            f"capacity={self.capacity}, threshold={self.threshold}, eviction={self.eviction!r}, "
            f"candidates={self.candidates}, shards={self.shards}"
        )

    def get_extra_state(self) -> dict[str, Tensor]:
        """For state_dict: what all slots hold, as tensors of shape (shards, slots). Nothing is communicated."""
        ranks = self._hold_shards_or_raise()
        state = dict(self._slots.stored)
        if ranks.size > 1:
            mesh = DeviceMesh.from_group(process_group(ranks), state["ids"].device.type)
            shape = torch.Size((self.shards, self._slots.width))
            for name, x in state.items():
                state[name] = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        return state | {"call": torch.tensor(self._calls, device="cpu"), "capacity": torch.tensor(self.capacity, device="cpu")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """For load_state_dict: `state` has what all slots hold, or this rank's share of it as DTensors."""
        ranks = self._hold_shards_or_raise()
        stored = self._slots.stored
        function = "IdMap.load_state_dict"
        if set(state) != {*stored, "call", "capacity"}:
            raise ValueError(f"{function}: expected {[*stored, 'call', 'capacity']}, got {list(state)}")
        shape = (self.shards, self._slots.width)
        for name in stored:
            if tuple(state[name].shape) != shape or state[name].dtype != torch.int64:
                raise ValueError(f"{function}: {name}: expected int64{list(shape)} for {self}, got {describe(state[name])}")
        if int(state["capacity"]) != self.capacity:
            raise ValueError(f"{function}: saved with capacity={int(state['capacity'])}, but this is {self}")
        for name, x in stored.items():
            x.copy_(_take_shards(state[name], self._slots.run, ranks))
        self._calls = int(state["call"])
        self._slots.forget_index()

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        memo[id(self.group)] = self.group  # the same ranks; a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IdMap:
        """Move the slots with .to() and similar calls, as if they were buffers."""
        self._slots.apply(fn)
        self.reassigned = fn(self.reassigned)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _input_error(self, ids: object) -> str:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            return f"ids: expected a Tensor of integers, got {describe(ids)}"
        device = self._slots.stored["ids"].device
        return "" if ids.device == device else f"ids are on {ids.device}, the map on {device}; move one of them by .to()"

    def _make_slots(self, run: range) -> _Slots:
        device = self.reassigned.device
        return _Slots(run, shards=self.shards, rows=self.capacity - 1, candidates=self.candidates, device=device)

    def _hold_shards(self, ranks: GroupRanks) -> str:
        """Make room for this rank's shards, now that the ranks are known; or say what is wrong."""
        run = range(*chunk(self.shards, ranks.size, ranks.rank))  # as DTensor divides them
        before = self._slots
        if run == before.run:
            return ""
        if self._calls and before.run != range(self.shards):
            return f"it was filled on another number of ranks than {ranks.size}; make a new one and load its state_dict"
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            self._slots = self._make_slots(run)
            for name, x in self._slots.stored.items():
                if self._calls:
                    x.copy_(before.stored[name][run.start : run.stop])
        return ""

    def _hold_shards_or_raise(self) -> GroupRanks:
        ranks = resolve_group(self.group)
        if error := self._hold_shards(ranks):
            raise ValueError(f"IdMap: {error}")
        return ranks


def _take_shards(x: Any, run: range, ranks: GroupRanks) -> Tensor:
    """The shards `run` of a whole tensor or a DTensor, which is gathered if it is divided in another way."""
    if isinstance(x, DTensor):
        if x.device_mesh.size() == ranks.size and tuple(x.placements) == (Shard(0),):
            return x.to_local()
        x = x.full_tensor()
    return x[run.start : run.stop]  # type: ignore[no-any-return]


class _Slots:
    """What one rank stores: the shards `run` of `shards`, each with slots for its share of `rows`, then of `candidates`.

    Each slot has an id, its count, and the call (from 1 on) in which it was last seen; if these are 0, the slot is free. Rows
    of a shard are taken in ascending order and never become free again.
    """

    def __init__(self, run: range, *, shards: int, rows: int, candidates: int, device: torch.device | None) -> None:
        self.run, self.shards, self.rows, self.candidates = run, shards, rows, candidates
        self.in_rows = -(-rows // shards)  # if the rows do not divide evenly, some shards do not use the last one
        self.width = self.in_rows - (-candidates // shards)
        self.stored = {
            name: torch.zeros(len(run), self.width, dtype=torch.int64, device=device) for name in ("ids", "counts", "calls")
        }
        self._table: _HashTable | None = None  # None: to be made from `stored`
        self._filled = torch.zeros(len(run), dtype=torch.int64, device=device)  # rows that are taken; set with the table

    def forget_index(self) -> None:
        """Call it after `stored` was changed from outside."""
        self._table = None

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.stored = {name: fn(x) for name, x in self.stored.items()}
        self.forget_index()

    def look_up(self, batch: _Distinct) -> Tensor:
        """The rows of ids that belong to these shards, counted from 1; 0 for ids that have none."""
        return self._rows_of(self._index().find(batch.hashes))

    def admit(self, batch: _Distinct, *, call: int, threshold: int, eviction: Eviction | None) -> tuple[Tensor, Tensor]:
        """Count the ids and admit those that have reached the threshold. Returns their rows, and the reassigned rows."""
        _, counts, calls = (x.view(-1) for x in self.stored.values())
        slots = self._index().find(batch.hashes)
        known = (slots >= 0).nonzero().squeeze(1)
        held = slots.index_select(0, known)
        counts.index_add_(0, held, batch.counts.index_select(0, known))
        calls.index_fill_(0, held, call)
        batch = batch._replace(counts=batch.counts.index_copy(0, known, counts.index_select(0, held)))

        waiting = (slots < 0) | (slots % self.width >= self.in_rows)
        ready = (waiting & (batch.counts >= threshold)).nonzero().squeeze(1)
        evicted = self._place(batch, ready, slots, range(self.in_rows), call, eviction)
        if self.candidates:
            new = (slots < 0).nonzero().squeeze(1)
            self._place(batch, new, slots, range(self.in_rows, self.width), call, "least_recent")
        return self._rows_of(slots), self._rows_of(evicted.sort().values)

    def _place(
        self, batch: _Distinct, which: Tensor, slots: Tensor, columns: range, call: int, eviction: Eviction | None
    ) -> Tensor:
        """Give `which` of the ids, with their total counts, slots in these columns of their shards, and write them to `slots`.

        The higher count comes first, then the smaller id; if slots run out, the rest get none. Returns the slots that belonged
        to another id.
        """
        if not which.numel():
            return which
        which = which[batch.ids[which].argsort()]
        which = which[batch.counts[which].argsort(descending=True, stable=True)]
        shard, order = (_divide_range(batch.hashes[which], self.shards) - self.run.start).sort(stable=True)
        wanted = shard.bincount(minlength=len(self.run))
        turn = torch.arange(which.numel(), device=which.device) - (wanted.cumsum(0) - wanted)[shard]
        places, had = self._vacate(wanted, columns, call, eviction)
        served = turn < had[shard]
        which, shard, turn = which[order][served], shard[served], turn[served]
        if not which.numel():
            return which
        taken = shard * self.width + columns.start + places[shard, turn]

        ids, counts, calls = (x.view(-1) for x in self.stored.values())
        left = slots[which]
        left = left[left >= 0]  # by candidates that move to their rows
        evicted = taken[calls[taken] > 0]
        self._index().remove(splitmix64(ids[torch.cat([left, evicted])]))
        for x in (ids, counts, calls):
            x.index_fill_(0, left, 0)
        ids.index_copy_(0, taken, batch.ids[which])
        counts.index_copy_(0, taken, batch.counts[which])
        calls.index_fill_(0, taken, call)
        self._index().insert(batch.hashes[which], taken)
        slots[which] = taken
        return evicted

    def _vacate(self, wanted: Tensor, columns: range, call: int, eviction: Eviction | None) -> tuple[Tensor, Tensor]:
        """For each shard, places in these columns in the order in which they are given away; and how many there are."""
        _, sizes = self._shares()
        rows = columns.start == 0
        if rows:
            free = sizes - self._filled
            had = wanted if eviction else torch.minimum(wanted, free)
            self._filled = torch.minimum(self._filled + wanted, sizes)
            if bool((had <= free).all()):  # the lowest free ones, without a look at what is stored
                return (sizes - free).unsqueeze(1) + torch.arange(int(had.max()), device=had.device), had
        _, counts, calls = (x[:, columns.start : columns.stop] for x in self.stored.values())
        # Each place has a different key: free ones come first, then the least recent, then the lower place. Ids of the
        # present call come last and stay where they are.
        key = calls * len(columns) + torch.arange(len(columns), device=calls.device)
        if rows:
            key[:, -1].masked_fill_(sizes < len(columns), _NEVER)
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

    def _shares(self) -> tuple[Tensor, Tensor]:
        """For each of these shards, its first row and its number of rows."""
        each, more = divmod(self.rows, self.shards)
        shard = torch.arange(self.run.start, self.run.stop, device=self.stored["ids"].device)
        return 1 + shard * each + shard.clamp(max=more), each + (shard < more).to(torch.int64)

    def _rows_of(self, slots: Tensor) -> Tensor:
        if not slots.numel():
            return slots
        first, _ = self._shares()
        shard, place = slots.clamp(min=0) // self.width, slots % self.width
        return (first[shard] + place).where((slots >= 0) & (place < self.in_rows), 0)

    def _index(self) -> _HashTable:
        if self._table is None:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
                ids, counts, _ = (x.view(-1) for x in self.stored.values())
                used = (counts > 0).nonzero().squeeze(1)
                self._table = _HashTable(self.run, shards=self.shards, slots=self.width, device=ids.device)
                self._table.insert(splitmix64(ids[used]), used)
                self._filled = (self.stored["counts"][:, : self.in_rows] > 0).sum(1)
        return self._table


class _Distinct(NamedTuple):
    """The different ids of a batch, in the order of their hashes: ids of one shard, and of one rank, are neighbours."""

    ids: Tensor
    hashes: Tensor
    counts: Tensor
    inverse: Tensor  # for each id of the batch, its index among them


def _distinct_ids(ids: Tensor, counts: Tensor | None = None) -> _Distinct:
    """`counts`: how often each of the ids counts; None: once."""
    hashes, order = splitmix64(ids).sort()
    new = torch.ones_like(hashes, dtype=torch.bool)
    new[1:] = hashes[1:] != hashes[:-1]
    first = new.nonzero().squeeze(1)
    inverse = torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)
    if counts is None:
        counts = first.diff(append=first.new_tensor([ids.numel()]))
    else:
        counts = torch.zeros_like(first).index_add_(0, inverse, counts)
    return _Distinct(ids.index_select(0, order.index_select(0, first)), hashes.index_select(0, first), counts, inverse)


def _divide_range(hashes: Tensor, parts: int) -> Tensor:
    """Which of `parts` equal ranges of the 2^64 hashes each hash is in. It rises with the hash."""
    return ((hashes >> 32) + 2**31) * parts >> 32


class _HashTable:
    """Finds the slot of a hash, for the hashes of the shards `run` of `shards`, at most `slots` of them in each.

    Open addressing with linear probing, at most half full. The first cell of a hash rises with the hash, so that a sorted
    batch reads memory in order. The cell of an entry depends on what came before; the result of a search does not.
    """

    def __init__(self, run: range, *, shards: int, slots: int, device: torch.device) -> None:
        self._all_cells = shards * slots * _CELLS_PER_SLOT
        self._first = run.start * slots * _CELLS_PER_SLOT
        self._size = len(run) * slots * _CELLS_PER_SLOT
        self._used = 0  # cells that are not empty, at most
        self._hashes = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._slots = torch.full((self._size,), _EMPTY, dtype=torch.int32, device=device)

    def find(self, hashes: Tensor) -> Tensor:
        """The slots of the hashes, int64; -1 for hashes that are not in the table."""
        cells = self._locate(hashes)
        if not cells.numel():
            return cells
        return self._slots.index_select(0, cells.clamp(min=0)).to(torch.int64).where(cells >= 0, -1)

    def insert(self, hashes: Tensor, slots: Tensor) -> None:
        """Add different hashes, none of which is in the table, with different slots."""
        if self._used + hashes.numel() > self._size * 3 // 4:
            self._sweep()
        self._used += hashes.numel()
        slots, cells = slots.to(torch.int32), self._home(hashes)
        while hashes.numel():
            free = self._slots.index_select(0, cells) < 0
            self._slots.index_copy_(0, cells[free], slots[free])  # if several want a cell, one gets it
            won = self._slots.index_select(0, cells) == slots
            self._hashes.index_copy_(0, cells[won], hashes[won])
            lost = ~won
            hashes, slots, cells = hashes[lost], slots[lost], self._next(cells[lost])

    def remove(self, hashes: Tensor) -> None:
        """Remove hashes that are in the table."""
        self._slots.index_fill_(0, self._locate(hashes), _REMOVED)

    def _locate(self, hashes: Tensor) -> Tensor:
        """The cells that hold the hashes, or -1."""
        cells = self._home(hashes)
        found, searched = torch.full_like(cells, -1), torch.arange(cells.numel(), device=cells.device)
        while cells.numel():
            slots = self._slots.index_select(0, cells)
            hit = (self._hashes.index_select(0, cells) == hashes) & (slots >= 0)
            found.index_copy_(0, searched, cells.where(hit, -1))
            left = ((slots != _EMPTY) & ~hit).nonzero().squeeze(1)
            hashes, cells, searched = (x.index_select(0, left) for x in (hashes, self._next(cells), searched))
        return found

    def _home(self, hashes: Tensor) -> Tensor:
        return _divide_range(hashes, self._all_cells) - self._first

    def _next(self, cells: Tensor) -> Tensor:
        cells = cells + 1
        return cells.where(cells < self._size, 0)

    def _sweep(self) -> None:
        """Make removed cells empty again: fill the table anew."""
        live = (self._slots >= 0).nonzero().squeeze(1)
        hashes, slots = self._hashes[live], self._slots[live]
        self._slots.fill_(_EMPTY)
        self._used = 0
        self.insert(hashes, slots)
