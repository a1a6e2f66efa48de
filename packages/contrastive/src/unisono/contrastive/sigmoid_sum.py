"""The sum of all pairs' sigmoid losses over all ranks, tile by tile, with its gradients made in the same pass.

No pair's loss depends on another's, so the gradient is known, but for one factor, as soon as the logits are: they are formed
once, and three matmuls do all. The price: where no backward follows, say so by torch.no_grad().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.nn.functional import logsigmoid

from unisono.collectives import Group, all_gather
from unisono.collectives.groups import GroupRanks, as_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, metadata_lengths
from unisono.contrastive.blocks import bring, choose
from unisono.contrastive.dense import all_logits
from unisono.contrastive.tiles import statistics_dtype, without_autocast
from unisono.contrastive.walk import Pairs, Walk, add_diagonal, diagonal, scale_gradient


class How(NamedTuple):
    masked: bool  # the same ids are left out, not positives
    plan: Pairs
    sizes: tuple[int, ...]
    group: Group


class Sum(NamedTuple):
    """Gradients are in the dtype of the logits: 16-bit features' are rounded when the factor that is to come is known."""

    total: Tensor  # over this rank's rows and all columns
    dx: Tensor
    dy: Tensor
    dscale: Tensor
    dbias: Tensor
    dweights: Tensor


def sigmoid_sum(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    masked: bool,
    plan: Pairs,
    sizes: Sequence[int] | None,
    group: Group,
) -> Tensor:
    """The sum over own rows i and all ranks' columns j of (weights[i] + weights[j]) / 2 * softplus(-sign * logit).

    The sign is + for (i, i) and, unless `masked`, for the same ids; - for all else.

    Backward: right if the gradient that arrives is the same on all ranks, as it is after an all_reduce of the result.
    """
    if torch.compiler.is_compiling():
        needed = torch.is_grad_enabled()
        how = (plan.exchange, plan.tile or 0, sizes or ())
        traced: Tensor = _op(x, y, scale, bias, weights, ids, masked, needed, *how, *resolve_group(group))[0]
        return traced
    assert sizes is not None
    total: Tensor = _SigmoidSum.apply(x, y, scale, bias, weights, ids, How(masked, plan, tuple(sizes), group))
    return total


class _SigmoidSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor,
        weights: Tensor | None,
        ids: Tensor | None,
        how: How,
    ) -> Tensor:
        total, *grads = compute(x, y, scale, bias, weights, ids, how, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, y, scale, bias, weights, ids, *grads)
        ctx.how = how
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, ids, dx, dy, dscale, dbias, dweights = ctx.saved_tensors
        wants = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # create_graph: somebody wants to differentiate this backward
            views: list[Any] = [t if t is None else t.view_as(t) for t in inputs]  # one tensor may have two roles
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            result = plain(views[0], views[1], views[2], views[3], views[4], ids, ctx.how)
            grads = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
            return *(next(grads) if needed else None for needed in wants), *(None,) * 2
        found = zip((dx, dy, dscale, dbias, dweights), inputs, wants, strict=True)
        return *((d * grad).to(t.dtype) if needed else None for d, t, needed in found), *(None,) * 2


