"""Folders of image files: classes, captions and broken files, the same on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.gan.data.image_files import build, build_error, write_image
from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data.folder import list_folder, read_captions


def describe_datasets(config: DataConfig, condition: Condition) -> list[Any]:
    datasets = build(config, condition)
    parts = [[x.pixels, x.labels, x.vectors, x.captions, x.classes] for x in (datasets.train, datasets.test)]
    return [*parts, datasets.notes, datasets.fingerprint]


def test_folder_is_the_same_on_one_and_three_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    np.save(folder.parent / "vectors.npy", np.arange(22.0).reshape(11, 2))
    config = DataConfig(str(folder), size=4, test_part=0.4, vectors=str(folder.parent / "vectors.npy"), max_broken=0.2)
    train, test, notes, fingerprint = describe_datasets(config, "vector")
    places = torch.cat([train[0], test[0]])[:, 0, 0, 0].sort().values
    assert places.tolist() == [0, 10, 20, 40, 50, 60, 70, 90, 100]
    for pixels, labels, vectors, _, classes in (train, test):
        assert pixels.flatten(1).unique(dim=1).shape[1] == 1 and classes == ("ant", "bee", "cow")
        assert torch.equal(labels, pixels[:, 0, 0, 0].long() // 40)
        assert torch.equal(vectors[:, 0], 2 * (pixels[:, 0, 0, 0].float() / 10))  # broken images have rows, too
    assert test[1].tolist() == [0, 1, 1, 2]  # round(.4 * 3), round(.4 * 4) and round(.4 * 2) of each
    assert notes[0].startswith("2 of 11 images skipped. broken image: 2, such as ant/3.png (file 3): ")
    assert notes[1:] == (
        "4 of 9 images are saved in colour and turned to grey. --data.colour trains on their colours.",
        "--data.batch 64 is more than the 5 images to train on: each step has all of them once.",
    )
    for other in ranks(describe_datasets, config, "vector", world_size=3):
        assert other[2:] == [notes, fingerprint]
        for mine, theirs in zip((train, test), other[:2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine[:3], theirs[:3], strict=True)) and mine[3:] == theirs[3:]


def test_too_many_broken_images_raise_on_all_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    config = DataConfig(str(folder), size=4, max_broken=0.18)
    found = ranks(build_error, [config] * 2, "none", world_size=2)
    assert found[0] == found[1] and found[0].startswith(f"UserError: --data.source {folder}: 2 of 11 images skipped.")
    assert (
        "such as ant/3.png (file 3): " in found[0]
        and "allowed fraction of 0.18" in found[0]
        and "--data.max-broken" in found[0]
    )
    assert not build_error([replace(config, max_broken=2 / 11)], "none")


def test_linked_folders_count_once_and_by_their_own_names(tmp_path: Path) -> None:
    for name in ("home/cow/1.png", "home/cow/deep/2.png", "home/dog/3.png", "far/4.png"):
        write_image(tmp_path / name, 1)
    for name, target in {"cow/loop": "../..", "cow/deep/dog": "../../dog", "ape": "../far", "bat": "../far"}.items():
        (tmp_path / "home" / name).symlink_to(tmp_path / "home" / Path(name).parent / target, target_is_directory=True)
    listing = list_folder(tmp_path / "home")
    assert listing.names == ("ape/4.png", "cow/1.png", "cow/deep/2.png", "dog/3.png")


def test_folder_with_fewer_images_than_ranks_and_a_test_set(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    write_image(tmp_path / "train/a.png", 7, size=(5, 9))
    write_image(tmp_path / "val/b.png", 9, mode="RGB")
    for datasets in ranks(build, DataConfig(str(tmp_path), size=3, colour=True), world_size=3):
        assert datasets.train.pixels.shape == datasets.test.pixels.shape == (1, 3, 3, 3)
        assert datasets.train.pixels.unique().tolist() == [7] and datasets.test.pixels.unique().tolist() == [9]
        assert datasets.train.labels is None and datasets.train.classes == ()


def test_images_are_cropped_rotated_and_put_on_white(tmp_path: Path) -> None:
    wide = Image.new("RGB", (8, 4), "black")
    wide.paste((255, 0, 0), (2, 0, 6, 4))
    wide.save(tmp_path / "0.png")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "1.png")
    Image.fromarray(np.full((4, 4), 0x8080, dtype=np.uint16)).save(tmp_path / "2.png")
    upright = Image.new("L", (2, 2), 0)
    upright.paste(255, (0, 0, 2, 1))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright.save(tmp_path / "3.png", exif=exif)
    grey, colour = ({int(x[0, 0, 0]): x for x in _all(tmp_path, colour)} for colour in (False, True))
    assert grey[76].unique().tolist() == [76]  # red only: the black parts are outside of the centre square
    assert grey[255].unique().tolist() == [255] and grey[128].unique().tolist() == [128]
    assert grey[0][0].tolist() == [[0, 0], [255, 255]]
    assert colour[255].shape == (3, 2, 2) and (255, 0, 0) in {tuple(x[:, 0, 0].tolist()) for x in _all(tmp_path, True)}


def test_images_of_all_kinds_are_read_alike_and_changes_are_said(tmp_path: Path) -> None:
    picture = Image.new("RGB", (12, 8), (200, 40, 90))
    turned = Image.Exif()
    turned[0x0112] = 6
    exact, close = {"rgb.png": "RGB", "rgba.png": "RGBA", "palette.gif": "P"}, {"cmyk.jpg": "CMYK", "plain.webp": "RGB"}
    for name, mode in (exact | close).items():
        picture.convert(mode).save(tmp_path / name)
    picture.convert("P").save(tmp_path / "film.gif", save_all=True, append_images=[Image.new("P", (12, 8), 0)])
    picture.rotate(90, expand=True).save(tmp_path / "turned.jpg", exif=turned, quality=95)
    picture.resize((3, 3)).save(tmp_path / "small.png")
    datasets = build(DataConfig(str(tmp_path), size=4, colour=True, batch=2))
    pixels = torch.cat([datasets.train.pixels, datasets.test.pixels]).int()
    assert pixels.shape == (8, 3, 4, 4)
    assert (pixels - torch.tensor([200, 40, 90]).view(3, 1, 1)).abs().max() < 12  # lossy formats, and the palette of a GIF
    assert datasets.notes == (
        "7 of 8 images are not square: their centre square is used.",
        "1 of 8 images are smaller than --data.size: they are enlarged.",
    )


def test_classes_and_captions_that_are_not_used_are_said(tmp_path: Path) -> None:
    for shade in range(8):
        write_image(tmp_path / f"{'abcd'[shade % 4]}/{shade}.png", shade)
    (tmp_path / "metadata.csv").write_text("file_name,text\n" + "".join(f"{'abcd'[s % 4]}/{s}.png,{s}\n" for s in range(8)))
    config = DataConfig(str(tmp_path), size=2, test_part=0.5, batch=2)
    classes, captions = build(config, "none").notes
    assert classes == "The 4 classes (a, b, c, …) are not used. --model.condition class trains by class."
    assert captions == "The captions are not used. --model.condition text trains by caption."
    assert build(config, "class").notes == ()


def _all(folder: Path, colour: bool) -> Tensor:
    datasets = build(DataConfig(str(folder), size=2, colour=colour, test_part=0.5))
    return torch.cat([datasets.train.pixels, datasets.test.pixels])


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_captions_belong_to_their_images(tmp_path: Path, name: str) -> None:
    for shade in range(6):
        write_image(tmp_path / f"{shade}.png", shade)
    rows = [(f"./{shade}.png", f"a shade, of\n {shade}" if shade != 2 else "") for shade in (4, 2, 0, 5, 3)]
    if name.endswith("csv"):
        text = "\ufefffile_name,id,text\n" + "".join(f'{path},1,"{caption}"\n' for path, caption in rows)
    else:
        text = "\n".join(json.dumps({"file_name": path, "text": caption}) for path, caption in rows)
    (tmp_path / name).write_text(text)
    datasets = build(DataConfig(str(tmp_path), size=2, test_part=0.5))
    for images in (datasets.train, datasets.test):
        assert images.captions == tuple(
            f"a shade, of {shade}" if shade not in (1, 2) else "" for shade in images.pixels[:, 0, 0, 0].tolist()
        )
    (tmp_path / name).write_text(text.replace("file_name", "file"))
    with pytest.raises(ValueError, match=rf"{name}, line 1: needs the columns file_name and text, but has .*file"):
        build(DataConfig(str(tmp_path), size=2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", b'{"file_name": "0.png", "text": "a"}\n\n{"file_name": oh}\n', "line 3: not JSON: .*, column 15"),
        ("metadata.jsonl", b"\n[1]", "line 2: not an object"),
        ("metadata.csv", b"file_name,text\n0.png", "line 2: needs the columns file_name and text"),
        (
            "metadata.csv",
            b'file_name,text\n0.png,"two\nlines"\n\n1.png\n2.png,c',
            "line 5: needs the columns file_name and text",
        ),
        ("metadata.csv", b"file_name,text\n0.png,a\n\xff.png,b", "line 3: 'utf-8' codec"),
        ("metadata.csv", b"file_name,text\n0.png,a\n1.png," + b"x" * 200_000, "line 3: field larger"),
    ],
)
def test_metadata_errors_name_file_and_line(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{name}, {message}"):
        read_captions(tmp_path)


def test_metadata_that_names_no_image_is_reported(tmp_path: Path) -> None:
    for shade in range(2):
        write_image(tmp_path / f"cow/{shade}.png", shade)
    (tmp_path / "metadata.csv").write_text("file_name,text\nimages/0.png,a cow\n")
    config = DataConfig(str(tmp_path), size=2, test_part=0.5)
    message = "No file_name of the metadata is the path of an image: they look like images/0.png, and the images like cow/0.png"
    assert message in build(config, "class").notes[0] and message in build_error([config], "text")
