"""Models with hidden layers: DeepFM, DCN-v2, DLRM."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from unisono_models.recommender.heads.inputs import Head, Inputs, Shape
from unisono_models.recommender.heads.machines import FactorizationMachine
from unisono_models.recommender.heads.perceptron import perceptron


class DeepFM(Head):
    """A factorization machine and a perceptron, both on the same vectors, added up (Guo et al. 2017)."""

    linear = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.machine = FactorizationMachine(shape)
        self.deep = perceptron(shape.fields * shape.dim, shape.config.hidden, dropout=shape.config.dropout, out=1)

    def forward(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.machine(inputs)
        deep: Tensor = self.deep(rearrange(inputs.vectors, "b f d -> b (f d)"))
        return logits + deep.squeeze(1)


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, of DCN-v2 (Wang et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = first * self.linear(x)
        return crossed + x


class DeepCross(Head):
    """DCN-v2: cross layers beside a perceptron, both on the vectors, and a linear layer on what they give."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, hidden = shape.fields * shape.dim, shape.config.hidden
        self.crosses = nn.ModuleList([CrossLayer(width) for _ in range(shape.config.crosses)])
        self.deep = perceptron(width, hidden, dropout=shape.config.dropout)
        self.out = nn.Linear(width + (hidden[-1] if hidden else width), 1)

    def forward(self, inputs: Inputs) -> Tensor:
        first = x = rearrange(inputs.vectors, "b f d -> b (f d)")
        for cross in self.crosses:
            x = cross(first, x)
        logits: Tensor = self.out(torch.cat([x, self.deep(first)], 1))
        return logits.squeeze(1)


class Dlrm(Head):
    """DLRM (Naumov et al. 2019): a perceptron makes one vector of the numbers; dot products of all pairs of vectors, and that
    vector, go through another. Without numbers a learned vector stands in, so that each embedding has a linear term."""

    number_fields = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        config, dim, numbers = shape.config, shape.dim, shape.numbers
        self.bottom = perceptron(numbers, [*config.bottom, dim]) if numbers else None
        self.constant = None if numbers else nn.Parameter(torch.full((dim,), dim**-0.5))
        self.top = perceptron(dim + (shape.fields + 1) * shape.fields // 2, config.hidden, dropout=config.dropout, out=1)
        self.register_buffer("pairs", torch.tril_indices(shape.fields + 1, shape.fields + 1, -1), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        if self.bottom is not None:
            dense: Tensor = self.bottom(inputs.numbers)
        else:
            assert self.constant is not None
            dense = self.constant.expand(len(inputs.vectors), -1)
        vectors = torch.cat([dense[:, None], inputs.vectors], 1)
        i, j = self.get_buffer("pairs")
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
        logits: Tensor = self.top(torch.cat([dense, dots], 1))
        return logits.squeeze(1)
