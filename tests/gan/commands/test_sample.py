"""The command that generates images with a finished run."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.gan.small_runs import SIDE, as_cells, cells, draw_images, make_generator
from unisono_models.gan.commands import sample as sample_module
from unisono_models.gan.commands.sample import SampleOptions, main, sample
from unisono_models.gan.config import DataConfig
from unisono_models.gan.figures import (
    GAP,
    MARGIN,
)
from unisono_models.gan.model.export import read_export, write_export
from unisono_models.gan.model.sampling import generate
from unisono_models.training.errors import UserError
from unisono_models.training.run.run_directory import RunError


def test_samples_have_the_labels_in_order(finished_run, tmp_path, capsys):
    path, generator, _ = finished_run
    command = [str(path), "--labels", "owl", "0", "owl", "--count", "2", "--out"]
    for name, more in {"one.png": [], "again/two.png": [], "other.png": ["--seed", "1"]}.items():
        main([*command, str(tmp_path / name), *more])
        assert capsys.readouterr().out.strip() == str(tmp_path / name)
    one = (tmp_path / "one.png").read_bytes()
    assert one == (tmp_path / "again" / "two.png").read_bytes() != (tmp_path / "other.png").read_bytes()
    with Image.open(tmp_path / "one.png") as image:
        shown = cells(image, rows=2, columns=3, top=image.height - MARGIN - 2 * SIDE - GAP)
    made = generate(generator, torch.tensor([2, 2, 0, 0, 2, 2]), torch.arange(6), seed=0)
    assert torch.equal(shown, as_cells(made[[0, 2, 4, 1, 3, 5]]))


def test_truncation_makes_images_more_alike(finished_run):
    exported = read_export(finished_run[0] / "export")

    def spread(truncation):
        options = SampleOptions(finished_run[0], labels=("dog",), count=4, truncation=truncation)
        image = sample(exported, options)
        return cells(image, rows=4, columns=1, top=image.height - MARGIN - 4 * SIDE - 3 * GAP).double().std(0).mean()

    assert spread(0.0) == 0 < spread(0.3) < spread(1.0)


def test_interpolations_begin_and_end_with_samples(finished_run, tmp_path):
    path, generator, _ = finished_run
    out = tmp_path / "path.png"
    main([str(path), "--labels", "dog", "--interpolate", "4", "--count", "2", "--out", str(out)])
    with Image.open(out) as image:
        shown = cells(image, rows=2, columns=4, left=image.width - MARGIN - 4 * SIDE - 3 * GAP)
    made = generate(generator, torch.ones(4, dtype=torch.int64), torch.arange(4), seed=0)
    assert (shown[[0, 3, 4, 7]].int() - as_cells(made).int()).abs().max() <= 1
    assert not torch.equal(shown[0], shown[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--labels", "cat", "cow"], "--labels: 'cow' is not a class; the classes are cat, dog, owl"),
        (["--texts", "a cat"], "--model.condition class: use --labels"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--interpolate", "1"], "--interpolate 1: must be at least 2"),
        (["--truncation", "nan"], "--truncation nan"),
        (["--out", "grid.gif"], "must end in .png"),
        (["--out", "/dev/null/grid.png"], "--out /dev/null/grid.png: cannot be written"),
    ],
)
def test_wrong_options_are_rejected(finished_run, args, message):
    with pytest.raises(UserError, match=message):
        main([str(finished_run[0]), *args])


def test_error_suggests_only_runs_of_this_model(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = json.loads((finished_run[0] / "config.json").read_text())
    for name, model in {"begun": "gan", "ours": "gan", "theirs": "clip"}.items():
        (tmp_path / "runs" / name / "export").mkdir(parents=True)
        if name != "begun":
            (tmp_path / "runs" / name / "export" / "model.safetensors").touch()
        (tmp_path / "runs" / name / "config.json").write_text(json.dumps(about | {"model": model}))
    with pytest.raises(UserError, match=r"runs/theirs holds a run of clip, not of gan\. Here are runs/ours$"):
        main(["runs/theirs"])


def test_generators_with_vectors_or_without_condition_can_be_sampled(tmp_path):
    for condition in ("vector", "none"):
        write_export(tmp_path, make_generator(condition), data=DataConfig(), images=draw_images())
        exported = read_export(tmp_path)
        file = tmp_path / "rows.npy"
        np.save(file, draw_images().vectors[:3].numpy())
        image = sample(exported, SampleOptions(tmp_path, vectors=file if condition == "vector" else None, count=2))
        rows = 3 if condition == "vector" else 1
        assert image.height == 2 * MARGIN + rows * (SIDE + GAP) - GAP
    with pytest.raises(RunError, match="takes no conditions"):
        sample(exported, SampleOptions(tmp_path, vectors=file))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((2, 5), np.nan), "row 0 has numbers that are not finite"),
        (np.ones((2, 4)), r"the table is \(2, 4\).*5 columns"),
        (np.array(["five"]), "must hold one table of numbers"),
    ],
)
def test_wrong_vectors_are_rejected(tmp_path, table, message):
    write_export(tmp_path, make_generator("vector"), data=DataConfig(), images=draw_images())
    np.save(tmp_path / "rows.npy", table)
    with pytest.raises(ValueError, match=rf"--vectors.*rows.npy: {message}"):
        sample(read_export(tmp_path), SampleOptions(tmp_path, vectors=tmp_path / "rows.npy"))


def test_each_text_has_a_row_even_if_it_is_short(monkeypatch, tmp_path):
    vectors = draw_images().vectors
    monkeypatch.setattr(sample_module, "TextEncoder", lambda model, device: lambda texts: vectors[: len(texts)])
    write_export(tmp_path, generator := make_generator("text"), data=DataConfig(), images=draw_images())
    image = sample(read_export(tmp_path), SampleOptions(tmp_path, texts=("a", "b"), count=3))
    shown = cells(image, rows=2, columns=3, left=image.width - MARGIN - 3 * SIDE - 2 * GAP)
    made = generate(generator, vectors[:2].repeat_interleave(3, 0), torch.arange(6), seed=0)
    assert torch.equal(shown, as_cells(made))
