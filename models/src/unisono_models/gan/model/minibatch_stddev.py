"""How much pictures of a batch differ, told to the discriminator: of the global batch, whichever ranks hold its rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_reduce
from unisono.collectives.groups import resolve_group
from unisono.collectives.sizes import resolve_sizes

_EPS = 1e-8  # keeps the gradient of the root finite where pictures are equal


class MinibatchStddev(nn.Module):
    """Appends a channel that holds `minibatch_stddev` of a row's group: (n, c, h, w) to (n, c + 1, h, w).

    Example:
        >>> MinibatchStddev(2)(torch.ones(4, 3, 5, 5)).shape
        torch.Size([4, 4, 5, 5])
    """

    def __init__(self, group_size: int, *, group: Group = None) -> None:
        super().__init__()
        _check_group_size(group_size)
        self.group_size, self.group = group_size, group

    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        found = minibatch_stddev(x, group_size=self.group_size, sizes=sizes, group=self.group)
        return torch.cat([x, found[:, None, None, None].expand(-1, 1, *x.shape[2:])], 1)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"


def minibatch_stddev(
    x: Tensor, *, group_size: int, sizes: Sequence[int] | None = None, group: Group = None, eps: float = _EPS
) -> Tensor:
    """For each row of `x` (n, ...) the standard deviation within its group, averaged over all other dimensions: (n,).

    Groups are `group_size` neighbours of the global batch, whose rows are those of rank 0, then of rank 1, and so on: row i
    of it is in group i // group_size. The last group may be smaller. Groups that lie on one rank need no communication;
    for those that straddle ranks, all ranks add up moments, of these groups only.

    sizes: every rank's number of rows, if known; otherwise one small exchange tells.

    Backward: that of one process with the whole batch, to any order (sums of moments are their own adjoint).

    Example:
        >>> minibatch_stddev(torch.tensor([[1.0], [3.0], [5.0]]), group_size=2)
        tensor([1.0000e+00, 1.0000e+00, 1.0000e-04])
    """
    _check_group_size(group_size)
    ranks = resolve_group(group)
    x, sizes = resolve_sizes("minibatch_stddev", x, 0, sizes, ranks, same=f"group_size={group_size}")
    ends = [0, *accumulate(sizes)]
    total, first, last = ends[-1], ends[ranks.rank], ends[ranks.rank + 1]
    straddling = sorted({end // group_size for end in ends if end % group_size and end < total})
    here = range(first // group_size, -(-last // group_size)) if len(x) else range(0)  # groups with rows of this rank
    rows = torch.arange(first, last, device=x.device) // group_size - here.start  # the place of each row's group in it
    counts = (total - torch.arange(here.start, here.stop, device=x.device) * group_size).clamp(max=group_size)
    counts = counts.view(-1, *(1,) * (x.ndim - 1))
    # Those that straddle are this rank's first group, its last one, or both. As ranges: a list would have to be copied to x's
    # device, which waits for it.
    mine = [number - here.start for number in straddling if number in here]
    own = torch.arange(mine[0], mine[-1] + 1, max(1, mine[-1] - mine[0]), device=x.device) if mine else rows[:0]
    before = sum(number < here.start for number in straddling)
    places = torch.arange(before, before + len(mine), device=x.device)

    def add_up(values: Tensor) -> Tensor:
        """Sums over groups, the ones of this rank, with other ranks' rows in them."""
        sums = values.new_zeros(len(here), *values.shape[1:]).index_add(0, rows, values)
        if not straddling:
            return sums
        parts = values.new_zeros(len(straddling), *values.shape[1:]).index_copy(0, places, sums[own])
        return sums.index_copy(0, own, all_reduce(parts, group=group)[places])

    means = add_up(x) / counts
    squares = (x - means[rows]).square()
    deviations = (add_up(squares) / counts + eps).sqrt()
    return deviations.flatten(1).mean(1)[rows]


def _check_group_size(group_size: int) -> None:
    if group_size < 1:
        raise ValueError(f"minibatch_stddev: group_size={group_size}: a group has at least 1 row")
