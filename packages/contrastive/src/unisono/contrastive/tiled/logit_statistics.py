"""logit_statistics: log-sum-exps of the logits by row and by column over all ranks, computed in tiles, differentiable.

clip_loss, ntxent_loss and supcon_loss are a few lines of plain torch on these vectors. A rank computes the logits of its own
rows only. Statistics of a row stay on the rank; those of a column are combined on the rank that owns the column. This file
communicates; block_kernels.py has the arithmetic of a block of columns. The backward computes the logits again, unless they
were small enough to keep. Second derivatives hold all logits of the rank's rows at once.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType

from unisono.collectives import all_gather, all_to_all_single
from unisono.collectives.autograd import batch_level
from unisono.collectives.groups import GroupRanks, as_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, metadata_lengths
from unisono.contrastive.tiled.block_kernels import LOG2E, BlockKernels, LogsAndGrads, block_kernels, join_statistics
from unisono.contrastive.tiled.columns import Columns, GatheredColumns, exchange_columns
from unisono.contrastive.tiled.tiles import (
    ColumnBlock,
    Ids,
    LogSumExp,
    TilePlan,
    all_logits,
    select,
    statistics_dtype,
    without_autocast,
)


class LogitStatistics(NamedTuple):
    rows: Tensor  # (statistics, rows): the log-sum-exps of the plan, then sum and number of the logits with the same id
    columns: Tensor  # (statistics, own columns): the same over the rows of all ranks; or empty
    diagonal: Tensor  # (rows,) or empty


class SavedForBackward(NamedTuple):
    """What the forward keeps for the backward in addition to its results, if memory allows."""

    columns: list[Tensor]  # of all ranks, if they were gathered
    logits: list[list[Tensor]]  # of each block


def logit_statistics(x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan) -> LogitStatistics:
    """Compute what `plan` asks for from this rank's rows `x` and the columns `y` of all ranks.

    Backward: the true adjoint under the sum over ranks of local losses, of any order. All ranks must run it.
    """
    if torch.compiler.is_compiling():
        row_ids, column_ids = ids if ids else (None, None)
        options = _encode(plan), plan.excluded_diagonals, plan.sizes or ()
        results = _forward_op(x, y, scale, row_ids, column_ids, *options, *resolve_group(plan.group))
        return LogitStatistics(*results[:3])
    return LogitStatistics(*_LogitStatisticsFunction.apply(x, y, scale, ids, plan))


@without_autocast
def forward(
    x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan, keep: bool = False
) -> tuple[LogitStatistics, SavedForBackward]:
    """Return the statistics and, if `keep`, what the backward can use again."""
    in_bits, saved = forward_in_bits(x, y, scale, ids, plan, keep)
    for part in in_bits:
        (part if part.ndim == 1 else part[: len(plan.log_sum_exps) + plan.same_id_sums]).div_(LOG2E)  # a number has no unit
    return in_bits, saved


@without_autocast
def forward_in_bits(
    x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan, keep: bool
) -> tuple[LogitStatistics, SavedForBackward]:
    """The same, but all logits are multiplied by log2(e)."""
    assert plan.sizes is not None
    entries = len(plan.log_sum_exps)
    kernels = block_kernels(x, scale, ids[0] if ids else None, y.shape[0], plan)
    columns = _exchange([y, *(ids[1:] if ids else ())], plan, kernels)
    keep_logits = keep and plan.keeps_logits(x.shape[0] * sum(plan.sizes), kernels.dtype.itemsize)
    by_row: Tensor | None = None
    diagonal = x.new_empty(0, dtype=statistics_dtype(x.device))
    kept: list[list[Tensor]] = []
    for own_start, (all_y, *all_ids) in columns:
        found = kernels.statistics(ColumnBlock(all_y, all_ids[0] if all_ids else None, own_start), keep=keep_logits)
        by_row = found.rows if by_row is None else join_statistics(torch.stack([by_row, found.rows]), entries)
        if found.diagonal is not None:
            diagonal = found.diagonal
        if found.columns is not None:
            columns.add(found.columns.T.contiguous(), lambda parts: kernels.join_ranks(parts).T)
        kept.append(found.kept)
    assert by_row is not None
    own_columns = columns.total().T.contiguous() if plan.columns else by_row.new_empty((plan.width, 0))
    gathered = columns.tensors if keep and isinstance(columns, GatheredColumns) else []
    return LogitStatistics(by_row, own_columns, diagonal), SavedForBackward(gathered, kept if keep_logits else [])


@without_autocast
def backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    ids: Ids,
    plan: TilePlan,
    statistics: LogitStatistics,
    grads: LogitStatistics,
    saved: SavedForBackward,
    wants_y: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x, y and scale. `wants_y` must be the same on all ranks."""
    in_bits = LogitStatistics(*(part * LOG2E for part in statistics))
    dx, dy = gradients_without_scale(x, y, scale, ids, plan, in_bits, grads, saved, wants_y)
    dscale = block_kernels(x, scale, None, y.shape[0], plan).sum_of_products(dx)
    return multiply_to(dx, scale, x.dtype), None if dy is None else multiply_to(dy, scale, y.dtype), dscale


