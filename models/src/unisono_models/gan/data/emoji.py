"""The emoji dataset: the drawings of three vendors, without skin tones."""

from pathlib import Path

import torch

from unisono_models.datasets.emoji.concepts import ARTISTS, list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.gan.data.images import DATASETS, ImageDataset, RawImageDataset, set_channels


@DATASETS.register("emoji")
def read_emoji(*, size: int, colour: bool = True, cache: Path | None = None) -> RawImageDataset:
    """Read the emoji on a white background, in the order of `list_emoji`.

    Classes are Unicode's nine groups, captions are English names. Families are those of Concept.family: all drawings and
    variants of a concept are held out, or none.

    cache: folder for the rendered drawings. Rendering one size takes about ten seconds.

    Example:
        raw = read_emoji(size=32)
        raw.images.captions[0], raw.images.classes[8]  ->  "hash sign keycap", "flags"
    """
    concepts, drawings = list_emoji()
    rows = [row for row, drawing in enumerate(drawings) if not concepts[drawing.concept].toned]
    shown = [concepts[drawings[row].concept] for row in rows]
    labels = torch.tensor([GROUPS.index(concept.group) for concept in shown])
    pixels = set_channels(load_emoji_images(size, cache=cache)[torch.tensor(rows)], colour=colour)
    images = ImageDataset(pixels, labels, GROUPS, captions=tuple(concept.name for concept in shown))
    notes = tuple(f"{art.name}, {art.licence}, {art.source}" for art in ARTISTS.values())
    families = tuple(concept.family for concept in shown)
    return RawImageDataset(images, torch.arange(len(rows)), len(rows), notes=notes, families=families)
