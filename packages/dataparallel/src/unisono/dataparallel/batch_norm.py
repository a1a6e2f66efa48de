"""Batch norm over all ranks: the function sync_batch_norm, the module SyncBatchNorm, and the conversion of a model.

Every rank sends its count, and mean and variance of each channel, 2 C + 1 numbers, and pools those of all ranks.
Deviations are always taken from a mean. E[x^2] - E[x]^2 would lose every digit if the mean is much larger than the deviation.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.collectives import Group, all_gather
from unisono.collectives.autograd import LinearMap, apply
from unisono.collectives.checks import call_site, checks_enabled, describe, user_frame, validate_across_ranks
from unisono.collectives.groups import GroupRanks, resolve_group
from unisono.dataparallel.batch_norm_kernels import (
    all_but_channels,
    backward_input,
    backward_sums,
    by_channel,
    channel_moments,
    normalize,
    statistics_dtype,
)

_NAME = "sync_batch_norm"
_Module = TypeVar("_Module", bound=nn.Module)


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    group: Group = None,
) -> Tensor:
    """Normalize every channel of `x` by the mean and variance over the batches of all ranks, then scale and shift it.

    `x` is (N, C, ...). N may differ between ranks and be zero; then the result is empty, but still part of the graph.
    running_mean, running_var, weight and bias are (C,) or None. The result has the shape, dtype and layout of `x`; statistics
    are float64 for float64, otherwise float32. Each rank sends 2 C + 1 numbers in one all_gather.

    training=True moves the running statistics towards those of the global batch by `momentum` (a number, or a scalar tensor);
    all ranks get the same bits. If the whole global batch has one value per channel, all ranks raise ValueError, as torch
    does; on accelerators and in compiled code it is an assertion of the device, for which the host does not wait. An empty
    global batch is accepted, as in torch. training=False normalizes by the running statistics and never communicates. dtype
    and shape, except N, must be the same on all ranks; only checked() compares them.

    Backward: the true adjoint for the sum over ranks of local losses, of any order. It is one all_reduce of 2 C numbers, so
    all ranks must run it. The gradients of weight and bias are local: DDP or sync_gradients must reduce them.

    Example:
        >>> import torch
        >>> from unisono.dataparallel import sync_batch_norm
        >>> sync_batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    ranks = resolve_group(group)
    _validate(
        x, {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}, eps, training, ranks
    )
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    if ranks.size == 1 and not isinstance(momentum, Tensor):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=True, momentum=momentum, eps=eps)
    plan = backward_map(_NAME, group=group)
    transformed = _transformed()
    traced = transformed or torch.compiler.is_compiling()
    if traced:
        moments = differentiable_global_moments(x, plan=plan, eps=eps, group=group, forward_mode=transformed)
    else:
        with torch.no_grad():
            moments = global_moments(x, group=group)
    _raise_if_single_value(x, moments, ranks)
    if running_mean is not None and running_var is not None:
        update_running_statistics(running_mean, running_var, moments, momentum)
    if traced:
        return _normalize(x, moments, weight, bias, eps)
    y: Tensor = _Normalize.apply(x, weight, bias, *moments, eps, plan, group)
    return y


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d and 3d in one module, with the statistics of the global batch: see sync_batch_norm.

    It works on any device and backend; local batches may be uneven or empty. Parameters, buffers and state_dict are those of
    nn.BatchNorm*d and nn.SyncBatchNorm. In eval mode with running statistics it never communicates; with
    track_running_stats=False it normalizes by the global batch in eval mode too, so all ranks must call it. momentum=None
    averages over all batches so far.

    Backward: as in sync_batch_norm. The gradients of weight and bias are local, as DDP, FSDP and sync_gradients need them.

    Example:
        >>> import torch
        >>> from unisono.dataparallel import SyncBatchNorm
        >>> norm = SyncBatchNorm(2)
        >>> norm(torch.randn(8, 2, 5, 5)).shape
        torch.Size([8, 2, 5, 5])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None and self.running_mean is not None:
                momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()  # without a copy to the host
        uses_running = self.track_running_stats or not self.training
        return sync_batch_norm(
            input,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.weight,
            self.bias,
            training=self.training or (self.running_mean is None and self.running_var is None),
            momentum=momentum,
            eps=self.eps,
            group=self.group,
        )

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.group is None else f"{text}, group={self.group}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class _SyncBatchNormAct(SyncBatchNorm):
    """The replacement for timm's BatchNormAct2d: its submodules `drop` and `act` follow the norm."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(input)))
        return y


def convert_sync_batchnorm(module: _Module, *, group: Group = None) -> _Module:
    """Turn every nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm in `module`, or `module` itself, into a SyncBatchNorm, in place.

    The modules stay the same objects and change only their class. So parameters, buffers, optimizers, hooks, shared layers,
    flags, device and dtype stay as they are. timm's BatchNormAct2d keeps its activation.

    `group`: with None, an nn.SyncBatchNorm or SyncBatchNorm keeps its own group, and all others get the default group.

    Raises TypeError, and changes nothing, if there are other subclasses of torch's batch norms, whose forward is unknown
    here, or lazy ones: run a batch through those first.

    Example:
        >>> from torch import nn
        >>> from unisono.dataparallel import convert_sync_batchnorm
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    norms = [(name, norm, _class_for(norm)) for name, norm in module.named_modules() if isinstance(norm, _BatchNorm)]
    unknown = [f"{name or 'module'}: {type(norm).__module__}.{type(norm).__qualname__}" for name, norm, cls in norms if not cls]
    if unknown:
        raise TypeError(
            f"convert_sync_batchnorm: cannot convert {'; '.join(unknown)}. Known: nn.BatchNorm1d, 2d, 3d, nn.SyncBatchNorm "
            "and timm's BatchNormAct2d; run a batch through lazy ones first, and make others a subclass of SyncBatchNorm"
        )
    for _, norm, cls in norms:
        own = vars(norm).pop("process_group", vars(norm).get("group"))
        norm.__class__ = cls  # type: ignore[assignment]
        vars(norm)["group"] = own if group is None else group
    return module


