"""BlockKernels: the arithmetic of one block of columns, apart from all communication.

logit_statistics.py and sigmoid_sum.py bring the columns of other ranks block by block (columns.py), give each block to the
kernels of the device, and send the results to their owners. An implementation of BlockKernels communicates nothing, knows no
group, and never makes the host wait for an accelerator. One object serves one pass (a forward or a backward) over all blocks.

- Logits are scale * x @ y.T. Inside the kernels they are in bits: multiplied by log2(e) as well, because exp2 is cheaper than
  exp. All log-sum-exps, sums of logits and diagonals that pass through this interface are in bits.
- A slope is the gradient of the loss with respect to a logit that is not in bits. The results are dx = slope @ y and
  dy = slope.T @ x: the caller multiplies both by the scale.
- Vectors of statistics are (statistics, rows) or (statistics, columns): first one for each log-sum-exp of the plan, then, if
  plan.same_id_sums, the sum and the number of the logits whose ids are the same. They have `statistics_dtype`.
- dx and dy have `logits_dtype`: float32 for features of 16 or 32 bits, float64 for those of 64.
- Any of rows and columns may be empty. A log-sum-exp without any term is -inf, and its gradient counts as zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import softplus

from unisono.contrastive.tiled.tiles import (
    ColumnBlock,
    TilePlan,
    log_sum_exp2,
    logits_dtype,
    spans,
    statistics_dtype,
    tile_shape,
)

LOG2E = math.log2(math.e)


class BlockStatistics(NamedTuple):
    rows: Tensor  # (statistics, rows), of this block only
    columns: Tensor | None  # (statistics, columns), of this rank's rows only; None unless plan.columns
    diagonal: Tensor | None  # (rows,): the logits (i, own_start + i) in bits; None unless plan.diagonal and own columns
    kept: list[Tensor]  # what `gradients` wants to use again if `keep`; may be empty


class LogsAndGrads(NamedTuple):
    """The statistics of whole rows or columns over all blocks and ranks, and the gradients of the loss for them."""

    logs: Tensor  # (statistics, rows or columns), in bits; only the log-sum-exps are read
    grads: Tensor  # the same shape; the gradients for the values that are not in bits


class SigmoidBlock(NamedTuple):
    total: Tensor  # scalar, of `statistics_dtype`: the sum of weight * loss over all pairs of the block
    dbias: Tensor | None  # scalar: the sum of all slopes
    row_losses: Tensor | None  # (rows,): the sum of the losses of each row, without weights; None without weights
    column_losses: Tensor | None  # (columns,): the same of each column


class SoftmaxLosses(NamedTuple):
    """Losses softplus(rest - diagonal) of rows and columns. The slopes are empty unless they are wanted."""

    total: Tensor  # scalar
    slopes: Tensor  # (1 or 2, rows): the derivatives, of rows and of columns
    diagonal_slopes: Tensor  # (rows,): those with respect to the diagonal, minus the sum of the others


class BlockKernels(ABC):
    """Computes with this rank's rows and one block of columns after the other.

    x: (rows, width). scale: a scalar of 32 or 64 bits, on the device of x, or on the CPU if it is a constant.
    row_ids: (rows,) int64; None if the plan needs none. own_columns: how many columns of the block with `own_start` are this
    rank's own. plan.excluded_diagonals: pairs (row i, own column i + d) that take no part in any statistic and are no pairs
    with the same id; columns that are not this rank's own are never excluded.
    """

    def __init__(self, x: Tensor, scale: Tensor, row_ids: Tensor | None, own_columns: int, plan: TilePlan) -> None:
        self.x = x
        self.scale = scale
        self.row_ids = row_ids
        self.own_columns = own_columns
        self.plan = plan
        self.dtype = logits_dtype(x.dtype)
        self.vector_dtype = statistics_dtype(x.device)  # what `gradients` wants to get of the columns

    @abstractmethod
    def statistics(self, block: ColumnBlock, *, keep: bool) -> BlockStatistics:
        """Compute what the plan asks for. `keep`: a backward follows, and there is memory for what it can use again."""

    @abstractmethod
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
        """Add slope @ y to `dx` (write it, unless `accumulate`), and write slope.T @ x to `dy` unless that is None.

        `diagonal_grads`, (rows,), are added to the slopes of the pairs (i, own_start + i); only for the block with own columns.
        `kept` is what `statistics` kept of this block.
        """

    @abstractmethod
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
        """Sum (weights[i] + weights[j]) / 2 * softplus(-sign * (logit + bias)) over all pairs of the block.

        The sign is + for the pairs (i, own_start + i) and for pairs with the same id, which are left out if `masked`; it is -
        for all others. `bias` is a scalar, like `scale`; `weights` are those of the rows and of the columns.
        dx, dy: as in `gradients`; both None if no gradient is wanted. `dy` may have a row stride of more than its width.
        """

    def join_ranks(self, parts: Tensor) -> Tensor:
        """Join the statistics of columns from several ranks, (ranks, n, statistics), in bits, into (statistics, n)."""
        return join_statistics(parts.transpose(1, 2), len(self.plan.log_sum_exps))

    def softmax_losses(self, rows: Tensor, columns: Tensor | None, diagonal: Tensor, *, wants_slopes: bool) -> SoftmaxLosses:
        """Compute the losses from log-sum-exps of rows and columns, (1, rows), and the diagonal, all in bits."""
        rest = rows if columns is None else torch.cat([rows, columns])
        excess = (rest - diagonal).mul_(1 / LOG2E)
        total = softplus(excess, threshold=50).sum()
        if not wants_slopes:
            return SoftmaxLosses(total, excess.new_empty(0), excess.new_empty(0))
        slopes = torch.sigmoid(excess, out=excess.new_empty(excess.shape, dtype=self.vector_dtype))
        return SoftmaxLosses(total, slopes, slopes.sum(0).neg_())

    def sum_of_products(self, dx: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum over all logits of slope times dot product, which equals the sum of x * dx: the gradient of the scale.

        `out`: a scalar of `statistics_dtype`.
        """
        x = self.x
        wide = statistics_dtype(x.device)
        step = tile_shape(None, x.device)[0] if x.device.type == "cpu" else max(x.shape[0], 1)
        by_row = [(x[part.slice] * dx[part.slice]).sum(1) for part in spans(x.shape[0], step)]
        if len(by_row) == 1:
            return torch.sum(by_row[0], 0, dtype=wide, out=out)
        parts = [each.sum(dtype=wide) for each in by_row]
        result = torch.stack(parts).sum() if parts else x.new_zeros((), dtype=wide)
        return result if out is None else out.copy_(result)


def join_statistics(parts: Tensor, log_sum_exps: int) -> Tensor:
    """Join statistics, (parts, statistics, n): log-sum-exps first, then sums."""
    if log_sum_exps == parts.shape[1]:
        return log_sum_exp2(parts)
    return torch.cat([log_sum_exp2(parts[:, :log_sum_exps]), parts[:, log_sum_exps:].sum(0)])


def block_kernels(x: Tensor, scale: Tensor, row_ids: Tensor | None, own_columns: int, plan: TilePlan) -> BlockKernels:
    """Choose the kernels for the device of `x`."""
    from unisono.contrastive.tiled.cpu_tiles import CpuTiles  # they need the classes above
    from unisono.contrastive.tiled.device_tiles import DeviceTiles

    if x.device.type == "cpu":
        return CpuTiles(x, scale, row_ids, own_columns, plan)
    if x.device.type == "cuda":
        from unisono.contrastive.tiled.triton_choice import triton_tiles

        if (kernels := triton_tiles(x.device, x.dtype, plan, is_fake(x))) is not None:
            return kernels(x, scale, row_ids, own_columns, plan)
    return DeviceTiles(x, scale, row_ids, own_columns, plan)
