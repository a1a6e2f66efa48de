"""The perceptron that the deep models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def perceptron(
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
