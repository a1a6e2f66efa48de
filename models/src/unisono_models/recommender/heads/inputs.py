"""What a model of a click is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig


class Inputs(NamedTuple):
    """A batch of rows, of `fields` features each, those of numbers last."""

    vectors: Tensor
    """(rows, fields, dim): embeddings; of a number, if numbers are fields, its value times a learned vector."""
    weights: Tensor
    """(rows, fields): the linear terms."""
    numbers: Tensor
    """(rows, numbers)"""


@dataclass(frozen=True)
class Shape:
    """Of a model's inputs, and its settings."""

    fields: int
    dim: int
    numbers: int
    config: ModelConfig


class Head(nn.Module):
    """A model of a click: Inputs to (rows,) logits."""

    linear: ClassVar[bool] = False
    """Whether it needs the linear terms."""
    vectors: ClassVar[bool] = True
    """Whether it needs the vectors."""
    number_fields: ClassVar[bool] = True
    """Whether numbers are fields with vectors of their own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError
