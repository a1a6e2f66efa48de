"""ImageDataset and the number of channels."""

from __future__ import annotations

import pytest
import torch

from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.data.mnist import set_channels


def test_image_dataset_rejects_inconsistent_tensors() -> None:
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="ImageDataset: 3 labels for 2 images"):
        ImageDataset(pixels, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be uint8"):
        ImageDataset(pixels.float())
    assert torch.equal(set_channels(pixels, colour=True), torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
