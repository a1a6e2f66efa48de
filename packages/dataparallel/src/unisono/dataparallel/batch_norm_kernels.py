"""The passes of sync_batch_norm over the data: two in forward, two in backward on CUDA, where torch has fused kernels for them.

Those are the kernels of nn.SyncBatchNorm. On other devices, each pass is what torch's batch norm offers there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED = {"cuda"}  # device types that have torch's fused kernels
aten = torch.ops.aten


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """View (C,) in the shape that broadcasts against `x`."""
    return values.view(-1, *(1,) * (x.ndim - 2))


def all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (divided by the count) of each channel of this rank's batch, which is not empty."""
    wide = statistics_dtype(x)
    if x.device.type in ("cpu", "cuda"):
        # It takes a third of the time of var_mean. It reads the dtype from the running statistics, and changes these two.
        scratch = x.new_empty((2, x.shape[1]), dtype=wide)
        mean, variance = torch.batch_norm_update_stats(_dense(x, x), scratch[0], scratch[1], 0.0)
        return mean, variance
    variance, mean = torch.var_mean(x.to(wide), all_but_channels(x), correction=0)
    return mean, variance


def normalize(
    x: Tensor, mean: Tensor, variance: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return (x - mean) * invstd * weight + bias, in the dtype and layout of `x`."""
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    if x.device.type not in _FUSED or x.numel() == 0:
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
    if weight is None and bias is not None:
        weight = torch.ones_like(mean)  # the kernel takes the dtype of both from the weight
    y: Tensor = torch.batch_norm_elemt(_dense(x, x), weight, bias, mean, invstd, eps)
    return y


def backward_sums(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, invstd: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return, for each channel of this rank's batch, the sums of grad and of grad * (x - mean)."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.device.type in _FUSED:
        by_bias, deviations, *_ = torch.batch_norm_backward_reduce(
            _dense(grad, x), _dense(x, x), mean, invstd, None, True, False, False
        )
        return by_bias, deviations
    ones = torch.ones_like(mean)  # without a weight, the sums would have the dtype of x
    _, by_weight, by_bias = aten.native_batch_norm_backward(
        grad, x, ones, mean, variance, None, None, False, eps, [False, True, True]
    )
    return by_bias, by_weight / invstd


def backward_input(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    total: Tensor,
    eps: float,
) -> Tensor:
    """Return the gradient of `x`. `sums`: those of backward_sums, times the weight, over all ranks. (2, C)

    It is invstd * (weight * grad - (sums[0] + (x - mean) * invstd^2 * sums[1]) / total).
    """
    if x.device.type in _FUSED and x.numel():
        # The kernel multiplies all of it by the weight, and divides by an int32, which has no room for a total of 4,096 ranks.
        if weight is None:
            by_bias, deviations = (sums / total).unbind()
        else:  # a weight of zero on all ranks has a gradient of zero
            by_bias, deviations = (sums / (weight * total)).masked_fill_(weight == 0, 0.0).unbind()
        one = x.new_ones(1, dtype=torch.int32)
        dx: Tensor = torch.batch_norm_backward_elemt(
            _dense(grad, x), _dense(x, x), mean, invstd, weight, by_bias, deviations, one
        )
        return dx
    constant, along = sums / -total.clamp(min=1)
    dx = F.batch_norm(x, mean, variance, along * invstd.square(), constant * invstd, training=False, eps=eps)
    scale = invstd if weight is None else invstd * weight
    if dx.dtype == scale.dtype:
        return dx.addcmul_(grad, by_channel(scale, x))
    return dx.add_(F.batch_norm(grad, torch.zeros_like(mean), torch.ones_like(mean), scale, training=False, eps=0.0))


def _dense(t: Tensor, x: Tensor) -> Tensor:
    """Return `t` in a layout that the fused kernels read without strides: that of `x`, or contiguous."""
    if x.device.type not in _FUSED:
        return t
    for ndim, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == ndim and x.is_contiguous(memory_format=last):
            return t.contiguous(memory_format=last)
    return t.contiguous()


def _like_channels(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    made = x.new_empty((2, x.shape[1]), dtype=statistics_dtype(x))
    return made[0].clone(), made[1].clone()


# torch has no shapes-only version of these kernels, so they did not run on fake tensors.
_SHAPES: dict[str, Any] = {
    "batch_norm_stats": _like_channels,
    "batch_norm_update_stats": _like_channels,
    "batch_norm_gather_stats_with_counts": _like_channels,
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda grad, x, *_: _like_channels(x) * 2,
    "batch_norm_backward_elemt": lambda grad, x, *_: torch.empty_like(x),
}
_library = torch.library.Library("aten", "IMPL")
for _name, _function in _SHAPES.items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _library.impl(_name, _function, "Meta")
