"""The hash of an id, and a table that finds the slot of a hash: open addressing in torch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EMPTY, _REMOVED = -1, -2  # instead of a slot; past a removed one the search goes on
_CELLS_PER_SLOT = 2
MOST_SLOTS = 2**31 // _CELLS_PER_SLOT - 1  # so that a product with 32 bits of a hash stays within 63


def mix(ids: Tensor) -> Tensor:
    """A hash of each int64, one to one and the same everywhere: what splitmix64 gives for this state."""
    x = ids - 0x61C8864680B583EB  # the constants of splitmix64 less 2^64: int64 wraps around
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def divide(hashes: Tensor, parts: int) -> Tensor:
    """Which of `parts` equal ranges of the 2^64 hashes each of them is in. It rises with the hash."""
    return ((hashes >> 32) + 2**31) * parts >> 32


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Distinct(NamedTuple):
    """The different ids of a batch, in the order of their hashes: those of a shard, and of a rank, are neighbours."""

    ids: Tensor
    hashes: Tensor
    counts: Tensor
    inverse: Tensor  # where each id of the batch is among them


def distinct(ids: Tensor, counts: Tensor | None = None) -> Distinct:
    """`counts`: how often each of the ids counts, otherwise once."""
    hashes, order = mix(ids).sort()
    new = torch.ones_like(hashes, dtype=torch.bool)
    new[1:] = hashes[1:] != hashes[:-1]
    first = new.nonzero().squeeze(1)
    inverse = torch.empty_like(order).scatter_(0, order, new.cumsum(0) - 1)
    if counts is None:
        counts = first.diff(append=first.new_tensor([ids.numel()]))
    else:
        counts = torch.zeros_like(first).index_add_(0, inverse, counts)
    return Distinct(ids.index_select(0, order.index_select(0, first)), hashes.index_select(0, first), counts, inverse)


class HashTable:
    """The slot of each hash, for the hashes of the shards `run` of `shards`, at most `slots` of them in each.

    Open addressing with linear probing, at most half full. A hash's first cell rises with the hash, so that a sorted batch
    reads memory in order. Where an entry lies depends on what came before; what is found does not.
    """

    def __init__(self, run: range, *, shards: int, slots: int, device: torch.device) -> None:
        self._all_cells = shards * slots * _CELLS_PER_SLOT
        self._first = run.start * slots * _CELLS_PER_SLOT
        self._size = len(run) * slots * _CELLS_PER_SLOT
        self._used = 0  # cells that are not empty, at most
        self._hashes = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._slots = torch.full((self._size,), _EMPTY, dtype=torch.int32, device=device)

    def find(self, hashes: Tensor) -> Tensor:
        """Their slots, int64; -1 for those that are not in the table."""
        cells = self._locate(hashes)
        if not cells.numel():
            return cells
        return self._slots.index_select(0, cells.clamp(min=0)).to(torch.int64).where(cells >= 0, -1)

    def insert(self, hashes: Tensor, slots: Tensor) -> None:
        """Different hashes, none of which is in the table, and their different slots."""
        if self._used + hashes.numel() > self._size * 3 // 4:
            self._sweep()
        self._used += hashes.numel()
        slots, cells = slots.to(torch.int32), self._home(hashes)
        while hashes.numel():
            free = self._slots.index_select(0, cells) < 0
            self._slots.index_copy_(0, cells[free], slots[free])  # where several want a cell, one gets it
            won = self._slots.index_select(0, cells) == slots
            self._hashes.index_copy_(0, cells[won], hashes[won])
            lost = ~won
            hashes, slots, cells = hashes[lost], slots[lost], self._next(cells[lost])

    def remove(self, hashes: Tensor) -> None:
        """Hashes that are in the table."""
        self._slots.index_fill_(0, self._locate(hashes), _REMOVED)

    def _locate(self, hashes: Tensor) -> Tensor:
        """The cells that hold them, or -1."""
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
        return divide(hashes, self._all_cells) - self._first

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
