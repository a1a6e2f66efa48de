"""What one rank stores of an IdMap: which ids have rows, which wait for one, and who makes room for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from unisono.embedding.vocabulary.hash_table import Distinct, HashTable, divide, mix

Eviction = Literal["least_recent", "least_frequent"]
_NEVER = 2**63 - 1


class Slots:
    """The shards `run` of `shards`. A shard has slots for its share of `rows`, and then for its share of `candidates`.

    Each slot has an id, its count, and the call (from 1 on) in which it was last seen; where these are 0, it is free. Rows
    of a shard are taken in ascending order and never become free again.
    """

    def __init__(self, run: range, *, shards: int, rows: int, candidates: int, device: torch.device | None) -> None:
        self.run, self.shards, self.rows, self.candidates = run, shards, rows, candidates
        self.in_rows = -(-rows // shards)  # where the rows do not divide, some shards leave the last one alone
        self.width = self.in_rows - (-candidates // shards)
        self.stored = {
            name: torch.zeros(len(run), self.width, dtype=torch.int64, device=device) for name in ("ids", "counts", "calls")
        }
        self._table: HashTable | None = None  # None: to be made of what is stored
        self._filled = torch.zeros(len(run), dtype=torch.int64, device=device)  # rows that are taken; made with the table

    def forget_index(self) -> None:
        """After `stored` was changed from outside."""
        self._table = None

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.stored = {name: fn(x) for name, x in self.stored.items()}
        self.forget_index()

    def look_up(self, batch: Distinct) -> Tensor:
        """The rows of ids that belong to these shards, counted from 1; 0 for those that have none."""
        return self._rows_of(self._index().find(batch.hashes))

    def admit(self, batch: Distinct, *, call: int, threshold: int, eviction: Eviction | None) -> tuple[Tensor, Tensor]:
        """Count the ids and admit those that have reached the threshold. Their rows, and the rows that changed hands."""
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
        self, batch: Distinct, which: Tensor, slots: Tensor, columns: range, call: int, eviction: Eviction | None
    ) -> Tensor:
        """Give `which` of the ids, with their total counts, slots in these columns of their shards, and note it in `slots`.

        The higher count comes first, then the smaller id; those for whom there is no slot get none. Returns the slots that
        belonged to another id.
        """
        if not which.numel():
            return which
        which = which[batch.ids[which].argsort()]
        which = which[batch.counts[which].argsort(descending=True, stable=True)]
        shard, order = (divide(batch.hashes[which], self.shards) - self.run.start).sort(stable=True)
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
        self._index().remove(mix(ids[torch.cat([left, evicted])]))
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
        # A key of its own for each place: free ones come first, then the least recent, then the lower place. Those of the
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
        # All below the limit go, and of those at the limit the first by their key.
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

    def _index(self) -> HashTable:
        if self._table is None:
            with torch.inference_mode(False):  # made inside, it could not be changed outside
                ids, counts, _ = (x.view(-1) for x in self.stored.values())
                used = (counts > 0).nonzero().squeeze(1)
                self._table = HashTable(self.run, shards=self.shards, slots=self.width, device=ids.device)
                self._table.insert(mix(ids[used]), used)
                self._filled = (self.stored["counts"][:, : self.in_rows] > 0).sum(1)
        return self._table
