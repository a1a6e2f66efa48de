"""Picture files as users have them, of any mode and shape, to squares of one size."""

from __future__ import annotations

import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from unisono_models.gan.data.scaling import fit_square

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
# Raster formats only: Pillow would hand EPS to Ghostscript, and the rare ones are where decoders are weakest.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MOST = 64 * 2**20  # pixels: a picture that claims more would unpack to any amount of memory, from a file that may be tiny


class BrokenPictureError(ValueError):
    """What was to be a picture is none, or is cut off, or would be too large."""


def read_picture(path: Path, *, size: int, colour: bool) -> Tensor:
    """The picture as uint8, (3 if colour else 1, size, size): its centre square, scaled by LANCZOS.

    Turned as its EXIF orientation says; transparent parts over white; the first frame if it moves.

    Raises: BrokenPictureError that says why.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BrokenPictureError("not a plain file")  # a pipe would never end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, one for every such picture
            pixels = fit_square(_flatten(_load(path), colour), size)
    except (BrokenPictureError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its own text is the path, another on every machine
        raise BrokenPictureError(f"not a picture in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # a decoder that is fed anything at all raises anything at all
        raise BrokenPictureError(f"{type(error).__name__}: {error}") from error
    return torch.from_numpy(pixels if colour else pixels[:, :, None]).permute(2, 0, 1).contiguous()


def _load(path: Path) -> Image.Image:
    with Image.open(path, formats=_FORMATS) as image:
        width, height = image.size
        if min(width, height) < 1 or width * height > _MOST:
            raise BrokenPictureError(f"{width} x {height} pixels, more than the {_MOST:,} that a picture may have")
        image.load()
        loaded: Image.Image = image
    with suppress(Exception):  # of metadata; the pixels are good
        ImageOps.exif_transpose(loaded, in_place=True)
    return loaded


def _flatten(image: Image.Image, colour: bool) -> Image.Image:
    """Without transparency, in mode RGB or L."""
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them to white
        grey = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((grey.clip(0, 65535) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode == "F":
        raise BrokenPictureError("a picture of floating-point numbers, whose range is not known")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if colour else "L")
