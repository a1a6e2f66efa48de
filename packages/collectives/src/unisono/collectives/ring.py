"""Work on every rank's data without ever holding all of it: blocks go round the ring, the next one always in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.groups import Group, process_group, resolve_group
from unisono.collectives.sizes import resolve_sizes
from unisono.collectives.wire import start_hop


class Ring:
    """Iterate over (rank, that rank's tensors): the own ones first, then those of rank - 1, rank - 2 and so on.

    While a block is in use the next one is on its way, so communication hides behind computation, and no rank holds more
    than two blocks. The tensors of a rank have the same first dimension; ranks may differ in it. `sizes`: every
    rank's, if known; otherwise they are exchanged.

    Results for a block go round with it: `add` this rank's contribution after each block; `total` is then what all ranks
    have added for the own block.

    Backward: none, it works on values. It is for the forward and backward of autograd Functions, on all ranks alike, and
    the loop must run to its end on all of them.

    Example, 2 ranks holding [1.] and [2.]:
        >>> import torch
        >>> from unisono.collectives import Ring
        >>> x = torch.tensor([1.])
        >>> ring = Ring([x])
        >>> for rank, (block,) in ring:
        ...     ring.add(x * block)
        >>> ring.total()  # on 2 ranks: x times the sum over ranks
        tensor([1.])
    """

    def __init__(self, tensors: Sequence[Tensor], *, sizes: Sequence[int] | None = None, group: Group = None) -> None:
        self.ranks = resolve_group(group)
        self.sizes: tuple[int, ...] = ()
        for x in tensors:
            self.sizes = resolve_sizes("Ring", x, 0, sizes, self.ranks)[1]
        self._own = [x.detach().contiguous() for x in tensors]
        self._total: Tensor | None = None
        self._pending: list[dist.Work] = []  # the contributions on their way
        self._leaving: Tensor | None = None
        self._block = self.ranks.rank

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        size, block = self.ranks.size, self._own
        for step in range(size):
            self._block = (self.ranks.rank - step) % size
            arriving: list[Tensor] = []
            on_the_way: list[dist.Work] = []
            if step + 1 < size:
                arriving = [x.new_empty((self.sizes[self._block - 1], *x.shape[1:])) for x in block]
                on_the_way = start_hop(block, arriving, process_group(self.ranks))
            yield self._block, block
            for work in on_the_way:
                work.wait()
            block = arriving

    def add(self, partial: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        """Hand on this rank's contribution to the current block, joined by `combine` to those that came with it.

        Contributions have the block's rows first and otherwise one shape. Call it once for each block, on all ranks.
        `partial` is given away: it may be changed.
        """
        for work in self._pending:
            work.wait()
        if self._total is not None:
            partial = torch.add(self._total, partial, out=partial) if combine is torch.add else combine(self._total, partial)
        partial = partial.contiguous()
        self._total, self._pending = partial, []
        if self.ranks.size > 1:
            self._total = partial.new_empty((self.sizes[self._block - 1], *partial.shape[1:]))
            self._pending = start_hop([partial], [self._total], process_group(self.ranks))
        self._leaving = partial  # alive until it has left

    def total(self) -> Tensor:
        """What all ranks have added for this rank's block; once, after the loop."""
        for work in self._pending:
            work.wait()
        if self._total is None:
            raise RuntimeError("Ring.total: nothing was added; call add() for each block first")
        total, self._total, self._pending, self._leaving = self._total, None, [], None
        return total
