"""The export of a generator, written and read."""

import shutil

import pytest
import torch
from safetensors.torch import save

from tests.gan.small_runs import CLASSES, SIZE, draw_images, make_generator
from unisono_models.gan.commands.sample import main as sample
from unisono_models.gan.config import DataConfig
from unisono_models.gan.model.export import read_export, write_export
from unisono_models.training.errors import UserError


@pytest.mark.parametrize(("condition", "dtype"), [("class", torch.float32), ("text", torch.float64), ("none", torch.float32)])
def test_export_is_read_as_it_was_written(tmp_path, condition, dtype):
    generator = make_generator(condition, dtype=dtype, channels=3)
    write_export(tmp_path, generator, data=DataConfig(text_model="some/encoder"), images=draw_images(channels=3))
    exported = read_export(tmp_path)
    assert (exported.classes, exported.size, exported.channels, exported.text_model) == (CLASSES, SIZE, 3, "some/encoder")
    assert exported.condition == condition and exported.generator.config == generator.config
    assert not exported.generator.training and not any(p.requires_grad for p in exported.generator.parameters())
    one, other = generator.state_dict(), exported.generator.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {value.dtype for value in other.values()} == {dtype}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-9], "SafetensorError"),
        ("model.safetensors", lambda data: save({"other": torch.ones(2)}), "RuntimeError.*Missing key"),
        ("model.safetensors", lambda data: save({}), "StopIteration"),
        ("config.json", lambda data: data[:-9], "is not JSON"),
        ("config.json", lambda data: b'{"features": []}', "KeyError: 'model'"),
        ("config.json", lambda data: b"[1]", "TypeError"),
    ],
)
def test_damaged_export_is_rejected(finished_run, tmp_path, name, change, message):
    run = shutil.copytree(finished_run[0], tmp_path / "run")
    file = run / "export" / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        UserError, match=rf"(?s)export is damaged, or not the export of a GAN \(.*{message}.*Start the training"
    ):
        sample([str(run), "--out", str(tmp_path / "out.png")])
