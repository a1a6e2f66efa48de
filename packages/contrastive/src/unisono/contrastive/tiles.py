"""One tile of logits: its log-sum-exps by row and by column, and the gradient of both. Logits are in bits here.

Powers of two cost half of powers of e, so the callers fold log2(e) into the scale. On CPUs one exp2 under one shift serves
rows and columns; a look at the sums tells whether every row and column kept its digits, and only a tile where one did not
(logits hundreds of bits apart) is done again with a shift for each row and each column. Other devices always take that
second way: looking would make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_autocast(fn: Callable[Concatenate[Tensor, _P], _T]) -> Callable[Concatenate[Tensor, _P], _T]:
    """Matmuls in the dtype that was chosen here, whatever the caller's autocast says of its own."""

    @wraps(fn)
    def call(x: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.autocast(x.device.type, enabled=False):
            return fn(x, *args, **kwargs)

    return call


class Reach(NamedTuple):
    """How far exponents may go before digits are lost, in bits."""

    lift: float  # the largest logit of a tile becomes 2**lift, which leaves more room below
    least: float  # sums below 2**least may have lost digits
    apart: float  # a row's log-sum-exp and the tile's shift may differ by this much


_REACH = {torch.float32: Reach(40, -80, 120), torch.float64: Reach(300, -600, 900)}


class Span(NamedTuple):
    """A range of rows or columns."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def spans(length: int, step: int) -> Iterator[Span]:
    for start in range(0, length, step):
        yield Span(start, min(start + step, length))


def default_tile(device: torch.device, at_once: int = 1) -> tuple[int, int]:
    """Rows and columns, for tiles that are needed some `at_once`: four megabytes stay in a CPU's cache, GPUs want more."""
    return (1024 // at_once, 1024) if device.type == "cpu" else (4096 // at_once, 4096)


def exclude(tile: Tensor, rows: Span, columns: Span, own: Span, diagonals: tuple[int, ...], value: float | bool) -> None:
    """Set the pairs (row i, own column i + d), for each d of `diagonals`, to `value` where `tile` has them."""
    start, stop = max(own.start, columns.start), min(own.stop, columns.stop)
    if start >= stop:
        return
    part = tile[:, start - columns.start : stop - columns.start]
    for diagonal in diagonals:
        offset = own.start + diagonal + rows.start - start
        if -part.shape[0] < offset < part.shape[1]:
            part.diagonal(offset).fill_(value)


class Scratch:
    """Room for tiles, taken once for all of a pass."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._like, self._dtype = like, dtype

    def room(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A tensor of `shape` with anything in it, the same memory for the same name."""
        size = shape[0] * shape[1]
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = self._like.new_empty(size, dtype=self._dtype)
        return room[:size].view(shape)


def log_sums(tile: Tensor, columns: bool, scratch: Scratch, bound: float, spend: bool) -> tuple[Tensor, Tensor | None]:
    """log2 of the sums of 2**tile over each row, and over each column if wanted, in the statistics' dtype.

    `bound`: on the magnitude of what is not left out of the tile, or inf if it is not known. `spend`: `tile` may be changed.
    """
    reach = _REACH[tile.dtype]
    if tile.device.type == "cpu":
        shift = _shift(tile, reach, bound)
        powers = _powers(tile, shift, scratch, spend)
        by_row = powers.sum(1)
        by_column = powers.sum(0) if columns else None
        if bound <= reach.lift or not _least(by_row, by_column) < 2**reach.least:  # NaN goes on as NaN
            return _log2(by_row, shift), None if by_column is None else _log2(by_column, shift)
    return _log_sums_along(tile, 1), _log_sums_along(tile, 0) if columns else None


def gradient(
    tile: Tensor,
    row_logs: Tensor,
    row_grads: Tensor,
    column_logs: Tensor | None,
    column_grads: Tensor | None,
    scratch: Scratch,
    bound: float,
    spend: bool,
) -> Tensor:
    """The gradient for `tile` of the log-sum-exps, given those of the whole rows and columns and their gradients.

    The result may lie in `scratch`, until the next call, or in the place of `tile`, if that may be spent.

    row_grads[i] * 2**(tile[i, j] - row_logs[i]) + column_grads[j] * 2**(tile[i, j] - column_logs[j])
    """
    reach = _REACH[tile.dtype]
    if tile.device.type == "cpu":
        shift = _shift(tile, reach, bound)
        by_row, by_column = _weights(row_logs, row_grads, shift, tile.dtype), None
        if column_logs is not None and column_grads is not None:
            by_column = _weights(column_logs, column_grads, shift, tile.dtype)
        # the weights may overflow where a loss is scaled up, as GradScaler does
        if bound <= reach.lift or (_near(row_logs, by_row, shift, reach) and _near(column_logs, by_column, shift, reach)):
            weights = by_row.unsqueeze(1)
            if by_column is not None:
                weights = torch.add(weights, by_column, out=scratch.room("weights", (tile.shape[0], tile.shape[1])))
            return _powers(tile, shift, scratch, spend).mul_(weights)
    result = _softmax(tile, row_logs, 1).mul_(row_grads.to(tile.dtype).unsqueeze(1))
    if column_logs is not None and column_grads is not None:
        result += _softmax(tile, column_logs, 0).mul_(column_grads.to(tile.dtype))
    return result


def statistics_dtype(device: torch.device) -> torch.dtype:
    """Of vectors with one number for each row or column: they cost nothing beside the tiles."""
    return torch.float32 if device.type == "mps" else torch.float64


def _shift(tile: Tensor, reach: Reach, bound: float) -> float:
    if bound <= reach.lift:
        return 0.0  # nothing can be far from anything: no shift, no look
    top = float(tile.amax())
    return (0.0 if top == -torch.inf else top) - reach.lift


def _powers(tile: Tensor, shift: float, scratch: Scratch, spend: bool) -> Tensor:
    if shift == 0 and spend:
        return tile.exp2_()
    room = scratch.room("powers", (tile.shape[0], tile.shape[1]))
    return torch.sub(tile, shift, out=room).exp2_() if shift else torch.exp2(tile, out=room)


def _least(by_row: Tensor, by_column: Tensor | None) -> float:
    return min(float(sums.min()) for sums in (by_row, by_column) if sums is not None)


def _near(logs: Tensor | None, weights: Tensor | None, shift: float, reach: Reach) -> bool:
    """Within reach, infinities aside: a row without a single candidate has none."""
    if logs is None or weights is None:
        return True
    if not bool(weights.isfinite().all()):
        return False
    far = (logs - shift).abs_() > reach.apart
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
    """2**(tile - logs); zeros where nothing at all was summed."""
    logs = torch.where(logs == -torch.inf, -logs, logs).unsqueeze(dim)
    whole = logs.to(tile.dtype)
    rest = torch.where(logs.isfinite(), logs - whole, torch.zeros_like(logs))  # the digits that float32 has no room for
    return (tile - whole).sub_(rest.to(tile.dtype)).exp2_()
