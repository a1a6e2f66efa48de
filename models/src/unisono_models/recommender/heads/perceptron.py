"""The perceptron that the deep models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def perceptron(width: int, hidden: Sequence[int], *, dropout: float = 0.0, out: int | None = None) -> nn.Sequential:
    """Linear layers with ReLU and dropout between; `out`: a last one, linear, of that width.

    Example:
        >>> [type(layer).__name__ for layer in perceptron(8, [4], dropout=0.1, out=1)]
        ['Dropout', 'Linear', 'ReLU', 'Dropout', 'Linear']
    """
    layers: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    for wide in hidden:
        layers += [nn.Linear(width, wide), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = wide
    if out is not None:
        layers.append(nn.Linear(width, out))
    return nn.Sequential(*layers)
