"""Whole runs of the tiny recipe: the same numbers again, on other numbers of ranks, and after a stop."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.training.skip_plots import skip_plots
from unisono_models.clip.data.dataset import open_source
from unisono_models.clip.model import Clip
from unisono_models.clip.train import main

FEW_PIXELS = ["--model.image.size", "32", "--model.image.views", "2", "--data.batch", "64", "--run.steps", "6"]


def train_and_draw(directory, *args, recipe="tiny"):
    torch.manual_seed(hash(str(directory)) % 2**31)  # the state of the generator must not matter
    main([recipe, "--run.dir", str(directory), *args])


def train(directory, *args, recipe="tiny"):
    """Without what people look at: the report has no curves, and one search instead of seven."""
    with skip_plots(), mock.patch("unisono_models.clip.report.QUERIES", ("red heart",)):
        train_and_draw(directory, *args, recipe=recipe)


def open_fewer(*args, **options):
    """Some of the emoji: more than four steps take, in several parts for each rank. Features of all take 20 seconds a run."""
    source = open_source(*args, **options)
    few = replace(source.train, rows=source.train.rows[:320])
    tests = {
        name: replace(test, pairs=replace(test.pairs, rows=test.pairs.rows[:90]), queries=None)
        for name, test in source.tests.items()
    }
    return replace(source, train=few, captions=[caption for _, caption in few.rows], tests=tests)


def train_default(directory, *args):
    """The default recipe, whose features are computed once, before training, with few pixels, pairs and steps."""
    with mock.patch("unisono_models.clip.train.open_source", open_fewer):
        train(directory, *FEW_PIXELS, *args, recipe="emoji")


def losses(directory):
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


@pytest.fixture(scope="module")
def on_two(ranks, tmp_path_factory):
    """A finished run on two ranks."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    ranks(train_and_draw, directory, world_size=2, timeout=120)
    return directory


def test_run_leaves_everything_behind(on_two):
    names = {path.name for path in on_two.iterdir()}
    assert {"config.json", "provenance.json", "metrics.jsonl", "tensorboard", "plots", "report.html", "summary.json"} <= names
    assert sorted(losses(on_two)) == list(range(12))
    summary = json.loads((on_two / "summary.json").read_text())
    assert summary["vendor/rows"] == 1632 and 0 < summary["vendor/text_to_image/recall@10"] < 1
    assert (on_two / "samples" / "search.png").stat().st_size > 10_000
    clip = Clip.from_pretrained(on_two / "export")
    found = clip.encode_texts(["red heart", "dog"]) @ clip.encode_images(torch.zeros(3, 3, 40, 50, dtype=torch.uint8)).T
    assert found.shape == (2, 3) and clip.scale > 1


def test_same_ranks_give_the_same_bits(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "again", world_size=2, timeout=120)
    assert losses(tmp_path / "again") == losses(on_two)
    assert (tmp_path / "again/export/model.safetensors").read_bytes() == (on_two / "export/model.safetensors").read_bytes()


def test_other_ranks_give_the_same_numbers(ranks, on_two, tmp_path):
    expected = {step: loss for step, loss in losses(on_two).items() if step < 10}
    for world in (1, 3):
        ranks(train, tmp_path / str(world), "--run.stop-after", "10", world_size=world, timeout=120)
        assert furthest(losses(tmp_path / str(world)), expected) < 1e-6


def test_other_ranks_differ_by_rounding_alone(ranks, tmp_path):
    small = ["--parallel.precision", "float64", "--run.steps", "60", "--data.batch", "11", "--optimizer.lr", "1e-3"]
    for world in (1, 3):
        ranks(train, tmp_path / str(world), *small, "--run.stop-after", "50", world_size=world, timeout=180)
    assert len(losses(tmp_path / "1")) == 50 and furthest(losses(tmp_path / "1"), losses(tmp_path / "3")) < 1e-9


def test_stopped_run_goes_on_with_the_same_bits(ranks, on_two, tmp_path):
    for _ in range(2):  # the second time there is nothing to do
        ranks(train, tmp_path / "run", "--run.stop-after", "7", world_size=2, timeout=120)
        assert sorted(losses(tmp_path / "run")) == list(range(7))
        assert not (tmp_path / "run/summary.json").exists()
    ranks(train_and_draw, tmp_path / "run", world_size=2, timeout=120)
    assert losses(tmp_path / "run") == losses(on_two)
    assert (tmp_path / "run/export/model.safetensors").read_bytes() == (on_two / "export/model.safetensors").read_bytes()


def test_run_goes_on_with_other_numbers_of_ranks(ranks, on_two, tmp_path):
    for world, last in ((3, 4), (1, 8), (2, 11)):
        ranks(train, tmp_path / "run", "--run.stop-after", str(last), world_size=world, timeout=120)
    expected = {step: loss for step, loss in losses(on_two).items() if step < 11}
    assert furthest(losses(tmp_path / "run"), expected) < 1e-5


def test_default_recipe_goes_on_with_the_same_bits_and_gives_the_same_numbers_on_other_ranks(ranks, tmp_path):
    for name, world, last in (("one", 1, 4), ("two", 2, 4), ("again", 2, 2), ("again", 2, 4)):
        ranks(train_default, tmp_path / name, "--run.stop-after", str(last), world_size=world, timeout=180)
    assert len(losses(tmp_path / "two")) == 4 and losses(tmp_path / "again") == losses(tmp_path / "two")
    assert furthest(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-6
