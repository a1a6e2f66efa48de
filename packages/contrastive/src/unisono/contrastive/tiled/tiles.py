"""Visit the logits of this rank's rows tile by tile, and take the log-sum-exps of one tile and their gradient.

Inside a tile the logits are in bits: the caller multiplies the scale by log2(e), because exp2 costs half as much as exp. On
CPUs one exp2 with one shift for the whole tile serves its rows and its columns. The sums then show whether every row and
every column kept its digits. If not (logits hundreds of bits apart), the tile is computed again with a shift for each row and
each column. Other devices always take this second way, because reading the sums would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather
from unisono.collectives.groups import resolve_group
from unisono.contrastive.tiled.columns import Exchange

Logits = Literal["auto", "keep", "recompute"]
Precision = Literal["exact", "fast"]
Ids = tuple[Tensor, Tensor] | None  # of this rank's rows, and of its columns

# logits="auto" keeps up to this much for the backward instead of computing it again, which saves a quarter of the work.
KEEP_BYTES = 128 * 2**20

_LARGEST = 3.0e38  # a finite float32

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_autocast(fn: Callable[Concatenate[Tensor, _P], _T]) -> Callable[Concatenate[Tensor, _P], _T]:
    """Run `fn` with autocast disabled: the dtype of its matmuls is chosen here, not by the caller's autocast."""

    @wraps(fn)
    def call(x: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.autocast(x.device.type, enabled=False):
            return fn(x, *args, **kwargs)

    return call


def statistics_dtype(device: torch.device) -> torch.dtype:
    """The dtype of vectors with one number per row or column, which cost nothing compared with the tiles."""
    return torch.float32 if device.type == "mps" else torch.float64


def logits_dtype(features: torch.dtype) -> torch.dtype:
    """Features of 16 bits have logits and sums of gradients of 32."""
    return torch.promote_types(features, torch.float32)


class LogSumExp(NamedTuple):
    """The log-sum-exp of `factor` * logits over all pairs, or over those whose ids are the same, or differ ("other")."""

    factor: float = 1.0
    where: Literal["all", "same", "other"] = "all"


@dataclass(frozen=True)
class TilePlan:
    """What to compute from the logits (row i of this rank, column j of any rank), and how."""

    log_sum_exps: tuple[LogSumExp, ...] = (LogSumExp(),)
    excluded_diagonals: tuple[int, ...] = (0,)  # pairs (i, i + d) of this rank's own rows and columns that take no part
    columns: bool = True  # compute the statistics by column, too
    same_id_sums: bool = False  # also the sum and the number of the logits whose ids are the same
    diagonal: bool = True  # also the logits (i, i)
    exchange: Exchange = "auto"
    tile: int | None = None
    logits: Logits = "auto"
    precision: Precision = "exact"  # how the backward rounds on accelerators
    sizes: tuple[int, ...] | None = None  # each rank's number of columns; None if a compiled graph has to exchange them
    group: Group = None

    def keeps_logits(self, number: int, itemsize: int) -> bool:
        return self.logits == "keep" or (self.logits == "auto" and number * itemsize <= KEEP_BYTES)

    @property
    def needs_ids(self) -> bool:
        return self.same_id_sums or any(entry.where != "all" for entry in self.log_sum_exps)

    @property
    def width(self) -> int:
        """The number of statistics per row and per column."""
        return len(self.log_sum_exps) + 2 * self.same_id_sums


class Span(NamedTuple):
    """A range of rows or columns."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class ColumnBlock(NamedTuple):
    """Some columns of the logits: those of one rank, or of all ranks in rank order."""

    y: Tensor  # (columns, width), contiguous, in the dtype of x
    ids: Tensor | None  # (columns,) int64; None if the plan needs none
    own_start: int | None  # where this rank's own columns start in the block; None if it has none of them


def spans(length: int, step: int) -> Iterator[Span]:
    for start in range(0, length, step):
        yield Span(start, min(start + step, length))


def tile_shape(tile: int | None, device: torch.device, tiles_at_once: int = 1) -> tuple[int, int]:
    """Rows and columns of a tile. By default 4 MB, which stay in a CPU's cache; GPUs want larger ones."""
    if tile:
        return tile, tile
    size = 1024 if device.type == "cpu" else 4096
    return size // tiles_at_once, size


def fill_diagonals(tile: Tensor, rows: Span, columns: Span, own: Span, diagonals: tuple[int, ...], value: float | bool) -> None:
    """Set the pairs (row i, own column i + d) that lie in `tile` to `value`, for each d of `diagonals`."""
    start, stop = max(own.start, columns.start), min(own.stop, columns.stop)
    if start >= stop:
        return
    part = tile[:, start - columns.start : stop - columns.start]
    for diagonal in diagonals:
        offset = own.start + diagonal + rows.start - start
        if -part.shape[0] < offset < part.shape[1]:
            part.diagonal(offset).fill_(value)


def select(logits: Tensor, entry: LogSumExp, same: Tensor | None) -> Tensor:
    """Return the logits of one log-sum-exp, times its factor; pairs that it does not include are -inf."""
    if entry.factor != 1:
        logits = logits * entry.factor
    if same is None or entry.where == "all":
        return logits
    return logits.masked_fill(same if entry.where == "other" else ~same, -torch.inf)


def log_sum_exp2(x: Tensor) -> Tensor:
    """log2 of the sum of 2**x over the first dimension; -inf where all are."""
    top = x.amax(0).clamp_(min=-_LARGEST)
    return (x - top).exp2_().sum(0).log2_().add_(top)


class Scratch:
    """Memory for tiles, allocated once for all tiles of a pass."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._like = like
        self._dtype = dtype

    def buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return an uninitialised tensor of `shape`; the same name gives the same memory."""
        size = shape[0] * shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size, dtype=self._dtype)
        return buffer[:size].view(*shape)


