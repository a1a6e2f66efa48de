"""Models with hidden layers: DeepFM, DCN-v2, DLRM."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from unisono_models.recommender.heads.inputs import Head, Inputs, Shape
from unisono_models.recommender.heads.machines import FactorizationMachine, LogisticRegression
from unisono_models.recommender.heads.perceptron import perceptron

_SMALL = 0.01


def deep_part(shape: Shape, width: int, out: int | None = None) -> nn.Sequential:
    """The perceptron of a model. Its last layer, `out` wide, starts from zero: what stands beside it is learned first."""
    config = shape.config
    layers = perceptron(width, config.hidden, dropout=config.dropout, input_dropout=config.input_dropout, out=out)
    if out is not None:
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
    return layers


class DeepFM(Head):
    """A factorization machine and a perceptron, both on the same vectors, added up (Guo et al. 2017)."""

    linear = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.machine = FactorizationMachine(shape)
        self.deep = deep_part(shape, shape.fields * shape.dim, out=1)

    def forward(self, inputs: Inputs) -> Tensor:
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

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, hidden = shape.fields * shape.dim, shape.config.hidden
        self.regression = LogisticRegression(shape)
        self.crosses = nn.ModuleList([CrossLayer(width) for _ in range(shape.config.crosses)])
        self.deep = deep_part(shape, width)
        self.out = nn.Linear(width + (hidden[-1] if hidden else width), 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, inputs: Inputs) -> Tensor:
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

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        fields, dim, numbers = shape.fields + bool(shape.numbers), shape.dim, shape.numbers
        self.regression = LogisticRegression(shape)
        self.bottom = perceptron(numbers, [*shape.config.bottom, dim]) if numbers else None
        self.top = deep_part(shape, (dim if numbers else fields * dim) + fields * (fields - 1) // 2, out=1)
        self.register_buffer("pairs", torch.tril_indices(fields, fields, -1), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
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
