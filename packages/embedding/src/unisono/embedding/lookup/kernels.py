"""The operations that touch rows: ids are deduplicated by one sort; rows are summed by bag, in the backward by duplicates.

All of the package's heavy memory traffic goes through these functions. Each chooses here between compiled.py on CPUs, if it
has a library and takes the tensors, triton_rows.py on GPUs, if triton_choice.py allows it, and torch's operations, which give
the same results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.embedding.lookup import compiled
from unisono.embedding.lookup.triton_choice import triton_rows

_BLOCK = 8192  # rows whose sums stay in the cache until they are used


@dataclass
class Deduplicated:
    """Numbers without their duplicates: unique[k] stands at the positions order[starts[k] : starts[k] + counts[k]].

    Padded, `unique`, `starts` and `counts` have as many elements as there are positions, and the first `unique_count` of them
    are meant: the host need not wait for a device to know their shapes. The others repeat the last number, with counts of 0.
    """

    unique: Tensor
    order: Tensor
    starts: Tensor
    given_counts: Tensor | None = None
    given_inverse: Tensor | None = None
    unique_count: Tensor | None = None  # (1,), on the device; None: there is no padding

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

    def without_padding(self) -> "Deduplicated":
        """If there is padding, the host waits for the device."""
        if self.unique_count is None:
            return self
        count = int(self.unique_count)
        return Deduplicated(self.unique[:count], self.order, self.starts[:count])


def is_on_host(device: torch.device) -> bool:
    """Whether the host reads numbers without a wait."""
    return device.type == "cpu"


def to_device(numbers: Sequence[Any] | int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of some numbers, without a wait: an accelerator reads pinned memory, which torch keeps until it was read."""
    made = torch.tensor(numbers, dtype=dtype, device="cpu")
    return made.to(device) if device.type in ("cpu", "meta") else made.pin_memory().to(device, non_blocking=True)


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
            return torch.searchsorted(self.done.unique, to_device(edges, self.done.unique.device, self.done.unique.dtype))
        own = to_device(edges, self.ordered.device, self.ordered.dtype)
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


def deduplicate(numbers: Tensor, *, may_pad: bool = False) -> Deduplicated:
    """Bring equal numbers together by one sort, which serves the requests and the backward.

    `may_pad`: the result may be padded, so that the host need not wait.
    """
    if compiled.handles(numbers) and (found := compiled.deduplicate(numbers)) is not None:
        return Deduplicated(*found)
    if not numbers.numel():
        empty = numbers.new_empty(0, dtype=torch.int64)
        return Deduplicated(numbers, empty, empty)
    if triton := triton_rows(numbers, dtype=torch.float32):
        unique, order, starts, count = triton.deduplicate(numbers)
        padded = Deduplicated(unique, order, starts, unique_count=count)
        return padded if may_pad else padded.without_padding()
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
    out: Tensor
    if not copied and (triton := triton_rows(rows, index, starts, weights, dtype=rows.dtype)):
        out = triton.sum_bags(rows, index, None, starts, weights)
        return out
    out = torch.embedding_bag(rows, index, starts.to(index.dtype), False, 0, False, weights)[0]
    return out


def sum_duplicates(
    rows: Tensor, bags: Tensor | None, dedup: Deduplicated, weights: Tensor | None = None, *, copied: bool = False
) -> Tensor:
    """For each unique number, sum rows[bags[p]] * weights[p] over its positions p: the transpose of sum_bags.

    `bags` None: position p has row p.
    """
    if rows.numel() and dedup.order.numel() and not copied:
        own_weights = None if weights is None else weights.to(rows.dtype)
        if triton := triton_rows(rows, bags, dedup.order, dedup.starts, own_weights, dtype=rows.dtype):
            out: Tensor = triton.sum_bags(rows, bags, dedup.order, dedup.starts, own_weights)
            return out
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

    def _drop_padding(self) -> None:
        """The host waits for the device if there is padding."""
        if self.dedup is not None and self.dedup.unique_count is not None:
            self.dedup = self.dedup.without_padding()
            self.rows = self.rows[: self.dedup.unique.numel()]
            self.divisors = None if self.divisors is None else self.divisors[: self.rows.numel()]

    def sums(self) -> Tensor:
        self._drop_padding()
        if self.dedup is None:
            return self.grads
        sums = sum_duplicates(self.grads, self.bags, self.dedup, self.weights, copied=self.copied)
        return self._scale_(sums, slice(None))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sums of some rows at a time: on a CPU a block is used before it has left the cache.

        There is one block even if there are no rows: an empty gradient is a gradient, too. Padding goes first, for which the
        host waits.
        """
        self._drop_padding()
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
        self,
        step: compiled.Step,
        weight: Tensor,
        states: Sequence[Tensor],
        part: slice,
        squares: Tensor | None = None,
        *,
        has_library: bool = True,
    ) -> bool:
        """Sum the gradients of rows[part] and make an optimizer's step with them, if one kernel can do so; return whether.

        `squares`: the sum of squares of the gradient of each whole row, if `weight` has not all columns.
        `has_library`: whether all ranks have that of compiled.py.
        """
        grads, dedup = self.grads.contiguous(), self.dedup
        if part.start == part.stop:
            return True
        if self._update_by_triton(step, weight, states, part, grads, squares):
            return True
        numbers = [None if x is None else x.to(grads.dtype) for x in (self.weights, self.divisors, squares)]
        tensors = (weight, self.rows, grads, *states, *numbers)
        if not has_library or grads.dtype != weight.dtype or not compiled.handles(*tensors, copied=self.copied):
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

    def _update_by_triton(
        self,
        step: compiled.Step,
        weight: Tensor,
        states: Sequence[Tensor],
        part: slice,
        grads: Tensor,
        squares: Tensor | None,
    ) -> bool:
        if self.copied or not weight.numel():
            return False
        numbers = (self.weights, self.divisors, squares)
        order, starts, count = (
            (None, None, None) if self.dedup is None else (self.dedup.order, self.dedup.starts, self.dedup.unique_count)
        )
        triton = triton_rows(
            weight, *states, self.rows, grads, *numbers, self.bags, order, starts, count, dtype=weight.dtype, rule=step.rule
        )
        if triton is not None:
            triton.update(
                step,
                weight,
                states,
                self.rows,
                part,
                grads,
                bags=self.bags,
                order=order,
                starts=starts,
                count=count,
                weights=self.weights,
                divisors=self.divisors,
                squares=squares,
                factor=self.factor,
            )
        return triton is not None
