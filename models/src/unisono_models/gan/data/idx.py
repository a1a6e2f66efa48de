"""Folders of idx files, the format of MNIST and of all that is made like it, plain or packed by gzip."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono_models.gan.data.found import Found
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.scaling import scale_grey, set_channels

_NAME = re.compile(r"(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_BYTES = 0x08  # the type of their numbers; other types are of no use for pictures


def find_idx(folder: Path) -> dict[tuple[str, str], Path]:
    """The idx files of `folder`, or of `raw` in it or one level deeper, as torchvision leaves them: by part and content.

    A plain file counts before a packed one. Empty if there are no training pictures.

    Example:
        find_idx(Path("/data/MNIST/raw"))  ->  {("train", "images"): …, ("train", "labels"): …, ("test", "images"): …, …}
    """
    for place in (folder, folder / "raw", *sorted(folder.glob("*/raw"))):
        found: dict[tuple[str, str], Path] = {}
        for path in sorted(place.glob("*ubyte*")):  # x before x.gz
            if (match := _NAME.fullmatch(path.name)) and path.is_file():
                found.setdefault(("train" if match[1] == "train" else "test", match[2]), path)
        if ("train", "images") in found:
            return found
    return {}


def read_idx_folder(folder: Path, *, size: int, colour: bool = False) -> Found:
    """All pictures of a folder, those to train on first. Its test set, named t10k- or test-, stays one.

    Example:
        found = read_idx_folder(Path("/usr/share/dataset/fashion-mnist"), size=32)
        found.images.pixels.shape, found.test.sum()  ->  (70000, 1, 32, 32), 10000
    """
    files = find_idx(folder)
    if not files:
        raise FileNotFoundError(f"read_idx_folder: {folder}: no train-images-idx3-ubyte or train-images-idx3-ubyte.gz there")
    parts = [part for part in ("train", "test") if (part, "images") in files]
    pixels = [_read(files[part, "images"], dims=3) for part in parts]
    numbers = [_read(files[part, "labels"], dims=1) for part in parts if (part, "labels") in files]
    if 0 < len(numbers) < len(parts):
        raise FileNotFoundError(f"read_idx_folder: {folder}: one of training and test set has labels: both must, or none")
    for pictures, theirs, part in zip(pixels, numbers, parts, strict=False):
        if len(pictures) != len(theirs):
            raise ValueError(f"read_idx_folder: {folder}: {len(theirs):,} labels for {len(pictures):,} pictures of {part}")
    scaled = set_channels(torch.cat([scale_grey(x, size=size) for x in pixels]), colour=colour)
    if numbers:
        values, labels = torch.cat(numbers).unique(return_inverse=True)
        images = Images(scaled, labels, tuple(str(value) for value in values.tolist()))
    else:
        images = Images(scaled)
    test = None
    if len(parts) == 2:
        test = torch.arange(len(images)) >= len(pixels[0])
    return Found(images, torch.arange(len(images)), len(images), test)


def _read(path: Path, *, dims: int) -> Tensor:
    numbers = read_idx(path)
    if numbers.dim() != dims:
        raise ValueError(f"read_idx: {path}: {numbers.dim()} dimensions, expected {dims}")
    return numbers


def read_idx(path: Path) -> Tensor:
    """The numbers of an idx file of bytes, uint8, in the shape that it states.

    Raises: ValueError for a file of another kind, or one that is cut off or damaged.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"read_idx: {path}: cut off or damaged: {error}") from error
    if len(data) < 4 or data[:3] != bytes((0, 0, _BYTES)) or len(data) < 4 + 4 * data[3]:
        raise ValueError(
            f"read_idx: {path}: begins with {data[:4].hex(' ')}: not an idx file of bytes (00 00 08 and dimensions)"
        )
    start = 4 + 4 * data[3]
    shape = tuple(int(x) for x in np.frombuffer(data, dtype=">u4", count=data[3], offset=4))
    if len(data) - start != math.prod(shape):
        raise ValueError(f"read_idx: {path}: {len(data) - start:,} numbers, and its head says {shape}: cut off or damaged")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())