class TileIterator:
    """The tiles of one pass, in an order that the next pass can repeat. Logits are `factor` times the dot products.

    `factor` multiplies the features of the columns rather than those of the rows, because each column is read only once.
    """

    def __init__(
        self, x: Tensor, factor: Tensor, row_ids: Tensor | None, own_columns: int, plan: TilePlan, tiles_at_once: int = 1
    ) -> None:
        self.x = x
        self.plan = plan
        self.row_ids = row_ids
        self.own_columns = own_columns
        self.dtype = logits_dtype(x.dtype)
        self.factor = factor.to(statistics_dtype(x.device))
        self.shape = tile_shape(plan.tile, x.device, tiles_at_once)
        self.scratch = Scratch(x, self.dtype)

    def row_spans(self) -> Iterator[Span]:
        return spans(self.x.shape[0], self.shape[0])

    def logits(self, rows: Span, features: Tensor, keep: bool = False) -> Tensor:
        """Compute one tile of logits. The next tile overwrites them, unless `keep`."""
        shape = (rows.stop - rows.start, features.shape[0])
        out = features.new_empty(shape) if keep else self.scratch.buffer("logits", shape)
        return torch.mm(self.x[rows.slice].to(self.dtype), features.T, out=out)

    def iterate(
        self, block: ColumnBlock, keep: list[Tensor] | None = None, kept: Iterator[Tensor] | None = None
    ) -> Iterator[tuple[Span, Span, Tensor, Tensor, Tensor | None]]:
        """Yield (rows, columns, features of the columns, logits, mask of the pairs with the same id).

        Excluded pairs have logits of -inf. `keep` collects the logits; `kept` gives those that an earlier pass collected.
        """
        excluded = self.plan.excluded_diagonals
        start = block.own_start
        own = Span(0, 0) if start is None else Span(start, start + self.own_columns)
        for columns in spans(block.y.shape[0], self.shape[1]):
            features = block.y[columns.slice].to(self.dtype)
            scaled = None if kept else features * self.factor
            for rows in self.row_spans():
                if scaled is not None:
                    logits = self.logits(rows, scaled, keep=keep is not None)
                    fill_diagonals(logits, rows, columns, own, excluded, -torch.inf)
                elif kept is not None:
                    logits = next(kept)
                if keep is not None:
                    keep.append(logits)
                same = None
                if self.plan.needs_ids and self.row_ids is not None and block.ids is not None:
                    same = self.row_ids[rows.slice].unsqueeze(1) == block.ids[columns.slice]
                    fill_diagonals(same, rows, columns, own, excluded, False)
                yield rows, columns, features, logits, same

    def add_products(self, slope: Tensor, rows: Span, columns: Span, features: Tensor, dx: Tensor, dy: Tensor | None) -> None:
        """Add the products of a tile of slopes with the features to `dx` and `dy`. The first tile of rows overwrites `dy`."""
        dx[rows.slice].addmm_(slope, features)
        if dy is not None:
            dy[columns.slice].addmm_(slope.T, self.x[rows.slice].to(self.dtype), beta=min(rows.start, 1))

    def logit_bound(self, y: Tensor) -> float:
        """An upper bound of all |logits|, by Cauchy-Schwarz; inf where reading the norms would make the host wait."""
        if self.x.device.type != "cpu":
            return math.inf
        return self._largest_row_norm * self._largest_norm(y) * abs(float(self.factor))

    @cached_property
    def _largest_row_norm(self) -> float:
        return self._largest_norm(self.x)

    def _largest_norm(self, x: Tensor) -> float:
        return max((float(x[part.slice].norm(dim=1).max()) for part in spans(x.shape[0], self.shape[0])), default=0.0)

    def diagonal_products(self, y: Tensor) -> Tensor:
        """The dot product of each row with its partner in `y`."""
        wide = self.factor.dtype
        parts = [
            (self.x[rows.slice].to(self.dtype) * y[rows.slice].to(self.dtype)).sum(1).to(wide) for rows in self.row_spans()
        ]
        return torch.cat([self.x.new_empty(0, dtype=wide), *parts])

    def add_diagonal_gradient(self, dx: Tensor, dy: Tensor | None, y: Tensor, slope: Tensor, own_start: int) -> None:
        """Add the products of the slopes of the pairs (i, own_start + i) with the features to `dx` and `dy`."""
        for rows in self.row_spans():
            partners = slice(own_start + rows.start, own_start + rows.stop)
            weight = slope[rows.slice].unsqueeze(1).to(self.dtype)
            dx[rows.slice].addcmul_(weight, y[partners].to(self.dtype))
            if dy is not None:
                dy[partners].addcmul_(weight, self.x[rows.slice].to(self.dtype))


