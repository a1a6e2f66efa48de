"""Pictures as users have them, of any mode and shape, to squares of RGB."""

from __future__ import annotations

import io
import os
import stat
import warnings
from contextlib import suppress

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

# Raster formats only: Pillow would hand EPS to Ghostscript, and the rare ones are where decoders are weakest.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20
"""A picture that claims more is broken: it would unpack to 192 MiB or more, from a file that may be tiny."""
MAX_BYTES = 256 * 2**20


class BrokenImageError(ValueError):
    """What was to be a picture is none, or is cut off, or would be too large."""


def decode_image(data: bytes, size: int) -> Tensor:
    """The picture as uint8 (3, size, size), RGB: its centre square, scaled with an antialiasing bicubic filter.

    Turned as its EXIF orientation says; transparent parts over white; the first frame if it moves. JPEGs that are more than
    four times too large are decoded at a fraction of their resolution, never below twice `size`: much faster, and hardly
    another picture.

    Raises: BrokenImageError that says why.

    Example:
        >>> data = io.BytesIO()
        >>> Image.new("CMYK", (40, 30)).save(data, "JPEG")
        >>> decode_image(data.getvalue(), 8).shape
        torch.Size([3, 8, 8])
    """
    if size < 1:
        raise ValueError(f"decode_image: size={size} must be at least 1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, one for every such picture
            return fit_picture(_load(data, size), size)
    except (BrokenImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its own text has an address in it, another every time
        raise BrokenImageError(f"not a picture in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # a decoder that is fed anything at all raises anything at all
        raise BrokenImageError(f"{type(error).__name__}: {error}") from error


def read_file(path: str) -> bytes:
    """The bytes of a plain file. Raises OSError for anything else: a pipe or a device would never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a plain file")
        if status.st_size > MAX_BYTES:
            raise OSError(f"{status.st_size:,} bytes, more than the {MAX_BYTES:,} that a picture may have")
        return file.read()


def _load(data: bytes, size: int) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        if min(width, height) < 1 or width * height > MAX_PIXELS:
            raise BrokenImageError(f"{width} x {height} pixels, more than the {MAX_PIXELS:,} that a picture may have")
        if image.format == "JPEG":
            image.draft(None, (2 * size, 2 * size))
        image.load()
        loaded: Image.Image = image
    with suppress(Exception):  # of metadata; the pixels are good
        ImageOps.exif_transpose(loaded, in_place=True)
    return loaded


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them to white
        grey = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((grey.clip(0, 65535) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode == "F":
        raise BrokenImageError("a picture of floating-point numbers, whose range is not known")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA") if image.mode != "La" else image.convert("LA").convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def fit_picture(image: Image.Image, size: int) -> Tensor:
    """The centre square of an open picture, as decode_image gives it."""
    image = _rgb(image)
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    # The centre is cut out by the same resize that scales it: scaling a long strip as a whole could take any amount of memory.
    cut = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous()
