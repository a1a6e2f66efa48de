"""Image files of any mode and shape, decoded to RGB squares."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unisono_models.datasets.images import explain_broken_images, flatten_image, open_image


def decode_image(data: bytes, size: int) -> Tensor:
    """Decode an image file to uint8 (3, size, size), RGB: its centre square, scaled with an antialiasing bicubic filter.

    The image is turned as its EXIF orientation says, transparent parts are put over white, and of an animation the first
    frame is taken. JPEGs that are more than four times too large are decoded at a fraction of their resolution, never below
    twice `size`: this is much faster, and the result is nearly the same.

    Raises: BrokenImageError that says why the data cannot be decoded.

    Example:
        >>> import io
        >>> data = io.BytesIO()
        >>> Image.new("CMYK", (40, 30)).save(data, "JPEG")
        >>> decode_image(data.getvalue(), 8).shape
        torch.Size([3, 8, 8])
    """
    if size < 1:
        raise ValueError(f"decode_image: size={size} must be at least 1")
    with explain_broken_images():
        return crop_square(open_image(data, draft=2 * size), size)


def crop_square(image: Image.Image, size: int) -> Tensor:
    """Crop and scale an open image as `decode_image` does."""
    image = flatten_image(image)
    width, height = image.size
    side = min(width, height)
    left = (width - side) / 2
    top = (height - side) / 2
    # One resize crops and scales: scaling a long strip as a whole could take any amount of memory.
    square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
