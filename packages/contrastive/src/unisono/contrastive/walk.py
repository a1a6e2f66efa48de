"""What is asked of all pairs, and the walk over their tiles that every pass takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unisono.contrastive.blocks import Exchange
from unisono.contrastive.tiles import Scratch, Span, default_tile, exclude, spans, statistics_dtype

# Logits that are kept for the backward, unless told otherwise, instead of formed again: a quarter less work in all.
KEEP_BYTES = 128 * 2**20

Logits = Literal["auto", "keep", "recompute"]


class Entry(NamedTuple):
    """One statistic: the log-sum-exp of `factor` * logits over the pairs whose keys are the same, differ, or all."""

    factor: float = 1.0
    where: Literal["all", "same", "other"] = "all"


@dataclass(frozen=True)
class Pairs:
    """What to compute of the pairs (row i of this rank, column j of any rank), and how.

    `left_out`: pairs (i, j) of this rank's own rows and columns that take part in nothing, j - i being one of these.
    `sums`: also the sum and the number of the logits whose keys are the same. `diagonal`: also the logits (i, i).
    """

    entries: tuple[Entry, ...] = (Entry(),)
    left_out: tuple[int, ...] = (0,)
    columns: bool = True
    sums: bool = False
    diagonal: bool = True
    exchange: Exchange = "auto"
    tile: int | None = None
    logits: Logits = "auto"  # for the backward

    def keeps(self, logits: int, itemsize: int) -> bool:
        return self.logits == "keep" or (self.logits == "auto" and logits * itemsize <= KEEP_BYTES)

    @property
    def keyed(self) -> bool:
        return self.sums or any(entry.where != "all" for entry in self.entries)

    @property
    def width(self) -> int:
        """Statistics of each row and of each column."""
        return len(self.entries) + 2 * self.sums


class Walk:
    """The tiles of one pass, in an order that the next pass can repeat. Logits are `factor` times the dot products.

    The columns' features are multiplied by `factor` and not the rows', for each of them is taken up once.
    """

    def __init__(
        self, x: Tensor, y: Tensor, factor: Tensor, keys: tuple[Tensor, Tensor] | None, plan: Pairs, at_once: int = 1
    ) -> None:
        self.x, self.plan = x, plan
        self.keys, self.own_columns = keys[0] if keys else None, y.shape[0]
        self.compute = torch.promote_types(x.dtype, torch.float32)  # 16-bit features, 32-bit logits
        self.factor = factor.to(statistics_dtype(x.device))
        self.step = (plan.tile, plan.tile) if plan.tile else default_tile(x.device, at_once)
        self.scratch = Scratch(x, self.compute)

    def tiles(
        self,
        y: Tensor,
        keys: Tensor | None,
        own: int | None,
        keep: list[Tensor] | None = None,
        kept: Iterator[Tensor] | None = None,
    ) -> Iterator[tuple[Span, Span, Tensor, Tensor, Tensor | None]]:
        """Rows, columns, the columns' features times `factor`, the logits, and which pairs have the same key.

        What is left out is -inf. `keep` collects the logits, which otherwise are overwritten; `kept`: those of an earlier pass.
        """
        left_out = self.plan.left_out
        mine = Span(0, 0) if own is None else Span(own, own + self.own_columns)
        for columns in spans(y.shape[0], self.step[1]):
            features = y[columns.slice].to(self.compute) * self.factor
            for rows in spans(self.x.shape[0], self.step[0]):
                if kept is None:
                    shape = (rows.stop - rows.start, columns.stop - columns.start)
                    logits = self.scratch.room("logits", shape) if keep is None else features.new_empty(shape)
                    torch.mm(self.x[rows.slice].to(self.compute), features.T, out=logits)
                    exclude(logits, rows, columns, mine, left_out, -torch.inf)
                else:
                    logits = next(kept)
                if keep is not None:
                    keep.append(logits)
                same = None
                if self.plan.keyed and self.keys is not None and keys is not None:
                    same = self.keys[rows.slice].unsqueeze(1) == keys[columns.slice]
                    exclude(same, rows, columns, mine, left_out, False)
                yield rows, columns, features, logits, same

    def columns_like(self, y: Tensor) -> Tensor:
        """Room for a sum over row tiles, to which the first is not added but written (beta=0)."""
        return y.new_empty(y.shape, dtype=self.compute) if self.x.shape[0] else y.new_zeros(y.shape, dtype=self.compute)

    def bound(self, y: Tensor) -> float:
        """On the magnitude of logits, by Cauchy and Schwarz; inf where a look would make the host wait."""
        if self.x.device.type != "cpu":
            return math.inf
        return self._norm_of_rows * self._largest_norm(y) * abs(float(self.factor))

    @cached_property
    def _norm_of_rows(self) -> float:
        return self._largest_norm(self.x)

    def _largest_norm(self, x: Tensor) -> float:
        return max((float(x[part.slice].norm(dim=1).max()) for part in spans(x.shape[0], self.step[0])), default=0.0)


def diagonal(x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    """The dot product of each row with its partner, some rows at a time."""
    wide = walk.factor.dtype
    parts = [
        (x[rows.slice].to(walk.compute) * y[rows.slice].to(walk.compute)).sum(1).to(wide)
        for rows in spans(x.shape[0], walk.step[0])
    ]
    return torch.cat([x.new_empty(0, dtype=wide), *parts])


def add_diagonal(dx: Tensor, dy: Tensor | None, x: Tensor, y: Tensor, grads: Tensor, own: int, walk: Walk) -> None:
    """Add what the pairs (i, i) contribute, whose logits have the gradients `grads`."""
    for rows in spans(x.shape[0], walk.step[0]):
        weight = grads[rows.slice].unsqueeze(1).to(walk.compute)
        dx[rows.slice].addcmul_(weight * walk.factor, y[rows.slice].to(walk.compute))
        if dy is not None:
            dy[own + rows.start : own + rows.stop].addcmul_(weight, x[rows.slice].to(walk.compute))


def scale_gradient(x: Tensor, dx: Tensor, walk: Walk) -> Tensor:
    """The sum of all logits' gradients times the logits: `x` times its own gradient, which is at hand."""
    total = x.new_zeros((), dtype=walk.factor.dtype)
    for rows in spans(x.shape[0], walk.step[0]):
        total += (x[rows.slice].to(walk.compute) * dx[rows.slice]).sum(1).sum(dtype=total.dtype)
    return total
