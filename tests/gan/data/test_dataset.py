"""The training and test set: the split, the fingerprint, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gan.data.image_files import build, build_error, write_image
from unisono_models.gan.config import DataConfig
from unisono_models.gan.data.dataset import hold_out


def test_hold_out_takes_the_same_fraction_of_each_class_and_never_all() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2])
    held = hold_out(labels, count=61, fraction=0.3)
    assert labels[held].bincount().tolist() == [15, 3]
    assert not hold_out(labels, count=61, fraction=0.9)[60]
    assert int(hold_out(None, count=61, fraction=0.3).sum()) == 18
    assert held[:50].nonzero().flatten().tolist() != list(range(15))
    with pytest.raises(ValueError, match=r"--data.test-part 1.0: must be above 0 and below 1"):
        hold_out(labels, count=61, fraction=1.0)


def test_errors_are_raised_on_all_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    good = DataConfig(str(folder), size=4, vectors=str(folder.parent / "vectors.npy"), max_broken=0.2)
    np.save(good.vectors, np.zeros((11, 2)))
    elsewhere = replace(good, vectors="/nowhere.npy")
    found = ranks(build_error, [good, elsewhere, good], "vector", world_size=3)
    assert len(set(found)) == 1 and "rank 1: " in found[0]
    assert "--data.vectors /nowhere.npy: not a .npy file of numbers" in found[0]
    other = folder.parent / "other"
    for place in range(3):
        write_image(other / f"{place}.png", place)
    found = ranks(build_error, [good, good, replace(good, source=str(other))], "vector", world_size=3)
    assert all("ranks [2] see other files than rank 0" in error for error in found)
    for path in other.iterdir():
        path.write_text("no image")
    found = ranks(build_error, [replace(good, source=str(other))] * 3, "vector", world_size=3)
    assert len(set(found)) == 1 and "none of its images can be read. 3 of 3 images skipped" in found[0]


def test_errors_say_what_to_do(folder: Path) -> None:
    np.save(folder.parent / "few.npy", np.zeros((9, 2)))
    np.save(folder.parent / "odd.npy", np.full((11, 2), np.nan))
    config = DataConfig(str(folder), size=4, max_broken=0.2)
    for changes, condition, message in (
        ({"source": ""}, "none", "--data.source: say which folder holds your images"),
        (
            {"source": "/nowhere"},
            "none",
            "--data.source /nowhere: there is no such folder. It must be a folder of images, or emoji",
        ),
        ({"source": str(folder / "ant" / "0.png")}, "none", "0.png: is a file, and no folder"),
        ({"source": str(folder / "bee")}, "class", "--model.condition class: --data.source {} has no classes. Put"),
        ({}, "text", "has no captions. Put a metadata.csv with the columns file_name and text into the folder"),
        ({}, "vector", "set --data.vectors to a .npy file with one row for each image"),
        ({"vectors": str(folder.parent / "few.npy")}, "vector", "9 rows for 11 images"),
        ({"vectors": str(folder.parent / "odd.npy")}, "vector", "row 0 has numbers that are not finite"),
        ({"test_part": 0.01}, "none", "there are 9 images to train on and 0 to test on"),
        (
            {"vectors": "x.npy"},
            "text",
            "--data.vectors x.npy is for --model.condition vector, and the condition is text: leave it out, or",
        ),
        (
            {"text_model": "some/one"},
            "class",
            "--data.text-model some/one is for --model.condition text, and the condition is class",
        ),
    ):
        error = build_error([replace(config, **changes)], condition)  # type: ignore[arg-type]
        assert error.startswith("UserError: ") and message.format(folder / "bee") in error, changes
    (folder.parent / "empty").mkdir()
    assert "the folder has no image files" in build_error([replace(config, source=str(folder.parent / "empty"))], "none")
    write_image(folder.parent / "parts/train/a/1.png", 1)
    write_image(folder.parent / "parts/test/b/1.png", 1)
    parts = replace(config, source=str(folder.parent / "parts"))
    assert "all images of the class b are in the test set" in build_error([parts], "class") and not build_error([parts], "none")


def test_fingerprint_changes_with_a_pixel_a_class_and_a_vector(folder: Path) -> None:
    vectors = folder.parent / "vectors.npy"
    np.save(vectors, np.zeros((11, 2)))
    config = DataConfig(str(folder), size=4, vectors=str(vectors), max_broken=0.2)
    marks = [build(config, "vector").fingerprint, build(config, "vector").fingerprint]
    np.save(vectors, np.eye(11, 2))
    marks.append(build(config, "vector").fingerprint)
    write_image(folder / "bee/1.png", 99)
    marks.append(build(config, "vector").fingerprint)
    (folder / "bee").rename(folder / "bug")
    marks.append(build(config, "vector").fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 4
