"""Statistics of all pairs of rows over all ranks: log-sum-exps of the logits by row and by column, tile by tile.

The losses are a few lines of plain torch on these vectors. A rank forms the logits of its own rows only, a tile
at a time; what concerns a column is put together on the rank that has it. The backward forms the tiles once more, unless they
were few enough to keep. Second derivatives take the plain formulas of dense.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group
from unisono.contrastive.blocks import Columns, Combine, Gathered, bring, choose
from unisono.contrastive.tiles import gradient, log_sums, statistics_dtype, without_autocast
from unisono.contrastive.walk import Entry, Pairs, Walk, add_diagonal, diagonal, scale_gradient

LOG2E = math.log2(math.e)


class Statistics(NamedTuple):
    rows: Tensor  # (entries, then sum and number if asked for; rows)
    columns: Tensor  # the same of this rank's columns, over the rows of all ranks; or empty
    diagonal: Tensor  # (rows,) or empty


def select(logits: Tensor, entry: Entry, same: Tensor | None) -> Tensor:
    """The logits that an entry is about, times its factor; the others are -inf, which counts for nothing."""
    if entry.factor != 1:
        logits = logits * entry.factor
    if same is None or entry.where == "all":
        return logits
    return logits.masked_fill(same if entry.where == "other" else ~same, -torch.inf)


def combine_with(entries: int) -> Combine:
    """Join two ranks' contributions to a column: log-sum-exps first, then sums."""

    def combine(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([torch.logaddexp2(a[:, :entries], b[:, :entries]), a[:, entries:] + b[:, entries:]], 1)

    return combine


class Kept(NamedTuple):
    """What the forward leaves for the backward beside its results, if there is room."""

    columns: list[Tensor]  # of all ranks, if they were gathered
    logits: list[Tensor]  # tile by tile, if they are few


@without_autocast
def forward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    keys: tuple[Tensor, Tensor] | None,
    plan: Pairs,
    sizes: Sequence[int],
    group: Group,
    keep: bool = False,
) -> tuple[Statistics, Kept]:
    """The statistics, and if `keep`, what the backward may use again."""
    wide, entries, width = statistics_dtype(x.device), len(plan.entries), plan.width
    walk = Walk(x, y, scale * LOG2E, keys, plan)
    exchange = choose(plan.exchange, sizes, y.shape[1], walk.compute.itemsize)
    columns = bring([y, *keys[1:]] if keys else [y], exchange, sizes, group)
    keep_logits = keep and plan.keeps(x.shape[0] * sum(sizes), walk.compute.itemsize)
    kept: list[Tensor] | None = [] if keep_logits else None

    def nothing(count: int) -> Tensor:
        result = x.new_full((count, width), -torch.inf, dtype=wide)
        result[:, entries:] = 0
        return result

    by_row = nothing(x.shape[0])
    for own, (all_y, *all_keys) in columns:
        by_column = nothing(all_y.shape[0])
        bound, spend = walk.bound(all_y), len(plan.entries) == 1 and not plan.sums and not keep_logits
        for rows, cols, _, logits, same in walk.tiles(all_y, all_keys[0] if all_keys else None, own, keep=kept):
            for k, entry in enumerate(plan.entries):
                row, column = log_sums(select(logits, entry, same), plan.columns, walk.scratch, bound * entry.factor, spend)
                by_row[rows.slice, k] = torch.logaddexp2(by_row[rows.slice, k], row)
                if column is not None:
                    by_column[cols.slice, k] = torch.logaddexp2(by_column[cols.slice, k], column)
            if plan.sums and same is not None:
                chosen = torch.where(same, logits, 0.0)
                by_row[rows.slice, entries] += chosen.sum(1, dtype=wide)
                by_row[rows.slice, entries + 1] += same.sum(1)
                if plan.columns:
                    by_column[cols.slice, entries] += chosen.sum(0, dtype=wide)
                    by_column[cols.slice, entries + 1] += same.sum(0)
        if plan.columns:
            columns.add(by_column, combine_with(entries))
    home = columns.total() if plan.columns else by_row.new_empty((0, width))
    by_row[:, : entries + plan.sums] /= LOG2E
    home[:, : entries + plan.sums] /= LOG2E
    own_logits = diagonal(x, y, walk) * (walk.factor / LOG2E) if plan.diagonal else by_row.new_empty(0)
    result = Statistics(by_row.T.contiguous(), home.T.contiguous(), own_logits)
    return result, Kept(columns.tensors if keep and isinstance(columns, Gathered) else [], kept or [])


@without_autocast
def backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    keys: tuple[Tensor, Tensor] | None,
    found: Statistics,
    grads: tuple[Tensor, Tensor, Tensor],
    kept: Kept,
    plan: Pairs,
    sizes: Sequence[int],
    group: Group,
    wants_y: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients for x, y (if wanted, on all ranks alike) and scale."""
    walk, entries, width = Walk(x, y, scale * LOG2E, keys, plan), len(plan.entries), plan.width
    row_logs, row_grads = (found.rows * LOG2E).T, grads[0].T
    with_columns = [torch.cat([found.columns * LOG2E, grads[1]]).T.contiguous()] if plan.columns else []
    if kept.columns:
        columns: Columns = Gathered(with_columns, sizes, group, already=kept.columns)
    else:
        exchange = choose(plan.exchange, sizes, y.shape[1], walk.compute.itemsize)
        columns = bring([y, *(keys[1:] if keys else ()), *with_columns], exchange, sizes, group)
    logits_kept = iter(kept.logits) if kept.logits else None

    dx = x.new_zeros(x.shape, dtype=walk.compute)
    for own, (all_y, *more) in columns:
        dy = walk.columns_like(all_y) if wants_y else None
        about = more[-1] if plan.columns else None
        bound, spend = walk.bound(all_y), len(plan.entries) == 1 and logits_kept is None
        for rows, cols, features, logits, same in walk.tiles(all_y, more[0] if keys else None, own, kept=logits_kept):
            slope = None
            for k, entry in enumerate(plan.entries):
                part = gradient(
                    select(logits, entry, same),
                    row_logs[rows.slice, k],
                    row_grads[rows.slice, k] * entry.factor,
                    None if about is None else about[cols.slice, k],
                    None if about is None else about[cols.slice, width + k] * entry.factor,
                    walk.scratch,
                    bound * entry.factor,
                    spend,
                )
                slope = part if len(plan.entries) == 1 else part.clone() if slope is None else slope.add_(part)
            if plan.sums and same is not None:
                linear = row_grads[rows.slice, entries].unsqueeze(1).to(walk.compute)
                if about is not None:
                    linear = linear + about[cols.slice, width + entries].to(walk.compute)
                linear = linear * same
                slope = linear if slope is None else slope.add_(linear)
            assert slope is not None
            dx[rows.slice].addmm_(slope, features)
            if dy is not None:
                dy[cols.slice].addmm_(slope.T, x[rows.slice].to(walk.compute), beta=min(rows.start, 1))
        if own is not None and plan.diagonal:
            add_diagonal(dx, dy, x, y, grads[2], own, walk)
        if dy is not None:
            columns.add(dy)
    dscale = scale_gradient(x, dx, walk) / scale / LOG2E
    dx = dx.div_(LOG2E).to(x.dtype)
    return dx, columns.total().mul_(scale).to(y.dtype) if wants_y else None, dscale
