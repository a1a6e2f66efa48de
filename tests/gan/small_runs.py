"""Random images, a small generator, and the images that a grid shows."""

import numpy as np
import torch

from unisono_models.gan.config import ModelConfig
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.figures import (
    GAP,
    MARGIN,
    to_uint8,
)
from unisono_models.gan.model.generator import Generator
from unisono_models.training.distributed.launch import Ranks

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
CLASSES = ("cat", "dog", "owl")
SEED = 4
SIZE = 8  # of an image
SIDE = 56  # of an image in a grid


def draw_images(count=30, *, channels=1, seed=0):
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, channels, SIZE, SIZE), generator=draws, dtype=torch.uint8)
    captions = tuple(f"number {index % 7}" for index in range(count))
    vectors = torch.randn(count, 5, generator=draws)
    return ImageDataset(pixels, torch.arange(count) % len(CLASSES), CLASSES, vectors, captions)


def make_generator(condition="class", *, dtype=torch.float32, channels=1):
    torch.manual_seed(0)
    config = ModelConfig(condition, noise=6, generator=(8, 4), embedding=4)
    conditions = {"class": len(CLASSES), "vector": 5, "text": 5, "none": 0}[condition]
    return Generator(config, size=SIZE, channels=channels, conditions=conditions).to(dtype).requires_grad_(False).eval()


def cells(image, *, rows, columns, left=MARGIN, top=MARGIN):
    """Return the images of a grid, uint8 (rows * columns, size, size, 3), and check that each is enlarged exactly."""
    sheet = torch.from_numpy(np.array(image.convert("RGB")))
    found = []
    for place in range(rows * columns):
        y, x = (at * (SIDE + GAP) for at in divmod(place, columns))
        cell = sheet[top + y : top + y + SIDE, left + x : left + x + SIDE]
        small = cell[:: SIDE // SIZE, :: SIDE // SIZE]
        assert torch.equal(cell, small.repeat_interleave(SIDE // SIZE, 0).repeat_interleave(SIDE // SIZE, 1))
        found.append(small)
    return torch.stack(found)


def as_cells(images):
    return to_uint8(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
