"""Minibatch standard deviation (Karras et al. 2018) over groups of the global batch, for any split of it over ranks."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_reduce
from unisono.collectives.groups import resolve_group
from unisono.collectives.sizes import resolve_sizes

_EPS = 1e-8  # keeps the gradient of the square root finite where images are equal


class MinibatchStddev(nn.Module):
    """Append a channel with the `minibatch_stddev` of the row's group: (n, c, h, w) to (n, c + 1, h, w).

    Example:
        >>> MinibatchStddev(2)(torch.ones(4, 3, 5, 5)).shape
        torch.Size([4, 4, 5, 5])
    """

    def __init__(self, group_size: int, *, group: Group = None) -> None:
        super().__init__()
        _validate_group_size(group_size)
        self.group_size = group_size
        self.group = group

    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        stddev = minibatch_stddev(x, group_size=self.group_size, sizes=sizes, group=self.group)
        return torch.cat([x, stddev[:, None, None, None].expand(-1, 1, *x.shape[2:])], 1)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"


def minibatch_stddev(
    x: Tensor, *, group_size: int, sizes: Sequence[int] | None = None, group: Group = None, eps: float = _EPS
) -> Tensor:
    """Return for each row of `x` (n, ...) the standard deviation in its group, averaged over all other dimensions: (n,).

    The global batch has the rows of rank 0, then those of rank 1, and so on. Row i of it is in group i // group_size, so the
    last group may be smaller. Groups that lie on one rank need no communication. For groups that straddle ranks, and for these
    only, the ranks all-reduce the moments.

    sizes: number of rows on every rank. None: the ranks exchange them.

    Backward: the gradient of one process with the whole batch, to any order (an all-reduced sum is its own adjoint).

    Example:
        >>> minibatch_stddev(torch.tensor([[1.0], [3.0], [5.0]]), group_size=2)
        tensor([1.0000e+00, 1.0000e+00, 1.0000e-04])
    """
    _validate_group_size(group_size)
    ranks = resolve_group(group)
    x, sizes = resolve_sizes("minibatch_stddev", x, 0, sizes, ranks, same=f"group_size={group_size}")
    ends = [0, *accumulate(sizes)]
    total = ends[-1]
    first, last = ends[ranks.rank], ends[ranks.rank + 1]
    straddling = sorted({end // group_size for end in ends if end % group_size and end < total})  # groups on several ranks
    groups = range(first // group_size, -(-last // group_size)) if len(x) else range(0)  # groups of this rank
    group_of_row = torch.arange(first, last, device=x.device) // group_size - groups.start  # index in `groups`
    counts = (total - torch.arange(groups.start, groups.stop, device=x.device) * group_size).clamp(max=group_size)
    counts = counts.view(-1, *(1,) * (x.ndim - 1))
    # This rank's first and last group may straddle. They are selected by ranges: a list would have to be copied to x's device,
    # which makes the host wait.
    shared = [number - groups.start for number in straddling if number in groups]
    in_groups = group_of_row[:0]
    if shared:
        in_groups = torch.arange(shared[0], shared[-1] + 1, max(1, shared[-1] - shared[0]), device=x.device)
    before = sum(number < groups.start for number in straddling)
    in_straddling = torch.arange(before, before + len(shared), device=x.device)

    def sum_groups(values: Tensor) -> Tensor:
        """Sum over the groups of this rank, including the rows that other ranks hold."""
        sums = values.new_zeros(len(groups), *values.shape[1:]).index_add(0, group_of_row, values)
        if not straddling:
            return sums
        partial = values.new_zeros(len(straddling), *values.shape[1:]).index_copy(0, in_straddling, sums[in_groups])
        return sums.index_copy(0, in_groups, all_reduce(partial, group=group)[in_straddling])

    means = sum_groups(x) / counts
    squares = (x - means[group_of_row]).square()
    deviations = (sum_groups(squares) / counts + eps).sqrt()
    return deviations.flatten(1).mean(1)[group_of_row]


def _validate_group_size(group_size: int) -> None:
    if group_size < 1:
        raise ValueError(f"minibatch_stddev: group_size={group_size}: must be at least 1")
