"""The generator: noise and a condition to a picture."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unisono_models.gan.config import ModelConfig
from unisono_models.gan.model.blocks import (
    GAIN,
    SLOPE,
    ConditionEmbedding,
    Resample,
    ResidualBlock,
    convolution,
    linear,
    squash,
)


class Generator(nn.Module):
    """(n, config.noise) normal numbers and a condition to pictures (n, channels, size, size) between -1 and 1.

    In training mode they may go a little beyond (see `squash`); for evaluation they are cut off there.

    condition: (n,) labels if config.condition is "class", (n, d) vectors if it is "vector" or "text", else None.
    conditions: how many classes there are, or d.

    Example:
        >>> generator = Generator(ModelConfig(), size=16, channels=1, conditions=10)
        >>> generator(torch.randn(3, 64), torch.tensor([7, 0, 1])).shape
        torch.Size([3, 1, 16, 16])
    """

    def __init__(self, config: ModelConfig, *, size: int, channels: int, conditions: int = 0) -> None:
        super().__init__()
        self.config = config
        widths = config.generator
        base = config.lowest(widths, size)
        blocks = config.blocks * len(widths)
        self.condition = ConditionEmbedding(config.condition, conditions, config.embedding)
        known = config.noise + (config.embedding if config.condition != "none" else 0)
        self.mix = linear(known, widths[0])
        self.basis = nn.Parameter(torch.randn(widths[0], base, base))
        self.stages = nn.ModuleList()
        for place, width in enumerate(widths):
            stage: list[nn.Module] = [Resample("up", widths[place - 1], width)] if place else []
            self.stages.append(nn.Sequential(*stage, *(ResidualBlock(width, blocks=blocks) for _ in range(config.blocks))))
        self.pixels = convolution(widths[-1], channels * config.patch**2, scale=GAIN)

    def forward(self, noise: Tensor, condition: Tensor | None = None) -> Tensor:
        embedded = self.condition(condition)
        known = noise if embedded is None else torch.cat([noise, embedded], 1)
        x: Tensor = self.mix(known)[:, :, None, None] * self.basis
        for stage in self.stages:
            x = stage(x)
        patch = self.config.patch  # not by nn.PixelShuffle: its backward fails on an empty batch
        folded = squash(self.pixels(leaky_relu(x, SLOPE)))
        pictures: Tensor = rearrange(folded, "n (c p q) h w -> n c (h p) (w q)", p=patch, q=patch)
        return pictures if self.training else pictures.clamp(-1, 1)


Network = TypeVar("Network", bound=nn.Module)
_WARM_UP = 0.05  # the half-life is at most this part of the pictures seen: the first weights do not linger


def start_average(network: Network) -> Network:
    """A copy to be averaged into, without gradients."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def update_average(average: nn.Module, network: nn.Module, *, pictures: int, seen: int, half_life: float) -> None:
    """Move `average` towards `network`, which has just learned from `pictures` more and from `seen` so far.

    A weight counts half after `half_life` pictures, and sooner at the beginning. Pure function of its arguments: the same on
    every rank, and after a restart.

    Example:
        >>> import torch
        >>> network = nn.Linear(1, 1)
        >>> average = start_average(network)
        >>> _ = network.weight.data.fill_(2), average.weight.fill_(0)
        >>> update_average(average, network, pictures=8, seen=10_000, half_life=8)
        >>> average.weight
        Parameter containing:
        tensor([[1.]])
    """
    decay = 0.5 ** (pictures / max(1e-9, min(half_life, _WARM_UP * seen)))
    get_ema_multi_avg_fn(decay)(list(average.parameters()), list(network.parameters()), None)
