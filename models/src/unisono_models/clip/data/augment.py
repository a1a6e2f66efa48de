"""Random augmentation of a batch of images. The result for an image does not depend on the others in the batch."""

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from unisono_models.clip.config import AugmentConfig
from unisono_models.training.randomness import uniform
from unisono_models.training.to_device import to_device


def augment(images: Tensor, *, seed: int, epoch: int, index: Tensor, config: AugmentConfig) -> Tensor:
    """Change `images`, uint8 (n, 3, height, width), at random; returns float32 in [0, 1].

    The changes of an image depend on (seed, epoch, its index) and the config alone: not on its row, its rank, or the others.

    Example:
        >>> images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        >>> augment(images, seed=0, epoch=3, index=torch.tensor([17, 4]), config=AugmentConfig()).shape
        torch.Size([2, 3, 8, 8])
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise TypeError(f"augment: images is {images.dtype} {tuple(images.shape)}, must be torch.uint8 (n, 3, height, width)")
    if index.shape != images.shape[:1]:
        raise ValueError(f"augment: index has shape {tuple(index.shape)}, must be ({len(images)},): one for each image")
    x = images.to(torch.float32) / 255
    if not len(x):
        return x
    draws = uniform(seed, "augment", epoch, index.to(images.device), (16,))
    x = _transform(x, draws, config)
    if config.outline:
        x = _outline(x, draws, config)
    return _change_colours(x, draws, config).clamp(0, 1)


def _transform(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    low, high = config.zoom
    angle = _between(draws[:, 0], config.rotate) * (math.pi / 180)
    scale = torch.exp(math.log(low) + draws[:, 1] * (math.log(high) - math.log(low)))
    stretch = torch.exp(_between(draws[:, 2], 0.5 * math.log1p(config.stretch)))
    cropped = config.crop != (1.0, 1.0)
    aspect = torch.ones_like(stretch) if cropped else stretch
    mirror = torch.where(draws[:, 3] < config.flip, -1.0, 1.0)
    x, y = 2 * _between(draws[:, 4], config.shift), 2 * _between(draws[:, 5], config.shift)
    # from a position in the result to the position in the source: shift back, rotate back, scale back
    cos, sin = torch.cos(angle), torch.sin(angle)
    across, down = mirror / (scale * aspect), aspect / scale
    rows = torch.stack(
        [across * cos, across * sin, -across * (cos * x + sin * y), -down * sin, down * cos, down * (sin * x - cos * y)], 1
    )
    if cropped:
        rows = _place_crop(rows, stretch, draws, config.crop)
    grid = affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    return config.margin + grid_sample(images - config.margin, grid, align_corners=False)


def _place_crop(rows: Tensor, stretch: Tensor, draws: Tensor, crop: tuple[float, float]) -> Tensor:
    """Map positions in the result to a random part of the source, instead of to all of it."""
    low, high = crop
    side = torch.sqrt(low + draws[:, 13] * (high - low))
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    x, y = (2 * draws[:, 14] - 1) * (1 - width), (2 * draws[:, 15] - 1) * (1 - height)
    rows = rows.view(-1, 2, 3) * torch.stack([width, height], 1)[:, :, None]
    rows[:, :, 2] += torch.stack([x, y], 1)
    return rows


def _outline(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Darken both sides of an edge by the difference between them, in the colour that differs most."""
    across = (images[..., 1:] - images[..., :-1]).abs().amax(1, keepdim=True)
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().amax(1, keepdim=True)
    edges = torch.maximum(pad(across, (1, 0)), pad(across, (0, 1)))
    edges = torch.maximum(edges, torch.maximum(pad(down, (0, 0, 1, 0)), pad(down, (0, 0, 0, 1))))
    strength = torch.where(draws[:, 6] < config.outline, 0.5 + 1.5 * draws[:, 7], 0.0)
    return images * (1 - strength[:, None, None, None] * edges).clamp(min=0)


def _change_colours(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Apply hue, saturation, contrast and brightness as one matrix for each image."""
    luma = to_device(torch.tensor([0.299, 0.587, 0.114], dtype=images.dtype), images.device)
    turn = _between(draws[:, 8], config.hue) * (2 * math.pi)
    cos, sin = torch.cos(turn)[:, None, None], torch.sin(turn)[:, None, None]
    third = torch.full((3, 3), 1 / 3, device=images.device)
    across = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=images.dtype)
    cross = to_device(across, images.device) / math.sqrt(3)
    hue = cos * torch.eye(3, device=images.device) + (1 - cos) * third + sin * cross  # a rotation about the grey axis
    amount = torch.where(draws[:, 9] < config.gray, 0.0, 1 + _between(draws[:, 10], config.saturation))[:, None, None]
    saturation = amount * torch.eye(3, device=images.device) + (1 - amount) * luma.expand(3, 3)
    contrast = (1 + _between(draws[:, 11], config.contrast))[:, None, None]
    matrix = contrast * (saturation @ hue)
    offset = 0.5 - 0.5 * contrast[:, 0, 0] + _between(draws[:, 12], config.brightness)
    mixed = torch.bmm(matrix, images.flatten(2)).view_as(images)
    return mixed + offset[:, None, None, None]


def _between(draw: Tensor, reach: float) -> Tensor:
    return (2 * draw - 1) * reach
