"""Image files as users have them, of any mode and shape, decoded to RGB or grey."""

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
# Raster formats only: Pillow would hand EPS to Ghostscript, and the rare ones are where decoders are weakest.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20
"""An image that claims more pixels is broken: it would unpack to 192 MiB or more, from a file that may be tiny."""
MAX_BYTES = 256 * 2**20


class BrokenImageError(ValueError):
    """The data is no image, or it is cut off, or it would be too large."""


@contextmanager
def explain_broken_images() -> Iterator[None]:
    """Turn whatever a decoder raises inside into a BrokenImageError that says why, and silence its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, one for every such image
            yield
    except (BrokenImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its own text has a path or an address in it, which differs every time
        raise BrokenImageError(f"not an image in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # decoders raise exceptions of any class for malformed data
        raise BrokenImageError(f"{type(error).__name__}: {error}") from error


def open_image(source: bytes | Path, *, draft: int | None = None) -> Image.Image:
    """Load the first frame of an image, turned as its EXIF orientation says.

    source: the bytes of the file, or its path. draft: JPEGs that are more than twice this size are decoded at a fraction of
    their resolution, never below `draft` pixels a side, which is much faster.

    Raises: BrokenImageError for a file that is not a plain one or an image with too many pixels; what the decoder raises.
    Call it within `explain_broken_images`.
    """
    if isinstance(source, Path) and not stat.S_ISREG(os.stat(source).st_mode):
        raise BrokenImageError("not a plain file")  # a pipe would never end
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
        width, height = image.size
        if min(width, height) < 1 or width * height > MAX_PIXELS:
            raise BrokenImageError(f"{width} x {height} pixels, more than the {MAX_PIXELS:,} that an image may have")
        if draft is not None and image.format == "JPEG":
            image.draft(None, (draft, draft))
        image.load()
        loaded: Image.Image = image
    with suppress(Exception):  # the metadata may be broken; the pixels are good
        ImageOps.exif_transpose(loaded, in_place=True)
    return loaded


def flatten_image(image: Image.Image, mode: Literal["RGB", "L"] = "RGB") -> Image.Image:
    """Convert to `mode`, with transparent parts over white.

    Raises: BrokenImageError for images of floating-point numbers.
    """
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them to white
        grey = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((grey.clip(0, 65535) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode == "F":
        raise BrokenImageError("an image of floating-point numbers, whose range is not known")
    if image.has_transparency_data:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def read_image_bytes(path: str) -> bytes:
    """Read a plain file. Raises: OSError for anything else, since a pipe or a device would never end, and for huge files."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a plain file")
        if status.st_size > MAX_BYTES:
            raise OSError(f"{status.st_size:,} bytes, more than the {MAX_BYTES:,} that an image may have")
        return file.read()
