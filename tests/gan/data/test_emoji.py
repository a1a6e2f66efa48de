"""The emoji dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unisono_models.datasets.emoji import images as drawings_module
from unisono_models.datasets.emoji.concepts import list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.gan.data import emoji as emoji_module
from unisono_models.gan.data.dataset import hold_out_families
from unisono_models.gan.data.emoji import read_emoji


def test_emoji_are_held_out_by_family_in_every_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    concepts, drawings = list_emoji()
    black = torch.zeros(1, 3, 16, 16, dtype=torch.uint8).expand(len(drawings), -1, -1, -1)
    monkeypatch.setattr(emoji_module, "load_emoji_images", lambda size, cache=None: black)
    found = read_emoji(size=16, cache=tmp_path)
    shown = [concepts[drawing.concept] for drawing in drawings if not concepts[drawing.concept].toned]
    assert found.images.captions == tuple(concept.name for concept in shown) and len(shown) == 5536
    labels = found.images.labels
    assert labels is not None and found.test is None and found.images.classes == GROUPS
    assert [GROUPS[label] for label in labels.tolist()] == [concept.group for concept in shown]
    test = hold_out_families(found.families, labels.tolist(), fraction=0.2)
    sides = [{c.family for c, held in zip(shown, test.tolist(), strict=True) if held == side} for side in (False, True)]
    assert sides[0].isdisjoint(sides[1])
    part = labels[test].bincount() / labels.bincount()
    assert bool(((part > 0.15) & (part < 0.25)).all()), part


def test_emoji_are_colour_or_grey(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    concepts, drawings = list_emoji()
    few = [drawing for drawing in drawings if concepts[drawing.concept].name in ("red apple", "boxing glove", "waving hand")]
    few += [drawing for drawing in drawings if concepts[drawing.concept].emoji == "👋🏿"]
    for module in (drawings_module, emoji_module):
        monkeypatch.setattr(module, "list_emoji", lambda: (concepts, tuple(few)))
    assert len(few) > 9
    colour, grey = (read_emoji(size=16, colour=colour, cache=tmp_path) for colour in (True, False))
    assert sorted(colour.images.captions) == ["boxing glove"] * 3 + ["red apple"] * 3 + ["waving hand"] * 3  # none that is dark
    apple = colour.images.captions.index("red apple")
    pixels = colour.images.pixels[apple]
    red, green, blue = pixels[:, 8, 8].tolist()
    assert red > green and red > blue and pixels[:, 0, 0].tolist() == [255] * 3
    expected = np.asarray(Image.fromarray(pixels.permute(1, 2, 0).numpy()).convert("L"))
    assert torch.equal(grey.images.pixels[apple, 0], torch.from_numpy(expected.copy()))
    assert any("OpenMoji" in note and "CC-BY-SA-4.0" in note for note in colour.notes)
