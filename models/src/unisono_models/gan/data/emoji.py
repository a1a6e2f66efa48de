"""Emoji as pictures to learn from: the drawings of three vendors, without skin tones."""

from __future__ import annotations

from pathlib import Path

import torch

from unisono_models.datasets.emoji.concepts import ARTISTS, list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.gan.data.found import Found
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.scaling import set_channels
from unisono_models.gan.data.splits import hold_out_families

NAME = "emoji"


def read_emoji(*, size: int, colour: bool = True, test_part: float = 0.2, cache: Path | None = None) -> Found:
    """The drawings, on white, in the order of `list_emoji`. Classes are Unicode's nine groups, captions English names.

    test_part: of the families of concepts (see Concept.family) in each group: a concept that is kept from training is so in all
    its drawings and variants.
    cache: where drawings are kept once they are rendered, which takes about ten seconds for a size.

    Example:
        found = read_emoji(size=32)
        found.images.captions[0], found.images.classes[8]  ->  "hash sign keycap", "flags"
    """
    concepts, drawings = list_emoji()
    rows = [row for row, drawing in enumerate(drawings) if not concepts[drawing.concept].toned]
    shown = [concepts[drawings[row].concept] for row in rows]
    labels = [GROUPS.index(concept.group) for concept in shown]
    test = hold_out_families([concept.family for concept in shown], labels, part=test_part)
    pixels = set_channels(load_emoji_images(size, cache=cache)[torch.tensor(rows)], colour=colour)
    images = Images(pixels, torch.tensor(labels), GROUPS, captions=tuple(concept.name for concept in shown))
    notes = tuple(f"{art.name}, {art.licence}, {art.source}" for art in ARTISTS.values())
    return Found(images, torch.arange(len(rows)), len(rows), test, notes)
