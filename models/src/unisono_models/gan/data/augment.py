"""Random changes of images. Those of an image depend on its own random numbers alone, not on the others in the batch."""

import torch
from torch import Tensor

from unisono_models.gan.config import AugmentConfig

NUMBERS = 5
"""The number of random numbers that `change_images` needs for each image."""


def mirror_images(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror those of `images` (n, c, height, width) left to right for which `mirrored`, bool (n,), is True.

    Example:
        >>> mirror_images(torch.tensor([[[[1, 2]]], [[[3, 4]]]]), torch.tensor([True, False])).flatten().tolist()
        [2, 1, 3, 4]
    """
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def shift_images(images: Tensor, parts: Tensor, *, limit: int) -> Tensor:
    """Shift images (n, c, size, size) by at most `limit` whole pixels up or down, left or right. Edges are repeated.

    parts: (n, 2) in [0, 1): how far each image goes, from one end of the range to the other.

    Backward: to `images`, of any order.

    Example:
        >>> shift_images(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[0.5, 0.0]]), limit=1).tolist()
        [[[[1, 1], [3, 3]]]]
    """
    if not limit or not len(images):
        return images
    size = images.shape[2]
    first = (parts * (2 * limit + 1)).long() - limit
    cells = (first[:, :, None] + torch.arange(size, device=images.device)).clamp(0, size - 1)
    rows = torch.arange(len(images), device=images.device)
    return images[rows[:, None, None], :, cells[:, 0, :, None], cells[:, 1, None, :]].movedim(3, 1)


def change_images(images: Tensor, numbers: Tensor, config: AugmentConfig) -> Tensor:
    """Shift and recolour images (n, c, size, size) in [-1, 1] for the discriminator (DiffAugment, Zhao et al. 2020).

    numbers: (n, NUMBERS) in [0, 1), random.

    Backward: to `images`, of any order.
    """
    images = shift_images(images, numbers[:, :2], limit=round(images.shape[2] * config.shift))
    if config.colour:
        reach = (2 * numbers[:, 2:, None, None, None] - 1) * config.colour
        grey = images.mean(1, keepdim=True)
        images = grey + (images - grey) * (1 + reach[:, 0])
        mean = images.mean((1, 2, 3), keepdim=True)
        images = mean + (images - mean) * (1 + reach[:, 1]) + reach[:, 2]
    return images
