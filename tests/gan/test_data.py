"""The data of the GAN: the right pictures with the right labels, the same on any number of ranks."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from unisono_models.datasets.emoji import images as drawings_module
from unisono_models.datasets.emoji.concepts import list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data import dataset as source_module
from unisono_models.gan.data import emoji as emoji_module
from unisono_models.gan.data.conditions import TextEncoder, encode_captions
from unisono_models.gan.data.dataset import Datasets, build_datasets, hold_out, hold_out_families
from unisono_models.gan.data.emoji import read_emoji
from unisono_models.gan.data.folder import list_folder, read_captions
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.mnist import mnist_file, read_idx, read_idx_folder, read_mnist, scale_grey, set_channels
from unisono_models.training.distributed.launch import Ranks, start_ranks

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def opened(config: DataConfig, condition: Condition = "none") -> Datasets:
    with start_ranks() as ranks:
        return build_datasets(config, condition=condition, ranks=ranks)


def failed(configs: Sequence[DataConfig], condition: Condition) -> str:
    """The error of a rank, which opens configs[rank]."""
    with start_ranks() as ranks:
        try:
            build_datasets(configs[ranks.rank], condition=condition, ranks=ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def put(path: Path, shade: int, *, mode: str = "L", size: tuple[int, int] = (6, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven files of three classes, two of them broken; the shade of a picture is ten times its place by name."""
    names = [f"{kind}/{number}.png" for kind in ("ant", "bee", "cow") for number in range(4)][:-1]
    for place, name in enumerate(names):
        put(tmp_path / "own" / name, 10 * place, mode=("L", "RGB", "LA", "P")[place % 4])
    (tmp_path / "own/ant/3.png").write_bytes((tmp_path / "own/ant/3.png").read_bytes()[:50])
    (tmp_path / "own/cow/0.png").write_text("no picture")
    (tmp_path / "own/.hidden.png").write_text("nor this")
    return tmp_path / "own"


# MNIST-5k and scaling


def test_mnist_is_split_by_class_as_on_every_machine() -> None:
    source = opened(DataConfig(size=16), "class")
    assert source.train.labels is not None and source.test.labels is not None
    assert source.train.labels.bincount().tolist() == [400] * 10 and source.test.labels.bincount().tolist() == [100] * 10
    assert source.shapes("class") == {"size": 16, "channels": 1, "conditions": 10} and source.shapes("none")["conditions"] == 0
    assert source.fingerprint[:16] == "09e9549bbe90a7d6"  # pixels, their order, and who is held out
    whole = read_mnist(size=16).images.pixels.flatten(1)
    both = torch.cat([source.train.pixels, source.test.pixels]).flatten(1)
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, whole.numpy()))
    floats = source.train.floats(torch.tensor([5, 3]), dtype=torch.float64)
    torch.testing.assert_close(floats, source.train.pixels[[5, 3]].double() / 127.5 - 1, rtol=0, atol=1e-15)
    assert "MNIST by Y. LeCun" in source.notes[0]


def test_mnist_is_padded_and_averaged_or_enlarged() -> None:
    table = np.loadtxt(mnist_file(), delimiter=",", dtype=np.uint8, max_rows=2000)[::200]
    raw = torch.from_numpy(table[:, :-1].reshape(-1, 28, 28))
    found = {size: read_mnist(size=size).images for size in (16, 28, 32, 64)}
    some = {size: images.pixels[:2000:200, 0] for size, images in found.items()}
    assert found[16].labels is not None and found[16].labels[:2000:200].tolist() == table[:, -1].tolist()
    assert torch.equal(some[28], raw) and torch.equal(some[32][:, 2:-2, 2:-2], raw)
    assert int(some[32].sum()) == int(raw.sum())  # the border is black
    boxes = some[32].double().view(-1, 16, 2, 16, 2).mean((2, 4))
    assert torch.equal(some[16], boxes.round().to(torch.uint8))
    halved = some[64].double().view(-1, 32, 2, 32, 2).mean((2, 4))
    assert float((halved - some[32]).abs().mean()) < 8 < float((halved - some[32].roll(1, 2)).abs().mean())
    assert read_mnist(size=16, colour=True).images.pixels.shape == (5000, 3, 16, 16)
    with pytest.raises(ValueError, match=r"data.size=20: pictures of 28 x 28 pixels can have the sizes 8, 16, 28, 32, 64"):
        read_mnist(size=20)


