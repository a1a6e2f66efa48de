"""The operations that touch rows: ids are deduplicated by one sort; rows are summed by bag, in the backward by duplicates.

All of the package's heavy memory traffic goes through these functions, so a compiled kernel would replace them here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 8192  # rows whose sums stay in the cache until they are used


class Deduplicated(NamedTuple):
    """Numbers without their duplicates: unique[k] stands at the positions order[starts[k] : starts[k] + counts[k]]."""

    unique: Tensor
    order: Tensor
    starts: Tensor
    counts: Tensor

    def inverse(self) -> Tensor:
        """For each position, the index of its number in `unique`."""
        numbers = torch.arange(self.unique.numel(), device=self.unique.device)
        return torch.empty_like(self.order).scatter_(0, self.order, numbers.repeat_interleave(self.counts))


def deduplicate(numbers: Tensor) -> Deduplicated:
    """Bring equal numbers together by one sort, which serves the requests and the backward."""
    ordered, order = numbers.sort(stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    return Deduplicated(unique, order, counts.cumsum(0) - counts, counts)


def sum_bags(rows: Tensor, index: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum rows[index[starts[b] : starts[b + 1]]] for each b, times `weights`, which has one number for each of `index`."""
    if starts.numel() == 0 or index.numel() == 0 or rows.shape[1] == 0:
        return rows.new_zeros((starts.numel(), rows.shape[1]))
    weights = None if weights is None else weights.to(rows.dtype)
    out: Tensor = torch.embedding_bag(rows, index, starts.to(index.dtype), False, 0, False, weights)[0]
    return out


def sum_duplicates(rows: Tensor, bags: Tensor | None, dedup: Deduplicated, weights: Tensor | None = None) -> Tensor:
    """For each unique number, sum rows[bags[p]] * weights[p] over its positions p: the transpose of sum_bags.

    `bags` None: position p has row p.
    """
    index = dedup.order if bags is None else bags.index_select(0, dedup.order)
    return sum_bags(rows, index, dedup.starts, None if weights is None else weights.index_select(0, dedup.order))


def sum_duplicates_in_blocks(
    rows: Tensor, bags: Tensor | None, dedup: Deduplicated, weights: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield what sum_duplicates returns, some unique numbers at a time: on a CPU a block is used before it has left the cache.

    There is one block even if there are no numbers: an empty gradient is a gradient, too.
    """
    total = dedup.unique.numel()
    size = _BLOCK if rows.device.type == "cpu" else max(total, 1)
    index = dedup.order if bags is None else bags.index_select(0, dedup.order)
    ordered = None if weights is None else weights.index_select(0, dedup.order)
    ends = [*dedup.starts[::size].tolist(), index.numel()] if total > size else [0, index.numel()]
    for block, start in enumerate(range(0, max(total, 1), size)):
        part = slice(start, min(start + size, total))
        positions = slice(ends[block], ends[block + 1])
        own_weights = None if ordered is None else ordered[positions]
        yield part, sum_bags(rows, index[positions], dedup.starts[part] - ends[block], own_weights)
