"""The mean and the variance of each channel over the batches of all ranks.

Every rank sends count, mean and sum of squared deviations, 2 C + 1 numbers, and pools those of all ranks. Deviations are
always from a mean, never E[x^2] - E[x]^2, which loses every digit where the mean is much larger than the deviation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather
from unisono.collectives.autograd import LinearMap, apply
from unisono.collectives.checks import call_site
from unisono.collectives.groups import resolve_group


class Moments(NamedTuple):
    """Of the global batch, the same bits on every rank."""

    total: Tensor
    """(1,): how many values each channel has."""
    mean: Tensor
    """(C,); zeros if there are no values."""
    variance: Tensor
    """(C,), divided by the total as normalization wants it; zeros if there are no values."""

    def unbiased_variance(self) -> Tensor:
        """(C,), divided by total - 1 as running statistics want it."""
        return self.variance * (self.total / (self.total - 1).clamp(min=1))


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def values_per_channel(x: Tensor) -> int:
    """Of the local batch: samples times positions."""
    return x.shape[0] * math.prod(x.shape[2:])


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """(C,) in the shape that broadcasts against `x`."""
    return values.view(-1, *(1,) * (x.ndim - 2))


def measure(x: Tensor, *, group: Group) -> Moments:
    """The moments of the global batch, by the fastest kernels there are. Not differentiable. One exchange."""
    wide, channels, count = statistics_dtype(x), x.shape[1], values_per_channel(x)
    if count == 0:
        return _pool(x.new_zeros(2 * channels + 1, dtype=wide), group)
    if x.device.type in ("cpu", "cuda"):
        # a third of the time of var_mean; it wants running statistics to tell it the dtype, and changes them
        scratch = x.new_zeros((2, channels), dtype=wide)
        mean, variance = torch.batch_norm_update_stats(x, scratch[0], scratch[1], 0.0)
    else:
        variance, mean = torch.var_mean(x.to(wide), _all_but_channels(x), correction=0)
    return _pool(torch.cat([mean, variance * count, mean.new_full((1,), count)]), group)


def measure_differentiably(x: Tensor, *, plan: LinearMap, group: Group, forward_mode: bool = False) -> Moments:
    """The same, composed of what autograd, torch.func and torch.compile know. One exchange; one in backward, by `plan`.

    `forward_mode`: also tangents are right, and the backward is a larger exchange.
    """
    wide, count, others = statistics_dtype(x), values_per_channel(x), _all_but_channels(x)
    mean = x.sum(others, dtype=wide) / max(count, 1)
    squares = (x.to(wide) - by_channel(mean, x)).square().sum(others)
    own = torch.cat([mean, squares, mean.new_full((1,), count)])
    if forward_mode:
        return _pool(own, group)
    # The exchange itself is not differentiated: as functions of this rank's sums of deviations from the pooled mean, the
    # moments are these numbers plus nothing, and that nothing has the derivatives.
    pooled = _pool(own.detach(), group)
    deviation = mean - pooled.mean
    sums = apply(torch.stack([count * deviation, squares + count * deviation.square()]), plan)
    moved, spread = (sums - sums.detach()) / pooled.total.clamp(min=1)
    return Moments(pooled.total, pooled.mean + moved, pooled.variance + spread - moved.square())


def backward_plan(name: str, *, group: Group) -> LinearMap:
    """The adjoint: what the derivative by the (2, C) global sums of deviations and of their squares is added up by."""
    return LinearMap("copy", resolve_group(group), call=name, site=call_site())


def update_running(running: Tensor, found: Tensor, momentum: float | Tensor, total: Tensor) -> None:
    """Move `running` towards `found`, in the precision of `found`. A batch that is empty everywhere changes nothing."""
    with torch.no_grad():
        before = running.to(found.dtype)
        share = momentum.to(found.dtype) if isinstance(momentum, Tensor) else momentum
        running.copy_(torch.where(total > 0, torch.lerp(before, found.detach(), share), before))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _pool(own: Tensor, group: Group) -> Moments:
    """From this rank's means, sums of squared deviations and count, those of all ranks together."""
    table = all_gather(own.unsqueeze(0), sizes=(1,) * resolve_group(group).size, group=group)
    channels = own.shape[0] // 2
    means, squares, counts = table.split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    some = total.clamp(min=1)
    shares = counts / some
    rough = (shares * means).sum(0)
    deviations = means - rough
    rest = (shares * deviations).sum(0)  # what rounding took from the rough mean
    variance = squares.sum(0) / some + (shares * (deviations - rest).square()).sum(0)
    return Moments(total, rough + rest, variance)
