"""MNIST-5k, idx files and the scaling of grey images."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gan.data.image_files import build
from unisono_models.gan.config import DataConfig
from unisono_models.gan.data.mnist import mnist_file, read_idx, read_idx_folder, read_mnist, scale_grey


def test_mnist_split_is_the_same_on_every_machine() -> None:
    datasets = build(DataConfig(size=16), "class")
    assert datasets.train.labels is not None and datasets.test.labels is not None
    assert datasets.train.labels.bincount().tolist() == [400] * 10 and datasets.test.labels.bincount().tolist() == [100] * 10
    assert (
        datasets.shapes("class") == {"size": 16, "channels": 1, "conditions": 10} and datasets.shapes("none")["conditions"] == 0
    )
    assert datasets.fingerprint[:16] == "09e9549bbe90a7d6"  # of pixels, their order, and the test set
    whole = read_mnist(size=16).images.pixels.flatten(1)
    both = torch.cat([datasets.train.pixels, datasets.test.pixels]).flatten(1)
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, whole.numpy()))
    floats = datasets.train.floats(torch.tensor([5, 3]), dtype=torch.float64)
    torch.testing.assert_close(floats, datasets.train.pixels[[5, 3]].double() / 127.5 - 1, rtol=0, atol=1e-15)
    assert "MNIST by Y. LeCun" in datasets.notes[0]


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
    with pytest.raises(ValueError, match=r"--data.size 20: images of 28 x 28 pixels can be scaled to 8, 16, 28, 32, 64"):
        read_mnist(size=20)


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
    for place in (raw, tmp_path):  # also the root folder that torchvision gets
        datasets = build(DataConfig(str(place), size=28), "class")
        assert torch.equal(datasets.train.pixels[:, 0], pixels[:4]) and torch.equal(datasets.test.pixels[:, 0], pixels[4:])
        assert datasets.train.classes == ("1", "3", "7")
        assert datasets.train.labels is not None and datasets.train.labels.tolist() == [2, 0, 2, 1]
    write_idx(raw / "train-labels-idx1-ubyte", torch.tensor([7, 1, 3, 7], dtype=torch.uint8))
    assert build(DataConfig(str(raw), size=28), "class").fingerprint != datasets.fingerprint
    write_idx(raw / "train-labels-idx1-ubyte", labels[:3])
    with pytest.raises(ValueError, match="3 labels for 4 images of train"):
        read_idx_folder(raw, size=28)
    write_idx(raw / "train-labels-idx1-ubyte", labels[:4])
    (raw / "t10k-images-idx3-ubyte.gz").unlink()
    assert read_idx_folder(raw, size=28).test is None
    for name in ("t10k", "train"):
        (raw / f"{name}-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"--model.condition class: .* has no classes. Put the images of each class into"):
        build(DataConfig(str(raw), size=28), "class")


def test_idx_images_of_other_shapes_are_cropped_and_scaled() -> None:
    wide = torch.zeros(1, 4, 8, dtype=torch.uint8)
    wide[:, :, 2:6] = 200  # the centre square
    assert scale_grey(wide, size=2).unique().tolist() == [200]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda data: data[:-1], r"5 numbers, but its header says \(2, 3\): truncated"),
        ("x", lambda data: b"\x00\x00\x0d" + data[3:], "begins with 00 00 0d 02: not an idx file of bytes"),
        ("x", lambda data: data[:7], "begins with 00 00 08 02: not an idx file"),
        ("x.gz", lambda data: data[:-9], "truncated or damaged"),
        ("x.gz", lambda data: b"12" + data[2:], "truncated or damaged"),
    ],
)
def test_read_idx_rejects_damaged_files(tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / name
    write_idx(path, torch.ones(2, 3, dtype=torch.uint8))
    assert read_idx(path).tolist() == [[1, 1, 1]] * 2
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_idx(path)