@without_autocast
def all_logits(x: Tensor, y: Tensor, scale: Tensor, plan: TilePlan) -> tuple[Tensor, Tensor]:
    """Return all logits of this rank's rows at once, and the mask of the pairs that take part: for second derivatives."""
    assert plan.sizes is not None
    wide = statistics_dtype(x.device)
    logits = scale.to(wide) * (x.to(wide) @ all_gather(y.to(wide), sizes=plan.sizes, group=plan.group).T)
    takes_part = torch.ones_like(logits, dtype=torch.bool)
    start = sum(plan.sizes[: resolve_group(plan.group).rank])
    own = Span(start, start + y.shape[0])
    fill_diagonals(takes_part, Span(0, x.shape[0]), Span(0, sum(plan.sizes)), own, plan.excluded_diagonals, False)
    return logits, takes_part


class _ExponentRange(NamedTuple):
    """How far apart the exponents of a tile may be, in bits, before a single shift loses digits."""

    lift: float  # the largest logit of a tile becomes 2**lift, which leaves more room below it
    smallest_sum: float  # sums below 2**smallest_sum may have lost digits
    largest_gap: float  # between a log-sum-exp and the shift of the tile


_EXPONENT_RANGES = {torch.float32: _ExponentRange(40, -80, 120), torch.float64: _ExponentRange(300, -600, 900)}


def tile_log_sums(tile: Tensor, columns: bool, scratch: Scratch, bound: float, overwrite: bool) -> tuple[Tensor, Tensor | None]:
    """Return log2 of the sums of 2**tile over each row and, if `columns`, over each column, in the statistics' dtype.

    `bound`: of the magnitude of the logits that are not -inf; inf if unknown. `overwrite`: `tile` may be changed.
    """
    limits = _EXPONENT_RANGES[tile.dtype]
    if tile.device.type == "cpu":
        shift = _tile_shift(tile, limits, bound)
        powers = _exp2(tile, shift, scratch, overwrite)
        row_sums = powers.sum(1)
        column_sums = powers.sum(0) if columns else None
        smallest = 2**limits.smallest_sum
        if bound <= limits.lift or not _minimum(row_sums, column_sums) < smallest:  # written so that NaN stays NaN
            return _log2(row_sums, shift), None if column_sums is None else _log2(column_sums, shift)
    return _log_sums_along(tile, 1), _log_sums_along(tile, 0) if columns else None


