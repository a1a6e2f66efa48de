"""The heads of click models: logistic regression, factorization machine, DeepFM, DCN-v2 and DLRM.

A head turns the embeddings of a row's features into the logit of a click.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig

_CROSS_STD = 0.01


class HeadInputs(NamedTuple):
    """A batch of rows. A row has `fields` features, those of numbers last."""

    vectors: Tensor
    """(rows, fields, dim): the embeddings. The vector of a number, if it is a field, is its value times a learned vector."""
    weights: Tensor
    """(rows, fields): the linear terms."""
    numbers: Tensor
    """(rows, numbers)"""


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head's inputs, and its settings."""

    fields: int
    dim: int
    numbers: int
    config: ModelConfig


class Head(nn.Module):
    """Base class of heads: HeadInputs to (rows,) logits. The class variables say which inputs it needs."""

    linear: ClassVar[bool] = False
    """It needs the linear terms."""
    vectors: ClassVar[bool] = True
    """It needs the vectors."""
    number_fields: ClassVar[bool] = True
    """Numbers are fields with vectors of their own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()

    def forward(self, inputs: HeadInputs) -> Tensor:
        raise NotImplementedError


class LogisticRegression(Head):
    """The sum of a weight for each value of each feature, and a bias."""

    linear = True
    vectors = False

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: HeadInputs) -> Tensor:
        return inputs.weights.sum(1) + self.bias


class FactorizationMachine(Head):
    """Logistic regression plus the dot products of all pairs of vectors (Rendle 2010)."""

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.regression = LogisticRegression(shape)

    def forward(self, inputs: HeadInputs) -> Tensor:
        logits: Tensor = self.regression(inputs)
        return logits + sum_of_pairs(inputs.vectors)


class DeepFM(Head):
    """The sum of a factorization machine and an MLP on the same vectors (Guo et al. 2017)."""

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.machine = FactorizationMachine(shape)
        self.deep = _hidden_layers(shape, shape.fields * shape.dim, out=1)

    def forward(self, inputs: HeadInputs) -> Tensor:
        logits: Tensor = self.machine(inputs)
        deep: Tensor = self.deep(rearrange(inputs.vectors, "b f d -> b (f d)"))
        return logits + deep.squeeze(1)


class CrossLayer(nn.Module):
    """A cross layer of DCN-v2, x0 * (W x + b + bias) + x (Wang et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=_CROSS_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x0: Tensor, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        crossed: Tensor = x0 * (self.linear(x) + bias)
        return crossed + x


class DCNv2(Head):
    """DCN-v2: cross layers and an MLP side by side on the vectors, a linear layer on their outputs, and the linear terms.

    It starts near a factorization machine: the first cross layer also multiplies each vector with half of the sum of the
    others, and the output of the last one is summed up. Weight decay draws it back there. With random cross layers alone it
    learned less on MovieLens.
    """

    linear = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        width, hidden = shape.fields * shape.dim, shape.config.hidden
        self.regression = LogisticRegression(shape)
        self.crosses = nn.ModuleList([CrossLayer(width) for _ in range(shape.config.crosses)])
        self.deep = _hidden_layers(shape, width)
        self.out = nn.Linear(width + (hidden[-1] if hidden else width), 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, inputs: HeadInputs) -> Tensor:
        vectors = inputs.vectors
        x0 = x = rearrange(vectors, "b f d -> b (f d)")
        bias: Tensor | float = rearrange((vectors.sum(1, keepdim=True) - vectors) / 2, "b f d -> b (f d)")
        for cross in self.crosses:
            x = cross(x0, x, bias)
            bias = 0.0
        logits: Tensor = self.regression(inputs)
        deep: Tensor = self.out(torch.cat([x, self.deep(x0)], 1))
        return logits + x.sum(1) + deep.squeeze(1)


class DLRM(Head):
    """DLRM (Naumov et al. 2019), with linear terms.

    The bottom MLP turns the numbers into one more vector. The top MLP takes that vector and the dot products of all pairs of
    vectors. Without numbers, it takes all vectors and their dot products.
    """

    linear = True
    number_fields = False

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        fields, dim, numbers = shape.fields + bool(shape.numbers), shape.dim, shape.numbers
        self.regression = LogisticRegression(shape)
        self.bottom = make_mlp(numbers, [*shape.config.bottom, dim]) if numbers else None
        self.top = _hidden_layers(shape, (dim if numbers else fields * dim) + fields * (fields - 1) // 2, out=1)
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)

    def forward(self, inputs: HeadInputs) -> Tensor:
        vectors = inputs.vectors
        dense = rearrange(vectors, "b f d -> b (f d)")
        if self.bottom is not None:
            dense = self.bottom(inputs.numbers)
            vectors = torch.cat([dense[:, None], vectors], 1)
        i, j = self.get_buffer("pairs")
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
        logits: Tensor = self.regression(inputs)
        deep: Tensor = self.top(torch.cat([dense, products], 1))
        return logits + deep.squeeze(1)


HEADS: dict[str, type[Head]] = {
    "lr": LogisticRegression,
    "fm": FactorizationMachine,
    "deepfm": DeepFM,
    "dcn": DCNv2,
    "dlrm": DLRM,
}


def sum_of_pairs(vectors: Tensor) -> Tensor:
    """Add up the dot products of all pairs of a row's vectors: (rows, fields, dim) to (rows,).

    Example:
        >>> sum_of_pairs(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]]))
        tensor([17.])
    """
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


def make_mlp(
    width: int, hidden: Sequence[int], *, dropout: float = 0.0, input_dropout: float = 0.0, out: int | None = None
) -> nn.Sequential:
    """Make an MLP of linear layers, each with ReLU and dropout, and a last linear layer of width `out`, if that is given.

    Example:
        >>> [type(layer).__name__ for layer in make_mlp(8, [4], dropout=0.1, out=1)]
        ['Linear', 'ReLU', 'Dropout', 'Linear']
    """
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for hidden_width in hidden:
        layers += [_make_linear(width, hidden_width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = hidden_width
    if out is not None:
        layers.append(_make_linear(width, out))
    return nn.Sequential(*layers)


def _make_linear(width: int, out: int) -> nn.Linear:
    layer = nn.Linear(width, out)
    nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _hidden_layers(shape: HeadShape, width: int, out: int | None = None) -> nn.Sequential:
    """The MLP of a head. Its last layer starts from zero, so that the terms that are added to it are learned first."""
    config = shape.config
    layers = make_mlp(width, config.hidden, dropout=config.dropout, input_dropout=config.input_dropout, out=out)
    if out is not None:
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
    return layers
