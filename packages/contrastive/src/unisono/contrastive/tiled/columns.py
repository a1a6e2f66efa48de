"""Bring the columns of all ranks to this rank: all at once (gather), or one rank's block after the other (ring).

`GatheredColumns` and `RingColumns` have one interface. Iterating gives pairs (start of this rank's own columns in the block,
or None; the tensors of the block). What this rank computes for columns of other ranks returns to their owners: call `add`
once per block and `total` after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unisono.collectives import Group, Ring, all_gather, all_to_all_single, reduce_scatter
from unisono.collectives.groups import resolve_group

Exchange = Literal["auto", "gather", "ring"]
Combine: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# The largest size of all ranks' columns plus their gradients for which exchange="auto" gathers. Above it the ring is as fast,
# because computing on a block takes longer than sending it.
GATHER_BYTES = 48 * 2**20


class GatheredColumns:
    """The columns of all ranks as one block: one collective, and memory that grows with the number of ranks.

    `gathered`: tensors that an earlier GatheredColumns has gathered already; only `tensors` are sent.
    """

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int], group: Group, gathered: Sequence[Tensor] = ()) -> None:
        self.sizes = tuple(sizes)
        self.group = group
        self.tensors = [*gathered, *(all_gather(x.detach(), sizes=sizes, group=group) for x in tensors)]
        self._partial: Tensor | None = None
        self._combine: Combine = torch.add

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:
        yield sum(self.sizes[: resolve_group(self.group).rank]), self.tensors

    def add(self, partial: Tensor, combine: Combine = torch.add) -> None:
        self._partial = partial
        self._combine = combine

    def total(self) -> Tensor:
        if self._partial is None:
            raise RuntimeError("GatheredColumns.total: call add() first")
        partial = self._partial
        self._partial = None
        if self._combine is torch.add:
            return reduce_scatter(partial, sizes=self.sizes, group=self.group)
        ranks = resolve_group(self.group)
        own = self.sizes[ranks.rank]
        partials = all_to_all_single(partial, send_sizes=self.sizes, receive_sizes=(own,) * ranks.size, group=self.group)
        return reduce(self._combine, partials.split_with_sizes([own] * ranks.size))


class RingColumns(Ring):
    """The columns of one rank per block, while the next block is in flight: memory for two blocks on any number of ranks."""

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:  # type: ignore[override]
        for owner, tensors in super().__iter__():
            yield 0 if owner == self.ranks.rank else None, tensors


Columns: TypeAlias = GatheredColumns | RingColumns


def exchange_columns(
    tensors: Sequence[Tensor], exchange: Exchange, sizes: Sequence[int], itemsize: int, group: Group
) -> Columns:
    """Start to bring the `tensors` of all ranks. "auto" decides by the size of the first, from values that all ranks share."""
    if exchange == "auto":
        gathered_bytes = 2 * sum(sizes) * tensors[0].shape[1] * itemsize
        exchange = "gather" if gathered_bytes <= GATHER_BYTES else "ring"
    if exchange == "ring" or len(sizes) == 1:  # one rank sends nothing, and the ring makes no copy
        return RingColumns(tensors, sizes=sizes, group=group)
    return GatheredColumns(tensors, sizes, group)
