"""Every rank's columns, at hand in one of two ways: gathered at once, or block by block round the ring.

Both are iterated alike, as (where this rank's own columns begin in the block or None, the block's tensors), and both bring
home what each rank has computed for the columns of others: `add` it for each block, and take `total` in the end.
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

# What a rank may hold of the others' columns and of the gradients for them. Above it the ring is as fast, for then a block
# is computed for longer than it travels.
GATHER_BYTES = 48 * 2**20


def choose(exchange: Exchange, sizes: Sequence[int], width: int, itemsize: int) -> Exchange:
    """Gather or ring, by what all ranks know alike."""
    if len(sizes) == 1:
        return "ring"  # with one rank there is nothing to send, nor to copy
    if exchange != "auto":
        return exchange
    return "gather" if 2 * sum(sizes) * width * itemsize <= GATHER_BYTES else "ring"


class Gathered:
    """All columns at once: one exchange, and memory for every rank's."""

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int], group: Group, already: Sequence[Tensor] = ()) -> None:
        """`already`: what an earlier one has gathered; only `tensors` travel."""
        self.sizes, self.group = tuple(sizes), group
        self.tensors = [*already, *(all_gather(x.detach(), sizes=sizes, group=group) for x in tensors)]
        self._partial: Tensor | None = None
        self._combine: Combine = torch.add

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:
        yield sum(self.sizes[: resolve_group(self.group).rank]), self.tensors

    def add(self, partial: Tensor, combine: Combine = torch.add) -> None:
        self._partial, self._combine = partial, combine

    def total(self) -> Tensor:
        if self._partial is None:
            raise RuntimeError("Gathered.total: nothing was added; call add() first")
        partial, self._partial = self._partial, None
        if self._combine is torch.add:
            return reduce_scatter(partial, sizes=self.sizes, group=self.group)
        ranks = resolve_group(self.group)
        own = self.sizes[ranks.rank]
        everyones = all_to_all_single(partial, send_sizes=self.sizes, receive_sizes=(own,) * ranks.size, group=self.group)
        return reduce(self._combine, everyones.split_with_sizes([own] * ranks.size))


class Circling(Ring):
    """One rank's columns after the other's, the next in flight: memory for two blocks, however many ranks there are."""

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:  # type: ignore[override]
        for owner, tensors in super().__iter__():
            yield 0 if owner == self.ranks.rank else None, tensors


Columns: TypeAlias = Gathered | Circling


def bring(tensors: Sequence[Tensor], exchange: Exchange, sizes: Sequence[int], group: Group) -> Columns:
    """Every rank's `tensors`, by the chosen way."""
    return Gathered(tensors, sizes, group) if exchange == "gather" else Circling(tensors, sizes=sizes, group=group)
