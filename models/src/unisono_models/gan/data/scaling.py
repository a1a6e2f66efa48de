"""Pictures that are in memory already, to another size and other channels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

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
