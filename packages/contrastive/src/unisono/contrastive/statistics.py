"""pair_statistics: the tiles of pairs.py as a differentiable function, in eager mode and under torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType

from unisono.collectives import Group
from unisono.collectives.groups import GroupRanks, as_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, metadata_lengths
from unisono.contrastive import dense
from unisono.contrastive.pairs import Kept, Statistics, backward, forward
from unisono.contrastive.walk import Entry, Pairs

Keys = tuple[Tensor, Tensor] | None


def pair_statistics(
    x: Tensor, y: Tensor, scale: Tensor, keys: Keys, plan: Pairs, sizes: Sequence[int] | None, group: Group
) -> Statistics:
    """What `plan` asks for, of this rank's rows `x` and the columns `y` of all ranks.

    `sizes`: every rank's number of columns; None, under torch.compile only, has them exchanged inside.

    Backward: the true adjoint under the sum over ranks of local losses, of any order. All ranks must run it.
    """
    if torch.compiler.is_compiling():
        row_keys, column_keys = keys if keys else (None, None)
        results = _op(x, y, scale, row_keys, column_keys, _encode(plan), plan.left_out, sizes or (), *resolve_group(group))
        return Statistics(*results[:3])
    assert sizes is not None
    return Statistics(*_PairStatistics.apply(x, y, scale, keys, plan, tuple(sizes), group))


class _PairStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, keys: Keys, plan: Pairs, sizes: tuple[int, ...], group: Group
    ) -> Statistics:
        result, kept = forward(x, y, scale, keys, plan, sizes, group, keep=any(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(x, y, scale, *result, *(keys or ()), *kept.columns, *kept.logits)
        ctx.kept = len(kept.columns)
        ctx.arguments = plan, sizes, group
        return result

    @staticmethod
    def backward(ctx: Any, rows: Tensor, columns: Tensor, diagonal: Tensor) -> tuple[Tensor | None, ...]:
        plan, sizes, group = ctx.arguments
        x, y, scale, *rest = ctx.saved_tensors
        found, rest = Statistics(*rest[:3]), rest[3:]
        keys, rest = ((rest[0], rest[1]), rest[2:]) if plan.keyed else (None, rest)
        wants = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: somebody wants to differentiate this backward
            views = [t.view_as(t) for t in (x, y, scale)]  # x and y may be one tensor: each role has its own gradient
            results = dense.statistics(views[0], views[1], views[2], keys, plan, sizes, group)
            known = [(r, g) for r, g in zip(results, (rows, columns, diagonal), strict=True) if r.requires_grad]
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            outputs, given = zip(*known, strict=True)
            grads = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True, materialize_grads=True))
            return *(next(grads) if needed else None for needed in wants), *(None,) * 4
        kept = Kept(rest[: ctx.kept], rest[ctx.kept :])
        arriving = (rows, columns, diagonal)
        dx, dy, dscale = backward(x, y, scale, keys, found, arriving, kept, plan, sizes, group, wants_y=wants[1])
        return dx, dy, dscale.to(scale.dtype), *(None,) * 4


# Under torch.compile the forward is one opaque op and the backward another: their loops over tiles and ranks are not for the
# compiler to unroll. Nothing is kept between them, for sizes are not known when the graph is made.
@torch.library.custom_op("unisono_contrastive::pair_statistics", mutates_args=())
def _op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    plan: str,
    left_out: Sequence[int],
    sizes: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, pairs = GroupRanks(group, rank, size), _decode(plan, left_out)
    if not sizes:
        sizes = metadata_lengths(all_gather_metadata("pair_statistics", y, 0, ranks, same=plan))
    keys = None if row_keys is None or column_keys is None else (row_keys, column_keys)
    result, _ = forward(x, y, scale, keys, pairs, sizes, as_group(ranks))
    return *result, torch.tensor(sizes, device="cpu")


@_op.register_fake
def _(
    x: Tensor, y: Tensor, scale: Tensor, row_keys: object, column_keys: object, plan: str, left_out: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, b, m = _decode(plan, left_out), x.shape[0], y.shape[0]

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float64)

    columns, diagonal = empty(pairs.width, m if pairs.columns else 0), empty(b if pairs.diagonal else 0)
    return empty(pairs.width, b), columns, diagonal, torch.empty(rest[-1], dtype=torch.int64, device="cpu")


@torch.library.custom_op("unisono_contrastive::pair_statistics_backward", mutates_args=())
def _backward_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    found: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Tensor,
    plan: str,
    left_out: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = None if row_keys is None or column_keys is None else (row_keys, column_keys)
    given, lengths, where = (grads[0], grads[1], grads[2]), sizes.tolist(), as_group(GroupRanks(group, rank, size))
    dx, dy, dscale = backward(
        x, y, scale, keys, Statistics(*found), given, Kept([], []), _decode(plan, left_out), lengths, where
    )
    assert dy is not None
    return dx, dy, dscale.to(scale.dtype)


@_backward_op.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape), torch.empty_like(scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, scale, row_keys, column_keys, plan, left_out, _, *ranks = inputs
    ctx.save_for_backward(x, y, scale, row_keys, column_keys, *output)
    ctx.plan, ctx.ranks = (plan, left_out), ranks


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, y, scale, row_keys, column_keys, *found, sizes = ctx.saved_tensors
    given = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(found, grads, strict=False)]
    results = _backward_op(x, y, scale, row_keys, column_keys, found, given, sizes, *ctx.plan, *ctx.ranks)
    return *results, *(None,) * 8


_op.register_autograd(_backward, setup_context=_save)
for _each in (_op, _backward_op):
    _each.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another


def _encode(plan: Pairs) -> str:
    """All but `left_out`, which may depend on sizes that are not known when the graph is made."""
    entries = ";".join(f"{entry.factor!r},{entry.where}" for entry in plan.entries)
    return f"{entries}|{int(plan.columns)}|{int(plan.sums)}|{int(plan.diagonal)}|{plan.exchange}|{plan.tile or 0}"


def _decode(text: str, left_out: Sequence[int]) -> Pairs:
    entries, columns, sums, diagonal, all_gather_metadata, tile = text.split("|")
    return Pairs(
        tuple(Entry(float(f), w) for f, w in (entry.split(",") for entry in entries.split(";"))),  # type: ignore[arg-type]
        tuple(left_out),
        columns == "1",
        sums == "1",
        diagonal == "1",
        all_gather_metadata,  # type: ignore[arg-type]
        int(tile) or None,
    )
