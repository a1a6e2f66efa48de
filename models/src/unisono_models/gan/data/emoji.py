"""Emoji as pictures to learn from: the drawings of three vendors, without skin tones."""

from __future__ import annotations

from pathlib import Path

import torch

from unisono_models.datasets.emoji.concepts import ARTISTS, list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.gan.data.images import Found, Images
from unisono_models.gan.data.mnist import set_channels

NAME = "emoji"


def read_emoji(*, size: int, colour: bool = True, cache: Path | None = None) -> Found:
    """The drawings, on white, in the order of `list_emoji`. Classes are Unicode's nine groups, captions English names.

    Its families are those of Concept.family: all drawings and variants of a concept stay on one side of the split.
    cache: where drawings are kept once they are rendered, which takes about ten seconds for a size.

    Example:
        found = read_emoji(size=32)
        found.images.captions[0], found.images.classes[8]  ->  "hash sign keycap", "flags"
    """
    concepts, drawings = list_emoji()
    rows = [row for row, drawing in enumerate(drawings) if not concepts[drawing.concept].toned]
    shown = [concepts[drawings[row].concept] for row in rows]
    labels = [GROUPS.index(concept.group) for concept in shown]
    pixels = set_channels(load_emoji_images(size, cache=cache)[torch.tensor(rows)], colour=colour)
    images = Images(pixels, torch.tensor(labels), GROUPS, captions=tuple(concept.name for concept in shown))
    notes = tuple(f"{art.name}, {art.licence}, {art.source}" for art in ARTISTS.values())
    return Found(images, torch.arange(len(rows)), len(rows), notes=notes, families=tuple(concept.family for concept in shown))
