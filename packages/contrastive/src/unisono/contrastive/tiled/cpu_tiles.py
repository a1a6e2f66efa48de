"""CpuTiles: the kernels of a block in plain torch, tile by tile, for CPUs: tiles stay in the cache, and values may be read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unisono.contrastive.tiled.block_kernels import (
    LOG2E,
    BlockKernels,
    BlockStatistics,
    LogsAndGrads,
    SigmoidBlock,
)
from unisono.contrastive.tiled.tiles import ColumnBlock, TileIterator, select, statistics_dtype, tile_gradient, tile_log_sums


class CpuTiles(BlockKernels):
    """All products of 16-bit features are computed in float32, forward and backward."""

    @cached_property
    def _in_bits(self) -> TileIterator:
        return TileIterator(self.x, self.scale * LOG2E, self.row_ids, self.own_columns, self.plan)

    @cached_property
    def _plain(self) -> TileIterator:
        return TileIterator(self.x, self.scale, self.row_ids, self.own_columns, self.plan, tiles_at_once=2)

    def _zero_sums(self, dx: Tensor, accumulate: bool, dy: Tensor | None) -> None:
        if not accumulate:
            dx.zero_()
        if dy is not None and not self.x.shape[0]:  # otherwise the first tile of rows overwrites it
            dy.zero_()

    def statistics(self, block: ColumnBlock, *, keep: bool) -> BlockStatistics:
        plan = self.plan
        wide = statistics_dtype(self.x.device)
        entries = len(plan.log_sum_exps)
        tiles = self._in_bits
        kept: list[Tensor] = []

        def initial_statistics(count: int) -> Tensor:
            result = self.x.new_full((plan.width, count), -torch.inf, dtype=wide)
            result[entries:] = 0
            return result

        by_row = initial_statistics(self.x.shape[0])
        by_column = initial_statistics(block.y.shape[0])
        overwrite = entries == 1 and not plan.same_id_sums and not keep
        bound = tiles.logit_bound(block.y)
        for rows, cols, _, logits, same in tiles.iterate(block, keep=kept if keep else None):
            for k, entry in enumerate(plan.log_sum_exps):
                selected = select(logits, entry, same)
                row, column = tile_log_sums(selected, plan.columns, tiles.scratch, bound * entry.factor, overwrite)
                by_row[k, rows.slice] = torch.logaddexp2(by_row[k, rows.slice], row)
                if column is not None:
                    by_column[k, cols.slice] = torch.logaddexp2(by_column[k, cols.slice], column)
            if plan.same_id_sums and same is not None:
                selected = torch.where(same, logits, 0.0)
                by_row[entries, rows.slice] += selected.sum(1, dtype=wide)
                by_row[entries + 1, rows.slice] += same.sum(1)
                if plan.columns:
                    by_column[entries, cols.slice] += selected.sum(0, dtype=wide)
                    by_column[entries + 1, cols.slice] += same.sum(0)
        diagonal = None
        if plan.diagonal and block.own_start is not None:
            diagonal = tiles.diagonal_products(block.y[block.own_start :]) * tiles.factor
        return BlockStatistics(by_row, by_column if plan.columns else None, diagonal, kept)

    def gradients(
        self,
        block: ColumnBlock,
        rows: LogsAndGrads,
        columns: LogsAndGrads | None,
        diagonal_grads: Tensor | None,
        *,
        kept: Sequence[Tensor],
        dx: Tensor,
        accumulate: bool,
        dy: Tensor | None,
    ) -> None:
        entries = len(self.plan.log_sum_exps)
        tiles = self._in_bits
        overwrite = entries == 1 and not kept
        bound = tiles.logit_bound(block.y)
        self._zero_sums(dx, accumulate, dy)
        for part, cols, features, logits, same in tiles.iterate(block, kept=iter(kept) if kept else None):
            slope = None
            for k, entry in enumerate(self.plan.log_sum_exps):
                each = tile_gradient(
                    select(logits, entry, same),
                    rows.logs[k, part.slice],
                    rows.grads[k, part.slice] * entry.factor,
                    None if columns is None else columns.logs[k, cols.slice],
                    None if columns is None else columns.grads[k, cols.slice] * entry.factor,
                    tiles.scratch,
                    bound * entry.factor,
                    overwrite,
                )
                if slope is None:
                    slope = each if entries == 1 else each.clone()
                else:
                    slope.add_(each)
            if self.plan.same_id_sums and same is not None:
                linear = rows.grads[entries, part.slice].unsqueeze(1).to(tiles.dtype)
                if columns is not None:
                    linear = linear + columns.grads[entries, cols.slice].to(tiles.dtype)
                linear = linear * same
                slope = linear if slope is None else slope.add_(linear)
            assert slope is not None
            tiles.add_products(slope, part, cols, features, dx, dy)
        if diagonal_grads is not None and block.own_start is not None:
            tiles.add_diagonal_gradient(dx, dy, block.y, diagonal_grads, block.own_start)

    def sigmoid(
        self,
        block: ColumnBlock,
        bias: Tensor,
        weights: tuple[Tensor, Tensor] | None,
        *,
        masked: bool,
        dx: Tensor | None,
        accumulate: bool,
        dy: Tensor | None,
    ) -> SigmoidBlock:
        x = self.x
        wide = statistics_dtype(x.device)
        tiles = self._plain
        minus_bias = -bias.to(wide)
        total = x.new_zeros((), dtype=wide)
        dbias = x.new_zeros((), dtype=wide)
        row_losses = x.new_zeros(x.shape[0] if weights else 0, dtype=wide)
        column_losses = x.new_zeros(block.y.shape[0] if weights else 0, dtype=wide)
        if dx is not None:
            self._zero_sums(dx, accumulate, dy)
        for rows, cols, features, logits, same in tiles.iterate(block):
            minus = torch.sub(minus_bias, logits, out=tiles.scratch.buffer("minus", logits.shape))
            if same is not None:
                minus = minus.masked_fill_(same, torch.inf) if masked else torch.where(same, -minus, minus)
            losses = logsigmoid(minus).neg_()
            row_sums = losses.sum(1).to(wide)
            if weights is None:
                total += row_sums.sum()
            else:
                column_sums = losses.sum(0).to(wide)
                row_losses[rows.slice] += row_sums
                column_losses[cols.slice] += column_sums
            if dx is None:
                continue
            slope = minus.neg_().sigmoid_()
            if same is not None and not masked:
                slope = torch.where(same, -slope, slope)
            if weights is not None:
                slope *= (weights[0][rows.slice].unsqueeze(1) + weights[1][cols.slice]).to(tiles.dtype) / 2
            dbias += slope.sum()
            tiles.add_products(slope, rows, cols, features, dx, dy)
        if block.own_start is not None:
            partners = block.y[block.own_start :]
            logits = tiles.diagonal_products(partners) * tiles.factor - minus_bias
            losses = logsigmoid(logits).neg_()
            slope = logits.neg_().sigmoid_().neg_()
            if weights is None:
                total += losses.sum()
            else:
                row_losses += losses
                column_losses[block.own_start : block.own_start + x.shape[0]] += losses
                slope = slope * weights[0]
            if dx is not None:
                dbias += slope.sum()
                tiles.add_diagonal_gradient(dx, dy, block.y, slope, block.own_start)
        if weights is None:
            return SigmoidBlock(total, dbias, None, None)
        total = (row_losses @ weights[0].to(wide) + column_losses @ weights[1].to(wide)) / 2
        return SigmoidBlock(total, dbias, row_losses, column_losses)
