"""The operations that touch rows: ids are deduplicated by one sort; rows are summed by bag, in the backward by duplicates.

All of the package's heavy memory traffic goes through these functions. Each chooses here between compiled.py, if it has a
library and takes the tensors, and torch's operations, which give the same results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.embedding.lookup import compiled

_BLOCK = 8192  # rows whose sums stay in the cache until they are used


@dataclass
class Deduplicated:
    """Numbers without their duplicates: unique[k] stands at the positions order[starts[k] : starts[k] + counts[k]]."""

    unique: Tensor
    order: Tensor
    starts: Tensor
    given_counts: Tensor | None = None
    given_inverse: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        if self.given_counts is None:
            self.given_counts = self.starts.diff(append=self.starts.new_full((1,), self.order.numel()))
        return self.given_counts

    @property
    def inverse(self) -> Tensor:
        """For each position, the index of its number in `unique`."""
        if self.given_inverse is None:
            indices = torch.repeat_interleave(self.counts, output_size=self.order.numel())
            self.given_inverse = torch.empty_like(self.order).scatter_(0, self.order, indices)
        return self.given_inverse


def is_on_host(device: torch.device) -> bool:
    """Whether the host reads numbers without a wait."""
    return device.type == "cpu"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor without a wait: an accelerator reads pinned memory, which torch keeps until it was read."""
    if device.type in ("cpu", "meta"):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Deduplicating:
    """Brings equal numbers together by one sort. `finish` makes them unique once the host knows how many there are.

    So the host of a GPU can read that number together with others. On a CPU it is known at once.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.done: Deduplicated | None = None
        if is_on_host(numbers.device):
            self.done = deduplicate(numbers)
            return
        self.ordered, self.order = numbers.sort(stable=True)
        first = torch.ones_like(self.ordered, dtype=torch.bool)
        torch.ne(self.ordered[1:], self.ordered[:-1], out=first[1:])
        self.before = self.order.new_zeros(numbers.numel() + 1)  # [p]: how many different numbers stand before position p
        torch.cumsum(first, 0, out=self.before[1:])

    def cuts(self, edges: Sequence[int]) -> Tensor:
        """How many different numbers are below each of the edges."""
        if self.done is not None:
            return torch.searchsorted(self.done.unique, torch.tensor(edges, dtype=self.done.unique.dtype))
        own = to_device(torch.tensor(edges, dtype=self.ordered.dtype), self.ordered.device)
        return self.before.index_select(0, torch.searchsorted(self.ordered, own))

    def finish(self, count: int) -> Deduplicated:
        """`count`: how many different numbers there are."""
        if self.done is None:
            index = self.before[1:] - 1
            unique = self.ordered.new_empty(count).scatter_(0, index, self.ordered)
            starts = torch.searchsorted(index, torch.arange(count, device=index.device))
            inverse = torch.empty_like(self.order).scatter_(0, self.order, index)
            self.done = Deduplicated(unique, self.order, starts, given_inverse=inverse)
        return self.done


def deduplicate(numbers: Tensor) -> Deduplicated:
    """Bring equal numbers together by one sort, which serves the requests and the backward."""
    if compiled.handles(numbers) and (found := compiled.deduplicate(numbers)) is not None:
        return Deduplicated(*found)
    ordered, order = numbers.sort(stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    return Deduplicated(unique, order, counts.cumsum(0) - counts, counts)


def number_bags(lengths: Tensor, ids: int) -> Tensor:
    """The bag of each of `ids` ids, which have bags of these lengths."""
    return torch.repeat_interleave(lengths.to(torch.int64), output_size=ids)


def sum_bags(rows: Tensor, index: Tensor, starts: Tensor, weights: Tensor | None = None, *, copied: bool = False) -> Tensor:
    """Sum rows[index[starts[b] : starts[b + 1]]] for each b, times `weights`, which has one number for each of `index`.

    `copied`: other ranks compute the same sums and must get the same bits.
    """
    if starts.numel() == 0 or index.numel() == 0 or rows.shape[1] == 0:
        return rows.new_zeros((starts.numel(), rows.shape[1]))
    weights = None if weights is None else weights.to(rows.dtype)
    if rows.is_floating_point() and compiled.handles(rows, index, starts, weights, copied=copied):
        return compiled.sum_bags(rows, index, starts, weights)
    out: Tensor = torch.embedding_bag(rows, index, starts.to(index.dtype), False, 0, False, weights)[0]
    return out


def sum_duplicates(
    rows: Tensor, bags: Tensor | None, dedup: Deduplicated, weights: Tensor | None = None, *, copied: bool = False
) -> Tensor:
    """For each unique number, sum rows[bags[p]] * weights[p] over its positions p: the transpose of sum_bags.

    `bags` None: position p has row p.
    """
    index = dedup.order if bags is None else bags.index_select(0, dedup.order)
    weights = None if weights is None else weights.index_select(0, dedup.order)
    return sum_bags(rows, index, dedup.starts, weights, copied=copied)


@dataclass
class RowGradients:
    """Gradients of different rows that are still to be summed: rows[k] has those at the positions of dedup's number k.

    Position p has grads[bags[p]] * weights[p]. The sum of row k is divided by divisors[k] and multiplied by `factor`.
    """

    rows: Tensor
    grads: Tensor
    dedup: Deduplicated | None = None  # None: rows[k] has grads[k]
    bags: Tensor | None = None  # None: position p has grads[p]
    weights: Tensor | None = None
    divisors: Tensor | None = None
    factor: float = 1.0
    copied: bool = False  # other ranks have the same gradients for their copies of the rows, and must get the same bits

    def sums(self) -> Tensor:
        if self.dedup is None:
            return self.grads
        sums = sum_duplicates(self.grads, self.bags, self.dedup, self.weights, copied=self.copied)
        return self._scale_(sums, slice(None))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sums of some rows at a time: on a CPU a block is used before it has left the cache.

        There is one block even if there are no rows: an empty gradient is a gradient, too.
        """
        total, dedup = self.rows.numel(), self.dedup
        size = _BLOCK if self.grads.device.type == "cpu" else max(total, 1)
        if dedup is None or total <= size:
            yield slice(0, total), self.sums()
            return
        index = dedup.order if self.bags is None else self.bags.index_select(0, dedup.order)
        ordered = None if self.weights is None else self.weights.index_select(0, dedup.order)
        ends = [*dedup.starts[::size].tolist(), index.numel()]
        for block, start in enumerate(range(0, total, size)):
            part = slice(start, min(start + size, total))
            positions = slice(ends[block], ends[block + 1])
            own_weights = None if ordered is None else ordered[positions]
            sums = sum_bags(self.grads, index[positions], dedup.starts[part] - ends[block], own_weights, copied=self.copied)
            yield part, self._scale_(sums, part)

    def _scale_(self, sums: Tensor, part: slice) -> Tensor:
        if self.divisors is not None:
            sums.div_(self.divisors[part, None])
        return sums if self.factor == 1 else sums.mul_(self.factor)

    def update(
        self, step: compiled.Step, weight: Tensor, states: Sequence[Tensor], part: slice, squares: Tensor | None = None
    ) -> bool:
        """Sum the gradients of rows[part] and make an optimizer's step with them, if a compiled kernel can; return whether.

        `squares`: the sum of squares of the gradient of each whole row, if `weight` has not all columns.
        """
        grads, dedup = self.grads.contiguous(), self.dedup
        numbers = [None if x is None else x.to(grads.dtype) for x in (self.weights, self.divisors, squares)]
        tensors = (weight, self.rows, grads, *states, *numbers)
        if grads.dtype != weight.dtype or not compiled.handles(*tensors, copied=self.copied):
            return False
        weights, divisors, squares = numbers
        index = None
        if dedup is not None:
            index = dedup.order if self.bags is None else self.bags.index_select(0, dedup.order)
            weights = None if weights is None else weights.index_select(0, dedup.order)
        compiled.update(
            step,
            weight,
            states,
            self.rows,
            part,
            grads,
            index=index,
            starts=None if dedup is None else dedup.starts,
            counts=None if dedup is None else dedup.counts,
            weights=weights,
            divisors=divisors,
            squares=squares,
            factor=self.factor,
        )
        return True
