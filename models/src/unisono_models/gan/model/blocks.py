"""The blocks both networks are stacked from: residual, without normalization, after R3GAN (Huang et al. 2024)."""

from __future__ import annotations

from typing import Literal

import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, leaky_relu

from unisono_models.gan.config import Condition

SLOPE = 0.2
GAIN = (2 / (1 + SLOPE**2)) ** 0.5  # of leaky_relu: keeps the size of what goes through

LEAK = 0.02


def squash(x: Tensor) -> Tensor:
    """tanh that is nowhere flat: a generator whose first steps take it far into black or white finds out again.

    With tanh alone some seeds ended there: its gradient is 0 in float32 beyond 10.

    Example:
        >>> squash(torch.tensor([0.0, 50.0]))
        tensor([0., 2.])
    """
    return x.tanh() + LEAK * x


class ResidualBlock(nn.Module):
    """x + conv(act(conv(act(x)))) of one width, which at first is x: its last layer begins with zeros.

    Without normalization, many blocks would add up to large activations: the weights of the first layer begin smaller, the
    more blocks there are in the network (`blocks`; Fixup, Zhang et al. 2019).
    """

    def __init__(self, width: int, *, blocks: int) -> None:
        super().__init__()
        self.first = convolution(width, width, scale=GAIN * blocks**-0.5)
        self.second = convolution(width, width, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.second(leaky_relu(self.first(leaky_relu(x, SLOPE)), SLOPE))
        return x + changed


class Resample(nn.Module):
    """Twice as many pixels a side ("up") or half as many ("down"), and another width if need be."""

    def __init__(self, direction: Literal["up", "down"], width: int, new_width: int) -> None:
        super().__init__()
        self.direction = direction
        self.width = convolution(width, new_width, kernel=1, bias=False) if width != new_width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # The convolution comes where there are fewer pixels.
        if self.direction == "up":
            larger: Tensor = repeat(self.width(x), "n c h w -> n c (h 2) (w 2)")
            return larger
        resampled: Tensor = self.width(avg_pool2d(x, 2))
        return resampled


def convolution(width: int, new_width: int, *, kernel: int = 3, scale: float = 1.0, bias: bool = True) -> nn.Conv2d:
    """A convolution that keeps the number of pixels. `scale`: how much it enlarges its input at first."""
    layer = nn.Conv2d(width, new_width, kernel, padding=kernel // 2, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(std=scale / (width * kernel**2) ** 0.5)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def linear(width: int, new_width: int, *, scale: float = 1.0) -> nn.Linear:
    """A linear layer that begins like `convolution`."""
    layer = nn.Linear(width, new_width)
    with torch.no_grad():
        layer.weight.normal_(std=scale / width**0.5)
        layer.bias.zero_()
    return layer


class ConditionEmbedding(nn.Module):
    """Labels (n,) or vectors (n, d) to (n, width); no condition to None. `size`: number of classes, or d."""

    def __init__(self, kind: Condition, size: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(size, width) if kind == "class" else None
        self.linear = nn.Linear(size, width) if kind in ("vector", "text") else None

    def forward(self, condition: Tensor | None) -> Tensor | None:
        layer = self.table or self.linear
        if layer is None:
            return None
        if condition is None:
            raise ValueError(f"condition: None, but the network was made for condition={self.kind!r}")
        embedded: Tensor = layer(condition)
        return embedded
