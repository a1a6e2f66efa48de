"""The generator: noise and a condition to an image; and the moving average of its weights."""

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
    leaky_tanh,
    linear,
)

Network = TypeVar("Network", bound=nn.Module)
_MAX_HALF_LIFE = 0.05  # as a fraction of the images seen so far: the average soon forgets the first weights


class Generator(nn.Module):
    """Normal noise (n, config.noise) and a condition to images (n, channels, size, size) in [-1, 1].

    In training mode the values may lie slightly outside (see `leaky_tanh`); in evaluation mode they are clamped.

    condition: (n,) labels if config.condition is "class", (n, d) vectors if it is "vector" or "text", else None.
    conditions: number of classes, or d.

    Example:
        >>> generator = Generator(ModelConfig(), size=16, channels=1, conditions=10)
        >>> generator(torch.randn(3, 64), torch.tensor([7, 0, 1])).shape
        torch.Size([3, 1, 16, 16])
    """

    def __init__(self, config: ModelConfig, *, size: int, channels: int, conditions: int = 0) -> None:
        super().__init__()
        self.config = config
        widths = config.generator
        base = config.lowest_resolution(widths, size)
        blocks = config.blocks * len(widths)
        self.condition = ConditionEmbedding(config.condition, conditions, config.embedding)
        input_width = config.noise + (config.embedding if config.condition != "none" else 0)
        self.mix = linear(input_width, widths[0])
        self.basis = nn.Parameter(torch.randn(widths[0], base, base))
        self.stages = nn.ModuleList()
        for index, width in enumerate(widths):
            layers: list[nn.Module] = [Resample("up", widths[index - 1], width)] if index else []
            layers += [ResidualBlock(width, blocks=blocks) for _ in range(config.blocks)]
            self.stages.append(nn.Sequential(*layers))
        self.pixels = convolution(widths[-1], channels * config.patch**2, scale=GAIN)

    def forward(self, noise: Tensor, condition: Tensor | None = None) -> Tensor:
        embedded = self.condition(condition)
        inputs = noise if embedded is None else torch.cat([noise, embedded], 1)
        x: Tensor = self.mix(inputs)[:, :, None, None] * self.basis
        for stage in self.stages:
            x = stage(x)
        patch = self.config.patch
        patches = leaky_tanh(self.pixels(leaky_relu(x, SLOPE)))
        # The backward of nn.PixelShuffle fails on an empty batch; rearrange does not.
        images: Tensor = rearrange(patches, "n (c p q) h w -> n c (h p) (w q)", p=patch, q=patch)
        return images if self.training else images.clamp(-1, 1)


def start_average(network: Network) -> Network:
    """Return a copy of `network` to average into, in evaluation mode and without gradients."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def update_average(average: nn.Module, network: nn.Module, *, batch: int, seen: int, half_life: float) -> None:
    """Move the weights of `average` towards those of `network`.

    The result depends on nothing but the arguments: it is the same on every rank and after a restart.

    batch: number of training images since the last update.
    seen: number of training images so far.
    half_life: half-life of a weight, in training images. It is shorter at the beginning of the training.

    Example:
        >>> network = nn.Linear(1, 1)
        >>> average = start_average(network)
        >>> _ = network.weight.data.fill_(2), average.weight.fill_(0)
        >>> update_average(average, network, batch=8, seen=10_000, half_life=8)
        >>> average.weight
        Parameter containing:
        tensor([[1.]])
    """
    decay = 0.5 ** (batch / max(1e-9, min(half_life, _MAX_HALF_LIFE * seen)))
    get_ema_multi_avg_fn(decay)(list(average.parameters()), list(network.parameters()), None)