def tile_gradient(
    tile: Tensor,
    row_logs: Tensor,
    row_grads: Tensor,
    column_logs: Tensor | None,
    column_grads: Tensor | None,
    scratch: Scratch,
    bound: float,
    overwrite: bool,
) -> Tensor:
    """Return the gradient of the log-sum-exps with respect to `tile`.

    row_grads[i] * 2**(tile[i, j] - row_logs[i]) + column_grads[j] * 2**(tile[i, j] - column_logs[j])

    The logs and grads are those of the whole rows and columns, over all tiles. The result is valid until the next call: it
    lies in `scratch`, or in `tile` if that may be overwritten.
    """
    limits = _EXPONENT_RANGES[tile.dtype]
    if tile.device.type == "cpu":
        shift = _tile_shift(tile, limits, bound)
        row_weights = _weights(row_logs, row_grads, shift, tile.dtype)
        column_weights = None
        if column_logs is not None and column_grads is not None:
            column_weights = _weights(column_logs, column_grads, shift, tile.dtype)
        if bound <= limits.lift or (
            _in_range(row_logs, row_weights, shift, limits) and _in_range(column_logs, column_weights, shift, limits)
        ):
            weights = row_weights.unsqueeze(1)
            if column_weights is not None:
                weights = torch.add(weights, column_weights, out=scratch.buffer("weights", tile.shape))
            return _exp2(tile, shift, scratch, overwrite).mul_(weights)
    result = _softmax(tile, row_logs, 1).mul_(row_grads.to(tile.dtype).unsqueeze(1))
    if column_logs is not None and column_grads is not None:
        result += _softmax(tile, column_logs, 0).mul_(column_grads.to(tile.dtype))
    return result


def _tile_shift(tile: Tensor, limits: _ExponentRange, bound: float) -> float:
    if bound <= limits.lift:
        return 0.0
    top = float(tile.amax())
    return (0.0 if top == -torch.inf else top) - limits.lift


def _exp2(tile: Tensor, shift: float, scratch: Scratch, overwrite: bool) -> Tensor:
    if shift == 0 and overwrite:
        return tile.exp2_()
    buffer = scratch.buffer("powers", tile.shape)
    return torch.sub(tile, shift, out=buffer).exp2_() if shift else torch.exp2(tile, out=buffer)


def _minimum(row_sums: Tensor, column_sums: Tensor | None) -> float:
    return min(float(sums.min()) for sums in (row_sums, column_sums) if sums is not None)


def _in_range(logs: Tensor | None, weights: Tensor | None, shift: float, limits: _ExponentRange) -> bool:
    """Whether one shift is exact enough. Infinite logs do not count: they belong to rows without any candidate."""
    if logs is None or weights is None:
        return True
    if not bool(weights.isfinite().all()):  # they overflow where a loss is scaled up, as GradScaler does
        return False
    far = (logs - shift).abs_() > limits.largest_gap
    return not bool((far & logs.isfinite()).any())


def _weights(logs: Tensor, grads: Tensor, shift: float, dtype: torch.dtype) -> Tensor:
    return torch.where(logs == -torch.inf, 0.0, grads * torch.exp2(shift - logs)).to(dtype)


def _log2(sums: Tensor, shift: float) -> Tensor:
    return sums.to(statistics_dtype(sums.device)).log2_().add_(shift)


def _log_sums_along(tile: Tensor, dim: int) -> Tensor:
    top = tile.amax(dim, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    sums = (tile - top).exp2_().sum(dim)
    wide = statistics_dtype(tile.device)
    return sums.to(wide).log2_().add_(top.squeeze(dim).to(wide))


def _softmax(tile: Tensor, logs: Tensor, dim: int) -> Tensor:
    """2**(tile - logs); zeros where the sum has no term."""
    logs = torch.where(logs == -torch.inf, -logs, logs).unsqueeze(dim)
    whole = logs.to(tile.dtype)
    rest = torch.where(logs.isfinite(), logs - whole, torch.zeros_like(logs))  # the digits that do not fit in float32
    return (tile - whole).sub_(rest.to(tile.dtype)).exp2_()
