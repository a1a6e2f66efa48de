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
from unisono.contrastive.tiled.block_kernels import SigmoidBlock, block_kernels
from unisono.contrastive.tiled.columns import exchange_columns
from unisono.contrastive.tiled.tiles import ColumnBlock, TilePlan, all_logits, statistics_dtype, without_autocast


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
        options = torch.is_grad_enabled(), plan.exchange, plan.tile or 0, plan.precision, plan.sizes or ()
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
    assert plan.sizes is not None
    wide = statistics_dtype(x.device)
    kernels = block_kernels(x, scale, ids, y.shape[0], plan)
    column_weights = [] if weights is None else [weights.to(wide).contiguous()]
    tensors = [y, *column_weights, *([] if ids is None else [ids])]
    columns = exchange_columns(tensors, plan.exchange, plan.sizes, kernels.dtype.itemsize, plan.group)
    dx = x.new_empty(x.shape, dtype=kernels.dtype) if needs_grad else None
    blocks: list[SigmoidBlock] = []
    for own_start, (all_y, *others) in columns:
        # One tensor returns to the owner of the columns: the gradient of y and, in a last column, that of the weights.
        rows, width = all_y.shape
        home = x.new_empty((rows, width + len(column_weights)) if needs_grad else (0, 0), dtype=kernels.dtype)
        found = kernels.sigmoid(
            ColumnBlock(all_y, None if ids is None else others[-1], own_start),
            bias,
            (column_weights[0], others[0]) if column_weights else None,
            masked=masked,
            dx=dx,
            accumulate=bool(blocks),
            dy=home[:, :width] if needs_grad else None,
        )
        if needs_grad:
            if found.column_losses is not None:
                home[:, -1] = found.column_losses
            columns.add(home)
        blocks.append(found._replace(column_losses=None))
    total = _sum([block.total for block in blocks])
    if dx is None:
        return SumAndGradients(total, *(x.new_empty(0) for _ in range(5)))
    home = columns.total()
    dscale = kernels.sum_of_products(dx)
    dbias = _sum([block.dbias for block in blocks])
    dweights = x.new_empty(0) if weights is None else (_sum([block.row_losses for block in blocks]) + home[:, -1]) / 2
    dy = home[:, : y.shape[1]].mul_(scale).contiguous()
    return SumAndGradients(total, dx.mul_(scale), dy, dscale, dbias, dweights)


def _sum(parts: Sequence[Tensor | None]) -> Tensor:
    known = [part for part in parts if part is not None]
    return known[0] if len(known) == 1 else torch.stack(known).sum(0)


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
    precision: str,
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
        precision=precision,  # type: ignore[arg-type]
        sizes=tuple(sizes),
        group=as_group(ranks),
    )
    found = compute(x, y, scale, bias, weights, ids, masked, plan, needs_grad)
    return found._replace(total=found.total.clone())  # total and dbias may be views of one tensor; an op may not return both


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
    scalar = x.new_empty((), dtype=statistics_dtype(x.device))
    if not grad:
        return SumAndGradients(scalar, *(x.new_empty(0) for _ in range(5)))
    dtype = torch.promote_types(x.dtype, torch.float32)
    dweights = x.new_empty(0) if weights is None else weights.new_empty(weights.shape, dtype=statistics_dtype(x.device))
    dx, dy = (t.new_empty(t.shape, dtype=dtype) for t in (x, y))
    return SumAndGradients(scalar, dx, dy, torch.empty_like(scalar), torch.empty_like(scalar), dweights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:5]]


def _compiled_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(None if dtype is None else (d * grad).to(dtype) for d, dtype in found), *(None,) * 10


_op.register_autograd(_compiled_backward, setup_context=_setup_context)
_op.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another
