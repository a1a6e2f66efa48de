"""DeviceTiles: the kernels of a block in plain torch for accelerators: few, large tiles, and no value is ever read by the host.

What costs on an accelerator is the launch of a kernel and each pass over a tile, so the scale stays outside of the features
(it is applied in the same kernel as the shift of an exponent), results of tiles go straight into one vector for all tiles, and
these vectors are joined once at the end. 16-bit features are multiplied as they are: each product of two is exact in float32,
in which they are added up. Each row and each column has a shift of its own, so logits may be any distance apart.

How the backward rounds (plan.precision): the slopes of 16-bit features are float32. "exact" splits each into two 16-bit
numbers whose sum has 16 bits (bfloat16) or 22 (float16), and multiplies both with the features; "fast" rounds it once, to 8
or 11 bits, and multiplies once. All sums are float32. float16 has a small range, so slopes are lifted by a power of two that
brings the largest possible one near 2**12; slopes below 2**-36 of that lose digits. The slopes of float32 features are not
split: "exact" leaves torch's setting for float32 matmuls, "fast" allows TF32 in the backward on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unisono.contrastive.tiled.block_kernels import LOG2E, BlockKernels, BlockStatistics, LogsAndGrads, SigmoidBlock
from unisono.contrastive.tiled.tiles import (
    ColumnBlock,
    LogSumExp,
    Span,
    TilePlan,
    fill_diagonals,
    log_sum_exp2,
    spans,
    statistics_dtype,
)

# The largest tile of logits. A pass holds up to three of them at once.
TILE_BYTES = 512 * 2**20
_LARGEST = 3.0e38  # finite in float32


class DeviceTiles(BlockKernels):
    """Tiles hold products x @ y.T without the scale, in float32 (float64 for features of float64)."""

    def __init__(self, x: Tensor, scale: Tensor, row_ids: Tensor | None, own_columns: int, plan: TilePlan) -> None:
        super().__init__(x, scale, row_ids, own_columns, plan)
        self.vector_dtype = self.dtype  # a cast fewer for each vector, and half of the bytes

    def statistics(self, block: ColumnBlock, *, keep: bool) -> BlockStatistics:
        plan = self.plan
        factor = self._factor(LOG2E)
        factors = [(times, -times) for times in (_times(factor, entry.factor) for entry in plan.log_sum_exps)]
        kept: list[Tensor] = []
        row_spans, column_spans = self._spans(block)
        by_row = [_Sums(self, (len(column_spans), self.x.shape[0])) for _ in plan.log_sum_exps]
        by_column = [_Sums(self, (len(row_spans), block.y.shape[0])) for _ in plan.log_sum_exps]
        same_rows = _empty(self.x, (2, len(column_spans), self.x.shape[0]), self.dtype, plan.same_id_sums)
        same_columns = _empty(self.x, (2, len(row_spans), block.y.shape[0]), self.dtype, plan.same_id_sums)
        diagonal = self.x.new_empty(self.x.shape[0], dtype=self.dtype) if self._has_diagonal(block) else None
        for r, rows in enumerate(row_spans):
            for c, columns in enumerate(column_spans):
                tile = self._products(rows, columns, block)
                if diagonal is not None:
                    self._copy_diagonal(tile, rows, columns, block, diagonal)
                self._fill_excluded(tile, rows, columns, block, -torch.inf)
                if keep:
                    kept.append(tile)
                same = self._same(rows, columns, block)
                for k, entry in enumerate(plan.log_sum_exps):
                    chosen = _choose(tile, entry, same)
                    by_row[k].set(chosen, *factors[k], 1, c, rows)
                    if plan.columns:
                        by_column[k].set(chosen, *factors[k], 0, r, columns)
                if plan.same_id_sums and same is not None:
                    chosen = torch.where(same, tile, 0.0)
                    for part, each in enumerate((chosen, same)):
                        torch.sum(each, 1, dtype=self.dtype, out=same_rows[part, c, rows.slice])
                        if plan.columns:
                            torch.sum(each, 0, dtype=self.dtype, out=same_columns[part, r, columns.slice])
        wide = statistics_dtype(self.x.device)

        def join(sums: list[_Sums], same: Tensor) -> Tensor:
            logs = [each.logs() for each in sums]
            if not plan.same_id_sums:
                return torch.stack(logs) if len(logs) != 1 else logs[0].unsqueeze(0)
            total, number = same.sum(1, dtype=wide)
            return torch.stack([*logs, total * factor, number])

        columns_found = join(by_column, same_columns) if plan.columns else None
        diagonal = None if diagonal is None else diagonal.to(wide) * factor
        return BlockStatistics(join(by_row, same_rows), columns_found, diagonal, kept)

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
        plan = self.plan
        entries = len(plan.log_sum_exps)
        factor = self._factor(LOG2E)
        lift = None
        if self.x.dtype == torch.float16:
            lift = largest_slope_lift([rows.grads, None if columns is None else columns.grads, diagonal_grads], self.dtype)
        sides = []
        for side in (rows, columns):
            if side is None:
                continue
            shifts = side.logs[:entries].to(self.dtype).neg().clamp_(max=_LARGEST)  # a sum without terms has no gradient
            grads = side.grads.to(self.dtype)
            sides.append((shifts, grads if lift is None else grads * lift))
        if diagonal_grads is not None:
            diagonal_grads = diagonal_grads.to(self.dtype) if lift is None else diagonal_grads.to(self.dtype) * lift
        products = _Products(self, block, dx, accumulate, dy)
        kept_tiles = iter(kept)
        overwrite = entries == 1 and not kept  # the last use of a tile may write into it
        row_spans, column_spans = self._spans(block)
        for part in row_spans:
            for cols in column_spans:
                tile = next(kept_tiles, None)
                if tile is None:
                    tile = self._products(part, cols, block)
                    self._fill_excluded(tile, part, cols, block, -torch.inf)
                same = self._same(part, cols, block)
                slope = None
                for k, entry in enumerate(plan.log_sum_exps):
                    chosen = _choose(tile, entry, same)
                    times = _times(factor, entry.factor)
                    for dim, (shifts, grads) in zip((1, 0), sides, strict=False):
                        span = part if dim else cols
                        shift = shifts[k, span.slice].unsqueeze(dim)
                        weight = grads[k, span.slice].unsqueeze(dim)
                        weight = weight * entry.factor if entry.factor != 1 else weight
                        powers = _add_multiple(shift, chosen, times, overwrite=overwrite and dim == 0).exp2_()
                        slope = powers.mul_(weight) if slope is None else slope.addcmul_(powers, weight)
                        del powers
                if plan.same_id_sums and same is not None:
                    linear = sides[0][1][entries, part.slice].unsqueeze(1)
                    if len(sides) == 2:
                        linear = linear + sides[1][1][entries, cols.slice]
                    linear = linear * same
                    slope = linear if slope is None else slope.add_(linear)
                assert slope is not None
                del tile, chosen  # slopes are split into two more tensors of their size
                if diagonal_grads is not None:
                    self._add_to_diagonal(slope, part, cols, block, diagonal_grads)
                products.add(slope, part, cols)
        products.finish(lift)

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
        factor = self._factor(1.0)
        offset = float(bias) if bias.device != self.x.device else bias.to(self.dtype)
        row_spans, column_spans = self._spans(block)
        totals = self.x.new_empty((1 + (dx is not None), len(column_spans), self.x.shape[0]), dtype=self.dtype)
        column_totals = _empty(self.x, (len(row_spans), block.y.shape[0]), self.dtype, weights is not None)
        own_weights = [] if weights is None else [each.to(self.dtype) for each in weights]
        products = None if dx is None else _Products(self, block, dx, accumulate, dy)
        lift = None
        if dx is not None and self.x.dtype == torch.float16:
            lift = largest_slope_lift(own_weights or [self.x.new_ones(1, dtype=self.dtype)], self.dtype)
        for r, rows in enumerate(row_spans):
            for c, columns in enumerate(column_spans):
                logits = self._products(rows, columns, block).mul_(factor).add_(offset)
                same = self._same(rows, columns, block)
                if same is not None and masked:
                    logits.masked_fill_(same, -torch.inf)
                elif same is not None:
                    logits = torch.where(same, -logits, logits)
                self._flip_diagonal(logits, rows, columns, block)
                losses = logsigmoid(-logits).neg_()
                torch.sum(losses, 1, out=totals[0, c, rows.slice])
                if weights is not None:
                    torch.sum(losses, 0, out=column_totals[r, columns.slice])
                if products is None:
                    continue
                slope = logits.sigmoid_()
                if same is not None and not masked:
                    slope = torch.where(same, -slope, slope)
                self._flip_diagonal(slope, rows, columns, block)
                if own_weights:
                    slope *= (own_weights[0][rows.slice].unsqueeze(1) + own_weights[1][columns.slice]) / 2
                torch.sum(slope, 1, out=totals[1, c, rows.slice])
                products.add(slope if lift is None else slope.mul_(lift), rows, columns)
        if products is not None:
            products.finish(lift)
        return sigmoid_block(totals, column_totals, weights)

    def _factor(self, times: float) -> Tensor | float:
        """`scale` * times: a scalar in the dtype of the tiles, or a number, which costs no kernel, if `scale` is a constant."""
        if self.scale.device != self.x.device:
            return float(self.scale) * times
        scale = self.scale.to(torch.promote_types(self.scale.dtype, self.dtype))  # a product of 16 bits would be rounded
        return (scale * times).to(self.dtype)

    def _spans(self, block: ColumnBlock) -> tuple[list[Span], list[Span]]:
        """All rows and as many columns as fit; if that are less than 128, fewer rows."""
        if tile := self.plan.tile:
            return list(spans(self.x.shape[0], tile)), list(spans(block.y.shape[0], tile))
        elements = TILE_BYTES // self.dtype.itemsize
        row_tile = min(self.x.shape[0], elements // 128)
        column_tile = elements // max(row_tile, 1) if row_tile else 1
        return list(spans(self.x.shape[0], max(row_tile, 1))), list(spans(block.y.shape[0], max(column_tile, 1)))

    def _products(self, rows: Span, columns: Span, block: ColumnBlock) -> Tensor:
        return matmul(self.x[rows.slice], block.y[columns.slice].T, self.dtype)

    def _own(self, block: ColumnBlock) -> Span:
        start = block.own_start
        return Span(0, 0) if start is None else Span(start, start + self.own_columns)

    def _has_diagonal(self, block: ColumnBlock) -> bool:
        return self.plan.diagonal and block.own_start is not None

    def _fill_excluded(self, tile: Tensor, rows: Span, columns: Span, block: ColumnBlock, value: float | bool) -> None:
        fill_diagonals(tile, rows, columns, self._own(block), self.plan.excluded_diagonals, value)

    def _same(self, rows: Span, columns: Span, block: ColumnBlock) -> Tensor | None:
        if not self.plan.needs_ids or self.row_ids is None or block.ids is None:
            return None
        same = self.row_ids[rows.slice].unsqueeze(1) == block.ids[columns.slice]
        self._fill_excluded(same, rows, columns, block, False)
        return same

    def _partners(self, tile: Tensor, rows: Span, columns: Span, block: ColumnBlock) -> tuple[Tensor, slice] | None:
        """The pairs (i, own_start + i) in `tile` as a view, and their rows."""
        if block.own_start is None:
            return None
        first = max(rows.start, columns.start - block.own_start)
        last = min(rows.stop, columns.stop - block.own_start)
        if first >= last:
            return None
        part = tile[first - rows.start : last - rows.start, first + block.own_start - columns.start :]
        return part.diagonal(), slice(first, last)

    def _copy_diagonal(self, tile: Tensor, rows: Span, columns: Span, block: ColumnBlock, diagonal: Tensor) -> None:
        if found := self._partners(tile, rows, columns, block):
            diagonal[found[1]] = found[0]

    def _add_to_diagonal(self, tile: Tensor, rows: Span, columns: Span, block: ColumnBlock, values: Tensor) -> None:
        if found := self._partners(tile, rows, columns, block):
            found[0].add_(values[found[1]])

    def _flip_diagonal(self, tile: Tensor, rows: Span, columns: Span, block: ColumnBlock) -> None:
        if found := self._partners(tile, rows, columns, block):
            found[0].neg_()


class _Sums:
    """The sums of 2**(factor * tile + shift) by row or by column: one vector for each tile along the other side."""

    def __init__(self, kernels: DeviceTiles, shape: tuple[int, int]) -> None:
        self._shifts = kernels.x.new_empty(shape, dtype=kernels.dtype)
        self._sums = kernels.x.new_empty(shape, dtype=kernels.dtype)
        self._wide = statistics_dtype(kernels.x.device)

    def set(self, tile: Tensor, factor: Tensor | float, minus_factor: Tensor | float, dim: int, index: int, span: Span) -> None:
        shift = torch.mul(tile.amax(dim), minus_factor, out=self._shifts[index, span.slice]).clamp_(max=_LARGEST)
        powers = _add_multiple(shift.unsqueeze(dim), tile, factor).exp2_()
        torch.sum(powers, dim, out=self._sums[index, span.slice])

    def logs(self) -> Tensor:
        if not self._sums.numel():
            return self._sums.new_full(self._sums.shape[1:], -torch.inf, dtype=self._wide)
        logs = self._sums.to(self._wide).log2_().sub_(self._shifts)
        return logs[0] if logs.shape[0] == 1 else log_sum_exp2(logs)


class _Products:
    """Multiplies slopes with the features of rows and columns, and adds the products up."""

    def __init__(self, kernels: DeviceTiles, block: ColumnBlock, dx: Tensor, accumulate: bool, dy: Tensor | None) -> None:
        self._x, self._y = kernels.x, block.y
        self._dx, self._dy = dx, dy
        self._accumulate = accumulate
        self._precision = kernels.plan.precision
        # dx of float16 is a lifted sum until `finish`, so it cannot be added to what other blocks have given at once.
        self._apart = kernels.x.dtype == torch.float16 and accumulate
        self._target = torch.empty_like(dx) if self._apart else dx
        empty = not kernels.x.shape[0] or not block.y.shape[0]
        if empty and not accumulate:
            dx.zero_()
        if empty and dy is not None:
            dy.zero_()
        self._empty = empty

    def add(self, slope: Tensor, rows: Span, columns: Span) -> None:
        if self._x.dtype.itemsize > 2:
            parts = [slope]
        else:
            parts = [slope.to(self._x.dtype)]
            if self._precision == "exact":
                parts.append(torch.sub(slope, parts[0], out=torch.empty_like(parts[0])))
        x, y = self._x[rows.slice], self._y[columns.slice]
        with allow_tf32(self._precision, self._x):
            for k, part in enumerate(parts):
                first = not k and not columns.start and (self._apart or not self._accumulate)
                _add_matmul(self._target[rows.slice], part, y, first)
                if self._dy is not None:
                    _add_matmul(self._dy[columns.slice], part.T, x, not k and not rows.start)

    def finish(self, lift: Tensor | None) -> None:
        if lift is None or self._empty:
            return
        self._target.div_(lift)
        if self._apart:
            self._dx.add_(self._target)
        if self._dy is not None:
            self._dy.div_(lift)


def _times(factor: Tensor | float, number: float) -> Tensor | float:
    return factor if number == 1 else factor * number


def _add_multiple(shift: Tensor, tile: Tensor, factor: Tensor | float, overwrite: bool = False) -> Tensor:
    """shift + factor * tile, in one kernel; in the memory of `tile` if `overwrite`."""
    out = tile if overwrite else torch.empty_like(tile)
    if isinstance(factor, Tensor):
        return torch.addcmul(shift, tile, factor, out=out)
    return torch.add(shift, tile, alpha=factor, out=out)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`: 16-bit numbers are multiplied as they are, and added up in float32."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _add_matmul(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b; if `first`, total = a @ b."""
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