@without_autocast
def compute(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    how: How,
    needed: bool,
) -> Sum:
    masked, plan, sizes, group = how
    wide, extra = statistics_dtype(x.device), 0 if weights is None else 1
    walk = Walk(x, y, scale, None if ids is None else (ids, ids), plan, at_once=2)
    minus_bias = -bias.to(wide)
    columns = bring(
        [y, *(() if weights is None else (weights.to(wide),)), *(() if ids is None else (ids,))],
        choose(plan.exchange, sizes, y.shape[1], walk.compute.itemsize),
        sizes,
        group,
    )
    total, dbias = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
    dx = x.new_zeros(x.shape if needed else (0, 0), dtype=walk.compute)
    by_row = x.new_zeros(x.shape[0] * extra, dtype=wide)
    for own, (all_y, *more) in columns:
        # One tensor for all that goes home: the gradient of y, and in a last column what the weights multiply.
        home = x.new_zeros((all_y.shape[0], all_y.shape[1] + extra) if needed else (0, 0), dtype=walk.compute)
        dy = home[:, : all_y.shape[1]]
        for rows, cols, features, logits, same in walk.tiles(all_y, more[-1] if ids is not None else None, own):
            minus = torch.sub(minus_bias, logits, out=walk.scratch.room("minus", (logits.shape[0], logits.shape[1])))
            if same is not None:
                minus = minus.masked_fill_(same, torch.inf) if masked else torch.where(same, -minus, minus)
            losses = logsigmoid(minus).neg_()
            row_sums = losses.sum(1).to(wide)
            if weights is None:
                total += row_sums.sum()
            else:
                column_sums = losses.sum(0)
                total += (row_sums @ weights[rows.slice].to(wide) + column_sums.to(wide) @ more[0][cols.slice].to(wide)) / 2
            if not needed:
                continue
            slope = minus.neg_().sigmoid_()
            if same is not None and not masked:
                slope = torch.where(same, -slope, slope)
            if weights is not None:
                by_row[rows.slice] += row_sums
                home[cols.slice, -1] += column_sums
                slope *= (weights[rows.slice].unsqueeze(1) + more[0][cols.slice]).to(walk.compute) / 2
            dbias += slope.sum()
            dx[rows.slice].addmm_(slope, features)
            dy[cols.slice].addmm_(slope.T, x[rows.slice].to(walk.compute))
        if own is not None:
            logits = diagonal(x, y, walk) * walk.factor - minus_bias
            losses = logsigmoid(logits).neg_()
            slope = logits.neg_().sigmoid_().neg_()
            if weights is not None:
                if needed:
                    by_row += losses
                    home[own : own + x.shape[0], -1] += losses.to(walk.compute)
                losses, slope = losses * weights, slope * weights
            total += losses.sum()
            if needed:
                dbias += slope.sum()
                add_diagonal(dx, dy, x, y, slope, own, walk)
        if needed:
            columns.add(home)
    if not needed:
        return Sum(total, *(x.new_empty(0) for _ in range(5)))
    dscale = scale_gradient(x, dx, walk) / scale
    home = columns.total()
    dweights = x.new_empty(0) if weights is None else (by_row + home[:, -1]) / 2
    dy = home[:, : y.shape[1]].mul_(scale).contiguous()
    return Sum(total, dx, dy, dscale, dbias, dweights)


def plain(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    how: How,
) -> Tensor:
    """The same by the formula, all logits at once: what second derivatives are taken of.

    The gradients that it sends to other ranks' columns carry their own factors, so it is right for any use.
    """
    masked, plan, sizes, group = how
    logits, partner = all_logits(x, y, scale, plan.left_out, sizes, group)
    logits = logits + bias.to(logits.dtype)
    same = torch.zeros_like(partner) if ids is None else ids.unsqueeze(1) == all_gather(ids, sizes=sizes, group=group)
    positive = ~partner | (same & (not masked))
    losses = -logsigmoid(torch.where(positive, logits, -logits))
    if masked:
        losses = losses.masked_fill(same & partner, 0)
    if weights is not None:
        everyones = all_gather(weights.to(logits.dtype), sizes=sizes, group=group)
        losses = losses * (weights.unsqueeze(1) + everyones) / 2
    return losses.sum()


@torch.library.custom_op("unisono_contrastive::sigmoid_sum", mutates_args=())
def _op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    masked: bool,
    needed: bool,
    exchanged: str,
    tile: int,
    sizes: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = GroupRanks(group, rank, size)
    if not sizes:
        sizes = metadata_lengths(all_gather_metadata("sigmoid_loss", y, 0, ranks, same=f"{masked}, {exchanged}, {tile}"))
    plan = Pairs(sums=ids is not None, exchange=exchanged, tile=tile or None)  # type: ignore[arg-type]
    return compute(x, y, scale, bias, weights, ids, How(masked, plan, tuple(sizes), as_group(ranks)), needed)


@_op.register_fake
def _(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: object,
    masked: bool,
    needed: bool,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty((), dtype=torch.float64)
    if not needed:
        return Sum(total, *(x.new_empty(0) for _ in range(5)))
    compute_dtype, wide = torch.promote_types(x.dtype, torch.float32), torch.float64
    dx, dy = x.new_empty(x.shape, dtype=compute_dtype), y.new_empty(y.shape, dtype=compute_dtype)
    dweights = x.new_empty(0) if weights is None else weights.new_empty(weights.shape, dtype=wide)
    return Sum(total, dx, dy, x.new_empty((), dtype=wide), x.new_empty((), dtype=wide), dweights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:5]]


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(None if dtype is None else (d * grad).to(dtype) for d, dtype in found), *(None,) * 9


_op.register_autograd(_backward, setup_context=_save)
_op.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another
