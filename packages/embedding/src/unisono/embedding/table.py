"""The description of a table (rows, width, features, options), and its initial weights, which no layout changes."""

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unisono.embedding.hashing import mix_seed
from unisono.embedding.sharding.layouts import Box

Mode = Literal["sum", "mean", "max"]
Initialize = Callable[[Tensor, torch.Generator], object]
MODES = ("sum", "mean", "max", None)
_BLOCK = 4096  # rows that are drawn at a time, so that a rank can draw its rows without those of other ranks


def draw_normal(rows: Tensor, generator: torch.Generator) -> None:
    """Draw as torch.nn.Embedding does."""
    rows.normal_(generator=generator)


@dataclass(frozen=True)
class Table:
    """One table of a collection, and the features that look into it.

    Args:
        name: A key of state_dict; no dots.
        rows: The number of ids, which go from 0 to rows - 1.
        dim: The width of a row.
        features: The names of the inputs that look into this table; by default one, which has the table's name.
        mode: How the rows of a bag become one: "sum", "mean" or "max". None: no pooling, each id gives its row.
        padding_idx, max_norm, norm_type, scale_grad_by_freq: As in torch.nn.EmbeddingBag.
        initialize: Fills rows in place: `lambda rows, generator: rows.uniform_(-1, 1, generator=generator)`. It is called with
            some thousand rows at a time, so it does not see how many rows the table has.
        ids_per_bag: What the planner expects if it gets no sample.
    """

    name: str
    rows: int
    dim: int
    features: Sequence[str] = ()
    mode: Mode | None = "sum"
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    initialize: Initialize = field(default=draw_normal, repr=False)
    ids_per_bag: float = 1.0

    def __post_init__(self) -> None:
        features = [self.features] if isinstance(self.features, str) else self.features  # one name is no list of letters
        object.__setattr__(self, "features", tuple(features) or (self.name,))
        for name in ("rows", "dim"):
            with suppress(TypeError):  # numpy's integers are welcome; what is no integer is refused below
                object.__setattr__(self, name, int(operator.index(getattr(self, name))))
        if error := self._validation_error():
            raise ValueError(f"Table {self.name!r}: {error}")
        if self.padding_idx is not None and self.padding_idx < 0:
            object.__setattr__(self, "padding_idx", self.rows + self.padding_idx)

    @property
    def owners_can_pool(self) -> bool:
        """Whether the rank that holds the rows can sum a bag for another rank: no maxima, and nothing that needs each row."""
        if self.mode not in ("sum", "mean") or self.scale_grad_by_freq:
            return False
        return self.max_norm is None or self.padding_idx is None  # a padding row is not summed, but renormalised

    def _validation_error(self) -> str:
        if not isinstance(self.name, str) or not all(isinstance(feature, str) for feature in self.features):
            return f"the name and features={self.features} must be strings"
        if type(self.rows) is not int or type(self.dim) is not int:
            return f"rows={self.rows!r} and dim={self.dim!r} must be integers"
        if not self.name or "." in self.name:
            return "the name must not be empty or have a dot, since it is part of a key of state_dict"
        if self.rows < 0 or self.dim < 0:
            return f"rows={self.rows} and dim={self.dim} must not be negative"
        if self.mode not in MODES:
            return f"mode={self.mode!r} is not one of {', '.join(map(repr, MODES))}"
        if self.padding_idx is not None and not -self.rows <= self.padding_idx < self.rows:
            return f"padding_idx={self.padding_idx} must be within the {self.rows} rows"
        if self.max_norm is not None and self.max_norm < 0:
            return f"max_norm={self.max_norm} must not be negative"
        if self.max_norm is not None and not self.norm_type > 0:
            return f"norm_type={self.norm_type} must be positive"
        if self.mode == "max" and self.scale_grad_by_freq:
            return "scale_grad_by_freq does not go with mode='max', as in torch.nn.EmbeddingBag"
        if self.ids_per_bag < 0:
            return f"ids_per_bag={self.ids_per_bag} must not be negative"
        if len(set(self.features)) < len(self.features):
            return f"features={self.features} has a name twice"
        return ""


def draw_weights(table: Table, box: Box, out: Tensor, *, seed: int, device: torch.device) -> None:
    """Fill `out` with the part `box` of the table's initial weights, drawn on `device`: the same whatever the layout."""
    block = torch.empty((min(_BLOCK, table.rows), table.dim), dtype=out.dtype, device=device)
    for start in range(box.row // _BLOCK * _BLOCK, box.row_end, _BLOCK):
        end = min(start + _BLOCK, table.rows)
        generator = torch.Generator(device).manual_seed(mix_seed(seed, start // _BLOCK))
        rows = block[: end - start]
        table.initialize(rows, generator)
        if table.padding_idx is not None and start <= table.padding_idx < end:
            rows[table.padding_idx - start] = 0
        first, last = max(start, box.row), min(end, box.row_end)
        out[first - box.row : last - box.row] = rows[first - start : last - start, box.column : box.column_end]
