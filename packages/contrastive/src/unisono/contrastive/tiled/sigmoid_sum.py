"""sigmoid_sum: the sum of the sigmoid losses of all pairs over all ranks, computed in tiles together with its gradient.

The loss of a pair depends on no other pair, so its gradient is known, up to one common factor, as soon as its logit is. One
pass computes each tile of logits once and needs three matmuls in all. Where no backward follows, call it under
torch.no_grad(), which skips the gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.nn.functional import logsigmoid

from unisono.collectives import all_gather
from unisono.collectives.groups import GroupRanks, as_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, metadata_lengths
from unisono.contrastive.tiled.tiles import TileIterator, TilePlan, all_logits, statistics_dtype, without_autocast


class SumAndGradients(NamedTuple):
    """The gradients have the dtype of the logits: those of 16-bit features are rounded after the last multiplication."""

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
    plan: TilePlan,
) -> Tensor:
    """Sum (weights[i] + weights[j]) / 2 * softplus(-sign * logit) over this rank's rows i and the columns j of all ranks.

    The sign is + for (i, i) and for pairs with the same id, which are left out if `masked`; it is - for all other pairs.

    Backward: right if the incoming gradient is the same on all ranks, as it is after an all_reduce of the result.
    """
    if torch.compiler.is_compiling():
        options = torch.is_grad_enabled(), plan.exchange, plan.tile or 0, plan.sizes or ()
        compiled_total: Tensor = _op(x, y, scale, bias, weights, ids, masked, *options, *resolve_group(plan.group))[0]
        return compiled_total
    total: Tensor = _SigmoidSum.apply(x, y, scale, bias, weights, ids, masked, plan)
    return total


class _SigmoidSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        total, *grads = compute(*arguments, needs_grad=any(ctx.needs_input_grad))  # type: ignore[misc]
        *tensors, masked, plan = arguments
        ctx.save_for_backward(*tensors, *grads)
        ctx.options = masked, plan
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, ids, dx, dy, dscale, dbias, dweights = ctx.saved_tensors
        wants = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # create_graph=True: this backward will be differentiated itself
            views: list[Any] = [t if t is None else t.view_as(t) for t in inputs]  # x and y may be one tensor
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            result = _sum_of_all_logits(views[0], views[1], views[2], views[3], views[4], ids, *ctx.options)
            grads = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
            return *(next(grads) if needed else None for needed in wants), *(None,) * 3
        found = zip((dx, dy, dscale, dbias, dweights), inputs, wants, strict=True)
        return *((d * grad).to(t.dtype) if needed else None for d, t, needed in found), *(None,) * 3


@without_autocast
def compute(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    masked: bool,
    plan: TilePlan,
    needs_grad: bool,
) -> SumAndGradients:
    """Compute the sum and, if `needs_grad`, its gradients; otherwise these are empty."""
    wide = statistics_dtype(x.device)
    tiles = TileIterator(x, y, scale, None if ids is None else (ids, ids), plan, tiles_at_once=2)
    minus_bias = -bias.to(wide)
    column_weights = [] if weights is None else [weights.to(wide)]
    column_ids = [] if ids is None else [ids]
    columns = tiles.exchange_columns(y, *column_weights, *column_ids)
    total = x.new_zeros((), dtype=wide)
    dbias = x.new_zeros((), dtype=wide)
    dx = x.new_zeros(x.shape if needs_grad else (0, 0), dtype=tiles.dtype)
    loss_by_row = x.new_zeros(0 if weights is None else x.shape[0], dtype=wide)
    for own_start, (all_y, *others) in columns:
        # One tensor returns to the owner of the columns: the gradient of y and, in a last column, that of the weights.
        width = all_y.shape[1]
        home = x.new_zeros((all_y.shape[0], width + len(column_weights)) if needs_grad else (0, 0), dtype=tiles.dtype)
        dy = home[:, :width]
        for rows, cols, features, logits, same in tiles.iterate(all_y, others[-1] if ids is not None else None, own_start):
            minus = torch.sub(minus_bias, logits, out=tiles.scratch.buffer("minus", logits.shape))
            if same is not None:
                minus = minus.masked_fill_(same, torch.inf) if masked else torch.where(same, -minus, minus)
            losses = logsigmoid(minus).neg_()
            row_sums = losses.sum(1).to(wide)
            if weights is None:
                total += row_sums.sum()
            else:
                column_sums = losses.sum(0)
                total += (row_sums @ weights[rows.slice].to(wide) + column_sums.to(wide) @ others[0][cols.slice].to(wide)) / 2
            if not needs_grad:
                continue
            slope = minus.neg_().sigmoid_()
            if same is not None and not masked:
                slope = torch.where(same, -slope, slope)
            if weights is not None:
                loss_by_row[rows.slice] += row_sums
                home[cols.slice, -1] += column_sums
                slope *= (weights[rows.slice].unsqueeze(1) + others[0][cols.slice]).to(tiles.dtype) / 2
            dbias += slope.sum()
            dx[rows.slice].addmm_(slope, features)
            dy[cols.slice].addmm_(slope.T, x[rows.slice].to(tiles.dtype))
        if own_start is not None:
            logits = tiles.diagonal_products(y) * tiles.factor - minus_bias
            losses = logsigmoid(logits).neg_()
            slope = logits.neg_().sigmoid_().neg_()
            if weights is not None:
                if needs_grad:
                    loss_by_row += losses
                    home[own_start : own_start + x.shape[0], -1] += losses.to(tiles.dtype)
                losses = losses * weights
                slope = slope * weights
            total += losses.sum()
            if needs_grad:
                dbias += slope.sum()
                tiles.add_diagonal_gradient(dx, dy, y, slope, own_start)
        if needs_grad:
            columns.add(home)
    if not needs_grad:
        return SumAndGradients(total, *(x.new_empty(0) for _ in range(5)))
    dscale = tiles.factor_gradient(dx) / scale
    home = columns.total()
    dweights = x.new_empty(0) if weights is None else (loss_by_row + home[:, -1]) / 2
    dy = home[:, : y.shape[1]].mul_(scale).contiguous()
    return SumAndGradients(total, dx, dy, dscale, dbias, dweights)


def _sum_of_all_logits(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    masked: bool,
    plan: TilePlan,
) -> Tensor:
    """Compute the same sum by plain torch, with all logits of this rank's rows at once: differentiable to any order."""
    logits, takes_part = all_logits(x, y, scale, plan)
    logits = logits + bias.to(logits.dtype)
    same = torch.zeros_like(takes_part)
    if ids is not None:
        same = ids.unsqueeze(1) == all_gather(ids, sizes=plan.sizes, group=plan.group)
    positive = ~takes_part | (same & (not masked))  # the excluded diagonal holds the partners
    losses = -logsigmoid(torch.where(positive, logits, -logits))
    if masked:
        losses = losses.masked_fill(same & takes_part, 0)
    if weights is not None:
        all_weights = all_gather(weights.to(logits.dtype), sizes=plan.sizes, group=plan.group)
        losses = losses * (weights.unsqueeze(1) + all_weights) / 2
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
    needs_grad: bool,
    exchange: str,
    tile: int,
    sizes: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = GroupRanks(group, rank, size)
    if not sizes:
        sizes = metadata_lengths(all_gather_metadata("sigmoid_loss", y, 0, ranks, same=f"{masked}, {exchange}, {tile}"))
    plan = TilePlan(
        same_id_sums=ids is not None,
        exchange=exchange,  # type: ignore[arg-type]
        tile=tile or None,
        sizes=tuple(sizes),
        group=as_group(ranks),
    )
    return compute(x, y, scale, bias, weights, ids, masked, plan, needs_grad)


@_op.register_fake
def _(
    x: Tensor,
    y: Tensor,
    _scale: Tensor,
    _bias: Tensor,
    weights: Tensor | None,
    _ids: object,
    _masked: bool,
    grad: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    scalar = x.new_empty((), dtype=torch.float64)
    if not grad:
        return SumAndGradients(scalar, *(x.new_empty(0) for _ in range(5)))
    dtype = torch.promote_types(x.dtype, torch.float32)
    dweights = x.new_empty(0) if weights is None else weights.new_empty(weights.shape, dtype=torch.float64)
    dx, dy = (t.new_empty(t.shape, dtype=dtype) for t in (x, y))
    return SumAndGradients(scalar, dx, dy, torch.empty_like(scalar), torch.empty_like(scalar), dweights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:5]]


def _compiled_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(None if dtype is None else (d * grad).to(dtype) for d, dtype in found), *(None,) * 9


_op.register_autograd(_compiled_backward, setup_context=_setup_context)
_op.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another
