"""softmax_mean: the mean over all anchors of -log softmax at the partner, with a gradient that is known after the forward.

This is clip_loss and ntxent_loss without further options. The loss of an anchor is softplus(rest - diagonal), where `rest` is
the log-sum-exp of all other candidates, so its derivative is a sigmoid. One autograd Function does it all: a tail of plain
torch operations would launch as many kernels, and send as many messages, as the logits themselves do.
"""

from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unisono.collectives import all_reduce, global_mean
from unisono.collectives.functional.reduce import GradReduce
from unisono.collectives.groups import resolve_group
from unisono.contrastive.tiled.block_kernels import block_kernels
from unisono.contrastive.tiled.logit_statistics import (
    LogitStatistics,
    SavedForBackward,
    forward_in_bits,
    gradients_without_scale,
    multiply_to,
    one_by_one,
    statistics_of_all_logits,
)
from unisono.contrastive.tiled.tiles import TilePlan, logits_dtype, statistics_dtype
from unisono.contrastive.validate import shared_scalar


def softmax_mean(x: Tensor, y: Tensor, scale: Tensor, plan: TilePlan, grad_reduce: GradReduce) -> Tensor:
    """Return the mean over the rows of all ranks and, if plan.columns, over their columns: the same value on every rank.

    Row i belongs to the own column i; plan.excluded_diagonals holds 0, so that `rest` leaves the partner out.

    Backward: as in clip_loss, of any order. `scale` gets the average over the ranks. Three collectives: the log-sum-exps of the
    columns, the gradient of y, and one for the incoming gradient and that of scale.
    """
    loss: Tensor = _SoftmaxMean.apply(x, y, scale, plan, grad_reduce)
    return loss


class _SoftmaxMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, plan: TilePlan, grad_reduce: GradReduce) -> Tensor:
        assert plan.sizes is not None
        needs_grad = any(ctx.needs_input_grad[:3])
        factor = _scale_for(x, scale)
        in_bits, saved = forward_in_bits(x, y, factor, None, plan, needs_grad)
        kernels = block_kernels(x, factor, None, y.shape[0], plan)
        columns = in_bits.columns if plan.columns else None
        # The gradients of the sum of the losses: those of the mean are smaller by `count`.
        total, *slopes = kernels.softmax_losses(in_bits.rows, columns, in_bits.diagonal, wants_slopes=needs_grad)
        count = (1 + plan.columns) * sum(plan.sizes)
        loss = all_reduce(total, group=plan.group)
        if needs_grad:
            ctx.save_for_backward(x, y, scale, *in_bits[:2], *slopes, *saved.columns, *chain.from_iterable(saved.logits))
        ctx.saved_columns = len(saved.columns)
        ctx.kept = [len(tensors) for tensors in saved.logits]
        ctx.plan, ctx.grad_reduce, ctx.count = plan, grad_reduce, count
        return torch.div(loss, count or torch.nan, out=loss.new_empty((), dtype=logits_dtype(x.dtype)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, row_logs, column_logs, slopes, diagonal_slopes, *rest = ctx.saved_tensors
        plan: TilePlan = ctx.plan
        wants = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True: this backward will be differentiated itself
            views = [t.view_as(t) for t in (x, y, scale)]  # x and y may be one tensor; each needs a gradient of its own
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            loss = _mean_of_all_logits(views[0], views[1], views[2], plan, ctx.grad_reduce)
            found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True, materialize_grads=True))
            return *(next(found) if needed else None for needed in wants), *(None,) * 2
        kept = iter(rest[ctx.saved_columns :])
        saved = SavedForBackward(rest[: ctx.saved_columns], [list(islice(kept, number)) for number in ctx.kept])
        in_bits = LogitStatistics(row_logs, column_logs, slopes)
        own_slopes = LogitStatistics(slopes[:1], slopes[1:], diagonal_slopes)
        factor = _scale_for(x, scale)
        dx, dy = gradients_without_scale(x, y, factor, None, plan, in_bits, own_slopes, saved, wants[1])
        # One message: the sum over ranks of the incoming gradients, and of the parts of scale's gradient.
        parts = x.new_empty(1 + wants[2], dtype=statistics_dtype(x.device))
        if wants[2]:
            block_kernels(x, factor, None, y.shape[0], plan).sum_of_products(dx, out=parts[1])
        ranks = resolve_group(plan.group).size
        count = ctx.count * (ranks if ctx.grad_reduce == "sum" else 1)
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)

        def gradients(grad: Tensor) -> tuple[Tensor | None, ...]:
            torch.div(grad, count, out=parts[0])
            message = all_reduce(parts, group=plan.group)
            times = message[0] * factor
            dx_and_dy = ((dx if wants[0] else None, x), (dy, y))
            grads = [None if d is None else multiply_to(d.clone() if batched else d, times, t.dtype) for d, t in dx_and_dy]
            if not wants[2]:
                return *grads, None
            out = message.new_empty((), dtype=scale.dtype)
            return *grads, torch.div(message.prod(), ranks, out=out).to(scale.device)

        return *(one_by_one(gradients, [grad]) if batched else gradients(grad)), *(None,) * 2


def _scale_for(x: Tensor, scale: Tensor) -> Tensor:
    """With as many digits as the logits have; on CPUs, where that costs nothing, with those of the statistics."""
    dtype = statistics_dtype(x.device) if x.device.type == "cpu" else logits_dtype(x.dtype)
    return scale.detach().to(torch.promote_types(scale.dtype, dtype))


def _mean_of_all_logits(x: Tensor, y: Tensor, scale: Tensor, plan: TilePlan, grad_reduce: GradReduce) -> Tensor:
    """The same by plain torch, with all logits of this rank's rows at once: differentiable to any order."""
    statistics = statistics_of_all_logits(x, y, shared_scalar(scale, plan.group), None, plan)
    rest = torch.cat([statistics.rows, statistics.columns]) if plan.columns else statistics.rows
    losses = softplus(rest - statistics.diagonal, threshold=50)
    loss = global_mean(losses.T, grad_reduce=grad_reduce, group=plan.group)
    return loss.to(logits_dtype(x.dtype))
