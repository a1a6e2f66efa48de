"""A gallery whose right answers are known without training: images of one colour each, and words for colours."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from unisono_models.clip.data.dataset import GalleryItem
from unisono_models.clip.data.decode import crop_square
from unisono_models.clip.gallery import Gallery

WORDS = {
    "red": (1.0, 0.0, 0.0),
    "orange": (1.0, 0.5, 0.0),
    "yellow": (1.0, 1.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}
EMOJI = {"red": "❤️", "orange": "🧡", "yellow": "💛", "green": "💚", "blue": "💙"}
HOSTILE = '</script><img src=x onerror="alert(1)">'


class ColourClip:
    """Stands for a trained Clip: the features of an image are its mean colour, those of words the mean of the colours named."""

    config = SimpleNamespace(image=SimpleNamespace(size=8))

    def __init__(self) -> None:
        self.read: list[str] = []

    def encode_texts(self, captions: Sequence[str]) -> Tensor:
        self.read += captions
        colours = [[WORDS[word] for word in caption.split() if word in WORDS] or [(1.0, 1.0, 1.0)] for caption in captions]
        return F.normalize(torch.stack([torch.tensor(found).mean(0) for found in colours]), dim=1)

    def encode_images(self, images: Any) -> Tensor:
        if not isinstance(images, Tensor):
            images = torch.stack([crop_square(image, 8) for image in images])
        return F.normalize(images.float().mean((2, 3)) / 255 + 1e-6, dim=1)


def colour_gallery() -> tuple[Gallery, ColourClip]:
    """Each colour by two vendors, `plain` exactly and `bold` with a little white in it, then a brown one with a skin tone."""
    items, colours = [], []
    for group, (name, colour) in enumerate(WORDS.items()):
        for vendor, white in (("plain", 0.0), ("bold", 0.25)):
            items.append(GalleryItem(f"{name} heart", group, EMOJI[name], vendor))
            colours.append([white + (1 - white) * part for part in colour])
    items += [GalleryItem("hand: dark skin tone", 90, "✋🏿", "plain", toned=True), GalleryItem(HOSTILE, 91, "", "plain")]
    colours += [[1.0, 0.3, 0.0], [0.2, 0.1, 0.9]]
    table = torch.tensor(colours)

    def draw(index: int, size: int) -> Image.Image:
        return Image.new("RGB", (size, size), tuple(round(255 * part) for part in table[index].tolist()))

    clip = ColourClip()
    options: dict[str, Any] = {"credits": ["Nobody (CC0-1.0)"], "examples": ["a cat in love", "orange"]}
    return Gallery(clip, items, F.normalize(table, dim=1), draw=draw, **options), clip  # type: ignore[arg-type]