@without_autocast
def gradients_without_scale(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    ids: Ids,
    plan: TilePlan,
    in_bits: LogitStatistics,
    grads: LogitStatistics,
    saved: SavedForBackward,
    wants_y: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and y, which are to be multiplied by the scale, in the dtype of the logits.

    `in_bits`: the statistics in bits; `grads`: the gradients for those that are not.
    """
    assert plan.sizes is not None
    kernels = block_kernels(x, scale, ids[0] if ids else None, y.shape[0], plan)
    column_logs_and_grads = []
    if plan.columns:
        packed = x.new_empty((y.shape[0], 2 * plan.width), dtype=kernels.vector_dtype)
        column_logs_and_grads = [torch.cat([in_bits.columns.T, grads.columns.T], 1, out=packed)]
    if saved.columns:
        columns: Columns = GatheredColumns(column_logs_and_grads, plan.sizes, plan.group, gathered=saved.columns)
    else:
        columns = _exchange([y, *(ids[1:] if ids else ()), *column_logs_and_grads], plan, kernels)
    kept = iter(saved.logits)
    dx = x.new_empty(x.shape, dtype=kernels.dtype)
    for number, (own_start, (all_y, *others)) in enumerate(columns):
        dy = all_y.new_empty(all_y.shape, dtype=kernels.dtype) if wants_y else None
        kernels.gradients(
            ColumnBlock(all_y, others[0] if ids else None, own_start),
            LogsAndGrads(in_bits.rows, grads.rows),
            LogsAndGrads(*others[-1].T.split(plan.width)) if plan.columns else None,
            grads.diagonal if plan.diagonal and own_start is not None else None,
            kept=next(kept, ()),
            dx=dx,
            accumulate=number > 0,
            dy=dy,
        )
        if dy is not None:
            columns.add(dy)
    return dx, columns.total() if wants_y else None


def multiply_to(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor as `dtype`, in one kernel. `x` may be overwritten."""
    out = x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)
    return torch.mul(x, factor, out=out)


def _exchange(tensors: Sequence[Tensor], plan: TilePlan, kernels: BlockKernels) -> Columns:
    assert plan.sizes is not None
    return exchange_columns(tensors, plan.exchange, plan.sizes, kernels.dtype.itemsize, plan.group)


