"""Pictures from a trained generator, each a function of the seed and its number."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono_models.gan.data.images import Images
from unisono_models.gan.game.batches import condition_of
from unisono_models.gan.networks.generator import Generator
from unisono_models.training.randomness import normal


@torch.no_grad()
def generate(generator: Generator, condition: Tensor | None, numbers: Tensor, *, seed: int, stream: str = "samples") -> Tensor:
    """Pictures (n, channels, size, size) between -1 and 1. Noise belongs to `numbers` (n,), whoever makes them.

    Example:
        generate(average, torch.tensor([7, 7, 7]), torch.arange(3), seed=0)    # three sevens
    """
    noise = draw_noise(generator, numbers, seed=seed, stream=stream)
    pictures: Tensor = generator(noise, fit_condition(generator, condition))
    return pictures


def draw_noise(generator: Generator, numbers: Tensor, *, seed: int, stream: str = "samples", scale: float = 1.0) -> Tensor:
    """(n, noise), a function of the seed, the stream and `numbers` (n,), times `scale`, in the generator's dtype and place."""
    parameter = next(generator.parameters())
    noise = normal(seed, stream, 0, numbers.to(parameter.device), (generator.config.noise,))
    return noise.to(parameter.dtype) * scale


def fit_condition(generator: Generator, condition: Tensor | None) -> Tensor | None:
    """Labels (n,) or vectors (n, d) where the generator is, and vectors in its dtype."""
    if condition is None:
        return None
    parameter = next(generator.parameters())
    return condition.to(parameter.device, parameter.dtype if condition.is_floating_point() else condition.dtype)


def generate_like(generator: Generator, images: Images, numbers: Tensor, places: Tensor, *, seed: int) -> Tensor:
    """For evaluation: pictures under the conditions of `images` at `places`."""
    parameter = next(generator.parameters())
    kind = generator.config.condition
    condition = condition_of(images, places, kind=kind, device=parameter.device, dtype=parameter.dtype)
    return generate(generator, condition, numbers, seed=seed, stream="evaluation")
