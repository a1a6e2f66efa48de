"""Augmentation of a batch of pictures in a few operations. What one gets depends on no other in the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from unisono_models.training.randomness import uniform


@dataclass(frozen=True)
class AugmentConfig:
    """How far pictures are changed. Ranges are drawn from evenly; 0 and a chance of 0 leave a thing as it is.

    The defaults are for photographs, of which there are many: a slight crop.
    """

    rotate: float = 0.0
    """Degrees, either way."""
    zoom: tuple[float, float] = (1.0, 1.1)
    """Smallest and largest scale; what is outside the picture becomes `margin`."""
    stretch: float = 0.0
    """Scale of the width over the height, up to this much more or less."""
    shift: float = 0.02
    """Part of the width and of the height, either way."""
    flip: float = 0.0
    """Chance of a mirror image. Off, since arrows, flags and letters are not what their mirror images are."""
    brightness: float = 0.0
    """Added to or taken from all colours."""
    contrast: float = 0.0
    """Distance from middle grey, up to this part more or less."""
    saturation: float = 0.0
    """Distance from grey, up to this part more or less."""
    hue: float = 0.0
    """Turn of the colour circle, either way; 0.5 is half of it."""
    gray: float = 0.0
    """Chance of no colour at all."""
    outline: float = 0.0
    """Chance of dark lines along edges, as some vendors draw and some do not."""
    margin: float = 1.0
    """The grey that comes in at the border: 1 is white, on which emoji are drawn."""


def augment(images: Tensor, *, seed: int, epoch: int, index: Tensor, config: AugmentConfig) -> Tensor:
    """`images`, uint8 (n, 3, height, width), changed at random: float32 in [0, 1].

    A picture's changes depend on (seed, epoch, its index) and the config alone: not on its row, its rank, or the others.

    Example:
        >>> pictures = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        >>> augment(pictures, seed=0, epoch=3, index=torch.tensor([17, 4]), config=AugmentConfig()).shape
        torch.Size([2, 3, 8, 8])
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise TypeError(f"augment: images is {images.dtype} {tuple(images.shape)}, must be torch.uint8 (n, 3, height, width)")
    if index.shape != images.shape[:1]:
        raise ValueError(f"augment: index has shape {tuple(index.shape)}, must be ({len(images)},): one for each picture")
    pictures = images.to(torch.float32) / 255
    if not len(pictures):
        return pictures
    draws = uniform(seed, "augment", epoch, index.to(images.device), (16,))
    pictures = _move(pictures, draws, config)
    if config.outline:
        pictures = _outline(pictures, draws, config)
    return _colour(pictures, draws, config).clamp(0, 1)


def _move(pictures: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    low, high = config.zoom
    angle = _between(draws[:, 0], config.rotate) * (math.pi / 180)
    scale = torch.exp(math.log(low) + draws[:, 1] * (math.log(high) - math.log(low)))
    aspect = torch.exp(_between(draws[:, 2], 0.5 * math.log1p(config.stretch)))
    mirror = torch.where(draws[:, 3] < config.flip, -1.0, 1.0)
    x, y = 2 * _between(draws[:, 4], config.shift), 2 * _between(draws[:, 5], config.shift)
    # from a place in the result to the place in the source: shift back, turn back, scale back
    cos, sin = torch.cos(angle), torch.sin(angle)
    across, down = mirror / (scale * aspect), aspect / scale
    rows = torch.stack(
        [across * cos, across * sin, -across * (cos * x + sin * y), -down * sin, down * cos, down * (sin * x - cos * y)], 1
    )
    grid = affine_grid(rows.view(-1, 2, 3), list(pictures.shape), align_corners=False)
    return config.margin + grid_sample(pictures - config.margin, grid, align_corners=False)


def _outline(pictures: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Darkens both sides of an edge by how much they differ, in the colour that differs most."""
    across = (pictures[..., 1:] - pictures[..., :-1]).abs().amax(1, keepdim=True)
    down = (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().amax(1, keepdim=True)
    edges = torch.maximum(pad(across, (1, 0)), pad(across, (0, 1)))
    edges = torch.maximum(edges, torch.maximum(pad(down, (0, 0, 1, 0)), pad(down, (0, 0, 0, 1))))
    strength = torch.where(draws[:, 6] < config.outline, 0.5 + 1.5 * draws[:, 7], 0.0)
    return pictures * (1 - strength[:, None, None, None] * edges).clamp(min=0)


def _colour(pictures: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Hue, saturation, contrast and brightness as one matrix for each picture."""
    luma = pictures.new_tensor([0.299, 0.587, 0.114])
    turn = _between(draws[:, 8], config.hue) * (2 * math.pi)
    cos, sin = torch.cos(turn)[:, None, None], torch.sin(turn)[:, None, None]
    third = torch.full((3, 3), 1 / 3, device=pictures.device)
    cross = pictures.new_tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    hue = cos * torch.eye(3, device=pictures.device) + (1 - cos) * third + sin * cross  # a turn about the grey axis
    amount = torch.where(draws[:, 9] < config.gray, 0.0, 1 + _between(draws[:, 10], config.saturation))[:, None, None]
    saturation = amount * torch.eye(3, device=pictures.device) + (1 - amount) * luma.expand(3, 3)
    contrast = (1 + _between(draws[:, 11], config.contrast))[:, None, None]
    matrix = contrast * (saturation @ hue)
    offset = 0.5 - 0.5 * contrast[:, 0, 0] + _between(draws[:, 12], config.brightness)
    mixed = torch.bmm(matrix, pictures.flatten(2)).view_as(pictures)
    return mixed + offset[:, None, None, None]


def _between(draw: Tensor, reach: float) -> Tensor:
    return (2 * draw - 1) * reach
