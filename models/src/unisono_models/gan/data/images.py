"""Images in memory, with the label, vector and caption of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unisono_models.datasets.registry import Registry
from unisono_models.gan.config import Condition
from unisono_models.training.to_device import to_device


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images of one size with their labels, vectors and captions. Treat its tensors as read-only.

    Example:
        >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> images = ImageDataset(pixels, torch.tensor([1, 0]), ("cat", "dog"))
        >>> images.floats(torch.tensor([1, 0])).flatten().tolist()
        [1.0, -1.0]
        >>> images.select(torch.tensor([1])).labels.tolist()
        [0]
    """

    pixels: Tensor
    """uint8, (n, channels, size, size)."""
    labels: Tensor | None = None
    """int64, (n,): indices into `classes`. None if the images have no labels."""
    classes: tuple[str, ...] = ()
    """Names of the classes; () if the images have no labels."""
    vectors: Tensor | None = None
    """float32, (n, d): the condition vector of each image, or None."""
    captions: tuple[str, ...] = ()
    """A caption for each image, "" where there is none; () if no image has one."""

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.dim() != 4 or self.pixels.shape[2] != self.pixels.shape[3]:
            raise ValueError(
                f"ImageDataset: pixels are {self.pixels.dtype} of shape {tuple(self.pixels.shape)}; they must be uint8 of "
                "shape (n, channels, size, size)"
            )
        for name, value in (("labels", self.labels), ("vectors", self.vectors), ("captions", self.captions or None)):
            if value is not None and len(value) != len(self):
                raise ValueError(f"ImageDataset: {len(value)} {name} for {len(self)} images; there must be one for each")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def size(self) -> int:
        """Height and width in pixels."""
        return self.pixels.shape[2]

    def select(self, indices: Tensor) -> ImageDataset:
        """Return the images at `indices` (int64), in that order."""
        return replace(
            self,
            pixels=self.pixels[indices],
            labels=None if self.labels is None else self.labels[indices],
            vectors=None if self.vectors is None else self.vectors[indices],
            captions=tuple(self.captions[index] for index in indices.tolist()) if self.captions else (),
        )

    def floats(
        self, indices: Tensor, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the images at `indices` as (n, channels, size, size) in [-1, 1]. Default device: that of the pixels."""
        return to_device(self.pixels[indices], torch.device(device or self.pixels.device)).to(dtype) / 127.5 - 1

    def condition(
        self, indices: Tensor, *, kind: Condition, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Return the condition of the images at `indices`: labels (n,), vectors (n, d), or None if `kind` is "none".

        Raises: ValueError if the images have no labels or vectors.
        """
        if kind == "none":
            return None
        name = "labels" if kind == "class" else "vectors"
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise ValueError(f"ImageDataset.condition: kind={kind!r}, but the images have no {name}")
        selected = to_device(values[indices.to(values.device)], device)
        return selected if kind == "class" else selected.to(dtype)


@dataclass(frozen=True, eq=False)
class RawImageDataset:
    """Everything that a reader could read, before it is split into a training and a test set."""

    images: ImageDataset
    indices: Tensor
    """int64, (n,): the index of each image in the source. Images that could not be read leave gaps."""
    total: int
    """Number of images in the source, with those that could not be read."""
    test: Tensor | None = None
    """bool, (n,): which images are in the source's own test set. None if it has none."""
    notes: tuple[str, ...] = ()
    """Origin, licence, and what was left out."""
    families: tuple[str, ...] = ()
    """A name for each image. Images of one family are variants of each other: all are held out, or none. (): no families."""


class ReadDataset(Protocol):
    """Reads a dataset that is registered by name, on every rank."""

    def __call__(self, *, size: int, colour: bool) -> RawImageDataset: ...


DATASETS: Registry[ReadDataset] = Registry("gan")
"""The datasets that data.source can name. Register another with @DATASETS.register("NAME")."""


def fit_square(image: Image.Image, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Scale the centre square of a Pillow image of mode L or RGB: uint8 (size, size) or (size, size, 3)."""
    width, height = image.size
    side = min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    square = image.crop((left, top, left + side, top + side))  # resize(box=…) would blend in pixels from outside the box
    return np.array(square.resize((size, size), Image.Resampling.LANCZOS))


def set_channels(pixels: Tensor, *, colour: bool) -> Tensor:
    """Convert uint8 images (n, 1 or 3, size, size) to 3 channels if `colour`, else to 1, with Pillow's weights of mode L.

    Example:
        >>> red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
        >>> set_channels(red, colour=False).flatten().tolist()
        [76]
    """
    if pixels.shape[1] == (3 if colour else 1):
        return pixels
    if colour:
        return pixels.expand(-1, 3, -1, -1).contiguous()
    red, green, blue = pixels.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]
