"""What a model of a click is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig


class HeadInputs(NamedTuple):
    """A batch of rows, of `fields` features each, those of numbers last."""

    vectors: Tensor
    """(rows, fields, dim): embeddings; of a number, if numbers are fields, its value times a learned vector."""
    weights: Tensor
    """(rows, fields): the linear terms."""
    numbers: Tensor
    """(rows, numbers)"""


@dataclass(frozen=True)
class HeadShape:
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

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()

    def forward(self, inputs: HeadInputs) -> Tensor:
        raise NotImplementedError


class LogisticRegression(Head):
    """A weight for each value of each feature, and a bias."""

    linear = True
    vectors = False

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: HeadInputs) -> Tensor:
        return inputs.weights.sum(1) + self.bias


class FactorizationMachine(Head):
    """Logistic regression and the products of all pairs of vectors (Rendle 2010)."""

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.regression = LogisticRegression(shape)

    def forward(self, inputs: HeadInputs) -> Tensor:
        logits: Tensor = self.regression(inputs)
        return logits + sum_of_pairs(inputs.vectors)


def sum_of_pairs(vectors: Tensor) -> Tensor:
    """The dot products of all pairs of a row's vectors, added up: (rows, fields, dim) to (rows,).

    Example:
        >>> sum_of_pairs(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]]))
        tensor([17.])
    """
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


def make_mlp(
    width: int, hidden: Sequence[int], *, dropout: float = 0.0, input_dropout: float = 0.0, out: int | None = None
) -> nn.Sequential:
    """Linear layers with ReLU and dropout after each, and before the first; `out`: a last one, linear, of that width.

    Example:
        >>> [type(layer).__name__ for layer in perceptron(8, [4], dropout=0.1, out=1)]
        ['Linear', 'ReLU', 'Dropout', 'Linear']
    """
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for wide in hidden:
        layers += [_linear(width, wide), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = wide
    if out is not None:
        layers.append(_linear(width, out))
    return nn.Sequential(*layers)


def _linear(width: int, out: int) -> nn.Linear:
    layer = nn.Linear(width, out)
    nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


_SMALL = 0.01


def deep_part(shape: HeadShape, width: int, out: int | None = None) -> nn.Sequential:
    """The perceptron of a model. Its last layer, `out` wide, starts from zero: what stands beside it is learned first."""
    config = shape.config
    layers = make_mlp(width, config.hidden, dropout=config.dropout, input_dropout=config.input_dropout, out=out)
    if out is not None:
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
    return layers


class DeepFM(Head):
    """A factorization machine and a perceptron, both on the same vectors, added up (Guo et al. 2017)."""

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.machine = FactorizationMachine(shape)
        self.deep = deep_part(shape, shape.fields * shape.dim, out=1)

    def forward(self, inputs: HeadInputs) -> Tensor:
        logits: Tensor = self.machine(inputs)
        deep: Tensor = self.deep(rearrange(inputs.vectors, "b f d -> b (f d)"))
        return logits + deep.squeeze(1)


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, of DCN-v2 (Wang et al. 2021). `more` is added to W x + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=_SMALL)
        nn.init.zeros_(self.linear.bias)

    def forward(self, first: Tensor, x: Tensor, more: Tensor | float = 0.0) -> Tensor:
        crossed: Tensor = first * (self.linear(x) + more)
        return crossed + x


class DeepCross(Head):
    """DCN-v2: cross layers beside a perceptron, both on the vectors, a linear layer on what they give, and the linear terms.

    It learns what a factorization machine lacks: the first cross layer multiplies each vector with half of the others besides,
    and what the last one gives is added up. So it starts near one, and weight decay draws it there. From random crosses alone
    it learned less on MovieLens.
    """

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        width, hidden = shape.fields * shape.dim, shape.config.hidden
        self.regression = LogisticRegression(shape)
        self.crosses = nn.ModuleList([CrossLayer(width) for _ in range(shape.config.crosses)])
        self.deep = deep_part(shape, width)
        self.out = nn.Linear(width + (hidden[-1] if hidden else width), 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, inputs: HeadInputs) -> Tensor:
        vectors = inputs.vectors
        first = x = rearrange(vectors, "b f d -> b (f d)")
        others: Tensor | float = rearrange((vectors.sum(1, keepdim=True) - vectors) / 2, "b f d -> b (f d)")
        for cross in self.crosses:
            x, others = cross(first, x, others), 0.0
        logits: Tensor = self.regression(inputs)
        deep: Tensor = self.out(torch.cat([x, self.deep(first)], 1))
        return logits + x.sum(1) + deep.squeeze(1)


class Dlrm(Head):
    """DLRM (Naumov et al. 2019): a perceptron makes one vector of the numbers; dot products of all pairs of vectors, and that
    one, go through another. Without numbers the vectors themselves go beside their products. And there are linear terms."""

    linear = True
    number_fields = False

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        fields, dim, numbers = shape.fields + bool(shape.numbers), shape.dim, shape.numbers
        self.regression = LogisticRegression(shape)
        self.bottom = make_mlp(numbers, [*shape.config.bottom, dim]) if numbers else None
        self.top = deep_part(shape, (dim if numbers else fields * dim) + fields * (fields - 1) // 2, out=1)
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)

    def forward(self, inputs: HeadInputs) -> Tensor:
        vectors = inputs.vectors
        beside = rearrange(vectors, "b f d -> b (f d)")
        if self.bottom is not None:
            beside = self.bottom(inputs.numbers)
            vectors = torch.cat([beside[:, None], vectors], 1)
        i, j = self.get_buffer("pairs")
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
        logits: Tensor = self.regression(inputs)
        deep: Tensor = self.top(torch.cat([beside, products], 1))
        return logits + deep.squeeze(1)