def test_hold_out_takes_the_same_part_of_each_class_and_never_all() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2])
    held = hold_out(labels, count=61, part=0.3)
    assert labels[held].bincount().tolist() == [15, 3]
    assert not hold_out(labels, count=61, part=0.9)[60]
    assert int(hold_out(None, count=61, part=0.3).sum()) == 18
    assert held[:50].nonzero().flatten().tolist() != list(range(15))
    with pytest.raises(ValueError, match=r"data.test_part=1.0: must be above 0 and below 1"):
        hold_out(labels, count=61, part=1.0)


# idx


def write_idx(path: Path, numbers: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes((0, 0, 8, numbers.dim())) + struct.pack(f">{numbers.dim()}I", *numbers.shape)
    data = head + numbers.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_idx_folder_keeps_order_labels_and_test_set(tmp_path: Path) -> None:
    pixels = torch.arange(6 * 28 * 28).remainder(251).to(torch.uint8).view(6, 28, 28)
    labels = torch.tensor([7, 1, 7, 3, 1, 3], dtype=torch.uint8)
    raw = tmp_path / "FashionMNIST/raw"
    for name, rows in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        write_idx(raw / f"{name}-images-idx3-ubyte.gz", pixels[rows])
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[rows])
    for place in (raw, tmp_path):  # its root, too, as torchvision is told
        source = opened(DataConfig(str(place), size=28), "class")
        assert torch.equal(source.train.pixels[:, 0], pixels[:4]) and torch.equal(source.test.pixels[:, 0], pixels[4:])
        assert source.train.classes == ("1", "3", "7")
        assert source.train.labels is not None and source.train.labels.tolist() == [2, 0, 2, 1]
    write_idx(raw / "train-labels-idx1-ubyte", torch.tensor([7, 1, 3, 7], dtype=torch.uint8))
    assert opened(DataConfig(str(raw), size=28), "class").fingerprint != source.fingerprint
    write_idx(raw / "train-labels-idx1-ubyte", labels[:3])
    with pytest.raises(ValueError, match="3 labels for 4 pictures of train"):
        read_idx_folder(raw, size=28)
    write_idx(raw / "train-labels-idx1-ubyte", labels[:4])
    (raw / "t10k-images-idx3-ubyte.gz").unlink()
    assert read_idx_folder(raw, size=28).test is None
    for name in ("t10k", "train"):
        (raw / f"{name}-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"model.condition=class: .* has no labels: put the pictures of each class into"):
        opened(DataConfig(str(raw), size=28), "class")


def test_idx_of_other_shapes_is_cut_to_a_square_and_scaled() -> None:
    wide = torch.zeros(1, 4, 8, dtype=torch.uint8)
    wide[:, :, 2:6] = 200  # the centre square
    assert scale_grey(wide, size=2).unique().tolist() == [200]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda data: data[:-1], r"5 numbers, and its head says \(2, 3\): cut off"),
        ("x", lambda data: b"\x00\x00\x0d" + data[3:], "begins with 00 00 0d 02: not an idx file of bytes"),
        ("x", lambda data: data[:7], "begins with 00 00 08 02: not an idx file"),
        ("x.gz", lambda data: data[:-9], "cut off or damaged"),
        ("x.gz", lambda data: b"12" + data[2:], "cut off or damaged"),
    ],
)
def test_read_idx_rejects_damaged_files(tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / name
    write_idx(path, torch.ones(2, 3, dtype=torch.uint8))
    assert read_idx(path).tolist() == [[1, 1, 1]] * 2
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_idx(path)


# folders


def described(config: DataConfig, condition: Condition) -> list[Any]:
    source = opened(config, condition)
    parts = [[x.pixels, x.labels, x.vectors, x.captions, x.classes] for x in (source.train, source.test)]
    return [*parts, source.notes, source.fingerprint]


def test_folder_is_the_same_on_one_and_three_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    np.save(folder.parent / "vectors.npy", np.arange(22.0).reshape(11, 2))
    config = DataConfig(str(folder), size=4, test_part=0.4, vectors=str(folder.parent / "vectors.npy"), max_broken=0.2)
    train, test, notes, fingerprint = described(config, "vector")
    places = torch.cat([train[0], test[0]])[:, 0, 0, 0].sort().values
    assert places.tolist() == [0, 10, 20, 40, 50, 60, 70, 90, 100]
    for pixels, labels, vectors, _, classes in (train, test):
        assert pixels.flatten(1).unique(dim=1).shape[1] == 1 and classes == ("ant", "bee", "cow")
        assert torch.equal(labels, pixels[:, 0, 0, 0].long() // 40)
        assert torch.equal(vectors[:, 0], 2 * (pixels[:, 0, 0, 0].float() / 10))  # rows of broken pictures count
    assert test[1].tolist() == [0, 1, 1, 2]  # round(.4 * 3), round(.4 * 4) and round(.4 * 2) of each
    assert len(notes) == 1 and notes[0].startswith("2 of 11 pictures skipped. broken picture: 2, such as ant/3.png (file 3): ")
    for other in ranks(described, config, "vector", world_size=3):
        assert other[2:] == [notes, fingerprint]
        for mine, theirs in zip((train, test), other[:2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine[:3], theirs[:3], strict=True)) and mine[3:] == theirs[3:]


def test_more_broken_pictures_than_allowed_end_the_run_on_all_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    config = DataConfig(str(folder), size=4, max_broken=0.18)
    found = ranks(failed, [config] * 2, "none", world_size=2)
    assert found[0] == found[1] and found[0].startswith(f"ValueError: data.source={folder}: 2 of 11 pictures skipped.")
    assert "such as ant/3.png (file 3): " in found[0] and "0.18 of them" in found[0] and "--data.max-broken" in found[0]
    assert not failed([replace(config, max_broken=2 / 11)], "none")


def test_folders_that_are_linked_count_once_and_by_their_own_names(tmp_path: Path) -> None:
    for name in ("home/cow/1.png", "home/cow/deep/2.png", "home/dog/3.png", "far/4.png"):
        put(tmp_path / name, 1)
    for name, target in {"cow/loop": "../..", "cow/deep/dog": "../../dog", "ape": "../far", "bat": "../far"}.items():
        (tmp_path / "home" / name).symlink_to(tmp_path / "home" / Path(name).parent / target, target_is_directory=True)
    listing = list_folder(tmp_path / "home")
    assert listing.names == ("ape/4.png", "cow/1.png", "cow/deep/2.png", "dog/3.png")


def test_folder_with_fewer_pictures_than_ranks_and_a_test_set(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    put(tmp_path / "train/a.png", 7, size=(5, 9))
    put(tmp_path / "val/b.png", 9, mode="RGB")
    for source in ranks(opened, DataConfig(str(tmp_path), size=3, colour=True), world_size=3):
        assert source.train.pixels.shape == source.test.pixels.shape == (1, 3, 3, 3)
        assert source.train.pixels.unique().tolist() == [7] and source.test.pixels.unique().tolist() == [9]
        assert source.train.labels is None and source.train.classes == ()


def test_pictures_are_cut_turned_and_laid_on_white(tmp_path: Path) -> None:
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
    assert grey[76].unique().tolist() == [76]  # red alone: black is outside of the centre
    assert grey[255].unique().tolist() == [255] and grey[128].unique().tolist() == [128]
    assert grey[0][0].tolist() == [[0, 0], [255, 255]]
    assert colour[255].shape == (3, 2, 2) and (255, 0, 0) in {tuple(x[:, 0, 0].tolist()) for x in _all(tmp_path, True)}


def _all(folder: Path, colour: bool) -> Tensor:
    source = opened(DataConfig(str(folder), size=2, colour=colour, test_part=0.5))
    return torch.cat([source.train.pixels, source.test.pixels])


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_captions_go_with_their_pictures(tmp_path: Path, name: str) -> None:
    for shade in range(6):
        put(tmp_path / f"{shade}.png", shade)
    rows = [(f"./{shade}.png", f"a shade, of\n {shade}" if shade != 2 else "") for shade in (4, 2, 0, 5, 3)]
    if name.endswith("csv"):
        text = "\ufefffile_name,id,text\n" + "".join(f'{path},1,"{caption}"\n' for path, caption in rows)
    else:
        text = "\n".join(json.dumps({"file_name": path, "text": caption}) for path, caption in rows)
    (tmp_path / name).write_text(text)
    source = opened(DataConfig(str(tmp_path), size=2, test_part=0.5))
    for images in (source.train, source.test):
        assert images.captions == tuple(
            f"a shade, of {shade}" if shade not in (1, 2) else "" for shade in images.pixels[:, 0, 0, 0].tolist()
        )
    (tmp_path / name).write_text(text.replace("file_name", "file"))
    with pytest.raises(ValueError, match=rf"{name}, line 1: columns file_name and text are needed; there are .*file"):
        opened(DataConfig(str(tmp_path), size=2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", b'{"file_name": "0.png", "text": "a"}\n\n{"file_name": oh}\n', "line 3: not JSON: .*, column 15"),
        ("metadata.jsonl", b"\n[1]", "line 2: not an object"),
        ("metadata.csv", b"file_name,text\n0.png", "line 2: columns file_name and text are"),
        ("metadata.csv", b'file_name,text\n0.png,"two\nlines"\n\n1.png\n2.png,c', "line 5: columns file_name and text are"),
        ("metadata.csv", b"file_name,text\n0.png,a\n\xff.png,b", "line 3: 'utf-8' codec"),
        ("metadata.csv", b"file_name,text\n0.png,a\n1.png," + b"x" * 200_000, "line 3: field larger"),
    ],
)
def test_captions_that_cannot_be_read_are_named_by_their_line(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{name}, {message}"):
        read_captions(tmp_path)


def test_captions_of_no_picture_are_pointed_out(tmp_path: Path) -> None:
    for shade in range(2):
        put(tmp_path / f"cow/{shade}.png", shade)
    (tmp_path / "metadata.csv").write_text("file_name,text\nimages/0.png,a cow\n")
    config = DataConfig(str(tmp_path), size=2, test_part=0.5)
    message = "No file_name of the metadata is that of a picture: they are such as images/0.png, and pictures such as cow/0.png"
    assert message in opened(config, "class").notes[0] and message in failed([config], "text")


# errors


def test_errors_are_raised_on_all_ranks(folder: Path, ranks: Callable[..., list[Any]]) -> None:
    good = DataConfig(str(folder), size=4, vectors=str(folder.parent / "vectors.npy"), max_broken=0.2)
    np.save(good.vectors, np.zeros((11, 2)))
    elsewhere = replace(good, vectors="/nowhere.npy")
    found = ranks(failed, [good, elsewhere, good], "vector", world_size=3)
    assert len(set(found)) == 1 and "rank 1: ValueError: data.vectors=/nowhere.npy: not a .npy file of numbers" in found[0]
    other = folder.parent / "other"
    for place in range(3):
        put(other / f"{place}.png", place)
    found = ranks(failed, [good, good, replace(good, source=str(other))], "vector", world_size=3)
    assert all("ranks [2] see other files than rank 0" in error for error in found)
    for path in other.iterdir():
        path.write_text("no picture")
    found = ranks(failed, [replace(good, source=str(other))] * 3, "vector", world_size=3)
    assert len(set(found)) == 1 and "none of its pictures can be read. 3 of 3 pictures skipped" in found[0]


def test_errors_say_what_to_do(folder: Path) -> None:
    np.save(folder.parent / "few.npy", np.zeros((9, 2)))
    np.save(folder.parent / "odd.npy", np.full((11, 2), np.nan))
    config = DataConfig(str(folder), size=4, max_broken=0.2)
    for changes, condition, message in (
        ({"source": "/nowhere"}, "none", "data.source=/nowhere: neither mnist-5k nor emoji nor a folder that exists"),
        ({"source": str(folder / "ant" / "0.png")}, "none", "nor a folder that exists"),
        ({}, "text", "has no captions: put a metadata.csv with the columns file_name and text into the folder"),
        ({}, "vector", "name a .npy file with a row for each picture by --data.vectors"),
        ({"vectors": str(folder.parent / "few.npy")}, "vector", "9 rows for 11 pictures"),
        ({"vectors": str(folder.parent / "odd.npy")}, "vector", "row 0 has numbers that are not finite"),
        ({"test_part": 0.01}, "none", "9 pictures to train on and 0 to test on"),
        ({"vectors": "x.npy"}, "text", "--data.vectors x.npy: is for model.condition=vector, and it is text: leave it out, or"),
        ({"text_model": "some/one"}, "class", "--data.text-model some/one: is for model.condition=text, and it is class"),
    ):
        assert message in failed([replace(config, **changes)], condition), changes  # type: ignore[arg-type]
    (folder.parent / "empty").mkdir()
    assert "a folder without pictures" in failed([replace(config, source=str(folder.parent / "empty"))], "none")
    put(folder.parent / "parts/train/a/1.png", 1)
    put(folder.parent / "parts/test/b/1.png", 1)
    parts = replace(config, source=str(folder.parent / "parts"))
    assert "of the class b are in the test set only" in failed([parts], "class") and not failed([parts], "none")


def test_fingerprint_notices_a_pixel_a_class_and_a_vector(folder: Path) -> None:
    vectors = folder.parent / "vectors.npy"
    np.save(vectors, np.zeros((11, 2)))
    config = DataConfig(str(folder), size=4, vectors=str(vectors), max_broken=0.2)
    marks = [opened(config, "vector").fingerprint, opened(config, "vector").fingerprint]
    np.save(vectors, np.eye(11, 2))
    marks.append(opened(config, "vector").fingerprint)
    put(folder / "bee/1.png", 99)
    marks.append(opened(config, "vector").fingerprint)
    (folder / "bee").rename(folder / "bug")
    marks.append(opened(config, "vector").fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 4


# texts


class TileEncoder:
    """Gives each caption what a forward could depend on: its neighbours in the tile."""

    fingerprint = "tiles"

    def __init__(self, model: str = "", *, device: torch.device | None = None) -> None:
        pass

    def __call__(self, captions: Sequence[str]) -> Tensor:
        rows = [[len(text), len(captions), max(map(len, captions)), sum(map(ord, "".join(captions)))] for text in captions]
        return torch.tensor(rows, dtype=torch.float32)


def encoded(captions: list[str]) -> Tensor:
    with start_ranks() as ranks:
        return encode_captions(captions, TileEncoder(), ranks=ranks)  # type: ignore[arg-type]


def test_captions_are_encoded_in_the_same_tiles_on_any_number_of_ranks(ranks: Callable[..., list[Any]]) -> None:
    captions = [f"{'x' * (n % 13)}{n % 190}" for n in range(400)]
    whole = encoded(captions)
    assert whole[:, 0].tolist() == [len(text) for text in captions]
    assert whole[:, 1].max() == 64
    for world in (2, 3):
        assert all(torch.equal(theirs, whole) for theirs in ranks(encoded, captions, world_size=world))
    assert all(torch.equal(theirs, encoded(["a"])) for theirs in ranks(encoded, ["a"], world_size=2))


def test_classes_without_a_caption_are_no_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source_module, "TextEncoder", TileEncoder)
    for place in range(12):
        put(tmp_path / ("ant", "bee", "cow")[place % 3] / f"{place}.png", place)
    rows = "".join(f"{('ant', '', 'cow')[place % 3]}/{place}.png,number {place}\n" for place in range(12) if place % 3 != 1)
    (tmp_path / "metadata.csv").write_text("file_name,text\n" + rows)
    source = opened(DataConfig(str(tmp_path), size=2, test_part=0.5), "text")
    for images in (source.train, source.test):
        assert images.classes == ("ant", "cow") and images.labels is not None
        assert images.labels.tolist() == [int(shade % 3 == 2) for shade in images.pixels[:, 0, 0, 0].tolist()]
    assert source.notes[-1] == "Without a picture, and so no class: bee."


def test_minilm_vectors_do_not_depend_on_padding_and_know_words(tmp_path: Path) -> None:
    encoder = TextEncoder("", device=torch.device("cpu"))
    texts = ["red heart", "a heart that is red", "a steam locomotive that pulls seven old wagons up the hill"]
    vectors = encode_captions([*texts, texts[0]], encoder, ranks=ALONE)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    assert torch.equal(vectors[0], vectors[3])
    torch.testing.assert_close(vectors[:1], encoder(texts[:1]), rtol=0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.8 > 0.4 > vectors[0] @ vectors[2]
    put(tmp_path / "0.png", 0)
    put(tmp_path / "1.png", 10)
    put(tmp_path / "2.png", 20)
    (tmp_path / "metadata.csv").write_text(f"file_name,text\n2.png,{texts[2]}\n0.png,{texts[0]}\n")
    source = opened(DataConfig(str(tmp_path), size=2, test_part=0.5), "text")
    found = {int(x.pixels[0, 0, 0, 0]): x.vectors for x in (source.train, source.test)}
    assert sorted(found) == [0, 20] and "1 of 3 pictures left out: they have no caption." in source.notes
    torch.testing.assert_close(torch.cat([found[0], found[20]]), vectors[[0, 2]], rtol=0, atol=1e-5)  # type: ignore[list-item]


# emoji


def test_emoji_hold_out_families_in_every_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    concepts, drawings = list_emoji()
    black = torch.zeros(1, 3, 16, 16, dtype=torch.uint8).expand(len(drawings), -1, -1, -1)
    monkeypatch.setattr(emoji_module, "load_drawings", lambda size, cache=None: black)
    found = read_emoji(size=16, cache=tmp_path)
    shown = [concepts[drawing.concept] for drawing in drawings if not concepts[drawing.concept].toned]
    assert found.images.captions == tuple(concept.name for concept in shown) and len(shown) == 5536
    labels = found.images.labels
    assert labels is not None and found.test is None and found.images.classes == GROUPS
    assert [GROUPS[label] for label in labels.tolist()] == [concept.group for concept in shown]
    test = hold_out_families(found.families, labels.tolist(), part=0.2)
    sides = [{c.family for c, held in zip(shown, test.tolist(), strict=True) if held == side} for side in (False, True)]
    assert sides[0].isdisjoint(sides[1])
    part = labels[test].bincount() / labels.bincount()
    assert bool(((part > 0.15) & (part < 0.25)).all()), part


def test_emoji_are_drawn_in_colour_or_grey(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_images_reject_what_does_not_belong_together() -> None:
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="Images: 3 labels for 2 pictures"):
        Images(pixels, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be uint8"):
        Images(pixels.float())
    assert torch.equal(set_channels(pixels, colour=True), torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
