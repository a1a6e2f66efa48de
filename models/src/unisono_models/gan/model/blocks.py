"""The layers that both networks are built from: residual, without normalization, after R3GAN (Huang et al. 2024)."""

from typing import Literal

import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, leaky_relu

from unisono_models.gan.config import Condition

SLOPE = 0.2
GAIN = (2 / (1 + SLOPE**2)) ** 0.5  # of leaky_relu: keeps the variance of the activations
LEAK = 0.02


def leaky_tanh(x: Tensor) -> Tensor:
    """Apply tanh plus a small linear term, so that the gradient is never 0.

    The gradient of tanh is 0 in float32 beyond 10, and with some seeds the first steps drove the generator there for good.

    Example:
        >>> leaky_tanh(torch.tensor([0.0, 50.0]))
        tensor([0., 2.])
    """
    return x.tanh() + LEAK * x


class ResidualBlock(nn.Module):
    """x + conv(act(conv(act(x)))), with one width. It begins as the identity: the second convolution begins with zeros.

    blocks: number of blocks in the network. Without normalization, the activations of many blocks would add up, so the first
    convolution begins with smaller weights the more blocks there are (Fixup, Zhang et al. 2019).
    """

    def __init__(self, width: int, *, blocks: int) -> None:
        super().__init__()
        self.first = convolution(width, width, scale=GAIN * blocks**-0.5)
        self.second = convolution(width, width, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.second(leaky_relu(self.first(leaky_relu(x, SLOPE)), SLOPE))
        return x + changed


class Resample(nn.Module):
    """Double ("up") or halve ("down") the height and width, and change the number of channels if they differ."""

    def __init__(self, direction: Literal["up", "down"], width: int, new_width: int) -> None:
        super().__init__()
        self.direction = direction
        self.width = convolution(width, new_width, kernel=1, bias=False) if width != new_width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # The convolution runs at the lower resolution, where it is cheaper.
        if self.direction == "up":
            larger: Tensor = repeat(self.width(x), "n c h w -> n c (h 2) (w 2)")
            return larger
        smaller: Tensor = self.width(avg_pool2d(x, 2))
        return smaller


class ConditionEmbedding(nn.Module):
    """Embed labels (n,) or vectors (n, d) as (n, width). Without a condition the result is None.

    size: number of classes, or d.
    """

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
            raise ValueError(f"condition is None, but the network was built for condition={self.kind!r}")
        embedded: Tensor = layer(condition)
        return embedded


def convolution(width: int, new_width: int, *, kernel: int = 3, scale: float = 1.0, bias: bool = True) -> nn.Conv2d:
    """Return a convolution that keeps height and width, and at first multiplies the standard deviation by `scale`."""
    layer = nn.Conv2d(width, new_width, kernel, padding=kernel // 2, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(std=scale / (width * kernel**2) ** 0.5)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def linear(width: int, new_width: int, *, scale: float = 1.0) -> nn.Linear:
    """Return a linear layer that is initialized like `convolution`."""
    layer = nn.Linear(width, new_width)
    with torch.no_grad():
        layer.weight.normal_(std=scale / width**0.5)
        layer.bias.zero_()
    return layer
