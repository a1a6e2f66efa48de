"""Models without hidden layers: logistic regression, and the factorization machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono_models.recommender.heads.inputs import Head, Inputs, Shape


class LogisticRegression(Head):
    """A weight for each value of each feature, and a bias."""

    linear = True
    vectors = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Inputs) -> Tensor:
        return inputs.weights.sum(1) + self.bias


class FactorizationMachine(Head):
    """Logistic regression and the products of all pairs of vectors (Rendle 2010)."""

    linear = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.regression = LogisticRegression(shape)

    def forward(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.regression(inputs)
        return logits + sum_of_pairs(inputs.vectors)


def sum_of_pairs(vectors: Tensor) -> Tensor:
    """The dot products of all pairs of a row's vectors, added up: (rows, fields, dim) to (rows,).

    Example:
        >>> sum_of_pairs(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]]))
        tensor([17.])
    """
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
