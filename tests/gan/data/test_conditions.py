"""Captions as vectors: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gan.data.image_files import build, write_image
from tests.gan.small_runs import ALONE
from unisono_models.gan.config import DataConfig
from unisono_models.gan.data import dataset as dataset_module
from unisono_models.gan.data.conditions import TextEncoder, encode_captions
from unisono_models.training.distributed.launch import start_ranks
from unisono_models.training.errors import UserError


class GroupEncoder:
    """Encodes a caption as numbers that depend on the other captions of the same forward."""

    fingerprint = "tiles"

    def __init__(self, model: str = "", *, device: torch.device | None = None) -> None:
        pass

    def __call__(self, captions: Sequence[str]) -> Tensor:
        rows = [[len(text), len(captions), max(map(len, captions)), sum(map(ord, "".join(captions)))] for text in captions]
        return torch.tensor(rows, dtype=torch.float32)


def encoded(captions: list[str]) -> Tensor:
    with start_ranks() as ranks:
        return encode_captions(captions, GroupEncoder(), ranks=ranks)  # type: ignore[arg-type]


def test_captions_are_encoded_in_the_same_groups_on_any_number_of_ranks(ranks: Callable[..., list[Any]]) -> None:
    captions = [f"{'x' * (n % 13)}{n % 190}" for n in range(400)]
    whole = encoded(captions)
    assert whole[:, 0].tolist() == [len(text) for text in captions]
    assert whole[:, 1].max() == 64
    for world in (2, 3):
        assert all(torch.equal(theirs, whole) for theirs in ranks(encoded, captions, world_size=world))
    assert all(torch.equal(theirs, encoded(["a"])) for theirs in ranks(encoded, ["a"], world_size=2))


def test_classes_without_captions_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dataset_module, "TextEncoder", GroupEncoder)
    for place in range(12):
        write_image(tmp_path / ("ant", "bee", "cow")[place % 3] / f"{place}.png", place)
    rows = "".join(f"{('ant', '', 'cow')[place % 3]}/{place}.png,number {place}\n" for place in range(12) if place % 3 != 1)
    (tmp_path / "metadata.csv").write_text("file_name,text\n" + rows)
    datasets = build(DataConfig(str(tmp_path), size=2, test_part=0.5), "text")
    for images in (datasets.train, datasets.test):
        assert images.classes == ("ant", "cow") and images.labels is not None
        assert images.labels.tolist() == [int(shade % 3 == 2) for shade in images.pixels[:, 0, 0, 0].tolist()]
    assert datasets.notes[1] == "These classes are dropped, since none of their images is left: bee."


def test_text_encoder_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "package:no_such_package"):
        with pytest.raises(
            UserError, match=rf"^--data\.text-model {name}: the text encoder cannot be loaded\. Give the folder"
        ):
            TextEncoder(name, device=torch.device("cpu"))


def test_minilm_vectors_do_not_depend_on_padding_and_reflect_meaning(tmp_path: Path) -> None:
    encoder = TextEncoder("", device=torch.device("cpu"))
    texts = ["red heart", "a heart that is red", "a steam locomotive that pulls seven old wagons up the hill"]
    vectors = encode_captions([*texts, texts[0]], encoder, ranks=ALONE)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    assert torch.equal(vectors[0], vectors[3])
    torch.testing.assert_close(vectors[:1], encoder(texts[:1]), rtol=0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.8 > 0.4 > vectors[0] @ vectors[2]
    write_image(tmp_path / "0.png", 0)
    write_image(tmp_path / "1.png", 10)
    write_image(tmp_path / "2.png", 20)
    (tmp_path / "metadata.csv").write_text(f"file_name,text\n2.png,{texts[2]}\n0.png,{texts[0]}\n")
    datasets = build(DataConfig(str(tmp_path), size=2, test_part=0.5), "text")
    found = {int(x.pixels[0, 0, 0, 0]): x.vectors for x in (datasets.train, datasets.test)}
    assert sorted(found) == [0, 20] and "1 of 3 images are left out: they have no caption." in datasets.notes
    torch.testing.assert_close(torch.cat([found[0], found[20]]), vectors[[0, 2]], rtol=0, atol=1e-5)  # type: ignore[list-item]
