"""logit_statistics: log-sum-exps of the logits by row and by column over all ranks, computed in tiles, differentiable.

clip_loss, ntxent_loss and supcon_loss are a few lines of plain torch on these vectors. A rank computes the logits of its own
rows only. Statistics of a row stay on the rank; those of a column are combined on the rank that owns the column. The backward
computes the tiles again, unless they were small enough to keep. Second derivatives hold all logits of the rank's rows at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType

from unisono.collectives import all_gather, all_to_all_single
from unisono.collectives.groups import GroupRanks, as_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, metadata_lengths
from unisono.contrastive.tiled.columns import Columns, Combine, GatheredColumns
from unisono.contrastive.tiled.tiles import (
    Ids,
    LogSumExp,
    TileIterator,
    TilePlan,
    all_logits,
    statistics_dtype,
    tile_gradient,
    tile_log_sums,
    without_autocast,
)

LOG2E = math.log2(math.e)


class LogitStatistics(NamedTuple):
    rows: Tensor  # (statistics, rows): the log-sum-exps of the plan, then sum and number of the logits with the same id
    columns: Tensor  # (statistics, own columns): the same over the rows of all ranks; or empty
    diagonal: Tensor  # (rows,) or empty


class SavedForBackward(NamedTuple):
    """What the forward keeps for the backward in addition to its results, if memory allows."""

    columns: list[Tensor]  # of all ranks, if they were gathered
    logits: list[Tensor]  # one tensor per tile


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
    wide = statistics_dtype(x.device)
    entries = len(plan.log_sum_exps)
    tiles = TileIterator(x, y, scale * LOG2E, ids, plan)
    columns = tiles.exchange_columns(y, *(ids[1:] if ids else ()))
    keep_logits = keep and plan.keeps_logits(x.shape[0] * sum(tiles.sizes), tiles.dtype.itemsize)
    kept: list[Tensor] | None = [] if keep_logits else None

    def initial_statistics(count: int) -> Tensor:
        result = x.new_full((count, plan.width), -torch.inf, dtype=wide)
        result[:, entries:] = 0
        return result

    by_row = initial_statistics(x.shape[0])
    overwrite = entries == 1 and not plan.same_id_sums and not keep_logits
    for own_start, (all_y, *all_ids) in columns:
        by_column = initial_statistics(all_y.shape[0])
        bound = tiles.logit_bound(all_y)
        for rows, cols, _, logits, same in tiles.iterate(all_y, all_ids[0] if all_ids else None, own_start, keep=kept):
            for k, entry in enumerate(plan.log_sum_exps):
                selected = _select(logits, entry, same)
                row, column = tile_log_sums(selected, plan.columns, tiles.scratch, bound * entry.factor, overwrite)
                by_row[rows.slice, k] = torch.logaddexp2(by_row[rows.slice, k], row)
                if column is not None:
                    by_column[cols.slice, k] = torch.logaddexp2(by_column[cols.slice, k], column)
            if plan.same_id_sums and same is not None:
                selected = torch.where(same, logits, 0.0)
                by_row[rows.slice, entries] += selected.sum(1, dtype=wide)
                by_row[rows.slice, entries + 1] += same.sum(1)
                if plan.columns:
                    by_column[cols.slice, entries] += selected.sum(0, dtype=wide)
                    by_column[cols.slice, entries + 1] += same.sum(0)
        if plan.columns:
            columns.add(by_column, _combine_columns(entries))
    own_columns = columns.total() if plan.columns else by_row.new_empty((0, plan.width))
    by_row[:, : entries + plan.same_id_sums] /= LOG2E
    own_columns[:, : entries + plan.same_id_sums] /= LOG2E
    diagonal = by_row.new_empty(0)
    if plan.diagonal:
        diagonal = tiles.diagonal_products(y) * (tiles.factor / LOG2E)
    result = LogitStatistics(by_row.T.contiguous(), own_columns.T.contiguous(), diagonal)
    gathered = columns.tensors if keep and isinstance(columns, GatheredColumns) else []
    return result, SavedForBackward(gathered, kept or [])


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
    entries = len(plan.log_sum_exps)
    tiles = TileIterator(x, y, scale * LOG2E, ids, plan)
    row_logs = (statistics.rows * LOG2E).T
    row_grads = grads.rows.T
    column_logs_and_grads = [torch.cat([statistics.columns * LOG2E, grads.columns]).T.contiguous()] if plan.columns else []
    if saved.columns:
        columns: Columns = GatheredColumns(column_logs_and_grads, tiles.sizes, plan.group, gathered=saved.columns)
    else:
        columns = tiles.exchange_columns(y, *(ids[1:] if ids else ()), *column_logs_and_grads)
    kept = iter(saved.logits) if saved.logits else None
    overwrite = entries == 1 and kept is None

    dx = x.new_zeros(x.shape, dtype=tiles.dtype)
    for own_start, (all_y, *others) in columns:
        dy = tiles.empty_column_gradient(all_y) if wants_y else None
        logs_and_grads = others[-1] if plan.columns else None
        bound = tiles.logit_bound(all_y)
        for rows, cols, features, logits, same in tiles.iterate(all_y, others[0] if ids else None, own_start, kept=kept):
            slope = None  # the gradient of this tile of logits
            for k, entry in enumerate(plan.log_sum_exps):
                part = tile_gradient(
                    _select(logits, entry, same),
                    row_logs[rows.slice, k],
                    row_grads[rows.slice, k] * entry.factor,
                    None if logs_and_grads is None else logs_and_grads[cols.slice, k],
                    None if logs_and_grads is None else logs_and_grads[cols.slice, plan.width + k] * entry.factor,
                    tiles.scratch,
                    bound * entry.factor,
                    overwrite,
                )
                if slope is None:
                    slope = part if entries == 1 else part.clone()
                else:
                    slope.add_(part)
            if plan.same_id_sums and same is not None:
                linear = row_grads[rows.slice, entries].unsqueeze(1).to(tiles.dtype)
                if logs_and_grads is not None:
                    linear = linear + logs_and_grads[cols.slice, plan.width + entries].to(tiles.dtype)
                linear = linear * same
                slope = linear if slope is None else slope.add_(linear)
            assert slope is not None
            dx[rows.slice].addmm_(slope, features)
            if dy is not None:
                dy[cols.slice].addmm_(slope.T, x[rows.slice].to(tiles.dtype), beta=min(rows.start, 1))
        if own_start is not None and plan.diagonal:
            tiles.add_diagonal_gradient(dx, dy, y, grads.diagonal, own_start)
        if dy is not None:
            columns.add(dy)
    dscale = tiles.factor_gradient(dx) / scale / LOG2E
    dx = dx.div_(LOG2E).to(x.dtype)
    return dx, columns.total().mul_(scale).to(y.dtype) if wants_y else None, dscale


def _select(logits: Tensor, entry: LogSumExp, same: Tensor | None) -> Tensor:
    """Return the logits of one log-sum-exp, times its factor; pairs that it does not include are -inf."""
    if entry.factor != 1:
        logits = logits * entry.factor
    if same is None or entry.where == "all":
        return logits
    return logits.masked_fill(same if entry.where == "other" else ~same, -torch.inf)


def _combine_columns(entries: int) -> Combine:
    """Join the statistics of a column from two ranks: log-sum-exps first, then sums."""

    def combine(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([torch.logaddexp2(a[:, :entries], b[:, :entries]), a[:, entries:] + b[:, entries:]], 1)

    return combine


class _LogitStatisticsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan) -> LogitStatistics:
        result, saved = forward(x, y, scale, ids, plan, keep=any(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(x, y, scale, *result, *(ids or ()), *saved.columns, *saved.logits)
        ctx.saved_columns = len(saved.columns)
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
            results = _statistics_of_all_logits(views[0], views[1], views[2], ids, plan)
            known = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
            outputs, known_grads = zip(*known, strict=True)
            wanted = [t for t, needed in zip(views, wants, strict=True) if needed]
            found = iter(torch.autograd.grad(outputs, wanted, known_grads, create_graph=True, materialize_grads=True))
            return *(next(found) if needed else None for needed in wants), *(None,) * 2
        saved = SavedForBackward(rest[: ctx.saved_columns], rest[ctx.saved_columns :])

        def gradients(*grads: Tensor) -> tuple[Tensor | None, ...]:
            dx, dy, dscale = backward(x, y, scale, ids, plan, statistics, LogitStatistics(*grads), saved, wants_y=wants[1])
            return dx, dy, dscale.to(scale.dtype)

        if any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
            return *_one_by_one(gradients, grads), *(None,) * 2
        return *gradients(*grads), *(None,) * 2


def _one_by_one(function: Callable[..., tuple[Tensor | None, ...]], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Call `function` for each of a batch of gradients, which jacobian(vectorize=True) sends through one backward."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = next(grad for grad in grads if torch._C._functorch.is_legacy_batchedtensor(grad))
    size = torch._remove_batch_dim(batched, level, 0, 0).shape[0]
    whole = [torch._remove_batch_dim(grad, level, size, 0) for grad in grads]
    results = zip(*(function(*each) for each in zip(*whole, strict=True)), strict=True)
    return [None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level) for parts in results]


@without_autocast
def _statistics_of_all_logits(x: Tensor, y: Tensor, scale: Tensor, ids: Ids, plan: TilePlan) -> LogitStatistics:
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
        selected = _select(logits.masked_fill(~takes_part, -torch.inf), entry, same)
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
# tiles and ranks. Nothing is kept between the two, because sizes are not known when the graph is made.
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
    if not sizes:
        sizes = metadata_lengths(all_gather_metadata("logit_statistics", y, 0, ranks, same=encoded_plan))
    plan = _decode(encoded_plan, excluded_diagonals, sizes, ranks)
    result, _ = forward(x, y, scale, _join(row_ids, column_ids), plan)
    return *result, torch.tensor(sizes, device="cpu")


@_forward_op.register_fake
def _(
    x: Tensor, y: Tensor, scale: Tensor, _row: object, _column: object, encoded: str, diagonals: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _decode(encoded, diagonals, (), None)

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float64)

    columns = empty(plan.width, y.shape[0] if plan.columns else 0)
    diagonal = empty(x.shape[0] if plan.diagonal else 0)
    sizes = torch.empty(rest[-1], dtype=torch.int64, device="cpu")
    return empty(plan.width, x.shape[0]), columns, diagonal, sizes


@torch.library.custom_op("unisono_contrastive::logit_statistics_backward", mutates_args=())
def _backward_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    statistics: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Tensor,
    encoded_plan: str,
    excluded_diagonals: Sequence[int],
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _decode(encoded_plan, excluded_diagonals, sizes.tolist(), GroupRanks(group, rank, size))
    both = LogitStatistics(*statistics), LogitStatistics(*grads)
    dx, dy, dscale = backward(x, y, scale, _join(row_ids, column_ids), plan, *both, SavedForBackward([], []))
    assert dy is not None
    return dx, dy, dscale.to(scale.dtype)


@_backward_op.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape), torch.empty_like(scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, scale, row_ids, column_ids, encoded_plan, excluded_diagonals, _, *ranks = inputs
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, *output)
    ctx.arguments = encoded_plan, excluded_diagonals, *ranks


def _compiled_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, y, scale, row_ids, column_ids, *statistics, sizes = ctx.saved_tensors
    known = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(statistics, grads, strict=False)]
    results = _backward_op(x, y, scale, row_ids, column_ids, statistics, known, sizes, *ctx.arguments)
    return *results, *(None,) * 8


_forward_op.register_autograd(_compiled_backward, setup_context=_setup_context)
for _each in (_forward_op, _backward_op):
    _each.register_effect(EffectType.ORDERED)  # communication must not be dropped on one rank and run on another


def _join(row_ids: Tensor | None, column_ids: Tensor | None) -> Ids:
    return None if row_ids is None or column_ids is None else (row_ids, column_ids)


def _encode(plan: TilePlan) -> str:
    """All but `excluded_diagonals` and `sizes`, which may not be known when the graph is made, and the group."""
    entries = ";".join(f"{entry.factor!r},{entry.where}" for entry in plan.log_sum_exps)
    return f"{entries}|{int(plan.columns)}|{int(plan.same_id_sums)}|{int(plan.diagonal)}|{plan.exchange}|{plan.tile or 0}"


def _decode(text: str, excluded_diagonals: Sequence[int], sizes: Sequence[int], ranks: GroupRanks | None) -> TilePlan:
    entries, columns, same_id_sums, diagonal, exchange, tile = text.split("|")
    return TilePlan(
        tuple(LogSumExp(float(f), w) for f, w in (entry.split(",") for entry in entries.split(";"))),  # type: ignore[arg-type]
        tuple(excluded_diagonals),
        columns=columns == "1",
        same_id_sums=same_id_sums == "1",
        diagonal=diagonal == "1",
        exchange=exchange,  # type: ignore[arg-type]
        tile=int(tile) or None,
        sizes=tuple(sizes),
        group=None if ranks is None else as_group(ranks),
    )
