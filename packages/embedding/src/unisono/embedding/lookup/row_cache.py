"""Rows that stay in host memory, or in a memory-mapped file, and a cache of them on the device.

A look-up fetches the rows that it needs and that are not in the cache, in one batch, and writes the rows that make room for
them back, in one batch. What follows, the read, the sums and the optimizer's step, works on the cache. The backward finds its
rows there, too, unless other look-ups have evicted some in the meantime; then it fetches them again.

Which row is in which slot of the cache is known on the device, by a number for each row of the table. So on a GPU the host
waits twice in a look-up whose rows are all there, for how many it needs and how many are missing, and once more, for the row
numbers and the rows that leave, in others.
"""

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_EMPTY = -1  # the slot of a row that is not in the cache
_BLOCK = 65536  # rows that are copied to the host at once when all are written back


class CacheStats(NamedTuple):
    """What the cache of a table in host memory has done on this rank. Tables in the same table group share a cache.

    A look-up counts each row that any rank requests once: as a hit if it is in the cache, otherwise as a miss.
    """

    slots: int  # rows that fit in; more than were asked for, if one look-up needed more
    rows: int  # that are in it now
    hits: int
    misses: int
    evictions: int  # rows that made room for others

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class RowCache:
    """The rows of a group shard: all of them in `store`, on the CPU, and some in `weight` and `state`, on the device.

    Args:
        store: The weight, by the name "weight", and the optimizer's state of all rows.
        slots: How many rows the cache holds. It grows if one look-up needs more.
        device: Of the cache.

    A row that is in the cache has its last value there and perhaps nowhere else, until `release`.
    """

    def __init__(self, store: Mapping[str, Tensor], slots: int, device: torch.device) -> None:
        self.store = dict(store)
        self.slots = slots
        self.device = device
        self.row_count = len(self.store["weight"])
        self.generation = 0  # changes when a row leaves the cache: until then, what was fetched is there
        self.is_dirty = False  # rows in the cache may differ from those in the store
        self.hits = self.misses = self.evictions = 0
        self._clock = 0  # counts fetches
        self._buffers = {name: x.new_empty((slots, *x.shape[1:]), device=device) for name, x in self.store.items()}
        # The last row number and the first time stand for what is not there.
        self._slot_of = torch.empty(self.row_count + 1, dtype=torch.int32, device=device)
        self._row_of = torch.empty(slots, dtype=torch.int64, device=device)
        self._last_used = torch.empty(slots + 1, dtype=torch.int64, device=device)  # of slot i at i + 1
        self._clear()

    def _clear(self) -> None:
        """Start with an empty cache, in place: in inference mode, new tensors could not be used in training."""
        self.filled = 0
        self._slot_of.fill_(_EMPTY)
        self._row_of.fill_(self.row_count)
        self._last_used.zero_()

    @property
    def weight(self) -> Tensor:
        return self._buffers["weight"]

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: x for name, x in self._buffers.items() if name != "weight"}

    def follow(self, old: "RowCache") -> None:
        """Take the place of another cache: what was fetched into that one is not here."""
        self.generation = old.generation + 1
        self.hits, self.misses, self.evictions = old.hits, old.misses, old.evictions

    def stats(self) -> CacheStats:
        return CacheStats(self.slots, self.filled, self.hits, self.misses, self.evictions)

    def places(self, rows: Tensor) -> Tensor:
        """The slots of rows that are in the cache."""
        return self._slot_of.index_select(0, rows)

    @torch.no_grad()
    def fetch(self, rows: Tensor) -> None:
        """Bring `rows`, which are sorted and different, into the cache."""
        needed = rows.numel()
        if needed == 0:
            return
        if needed > self.slots:
            self._grow(needed)
        self._clock += 1
        slots = self.places(rows)
        self._last_used.index_fill_(0, slots.to(torch.int64).add_(1), self._clock)
        missing = rows.masked_select(slots == _EMPTY).to(torch.int64)
        count = missing.numel()
        self.hits += needed - count
        self.misses += count
        if count == 0:
            return
        # Empty slots come first, since they were never used; the rows of this look-up are the last to leave.
        slots = self._last_used[1:].topk(count, largest=False, sorted=True).indices
        evicted = max(0, self.filled + count - self.slots)
        self._exchange(slots, missing, slots[count - evicted :])
        self._slot_of.index_copy_(0, missing, slots.to(torch.int32))
        self._row_of.index_copy_(0, slots, missing)
        self._last_used.index_fill_(0, slots + 1, self._clock)
        self.filled += count - evicted
        if evicted:
            self.evictions += evicted
            self.generation += 1

    def _exchange(self, slots: Tensor, missing: Tensor, evicted_slots: Tensor) -> None:
        """Write the rows of `evicted_slots` back, and read the missing ones into `slots`, which include them."""
        evicted = self._row_of.index_select(0, evicted_slots)
        self._slot_of.index_fill_(0, evicted, _EMPTY)
        leaving: dict[str, Tensor] = {}
        if self.is_dirty and evicted.numel():  # the host waits for all copies at once, by the last one
            leaving = {name: _to_host(x.index_select(0, evicted_slots)) for name, x in self._buffers.items()}
        numbers = torch.cat([missing, evicted]).to("cpu")
        coming, evicted = numbers[: missing.numel()], numbers[missing.numel() :]
        for name, x in leaving.items():
            self.store[name].index_copy_(0, evicted, x)
        for name, x in self._buffers.items():
            x.index_copy_(0, slots, self._to_device(self.store[name].index_select(0, coming)))

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy to the device. From pinned memory the host need not wait for it."""
        return x if self.device.type == "cpu" else x.pin_memory().to(self.device, non_blocking=True)

    @torch.inference_mode(mode=False)  # what is made in inference mode cannot be trained later
    def _grow(self, slots: int) -> None:
        def extend(x: Tensor, value: int) -> Tensor:
            return torch.cat([x, x.new_full((slots - self.slots,), value)])

        self._row_of, self._last_used = extend(self._row_of, self.row_count), extend(self._last_used, 0)
        for name, x in self._buffers.items():
            grown = x.new_empty((slots, *x.shape[1:]))
            grown[: self.slots] = x
            self._buffers[name] = grown
        self.slots = slots

    @torch.no_grad()
    def release(self) -> None:
        """Write all rows back and empty the cache: the store may be read and changed until the next look-up."""
        if self.is_dirty:
            for slots in (self._row_of < self.row_count).nonzero()[:, 0].split(_BLOCK):
                rows = self._row_of.index_select(0, slots).to("cpu")
                for name, x in self._buffers.items():
                    self.store[name].index_copy_(0, rows, x.index_select(0, slots).to("cpu"))
        self.is_dirty = False
        if self.filled:
            self._clear()
            self.generation += 1

    @torch.no_grad()
    def drop(self, rows: Tensor) -> None:
        """Forget some rows without writing them back, since the store gets new values for them."""
        rows = rows.to(self.device, torch.int64).unique()
        slots = self.places(rows)
        slots = slots.masked_select(slots != _EMPTY).to(torch.int64)
        self._slot_of.index_fill_(0, rows, _EMPTY)
        self._row_of.index_fill_(0, slots, self.row_count)
        self._last_used.index_fill_(0, slots + 1, 0)
        self.filled -= slots.numel()
        self.generation += 1


def _to_host(x: Tensor) -> Tensor:
    """Start a copy to the CPU, into pinned memory. It is done when a later copy that the host waits for is done."""
    return x.to("cpu", non_blocking=True)


def map_rows(shape: torch.Size, dtype: torch.dtype, directory: str) -> Tensor:
    """Make a tensor in a file of `directory`. The file has no name, so it vanishes with the process, however that ends."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    handle, name = tempfile.mkstemp(prefix="unisono-rows-", dir=directory)
    try:
        os.posix_fallocate(handle, 0, math.prod(shape) * dtype.itemsize)  # a full disk is an error here, later a crash
        return torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype, device="cpu").view(shape)
    finally:
        os.close(handle)
        Path(name).unlink()
