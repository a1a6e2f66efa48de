"""Whole runs on a folder of tars, some of whose pictures are broken: every way to spread the work gives the same numbers."""

import json
import re

import pytest

from tests.clip.pictures import noise, write_tars
from tests.clip.test_train import furthest, losses, train
from unisono_models.clip.data.sources import open_pairs
from unisono_models.clip.data.splits import split_pairs

KINDS = ("cat", "dog", "fish", "bird", "tree", "house", "boat", "cup", "hat", "star")
LOOKS = ("red", "green", "blue", "small", "large", "old", "new", "sad", "happy")
BROKEN = range(4, 90, 12)
STEPS = 6


def pair(number):
    caption = f"a {LOOKS[number % 9]} {KINDS[number // 9]}"
    picture = b"junk" if number in BROKEN else noise((40, 36), seed=number)
    return {"__key__": f"{number:09d}", "png": picture, "txt": caption}


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, (40, 30, 20), pair)
    return folder


@pytest.fixture(scope="module")
def run(ranks, tars, tmp_path_factory):
    """Trains on two ranks, in a directory of its own if none is given, which it returns."""
    data = ["--data.source", str(tars), "--data.held-out", "0.1", "--data.max-broken", "0.2", "--data.batch", "16"]

    def run(*args, steps=STEPS, directory=None, body=train):
        directory = directory or tmp_path_factory.mktemp("runs") / "run"
        ranks(body, directory, *data, "--run.steps", str(steps), *args, world_size=2, timeout=240)
        return directory

    run.data = data
    return run


@pytest.fixture(scope="module")
def plain(run):
    """A finished run with DDP in float32."""
    return run()


def first(found, count):
    return {step: found[step] for step in range(count)}


def test_broken_pictures_are_skipped_and_counted(tars, plain):
    trained, held_out = (set(part.rows.tolist()) for part in split_pairs(open_pairs(tars), 0.1, seed=0))
    assert trained & set(BROKEN) and held_out & set(BROKEN), "neither training nor evaluation should be spared"
    assert sorted(losses(plain)) == list(range(STEPS))
    report = (plain / "report.html").read_text()
    skipped, read = map(int, re.search(r"(\d+) of (\d+) pairs skipped. broken image: ", report).groups())
    assert read == min(STEPS * 16, len(trained) + (STEPS * 16 - len(trained))) and skipped >= len(trained & set(BROKEN))
    summary = json.loads((plain / "summary.json").read_text())
    assert summary["held_out/rows"] == len(held_out - set(BROKEN))


def test_timing(run, plain, tmp_path):
    import time

    vit = [
        "--model.image.model",
        "test_vit",
        "--model.image.kwargs",
        '{"img_size": 32, "patch_size": 8, "depth": 2}',
        "--run.stop-after",
        "2",
        "--run.timeout",
        "200",
    ]
    t = time.time()
    v = run(*vit)
    print("vit", time.time() - t)
    for name, args in {
        "fsdp": ["--parallel.kind", "fsdp"],
        "bf16": ["--parallel.precision", "bfloat16"],
        "micro": ["--objective.micro-batch", "3"],
        "sig": ["--objective.loss", "sigmoid"],
        "ckpt": ["--parallel.checkpoint-activations"],
        "compile": [*vit, "--parallel.compile"],
    }.items():
        t = time.time()
        d = run(*args)
        print(name, time.time() - t, furthest(losses(v if name == "compile" else plain), losses(d)), flush=True)
