"""Ring: visit every rank's tensors without holding all of them; the next block is received while the current one is used."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.checks import describe, tensor_error
from unisono.collectives.groups import Group, process_group, resolve_group
from unisono.collectives.profiling import profiled
from unisono.collectives.sizes import Sizes, resolve_sizes
from unisono.collectives.wire import start_hop


class Ring:
    """Iterate over (rank, tensors of that rank): first this rank's own, then those of rank - 1, rank - 2 and so on.

    While a block is in use, the next one is being received. So communication overlaps with computation, and no rank holds
    more than two blocks. The tensors of one rank have the same first dimension; ranks may differ in it. `sizes`: the first
    dimension on every rank, if known, or "equal" if all ranks have the same; otherwise it is exchanged.

    Results for a block travel with it: call `add` with this rank's contribution after each block; `total` then returns
    what all ranks have added for this rank's own block.

    Backward: none, it works on values. Use it inside the forward and backward of autograd Functions. All ranks must iterate,
    to the end of the loop.

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

    def __init__(self, tensors: Sequence[Tensor], *, sizes: Sizes = None, group: Group = None) -> None:
        self.ranks = resolve_group(group)
        self.sizes: tuple[int, ...] = ()
        problem = _tensors_error(tensors)
        same = f"tensors={len(tensors)}"
        for x in [torch.empty(0, device="cpu")] if problem else tensors:
            self.sizes = resolve_sizes("Ring", x, 0, sizes, self.ranks, same=same, problem=problem)[1]
        self._own = [x.detach().contiguous() for x in tensors]
        self._total: Tensor | None = None
        self._pending: list[dist.Work] = []  # contributions that are being sent or received
        self._leaving: Tensor | None = None
        self._block = self.ranks.rank

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        size = self.ranks.size
        block = self._own
        for step in range(size):
            self._block = (self.ranks.rank - step) % size
            arriving: list[Tensor] = []
            in_flight: list[dist.Work] = []
            if step + 1 < size:
                arriving = [x.new_empty((self.sizes[self._block - 1], *x.shape[1:])) for x in block]
                in_flight = profiled("Ring", start_hop, block, arriving, process_group(self.ranks))
            yield self._block, block
            profiled("wait of Ring", _wait_for, in_flight)
            block = arriving

    def add(self, partial: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        """Combine this rank's contribution to the current block with those that came with it, and send the result on.

        `partial` has the rows of the block, and otherwise the same shape for all blocks; it may be modified. Call this once
        for each block, on all ranks.
        """
        profiled("wait of Ring", _wait_for, self._pending)
        if self._total is not None:
            partial = torch.add(self._total, partial, out=partial) if combine is torch.add else combine(self._total, partial)
        partial = partial.contiguous()
        self._total = partial
        self._pending = []
        if self.ranks.size > 1:
            self._total = partial.new_empty((self.sizes[self._block - 1], *partial.shape[1:]))
            self._pending = profiled("Ring", start_hop, [partial], [self._total], process_group(self.ranks))
        self._leaving = partial  # must stay alive until it has been sent

    def total(self) -> Tensor:
        """Return what all ranks have added for this rank's block. Call it once, after the loop."""
        profiled("wait of Ring", _wait_for, self._pending)
        if self._total is None:
            raise RuntimeError("Ring.total: nothing was added; call add() for each block first")
        total = self._total
        self._total = self._leaving = None
        self._pending = []
        return total


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _tensors_error(tensors: Sequence[Tensor]) -> str:
    if isinstance(tensors, Tensor):
        return "tensors: expected a list of tensors, got one tensor: pass [x]"
    if not tensors:
        return "tensors: expected at least one tensor, got an empty sequence"
    if problem := next((problem for x in tensors if (problem := tensor_error(x))), ""):
        return problem
    if any(x.ndim == 0 for x in tensors) or len({len(x) for x in tensors}) > 1:
        return f"tensors must have the same first dimension, got {', '.join(map(describe, tensors))}"
    return ""