def _class_for(norm: _BatchNorm) -> type[SyncBatchNorm] | None:
    kind = type(norm)
    if isinstance(norm, SyncBatchNorm):
        return type(norm)
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return SyncBatchNorm
    if kind.__module__.startswith("timm.") and kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct"):
        return _SyncBatchNormAct
    return None


class _Normalize(torch.autograd.Function):
    """_normalize by torch's kernels for fixed statistics, which save only `x`.

    Its backward exchanges the same as that of _normalize, so one rank may run compiled code while another does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        total: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        plan: LinearMap,
        group: Group,
    ) -> Tensor:
        invstd = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, total, mean, variance, invstd)
        ctx.eps, ctx.plan, ctx.group = eps, plan, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return normalize(x, mean, variance, invstd, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: this backward will be differentiated
            return *_differentiable_backward(ctx, grad), *(None,) * 6
        x, weight, total, mean, variance, invstd = ctx.saved_tensors
        by_bias, deviations = backward_sums(grad, x, mean, variance, invstd, ctx.eps)
        wide = None if weight is None else weight.to(mean.dtype)
        sums = torch.stack([by_bias, deviations])
        # Run it also if x of this rank needs no gradient: x of another rank may.
        sums = apply(sums if wide is None else sums * wide, ctx.plan.adjoint())
        dx = None
        if ctx.needs_input_grad[0]:
            dx = backward_input(grad, x, mean, variance, invstd, wide, sums, total, ctx.eps)
        dweight = (deviations * invstd).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = by_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, *(None,) * 6


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, *_ = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    x = x.view_as(x) if wants_x else x.detach().requires_grad_()  # every rank must run the backward of the exchange
    weight = weight.view_as(weight) if wants_weight else weight
    bias = torch.zeros(x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True) if wants_bias else None
    y = _normalize(x, differentiable_global_moments(x, plan=ctx.plan, eps=ctx.eps, group=ctx.group), weight, bias, ctx.eps)
    inputs = [x, *([weight] if wants_weight else []), *([bias] if wants_bias else [])]
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    dx = next(grads)
    return dx if wants_x else None, next(grads) if wants_weight else None, next(grads) if wants_bias else None


def _normalize(x: Tensor, moments: BatchMoments, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the formula in operations that autograd, torch.func and torch.compile know."""
    scale = (moments.variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    y = (x.to(scale.dtype) - by_channel(moments.mean, x)) * by_channel(scale, x)
    return (y if bias is None else y + by_channel(bias, x)).to(x.dtype)


def _transformed() -> bool:
    """Return whether torch.func or forward mode is active: _Normalize supports neither."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _raise_if_single_value(x: Tensor, moments: BatchMoments, ranks: GroupRanks) -> None:
    if values_per_channel(x) > 1:  # then the global batch has more, too
        return
    problem = f"{_NAME}: expected more than 1 value per channel in the global batch when training, got 1"
    if torch.compiler.is_compiling() or x.device.type != "cpu":  # the device checks it; the host does not wait for the answer
        torch._assert_async(moments.total != 1, problem)
    elif not torch._C._are_functorch_transforms_active() and moments.total.item() == 1:
        raise ValueError(f"{problem}; x has shape {tuple(x.shape)} on rank {ranks.rank} of {ranks.size}")


def _validate(x: Tensor, by_name: dict[str, Tensor | None], eps: float, training: bool, ranks: GroupRanks) -> None:
    problem = _argument_error(x, by_name, training) or (f"eps={eps} must be positive" if training and eps <= 0 else "")
    if training and checks_enabled():
        validate_across_ranks(
            _NAME,
            ranks,
            same=(_NAME, str(getattr(x, "dtype", "")), *(() if problem else x.shape[1:2])),
            numbers=(),
            words=lambda: f"{_NAME}({describe(x)}) at {user_frame()}",
            device=getattr(x, "device", None),
            rule="All ranks must have the same dtype and number of channels.",
            problem=problem,
        )
    if problem:
        waiting = "; the others may wait for it: run with UNISONO_CHECK=1 to raise this on all ranks"
        raise ValueError(f"{_NAME}: {problem} (rank {ranks.rank} of {ranks.size}{waiting * (training and ranks.size > 1)})")


def _argument_error(x: Tensor, by_name: dict[str, Tensor | None], training: bool) -> str:
    if not isinstance(x, Tensor):
        return f"x: expected a Tensor, got {type(x).__name__}"
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        return f"x: expected floating point of 16 bits or more, got {x.dtype}"
    if x.ndim < 2:
        return f"x: expected (N, C) or (N, C, ...), got shape {tuple(x.shape)}"
    if (by_name["running_mean"] is None) != (by_name["running_var"] is None):
        return "running_mean and running_var: give both or neither"
    if not training and by_name["running_mean"] is None:
        return "running_mean=None, but training=False normalizes by it"
    for name, given in by_name.items():
        if given is not None and given.shape != x.shape[1:2]:
            return f"{name}: shape {tuple(given.shape)} does not fit the {x.shape[1]} channels of x of shape {tuple(x.shape)}"
    return ""


class BatchMoments(NamedTuple):
    """Mean and variance of each channel over the global batch: the same bits on every rank."""

    total: Tensor  # (1,): how many values each channel has
    mean: Tensor  # (C,); zeros if there are no values
    variance: Tensor  # (C,), divided by total; zeros if there are no values

    def unbiased_variance(self) -> Tensor:
        """Return the variance divided by total - 1, for the running statistics. (C,)"""
        return self.variance * (self.total / (self.total - 1).clamp(min=1))


def values_per_channel(x: Tensor) -> int:
    """Return samples times positions of the local batch."""
    return x.shape[0] * math.prod(x.shape[2:])


def global_moments(x: Tensor, *, group: Group) -> BatchMoments:
    """Return the moments of the global batch, by the fastest kernels. Not differentiable. One all_gather."""
    count = values_per_channel(x)
    if count == 0:
        return _pool(x.new_zeros(2 * x.shape[1] + 1, dtype=statistics_dtype(x)), group)
    mean, variance = channel_moments(x)
    return _pool(torch.cat([mean, variance, mean.new_full((1,), count)]), group)


def differentiable_global_moments(
    x: Tensor, *, plan: LinearMap, eps: float, group: Group, forward_mode: bool = False
) -> BatchMoments:
    """Return the same by operations that autograd, torch.func and torch.compile know. One all_gather; `plan` in backward.

    `forward_mode`: tangents are right, too, but the backward exchanges more.
    """
    wide = statistics_dtype(x)
    count = values_per_channel(x)
    others = all_but_channels(x)
    mean = x.sum(others, dtype=wide) / max(count, 1)
    squares = (x.to(wide) - by_channel(mean, x)).square().sum(others)
    own = torch.cat([mean, squares / max(count, 1), mean.new_full((1,), count)])
    if forward_mode:
        return _pool(own, group)
    # The exchange itself is not differentiated. The moments are the pooled numbers plus a zero, and this zero has the
    # derivatives with respect to this rank's sums of deviations from the pooled mean. `units` are such that the backward of
    # `plan` adds over ranks what _Normalize adds: the sums of weight * grad and of weight * grad * (x - mean).
    pooled = _pool(own.detach(), group)
    deviation = mean - pooled.mean
    divisor = pooled.total.clamp(min=1)
    invstd = (pooled.variance + eps).rsqrt()
    units = torch.stack([-invstd, invstd.pow(3) / -2]) / divisor
    sums = apply(torch.stack([count * deviation, squares + count * deviation.square()]) * units, plan)
    mean_zero, square_zero = (sums - sums.detach()) / (units * divisor)
    return BatchMoments(pooled.total, pooled.mean + mean_zero, pooled.variance + square_zero - mean_zero.square())


def backward_map(name: str, *, group: Group) -> LinearMap:
    """Return the map whose adjoint adds, over ranks, the derivatives with respect to the (2, C) global sums."""
    return LinearMap("copy", resolve_group(group), call=name, site=call_site())


def update_running_statistics(
    running_mean: Tensor, running_var: Tensor, moments: BatchMoments, momentum: float | Tensor
) -> None:
    """Move them towards the moments, in the precision of those. A batch that is empty on all ranks changes nothing."""
    with torch.no_grad():
        found = moments.mean.detach()
        share = moments.total.clamp(max=1) * momentum  # 0 for an empty batch
        for running, towards in ((running_mean, found), (running_var, moments.unbiased_variance().detach())):
            if running.dtype == found.dtype:
                running.lerp_(towards, share)
            else:
                running.copy_(torch.lerp(running.to(found.dtype), towards, share))


def _pool(own: Tensor, group: Group) -> BatchMoments:
    """Gather every rank's means, variances and count, and return the moments of all values."""
    table = all_gather(own.unsqueeze(0), sizes=(1,) * resolve_group(group).size, group=group)
    channels = own.shape[0] // 2
    means, variances, counts = table.split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    shares = counts / total.clamp(min=1)
    rough = (shares * means).sum(0)
    deviations = means - rough
    rest = (shares * deviations).sum(0)  # the rounding error of the rough mean
    deviations = deviations - rest
    variance = (shares * torch.addcmul(variances, deviations, deviations)).sum(0)
    return BatchMoments(total, rough + rest, variance)