class _LogitStatisticsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan) -> LogitStatistics:
        result, saved = forward(x, y, scale, ids, plan, keep=any(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(x, y, scale, *result, *(ids or ()), *saved.columns, *chain.from_iterable(saved.logits))
        ctx.saved_columns = len(saved.columns)
        ctx.kept = [len(tensors) for tensors in saved.logits]
        ctx.plan = plan
        return result

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, y, scale, *rest = ctx.saved_tensors
        statistics, rest = LogitStatistics(*rest[:3]), rest[3:]
        ids = None
        if plan.needs_ids:
            ids, rest = (rest[0], rest[1]), rest[2:]
        wants = ctx.needs_input_grad[:3]
        grads = LogitStatistics(*output_grads)
        if torch.is_grad_enabled():  # create_graph=True: this backward will be differentiated itself
            views = [t.view_as(t) for t in (x, y, scale)]  # x and y may be one tensor; each needs a gradient of its own
            results = statistics_of_all_logits(views[0], views[1], views[2], ids, plan)
            known = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
            outputs, known_grads = zip(*known, strict=True)
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            found = iter(torch.autograd.grad(outputs, wanted, known_grads, create_graph=True, materialize_grads=True))
            return *(next(found) if needed else None for needed in wants), *(None,) * 2
        kept = iter(rest[ctx.saved_columns :])
        saved = SavedForBackward(rest[: ctx.saved_columns], [list(islice(kept, count)) for count in ctx.kept])

        def gradients(*grads: Tensor) -> tuple[Tensor | None, ...]:
            dx, dy, dscale = backward(x, y, scale, ids, plan, statistics, LogitStatistics(*grads), saved, wants_y=wants[1])
            return dx, dy, dscale.to(scale.dtype)

        if any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
            return *one_by_one(gradients, grads), *(None,) * 2
        return *gradients(*grads), *(None,) * 2


def one_by_one(function: Callable[..., tuple[Tensor | None, ...]], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Call `function` for each of a batch of gradients, which jacobian(vectorize=True) sends through one backward."""
    level, size = batch_level(next(grad for grad in grads if torch._C._functorch.is_legacy_batchedtensor(grad)))
    whole = [torch._remove_batch_dim(grad, level, size, 0) for grad in grads]
    results = zip(*(function(*each) for each in zip(*whole, strict=True)), strict=True)
    return [None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level) for parts in results]


@without_autocast
def statistics_of_all_logits(x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan) -> LogitStatistics:
    """Compute the same statistics by plain torch, with all logits of this rank's rows at once: differentiable to any order."""
    logits, takes_part = all_logits(x, y, scale, plan)
    same = torch.zeros_like(takes_part)
    if ids is not None:
        same = (ids[0].unsqueeze(1) == all_gather(ids[1], sizes=plan.sizes, group=plan.group)) & takes_part
    by_row, by_column = [], []
    own = (y.shape[0],) * resolve_group(plan.group).size

    def partials_of_all_ranks(partial: Tensor) -> Tensor:
        received = all_to_all_single(partial, send_sizes=plan.sizes, receive_sizes=own, group=plan.group)
        return received.view(len(own), -1)

    for entry in plan.log_sum_exps:
        selected = select(logits.masked_fill(~takes_part, -torch.inf), entry, same)
        by_row.append(_log_sum_exp(selected, 1))
        if plan.columns:
            by_column.append(_log_sum_exp(partials_of_all_ranks(_log_sum_exp(selected, 0)), 0))
    if plan.same_id_sums:
        selected = logits.masked_fill(~same, 0)
        for part in (selected, same.to(selected.dtype)):
            by_row.append(part.sum(1))
            if plan.columns:
                by_column.append(partials_of_all_ranks(part.sum(0)).sum(0))
    wide = logits.dtype
    columns = torch.stack(by_column) if plan.columns else logits.new_empty((plan.width, 0))
    diagonal = logits.new_empty(0)
    if plan.diagonal:
        diagonal = scale.to(wide) * (x.to(wide) * y[: x.shape[0]].to(wide)).sum(1)
    return LogitStatistics(torch.stack(by_row), columns, diagonal)


def _log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """torch.logsumexp, but with a gradient of zero instead of NaN where all elements are -inf."""
    if x.shape[dim] == 0:
        return x.sum(dim) - torch.inf
    nothing = (x == -torch.inf).all(dim, keepdim=True)
    return torch.logsumexp(x.masked_fill(nothing, 0), dim).masked_fill(nothing.squeeze(dim), -torch.inf)


# Under torch.compile the forward is one opaque op and the backward another: the compiler must not unroll their loops over
# tiles and ranks. Nothing is kept between the two, because sizes may not be known when the graph is made: then the forward
# returns them on the CPU. If they are given, no tensor is on the CPU, so that the graph can be captured as a CUDA graph.
@torch.library.custom_op("unisono_contrastive::logit_statistics", mutates_args=())
def _forward_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    encoded_plan: str,
    excluded_diagonals: Sequence[int],
    sizes: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks = GroupRanks(group, rank, size)
    given = tuple(sizes)
    sizes = given or metadata_lengths(all_gather_metadata("logit_statistics", y, 0, ranks, same=encoded_plan))
    plan = _decode(encoded_plan, excluded_diagonals, sizes, ranks)
    result, _ = forward(x, y, scale, _join(row_ids, column_ids), plan)
    exchanged = x.new_empty(0, dtype=torch.int64) if given else torch.tensor(sizes, device="cpu")
    return *result, exchanged


@_forward_op.register_fake
def _(
    x: Tensor, y: Tensor, scale: Tensor, _row: object, _column: object, encoded: str, diagonals: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _decode(encoded, diagonals, (), None)

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=statistics_dtype(x.device))

    columns = empty(plan.width, y.shape[0] if plan.columns else 0)
    diagonal = empty(x.shape[0] if plan.diagonal else 0)
    sizes, *_, ranks = rest
    exchanged = x.new_empty(0, dtype=torch.int64) if sizes else torch.empty(ranks, dtype=torch.int64, device="cpu")
    return empty(plan.width, x.shape[0]), columns, diagonal, exchanged


@torch.library.custom_op("unisono_contrastive::logit_statistics_backward", mutates_args=())
def _backward_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    statistics: Sequence[Tensor],
    grads: Sequence[Tensor],
    exchanged_sizes: Tensor,
    encoded_plan: str,
    excluded_diagonals: Sequence[int],
    sizes: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = sizes or exchanged_sizes.tolist()
    plan = _decode(encoded_plan, excluded_diagonals, sizes, GroupRanks(group, rank, size))
    both = LogitStatistics(*statistics), LogitStatistics(*grads)
    dx, dy, dscale = backward(x, y, scale, _join(row_ids, column_ids), plan, *both, SavedForBackward([], []))
    assert dy is not None
    return dx, dy, dscale.to(scale.dtype)


@_backward_op.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    # The scale may be a constant on the CPU. If the op moved its gradient there, the host would wait for the device.
    return x.new_empty(x.shape), y.new_empty(y.shape), x.new_empty((), dtype=scale.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, scale, row_ids, column_ids, *arguments = inputs
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, *output)
    ctx.arguments = arguments


def _compiled_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, y, scale, row_ids, column_ids, *statistics, exchanged_sizes = ctx.saved_tensors
    known = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(statistics, grads, strict=False)]
    dx, dy, dscale = _backward_op(x, y, scale, row_ids, column_ids, statistics, known, exchanged_sizes, *ctx.arguments)
    return dx, dy, dscale.to(scale.device) if ctx.needs_input_grad[2] else None, *(None,) * 8


_forward_op.register_autograd(_compiled_backward, setup_context=_setup_context)
for _each in (_forward_op, _backward_op):
    _each.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another


def _join(row_ids: Tensor | None, column_ids: Tensor | None) -> Ids:
    return None if row_ids is None or column_ids is None else (row_ids, column_ids)


def _encode(plan: TilePlan) -> str:
    """All but `excluded_diagonals` and `sizes`, which may not be known when the graph is made, and the group."""
    entries = ";".join(f"{entry.factor!r},{entry.where}" for entry in plan.log_sum_exps)
    flags = f"{int(plan.columns)}|{int(plan.same_id_sums)}|{int(plan.diagonal)}"
    return f"{entries}|{flags}|{plan.exchange}|{plan.tile or 0}|{plan.precision}"


def _decode(text: str, excluded_diagonals: Sequence[int], sizes: Sequence[int], ranks: GroupRanks | None) -> TilePlan:
    entries, columns, same_id_sums, diagonal, exchange, tile, precision = text.split("|")
    return TilePlan(
        tuple(LogSumExp(float(f), w) for f, w in (entry.split(",") for entry in entries.split(";"))),  # type: ignore[arg-type]
        tuple(excluded_diagonals),
        columns=columns == "1",
        same_id_sums=same_id_sums == "1",
        diagonal=diagonal == "1",
        exchange=exchange,  # type: ignore[arg-type]
        tile=int(tile) or None,
        precision=precision,  # type: ignore[arg-type]
        sizes=tuple(sizes),
        group=None if ranks is None else as_group(ranks),
    )
