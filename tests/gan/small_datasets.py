"""Images that a small network can classify."""

from typing import Any

import torch

from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import ImageDataset


def squares(rows: int, *, labelled: bool = True, size: int = 16, channels: int = 1) -> ImageDataset:
    """Make noisy images with a bright square in one of three corners, which is the label."""
    random = torch.Generator().manual_seed(rows)
    labels = torch.arange(rows) % 3 if labelled else torch.zeros(rows, dtype=torch.int64)
    pixels = torch.randint(60, (rows, channels, size, size), generator=random, dtype=torch.uint8)
    half = size // 2
    for row, label in enumerate(labels.tolist()):
        top, left = divmod(label, 2)
        pixels[row, :, top * half : (top + 1) * half, left * half : (left + 1) * half] += torch.tensor(
            80 + 5 * (row % 17), dtype=torch.uint8
        )
    return ImageDataset(pixels, labels if labelled else None, ("a", "b", "c") if labelled else ())


def small_datasets(**settings: Any) -> Datasets:
    return Datasets(squares(50, **settings), squares(21, **settings), fingerprint="squares")
