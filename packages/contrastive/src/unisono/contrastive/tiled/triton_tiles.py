"""TritonTiles: the kernels of a block in Triton, for features of 16 and 32 bits on CUDA. triton_kernels.py has the kernels.

A tile of logits never leaves the processor: the forward writes only the statistics of each tile, which a second kernel joins in
float64. The backward computes the logits again. Features are hundreds or thousands of numbers wide, so a gradient of some rows
does not fit in registers as it does in attention; instead the slopes of some columns at a time go to memory, in the dtype of
the features (two planes, hi and lo, with precision="exact"), and a second kernel multiplies them with the features of both
sides. That is five products of the size of the logits; kernels that keep no slopes would need six, or more for wide features.

Each launch is a custom op with registered costs, so that the ledger counts it on fake tensors. Inputs are read once in these
counts, as with torch's matmuls. The ops write to tensors that the caller allocates, so that the ledger sees all memory, too.

How slopes are rounded and lifted is what device_tiles.py says. There is no TF32 unless torch's setting for float32 matmuls
or precision="fast" allows it. logits="keep" has no effect: nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from unisono.collectives import register_cost
from unisono.collectives.triton_choice import on_device_of
from unisono.contrastive.tiled import triton_kernels
from unisono.contrastive.tiled.block_kernels import (
    LOG2E,
    BlockKernels,
    BlockStatistics,
    LogsAndGrads,
    SigmoidBlock,
    SoftmaxLosses,
)
from unisono.contrastive.tiled.device_tiles import allow_tf32, largest_slope_lift, sigmoid_block, tf32_is_allowed
from unisono.contrastive.tiled.tiles import ColumnBlock, TilePlan, spans, statistics_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_DIAGONALS = 3  # that a plan may exclude

# Memory for slopes: this much, or half of what the gradient of y takes if that is more, so that the number of launches does not
# grow with the number of ranks.
SLOPE_BYTES = 64 * 2**20

_WHERE = {"all": triton_kernels.ALL, "same": triton_kernels.SAME, "other": triton_kernels.OTHER}
_PROGRAMS = 128  # as many as a GPU has processors, about


class Blocks(NamedTuple):
    """The shape of a tile, the width of the features that a program reads at once, and how Triton is to compile it."""

    rows: int
    columns: int
    width: int
    warps: int = 8
    stages: int = 3


_PADDING = 128  # slopes fill whole tiles of any of these shapes


def tile_blocks(dtype: torch.dtype, rows: int, wide: bool, capability: tuple[int, int] = (9, 0)) -> Blocks:
    """Shapes that compile for sm_80 and sm_90 with few or no spilled registers, as a test checks.

    `wide`: what follows the matmul needs few registers. `capability`, the GPU's, decides only how the features are read.
    """
    tall = 64 if rows <= 64 else 128
    if dtype == torch.float32:
        return Blocks(tall, 64, 32)
    columns = 128 if wide else 64
    large = capability[0] in (9, 10)  # 227 KiB of shared memory; others have 163 or 99
    return Blocks(tall, columns, 64) if large else Blocks(tall, columns, 32, stages=4)


class TritonTiles(BlockKernels):
    """Takes features of `DTYPES` and plans with up to `MOST_DIAGONALS` excluded diagonals."""

    def __init__(self, x: Tensor, scale: Tensor, row_ids: Tensor | None, own_columns: int, plan: TilePlan) -> None:
        super().__init__(x, scale, row_ids, own_columns, plan)
        if x.stride(1) != 1:
            self.x = x.contiguous()
        self.vector_dtype = self.dtype
        self._wide = len(plan.log_sum_exps) == 1 and not plan.needs_ids
        self._entries = [entry.factor for entry in plan.log_sum_exps], [_WHERE[entry.where] for entry in plan.log_sum_exps]

    def statistics(self, block: ColumnBlock, *, keep: bool) -> BlockStatistics:
        x, plan, wide = self.x, self.plan, statistics_dtype(self.x.device)
        n_rows, n_columns = x.shape[0], block.y.shape[0]
        rows = x.new_empty((plan.width, n_rows), dtype=wide)
        columns = x.new_empty((n_columns, plan.width), dtype=wide) if plan.columns else None
        diagonal = x.new_empty(n_rows, dtype=wide) if plan.diagonal and block.own_start is not None else None
        if not n_rows or not n_columns:
            for empty in (rows, columns if columns is None else columns.T):
                if empty is not None:
                    empty[: len(plan.log_sum_exps)] = -torch.inf
                    empty[len(plan.log_sum_exps) :] = 0
        else:
            blocks = tile_blocks(x.dtype, n_rows, self._wide)
            numbers = 2 * (len(plan.log_sum_exps) + plan.same_id_sums)
            row_shape = numbers, triton.cdiv(n_columns, blocks.columns), n_rows
            column_shape = numbers, triton.cdiv(n_rows, blocks.rows), n_columns
            _statistics_op(
                x,
                block.y,
                self.scale,
                *self._ids(block),
                x.new_empty(row_shape, dtype=self.dtype),
                x.new_empty(column_shape if plan.columns else (0, 0, 0), dtype=self.dtype),
                x.new_empty(n_rows if diagonal is not None else 0, dtype=self.dtype),
                rows,
                columns,
                diagonal,
                *self._entries,
                *self._own(block),
                plan.same_id_sums,
            )
        return BlockStatistics(rows, None if columns is None else columns.T, diagonal, [])

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
        lift = None
        if self.x.dtype == torch.float16:
            lift = largest_slope_lift([rows.grads, None if columns is None else columns.grads, diagonal_grads], self.dtype)
        row_logs, row_grads = (each if each.stride(-1) == 1 else each.contiguous() for each in rows)
        diagonal_grads = None if diagonal_grads is None else diagonal_grads.contiguous()

        def slopes_of(start: int, slopes: Tensor) -> None:
            _slopes_op(
                self.x,
                block.y,
                self.scale,
                *self._ids(block),
                row_logs,
                row_grads,
                *((None, None) if columns is None else columns),
                diagonal_grads,
                lift,
                slopes,
                start,
                *self._entries,
                *self._own(block),
                self.plan.same_id_sums,
            )

        self._add_products(block, slopes_of, lift, dx, accumulate, dy)

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
        n_rows, n_columns = x.shape[0], block.y.shape[0]
        blocks = tile_blocks(x.dtype, n_rows, False)
        totals = x.new_empty((1 + (dx is not None), triton.cdiv(n_columns, blocks.columns), n_rows), dtype=self.dtype)
        column_totals = None
        if weights is not None:
            column_totals = x.new_empty((triton.cdiv(n_rows, blocks.rows), n_columns), dtype=self.dtype)
        lift = None
        if dx is not None and x.dtype == torch.float16:
            lift = largest_slope_lift(weights or [x.new_ones(1, dtype=self.dtype)], self.dtype)

        def slopes_of(start: int, slopes: Tensor | None) -> None:
            _sigmoid_op(
                x,
                block.y,
                self.scale,
                bias,
                *self._ids(block),
                *(weights or (None, None)),
                lift,
                totals,
                column_totals,
                slopes,
                start,
                *self._own(block),
                masked,
            )

        if dx is not None:
            self._add_products(block, slopes_of, lift, dx, accumulate, dy)
        elif n_rows and n_columns:
            slopes_of(0, None)
        return sigmoid_block(totals, column_totals, weights)

    def join_ranks(self, parts: Tensor) -> Tensor:
        if not parts.numel():
            return super().join_ranks(parts)
        result = parts.new_empty((self.plan.width, parts.shape[1]))
        _join_ranks_op(parts.contiguous(), result, len(self.plan.log_sum_exps))
        return result

    def softmax_losses(self, rows: Tensor, columns: Tensor | None, diagonal: Tensor, *, wants_slopes: bool) -> SoftmaxLosses:
        if not diagonal.numel():
            return super().softmax_losses(rows, columns, diagonal, wants_slopes=wants_slopes)
        losses = diagonal.new_empty(triton.cdiv(diagonal.shape[0], _TAIL_BLOCK))
        slopes = diagonal.new_empty((1 + (columns is not None), diagonal.shape[0]), dtype=self.vector_dtype)
        diagonal_slopes = torch.empty_like(slopes[0])
        _softmax_tail_op(rows, None if columns is None else columns.contiguous(), diagonal, losses, slopes, diagonal_slopes)
        return SoftmaxLosses(losses.sum(), slopes, diagonal_slopes)

    def sum_of_products(self, dx: Tensor, out: Tensor | None = None) -> Tensor:
        if not dx.numel():
            return super().sum_of_products(dx, out)
        sums = dx.new_empty(triton.cdiv(dx.shape[0], _SUM_ROWS), dtype=statistics_dtype(dx.device))
        _sum_of_products_op(self.x, dx, sums)
        return torch.sum(sums, 0, out=out)

    def _own(self, block: ColumnBlock) -> tuple[Sequence[int], int, int]:
        """Excluded diagonals, and where own columns start and stop; the start is -1 if the block has none of them."""
        if block.own_start is None:
            return (), -1, -1
        return self.plan.excluded_diagonals, block.own_start, block.own_start + self.own_columns

    def _ids(self, block: ColumnBlock) -> tuple[Tensor | None, Tensor | None]:
        if not self.plan.needs_ids or self.row_ids is None or block.ids is None:
            return None, None
        return self.row_ids.contiguous(), block.ids

    def _add_products(
        self,
        block: ColumnBlock,
        slopes_of: Callable[[int, Tensor], None],
        lift: Tensor | None,
        dx: Tensor,
        accumulate: bool,
        dy: Tensor | None,
    ) -> None:
        """Compute the slopes of some columns after the other, and add their products with the features up."""
        x, y = self.x, block.y
        n_rows, n_columns = x.shape[0], y.shape[0]
        if not n_rows or not n_columns:
            if not accumulate:
                dx.zero_()
            if dy is not None:
                dy.zero_()
            return
        blocks = tile_blocks(x.dtype, n_rows, True)
        planes = 2 if x.dtype != torch.float32 and self.plan.precision == "exact" else 1
        padded_rows = triton.cdiv(n_rows, blocks.rows) * blocks.rows
        budget = max(SLOPE_BYTES, n_columns * x.shape[1] * self.dtype.itemsize // 2)
        step = max(budget // (planes * padded_rows * x.dtype.itemsize) // _PADDING, 1) * _PADDING
        step = min(step, triton.cdiv(n_columns, _PADDING) * _PADDING)
        scratch = x.new_empty(planes * padded_rows * step)
        # Few rows make few programs for dx: each takes a part of the columns, and the parts are added up at the end.
        programs = triton.cdiv(n_rows, blocks.rows) * triton.cdiv(x.shape[1], blocks.columns)
        parts = max(min(_PROGRAMS // programs, step // (4 * _PADDING)), 1)
        target = x.new_empty((parts, *x.shape), dtype=self.dtype) if parts > 1 else dx.unsqueeze(0)
        for part in spans(n_columns, step):
            width = triton.cdiv(part.stop - part.start, _PADDING) * _PADDING
            slopes = scratch[: planes * padded_rows * width].view(planes, padded_rows, width)
            slopes_of(part.start, slopes)
            adds = part.start > 0 or (accumulate and parts == 1)
            with allow_tf32(self.plan.precision, x):  # the logits must be those of the forward
                _products_op(slopes, x, y[part.slice], lift, target, None if dy is None else dy[part.slice], adds)
        if parts > 1 and accumulate:
            dx.add_(target.sum(0))
        elif parts > 1:
            torch.sum(target, 0, out=dx)


_COMPILED: dict[str, Any] = {"enable_fp_fusion": True}  # a multiplication and an addition may be rounded once
_TAIL_BLOCK = 256  # rows of one program
_SUM_ROWS, _SUM_WIDTH = 16, 256
_JOIN_BLOCK, _JOIN_PARTS = 32, 32


def _number_or_tensor(scalar: Tensor, x: Tensor, times: float) -> tuple[Tensor | float, bool]:
    """A scalar on the device stays there; a constant on the CPU becomes a number."""
    is_tensor = scalar.device == x.device
    return (scalar if is_tensor else float(scalar) * times), is_tensor


def _dot_options(x: Tensor, blocks: Blocks) -> dict[str, Any]:
    return {
        "even": x.shape[1] % blocks.width == 0,
        "float32_dot": "tf32" if x.dtype == torch.float32 and tf32_is_allowed() else "ieee",
        "block_rows": blocks.rows,
        "block_columns": blocks.columns,
        "block_width": blocks.width,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **_COMPILED,
    }


def _excluded(diagonals: Sequence[int]) -> list[int]:
    return [*diagonals, *[0] * (MOST_DIAGONALS - len(diagonals))]


def _bytes(*tensors: Tensor | None) -> int:
    return sum(0 if t is None else t.numel() * t.element_size() for t in tensors)


@torch.library.custom_op(
    "unisono_contrastive::triton_statistics",
    mutates_args=("row_parts", "column_parts", "products", "rows", "columns", "diagonal"),
)
def _statistics_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    row_parts: Tensor,
    column_parts: Tensor,
    products: Tensor,
    rows: Tensor,
    columns: Tensor | None,
    diagonal: Tensor | None,
    factors: Sequence[float],
    where: Sequence[int],
    excluded: Sequence[int],
    own_start: int,
    own_stop: int,
    same_id_sums: bool,
) -> None:
    (n_rows, width), n_columns = x.shape, y.shape[0]
    factor, scale_is_tensor = _number_or_tensor(scale, x, LOG2E)
    flags: dict[str, Any] = {
        "same_id_sums": same_id_sums,
        "by_column": columns is not None,
        "has_diagonal": diagonal is not None,
        "scale_is_tensor": scale_is_tensor,
        "log2e": LOG2E,
    }
    with on_device_of(x) as capability:
        blocks = tile_blocks(x.dtype, n_rows, len(factors) == 1 and row_ids is None, capability)
        row_tiles, column_tiles = triton.cdiv(n_rows, blocks.rows), triton.cdiv(n_columns, blocks.columns)
        triton_kernels.statistics_kernel[(row_tiles * column_tiles,)](
            x, y, factor, row_ids, column_ids, row_parts, column_parts, products, n_rows, n_columns, width, x.stride(0),
            y.stride(0), own_start, own_stop, *_excluded(excluded), factors=tuple(factors), where=tuple(where),
            excluded_diagonals=len(excluded), **flags, **_dot_options(x, blocks),
        )  # fmt: skip
        programs = triton.cdiv(n_rows, _JOIN_BLOCK) + (0 if columns is None else triton.cdiv(n_columns, _JOIN_BLOCK))
        triton_kernels.join_tiles_kernel[(programs,)](
            factor, row_parts, column_parts, products, rows, columns, diagonal, n_rows, n_columns, row_tiles, column_tiles,
            log_sum_exps=len(factors), block_parts=_JOIN_PARTS, block=_JOIN_BLOCK, **flags, **_COMPILED,
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_slopes", mutates_args=("slopes",))
def _slopes_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    row_logs: Tensor,
    row_grads: Tensor,
    column_logs: Tensor | None,
    column_grads: Tensor | None,
    diagonal_grads: Tensor | None,
    lift: Tensor | None,
    slopes: Tensor,
    first: int,
    factors: Sequence[float],
    where: Sequence[int],
    excluded: Sequence[int],
    own_start: int,
    own_stop: int,
    same_id_sums: bool,
) -> None:
    factor, scale_is_tensor = _number_or_tensor(scale, x, LOG2E)
    with on_device_of(x) as capability:
        blocks = tile_blocks(x.dtype, x.shape[0], len(factors) == 1 and row_ids is None, capability)
        programs = (slopes.shape[1] // blocks.rows) * (slopes.shape[2] // blocks.columns)
        triton_kernels.slopes_kernel[(programs,)](
            x, y, factor, row_ids, column_ids, row_logs, row_grads, column_logs, column_grads, diagonal_grads, lift, slopes,
            x.shape[0], y.shape[0], first, x.shape[1], x.stride(0), y.stride(0), own_start, own_stop, *_excluded(excluded),
            row_logs.stride(0), row_grads.stride(0), *((0, 0) if column_logs is None else column_logs.stride()),
            *((0, 0) if column_grads is None else column_grads.stride()), slopes.stride(0), slopes.stride(1),
            factors=tuple(factors), where=tuple(where), excluded_diagonals=len(excluded), by_column=column_logs is not None,
            same_id_sums=same_id_sums, has_diagonal=diagonal_grads is not None,
            has_lift=lift is not None, scale_is_tensor=scale_is_tensor, log2e=LOG2E, planes=slopes.shape[0],
            **_dot_options(x, blocks),
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_sigmoid", mutates_args=("row_parts", "column_losses", "slopes"))
def _sigmoid_op(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    row_weights: Tensor | None,
    column_weights: Tensor | None,
    lift: Tensor | None,
    row_parts: Tensor,
    column_losses: Tensor | None,
    slopes: Tensor | None,
    first: int,
    excluded: Sequence[int],
    own_start: int,
    own_stop: int,
    masked: bool,
) -> None:
    factor, scale_is_tensor = _number_or_tensor(scale, x, 1.0)
    offset, bias_is_tensor = _number_or_tensor(bias, x, 1.0)
    last = y.shape[0] if slopes is None else first + slopes.shape[2]
    plane, stride = (0, 0) if slopes is None else slopes.stride()[:2]
    with on_device_of(x) as capability:
        blocks = tile_blocks(x.dtype, x.shape[0], False, capability)
        programs = triton.cdiv(x.shape[0], blocks.rows) * triton.cdiv(last - first, blocks.columns)
        triton_kernels.sigmoid_kernel[(programs,)](
            x, y, factor, offset, row_ids, column_ids, row_weights, column_weights, lift, row_parts, column_losses, slopes,
            x.shape[0], y.shape[0], first, last, x.shape[1], x.stride(0), y.stride(0), own_start, own_stop,
            *_excluded(excluded), plane, stride,
            excluded_diagonals=len(excluded), has_ids=row_ids is not None, masked=masked, has_partners=own_start >= 0,
            has_weights=row_weights is not None, has_lift=lift is not None, wants_slopes=slopes is not None,
            scale_is_tensor=scale_is_tensor, bias_is_tensor=bias_is_tensor, log2e=LOG2E,
            planes=1 if slopes is None else slopes.shape[0], **_dot_options(x, blocks),
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_products", mutates_args=("dx", "dy"))
def _products_op(
    slopes: Tensor, x: Tensor, y: Tensor, lift: Tensor | None, dx: Tensor, dy: Tensor | None, accumulate: bool
) -> None:
    (n_rows, width), parts = x.shape, dx.shape[0]
    with on_device_of(x) as capability:
        blocks = tile_blocks(x.dtype, n_rows, True, capability)
        across = triton.cdiv(width, blocks.columns)
        row_programs = slopes.shape[1] // blocks.rows * across * parts
        programs = row_programs + (0 if dy is None else slopes.shape[2] // blocks.rows * across)
        split = triton.cdiv(triton.cdiv(slopes.shape[2], parts), blocks.width) * blocks.width
        options = _dot_options(x, blocks)
        triton_kernels.products_kernel[(programs,)](
            slopes, x, y, lift, dx, dy, n_rows, y.shape[0], width, x.stride(0), y.stride(0), dx.stride(0),
            0 if dy is None else dy.stride(0), slopes.stride(0), slopes.stride(1), row_programs, split, int(accumulate),
            wants_dy=dy is not None, has_lift=lift is not None, planes=slopes.shape[0], float32_dot=options["float32_dot"],
            block_m=blocks.rows, block_n=blocks.columns, block_k=blocks.width, num_warps=blocks.warps, num_stages=blocks.stages,
            **_COMPILED,
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_join_ranks", mutates_args=("result",))
def _join_ranks_op(parts: Tensor, result: Tensor, log_sum_exps: int) -> None:
    with on_device_of(parts):
        triton_kernels.join_ranks_kernel[(triton.cdiv(parts.shape[1], _JOIN_BLOCK),)](
            parts, result, parts.shape[0], parts.shape[1], log_sum_exps=log_sum_exps, width=parts.shape[2],
            block_parts=_JOIN_PARTS, block=_JOIN_BLOCK, **_COMPILED,
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_softmax_tail", mutates_args=("losses", "slopes", "diagonal_slopes"))
def _softmax_tail_op(
    rows: Tensor, columns: Tensor | None, diagonal: Tensor, losses: Tensor, slopes: Tensor, diagonal_slopes: Tensor
) -> None:
    with on_device_of(rows):
        triton_kernels.softmax_tail_kernel[(losses.shape[0],)](
            rows, columns, diagonal, losses, slopes, diagonal_slopes, diagonal.shape[0],
            by_column=columns is not None, log2e=LOG2E, block=_TAIL_BLOCK, **_COMPILED,
        )  # fmt: skip


@torch.library.custom_op("unisono_contrastive::triton_sum_of_products", mutates_args=("sums",))
def _sum_of_products_op(x: Tensor, dx: Tensor, sums: Tensor) -> None:
    with on_device_of(x):
        triton_kernels.sum_of_products_kernel[(sums.shape[0],)](
            x, dx, sums, x.shape[0], x.shape[1], x.stride(0), block_rows=_SUM_ROWS, block_width=_SUM_WIDTH, **_COMPILED
        )


for _op in (
    _statistics_op, _slopes_op, _sigmoid_op, _products_op, _join_ranks_op, _softmax_tail_op, _sum_of_products_op
):  # fmt: skip
    _op.register_fake(lambda *_: None)


def _columns_with_slopes(x: Tensor, y: Tensor, slopes: Tensor | None, first: int) -> int:
    return y.shape[0] if slopes is None else min(slopes.shape[2], y.shape[0] - first)


def _flops(x: Tensor, columns: int) -> int:
    return 2 * x.shape[0] * columns * x.shape[1]


def _slopes_bytes(x: Tensor, y: Tensor, *args: Any, out: None) -> int:
    columns = _columns_with_slopes(x, y, args[9], args[10])
    return _bytes(x, *args[1:6], *args[8:10]) + columns * (_bytes(y, args[6], args[7]) // y.shape[0])


def _sigmoid_bytes(x: Tensor, y: Tensor, *args: Any, out: None) -> int:
    """What belongs to columns is touched for those of this launch."""
    columns = _columns_with_slopes(x, y, args[9], args[10])
    return _bytes(x, args[2], args[4], args[9]) + columns * (_bytes(y, args[3], args[5], *args[7:9]) // y.shape[0])


_ops = torch.ops.unisono_contrastive
register_cost(
    _ops.triton_statistics,
    kernels=2,
    flops=lambda x, y, *args, out: _flops(x, y.shape[0]),
    bytes_touched=lambda *args, out: _bytes(*args[:11], *args[5:8]),  # parts are written and read
)
register_cost(
    _ops.triton_slopes,
    flops=lambda x, y, *args, out: _flops(x, _columns_with_slopes(x, y, args[9], args[10])),
    bytes_touched=_slopes_bytes,
)
register_cost(
    _ops.triton_sigmoid,
    flops=lambda x, y, *args, out: _flops(x, _columns_with_slopes(x, y, args[9], args[10])),
    bytes_touched=_sigmoid_bytes,
)
register_cost(
    _ops.triton_products,
    flops=lambda slopes, x, y, lift, dx, dy, accumulate, out: slopes.shape[0] * (1 + (dy is not None)) * _flops(x, y.shape[0]),
    bytes_touched=lambda slopes, x, y, lift, dx, dy, accumulate, out: (
        _bytes(slopes, x, y, dx, dy) + _bytes(slopes, x if dy is not None else None, dx if accumulate else None)
    ),
)
