"""sync_batch_norm: torch's batch_norm whose batch is that of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from unisono.collectives import Group
from unisono.collectives.autograd import LinearMap, apply
from unisono.collectives.checks import checks_enabled, describe, user_frame, validate_across_ranks
from unisono.collectives.groups import GroupRanks, resolve_group
from unisono.dataparallel.batch_statistics import (
    Moments,
    backward_plan,
    by_channel,
    measure,
    measure_differentiably,
    update_running,
    values_per_channel,
)

_NAME = "sync_batch_norm"


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

    x (N, C, ...): N may differ between ranks and be zero; then the result is empty, and part of the graph all the same.
    running_mean, running_var, weight, bias (C,), or None. The result has the shape, dtype and layout of `x`; statistics are
    float64 for float64, otherwise float32. One exchange of 2 C + 1 numbers for each rank.

    training=True moves the running statistics towards those of the global batch by `momentum` (a number, or a scalar tensor);
    all ranks get the same bits. One value per channel in the whole global batch is a ValueError on all ranks, as in torch (a
    RuntimeError in compiled code); a global batch of none passes, as in torch. training=False normalizes by the running
    statistics and never communicates. Shape and dtype must be the same on all ranks but for N; they are compared in
    checked() only.

    Backward: the true adjoint under the sum over ranks of local losses, of any order. One all_reduce of 2 C numbers, so all
    ranks must run it. The gradients of weight and bias are those of the local part, for DDP or sync_gradients to reduce.

    Example:
        >>> import torch
        >>> from unisono.dataparallel import sync_batch_norm
        >>> sync_batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    ranks = resolve_group(group)
    _check(x, {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}, eps, training, ranks)
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    if ranks.size == 1 and not isinstance(momentum, Tensor):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=True, momentum=momentum, eps=eps)
    plan = backward_plan(_NAME, group=group)
    transformed = _transformed()
    traced = transformed or torch.compiler.is_compiling()
    if traced:
        moments = measure_differentiably(x, plan=plan, group=group, forward_mode=transformed)
    else:
        with torch.no_grad():
            moments = measure(x, group=group)
    _refuse_single_value(x, moments, ranks)
    if running_mean is not None and running_var is not None:
        update_running(running_mean, moments.mean, momentum, moments.total)
        update_running(running_var, moments.unbiased_variance(), momentum, moments.total)
    if traced:
        return _normalize(x, moments, weight, bias, eps)
    y: Tensor = _Normalize.apply(x, weight, bias, *moments, eps, plan, group)
    return y


def _transformed() -> bool:
    """Whether torch.func or forward mode looks on: they would need a Function of another form, and tangents."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _normalize(x: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The formula, for what differentiates or compiles it."""
    scale = (moments.variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    y = (x.to(scale.dtype) - by_channel(moments.mean, x)) * by_channel(scale, x)
    return (y if bias is None else y + by_channel(bias, x)).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """The same by torch's kernels for fixed statistics, which keep nothing but `x`.

    The backward exchanges what that of the formula does, so one rank may run compiled code while another does not.
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
        ctx.save_for_backward(x, weight, total, mean, variance)
        ctx.eps, ctx.plan, ctx.group = eps, plan, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide_weight, wide_bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        return F.batch_norm(x, mean, variance, wide_weight, wide_bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: somebody wants to differentiate this backward
            return *_differentiable_backward(ctx, grad), *(None,) * 6
        x, weight, total, mean, variance = ctx.saved_tensors
        ones = torch.ones_like(mean)  # with no weight the sums would have the dtype of x
        if x.numel():  # the sums of grad * normalized x and of grad
            _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, ones, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:
            by_weight = by_bias = torch.zeros_like(mean)
        scale = (variance + ctx.eps).rsqrt()
        # The derivative by the global sums of deviations and of their squares, of which mean and variance are functions.
        sums = torch.stack([by_bias * scale, by_weight * scale.square() / 2]) / -total.clamp(min=1)
        # also where this rank's x needs no gradient: that of another may
        constant, along = apply(sums if weight is None else sums * weight.to(mean.dtype), ctx.plan.adjoint())
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.batch_norm(x, mean, variance, along * 2 / scale, constant, training=False, eps=ctx.eps)
            scale = scale if weight is None else scale * weight
            if dx.dtype == scale.dtype:
                dx.addcmul_(grad, by_channel(scale, x))
            else:
                dx += F.batch_norm(grad, torch.zeros_like(mean), ones, scale, training=False, eps=0.0)
        dweight = by_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = by_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, *(None,) * 6


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, *_ = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    x = x.view_as(x) if wants_x else x.detach().requires_grad_()  # every rank takes part in the backward of the exchange
    weight = weight.view_as(weight) if wants_weight else weight
    bias = torch.zeros(x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True) if wants_bias else None
    y = _normalize(x, measure_differentiably(x, plan=ctx.plan, group=ctx.group), weight, bias, ctx.eps)
    wanted = [x, *([weight] if wants_weight else []), *([bias] if wants_bias else [])]
    grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    dx = next(grads)
    return dx if wants_x else None, next(grads) if wants_weight else None, next(grads) if wants_bias else None


def _refuse_single_value(x: Tensor, moments: Moments, ranks: GroupRanks) -> None:
    if values_per_channel(x) > 1:  # so has the whole: the usual case, and the device need not be waited for
        return
    problem = f"{_NAME}: expected more than 1 value per channel in the global batch when training, got 1"
    if torch.compiler.is_compiling():
        torch._assert_async(moments.total != 1, problem)
    elif not torch._C._are_functorch_transforms_active() and moments.total.item() == 1:
        raise ValueError(f"{problem}; x has shape {tuple(x.shape)} on rank {ranks.rank} of {ranks.size}")


def _check(x: Tensor, by_name: dict[str, Tensor | None], eps: float, training: bool, ranks: GroupRanks) -> None:
    problem = _complaint(x, by_name, training) or (f"eps={eps} must be positive" if training and eps <= 0 else "")
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
        waiting = "; the others may wait for it: run with UNISONO_CHECK=1 to have all of them raise this"
        raise ValueError(f"{_NAME}: {problem} (rank {ranks.rank} of {ranks.size}{waiting * (training and ranks.size > 1)})")


def _complaint(x: Tensor, by_name: dict[str, Tensor | None], training: bool) -> str:
    if not isinstance(x, Tensor):
        return f"x: expected a Tensor, got {type(x).__name__}"
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        return f"x: expected floating point of 16 bits or more, got {x.dtype}"
    if x.ndim < 2:
        return f"x: expected (N, C) or (N, C, ...), got shape {tuple(x.shape)}"
    if (by_name["running_mean"] is None) != (by_name["running_var"] is None):
        return "running_mean and running_var: give both or neither"
    if not training and by_name["running_mean"] is None:
        return "running_mean=None, which training=False normalizes by"
    for name, given in by_name.items():
        if given is not None and given.shape != x.shape[1:2]:
            return f"{name}: shape {tuple(given.shape)} does not fit the {x.shape[1]} channels of x of shape {tuple(x.shape)}"
    return ""
