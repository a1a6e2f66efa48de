"""Image files of any kind become RGB squares, and broken ones say why."""

import io
import struct
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.clip.image_files import encode_image, noise_image
from unisono_models.clip.data.decode import decode_image
from unisono_models.datasets import images
from unisono_models.datasets.images import BrokenImageError

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr", "L", "LA", "1", "I;16"])
def test_every_mode_becomes_rgb(mode):
    kind = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    if mode == "I;16":
        data = io.BytesIO()
        Image.fromarray(np.full((8, 12), 20000, dtype=np.uint16)).save(data, "PNG")
        found, expected = decode_image(data.getvalue(), 4), [round(20000 / 65535 * 255)] * 3
    else:
        grey = mode in ("L", "LA", "1")
        found = decode_image(encode_image("white" if grey else "orange", mode=mode, kind=kind), 4)
        expected = [255] * 3 if grey else [255, 165, 0]
    assert found.shape == (3, 4, 4) and found.dtype == torch.uint8
    assert (found[:, 2, 2].int() - torch.tensor(expected)).abs().max() <= (40 if mode in ("P", "YCbCr", "CMYK") else 0)


def test_sixteen_bits_of_grey_are_scaled_not_clipped():
    data = io.BytesIO()
    Image.fromarray(np.array([[0, 257, 32896, 65535]] * 4, dtype=np.uint16)).save(data, "PNG")
    assert decode_image(data.getvalue(), 4)[0, 0].tolist() == [0, 1, 128, 255]


def test_transparent_parts_are_white():
    data = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(data, "PNG")
    assert (decode_image(data.getvalue(), 4) == 255).all()
    data = io.BytesIO()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(data, "PNG", transparency=1)
    assert (decode_image(data.getvalue(), 4) == 255).all()


def test_exif_orientation_turns_the_image():
    image = Image.new("RGB", (8, 8), "red")
    image.paste("blue", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    data = io.BytesIO()
    image.save(data, "PNG", exif=exif)
    found = decode_image(data.getvalue(), 8)
    assert found[:, 0, 0].tolist() == [255, 0, 0] and found[:, 7, 0].tolist() == [0, 0, 255]


def test_the_centre_is_what_resize_and_crop_give():
    data = noise_image((64, 128))
    whole = Image.open(io.BytesIO(data)).resize((64, 32), Image.Resampling.BICUBIC).crop((16, 0, 48, 32))
    found = decode_image(data, 32).permute(1, 2, 0).numpy().astype(int)
    assert (found[:, 1:-1] == np.asarray(whole)[:, 1:-1]).all()  # at the cut the filter has no pixels beyond


def test_large_jpeg_by_a_fraction_is_the_same_image():
    data = io.BytesIO()
    ramp = np.linspace(0, 255, 512)
    Image.fromarray(np.stack([np.add.outer(ramp, ramp) / 2] * 3, -1).astype(np.uint8)).save(data, "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data.getvalue())).resize((32, 32), Image.Resampling.BICUBIC)
    found = decode_image(data.getvalue(), 32).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(found - np.asarray(whole)).max() <= 3


def test_long_strip_needs_no_memory():
    assert decode_image(encode_image("lime", (1, 60000)), 224)[:, 9, 9].tolist() == [0, 255, 0]


def png_that_claims(width, height):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an image in a known format"),
        (b"<html>404</html>", "not an image in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in a known format"),
        (noise_image()[:3000], "truncated"),
        (noise_image(kind="JPEG")[:1000], "truncated"),
        (noise_image(kind="WEBP")[:1000], "Error"),
        (png_that_claims(60000, 60000), "60000 x 60000|DecompressionBomb"),
        (png_that_claims(9000, 9000), "9000 x 9000 pixels"),
    ],
    ids=["empty", "html", "eps", "png", "jpeg", "webp", "bomb", "large"],
)
def test_broken_images_say_why(data, words):
    with pytest.raises(BrokenImageError, match=words):
        decode_image(data, 8)


@fuzz
@given(st.data())
def test_damaged_images_decode_or_are_broken(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
    found = bytearray(noise_image((9, 7), kind=kind))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(found) - 1), st.integers(0, 255)), max_size=8)):
        found[place] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(BrokenImageError):
            assert decode_image(bytes(found), 5).shape == (3, 5, 5)


def test_limits_are_those_that_the_errors_name():
    assert images.MAX_PIXELS * 3 < 2**28 and (Image.MAX_IMAGE_PIXELS or 0) > images.MAX_PIXELS