@contextmanager
def allow_tf32(precision: str, x: Tensor) -> Iterator[None]:
    """In the backward of float32 features on CUDA: "fast" allows TF32, "exact" leaves torch's setting."""
    if precision != "fast" or x.dtype != torch.float32 or not x.is_cuda:
        yield
        return
    matmul_settings = torch.backends.cuda.matmul
    before = matmul_settings.fp32_precision
    matmul_settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul_settings.fp32_precision = before


def tf32_is_allowed() -> bool:
    """Return torch's setting for float32 matmuls on CUDA.

    torch.get_float32_matmul_precision() raises once a program has used torch.backends.cuda.matmul.fp32_precision, which follows
    torch.set_float32_matmul_precision() as well.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def largest_slope_lift(grads: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """For float16: the power of two that brings the largest of `grads` near 2**12; 1 where that is impossible."""
    largest = [each.abs().amax() for each in grads if each is not None and each.numel()]
    if not largest:
        return None
    lift = torch.exp2(12 - torch.stack(largest).amax().to(dtype).log2().ceil_())
    return torch.where(lift.isfinite() & (lift > 0), lift, 1.0)


def sigmoid_block(totals: Tensor, column_totals: Tensor | None, weights: tuple[Tensor, Tensor] | None) -> SigmoidBlock:
    """Add up what the tiles gave.

    totals: (1 or 2, tiles, rows): sums of the losses of a row and, if there is a gradient, of its slopes.
    column_totals: (tiles, columns): sums of the losses of a column; not read without weights.
    """
    wide = statistics_dtype(totals.device)
    if weights is None or column_totals is None:
        total, *dbias = totals.sum((1, 2), dtype=wide)
        return SigmoidBlock(total, dbias[0] if dbias else None, None, None)
    row_losses = totals[0].sum(0, dtype=wide)
    column_losses = column_totals.sum(0, dtype=wide)
    total = (row_losses @ weights[0].to(wide) + column_losses @ weights[1].to(wide)) / 2
    return SigmoidBlock(total, totals[1].sum(dtype=wide) if len(totals) == 2 else None, row_losses, column_losses)


def _choose(tile: Tensor, entry: LogSumExp, same: Tensor | None) -> Tensor:
    if same is None or entry.where == "all":
        return tile
    return torch.where(same, -torch.inf, tile) if entry.where == "other" else torch.where(same, tile, -torch.inf)


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, wanted: bool) -> Tensor:
    return like.new_empty(shape if wanted else (0,) * len(shape), dtype=dtype)
