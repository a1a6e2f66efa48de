"""Running a run again: what is launched, and what is said of the numbers."""

import copy
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono_models.training.config import ParallelConfig, RunConfig
from unisono_models.training.run import reproduce as reproduction
from unisono_models.training.run.compare import compare_runs, relative_difference
from unisono_models.training.run.log import RunLog, read_metrics
from unisono_models.training.run.reproduce import main, reproduce
from unisono_models.training.run.run_directory import open_run, read_config, read_provenance

START = {
    "world_size": 2,
    "threads": 1,
    "environment": {},
    "versions": {"torch": "2.15.0"},
    "machine": {"cpu": "A", "device": "cpu"},
    "git": {"commit": "abc", "dirty": False},
}


def make_run(path, losses, *, start=START, starts=None, precision="float32", evaluations=(), finished=True):
    path.mkdir()
    config = {"run": {"steps": len(losses)}, "parallel": {"precision": precision}}
    (path / "config.json").write_text(json.dumps({"model": "clip", "recipe": "tiny", "config": config}))
    (path / "provenance.json").write_text(json.dumps({"seed": 0, "starts": starts or [start]}))
    lines = [{"kind": "train", "step": s, "loss": loss, "samples": 8} for s, loss in enumerate(losses)]
    lines += [{"kind": "evaluation", "step": s, "recall": value} for s, value in evaluations]
    lines.append({"kind": "speed", "step": 0, "samples_per_second": hash(path) % 1000 / 7})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "summary.json").write_text("{}")
    return path


def other(**changes):
    return copy.deepcopy(START) | changes


LOSSES = [1 / 3, float("nan"), 0.1, *(2.0 / k for k in range(1, 20))]


def test_same_numbers_are_bitwise_equal(tmp_path):
    runs = [make_run(tmp_path / name, LOSSES, evaluations=[(5, 0.5)]) for name in "ab"]
    verdict = compare_runs(*runs)
    assert verdict.good and "Reproduced: bitwise equal." in verdict.text and "22 steps" in verdict.text


def test_first_difference_is_named_with_both_values(tmp_path):
    changed = [*LOSSES[:4], 1.0000000000000002, *LOSSES[5:-1], 9.0]
    verdict = compare_runs(make_run(tmp_path / "a", LOSSES), make_run(tmp_path / "b", changed))
    assert not verdict.good
    assert "first difference is at step 4 (train): loss was 1.0, is 1.0000000000000002." in verdict.text
    assert "bitwise equal numbers were expected" in verdict.text
    assert compare_runs(tmp_path / "a", tmp_path / "b", steps=4).good


def test_negative_zero_is_not_zero_and_evaluations_count(tmp_path):
    a = make_run(tmp_path / "a", [0.0], evaluations=[(0, 0.5)])
    assert "loss was 0.0, is -0.0" in compare_runs(a, make_run(tmp_path / "b", [-0.0], evaluations=[(0, 0.5)])).text
    assert (
        "(evaluation): recall was 0.5, is 0.25"
        in compare_runs(a, make_run(tmp_path / "c", [0.0], evaluations=[(0, 0.25)])).text
    )
    missing = compare_runs(a, make_run(tmp_path / "d", [0.0]))
    assert not missing.good and "the evaluation line of step 0 is missing" in missing.text
    assert compare_runs(a, tmp_path / "d", steps=1).good, "a run that stops early need not evaluate where it stops"


def test_uncommitted_changes_are_pointed_out(tmp_path):
    dirty = other(git={"commit": "abc", "dirty": True})
    verdict = compare_runs(make_run(tmp_path / "a", [1.0], start=dirty), make_run(tmp_path / "b", [2.0]))
    assert "uncommitted changes" in verdict.text


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (other(world_size=1), "world_size 2 and 1"),
        (other(threads=4), "threads 1 and 4"),
        (other(versions={"torch": "2.16.0"}), "torch 2.15.0 and 2.16.0"),
        (other(machine={"cpu": "B", "device": "cpu"}), "machine.cpu A and B"),
        (other(git={"commit": "def", "dirty": False}), "git.commit abc and def"),
        (other(git=None), "git.commit abc and None"),
    ],
)
def test_other_environments_allow_for_rounding(tmp_path, start, words):
    old = make_run(tmp_path / "a", LOSSES)
    near = [loss * (1 + 1e-7) for loss in LOSSES[:10]] + [loss * 1.01 for loss in LOSSES[10:]]
    verdict = compare_runs(old, make_run(tmp_path / "b", near, start=start))
    assert verdict.good and words in verdict.text and "Reproduced: within 1e-06" in verdict.text
    assert "1.0e-07 in the first 10 steps" in verdict.text and "9.9e-03 in all 22" in verdict.text
    far = [*near[:9], near[9] * 1.00001]
    assert not compare_runs(old, make_run(tmp_path / "c", far + near[10:], start=start)).good


def test_threads_that_came_of_different_variables_are_the_same(tmp_path):
    runs = [make_run(tmp_path / "a", [1.0]), make_run(tmp_path / "b", [2.0], start=other(environment={"OMP_NUM_THREADS": "1"}))]
    assert "environments" not in compare_runs(*runs).text


def test_restarts_with_other_ranks_are_other_environments(tmp_path):
    a = make_run(tmp_path / "a", LOSSES, starts=[START, other(world_size=3)])
    verdict = compare_runs(a, make_run(tmp_path / "b", [loss * (1 + 1e-8) for loss in LOSSES]))
    assert verdict.good and "world_size 2, then 3 and 2" in verdict.text


@pytest.mark.parametrize(
    ("precision", "error", "good"), [("float64", 1e-8, False), ("float64", 1e-10, True), ("bfloat16", 5e-3, True)]
)
def test_tolerance_goes_with_the_precision(tmp_path, precision, error, good):
    a = make_run(tmp_path / "a", [1.0] * 60, precision=precision)
    b = make_run(tmp_path / "b", [1.0] * 40 + [1.0 + error] * 20, precision=precision, start=other(world_size=1))
    assert compare_runs(a, b).good is good


def test_losses_that_are_not_finite_on_one_side_only_differ():
    assert relative_difference(float("inf"), float("inf")) == 0 and relative_difference(float("nan"), 1.0) == float("inf")
    assert relative_difference(0.0, -0.0) == 0


@pytest.mark.parametrize("model", ["os", "../clip", "clip.data", "training", "Clip", "", 3, "clip;ls"])
def test_models_that_are_not_ours_are_rejected_before_anything_runs(tmp_path, model, monkeypatch):
    monkeypatch.setattr(reproduction.subprocess, "run", lambda *_, **__: pytest.fail("launched"))
    path = make_run(tmp_path / "a", [1.0])
    saved = read_config(path) | {"model": model}
    (path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"config\.json names the model"):
        reproduce(path)


def test_rejects_what_is_no_run_and_directories_that_are_not_fresh(tmp_path, capsys):
    with pytest.raises(ValueError, match="is not a run directory"):
        reproduce(tmp_path)
    assert main([str(tmp_path)]) == 1 and "is not a run directory" in capsys.readouterr().err
    path = make_run(tmp_path / "a", [])
    with pytest.raises(ValueError, match="has taken no step"):
        reproduce(path)
    path = make_run(tmp_path / "b", [1.0])
    with pytest.raises(ValueError, match="steps=2 must be at least 1 and at most 1"):
        reproduce(path, steps=2)
    with pytest.raises(FileExistsError, match="is not empty"):
        reproduce(path, dir=path)


# A model whose training is a few numbers, launched as a real one is. What differs between worlds is its rounding.


@dataclass(frozen=True)
class ToyConfig:
    run: RunConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def train_toy(config, ranks):
    run = open_run(config, model="toy", recipe="tiny", ranks=ranks)
    with RunLog(run, ranks, steps=config.run.steps) as log:
        for step in range(config.run.stop_after or config.run.steps):
            log.step(step, {"loss": (1 + config.run.seed) / (step + 1) * (1 + 1e-9 * ranks.size)}, samples=4)
    if config.run.stop_after is None:
        run.finish({})
    return run.path


TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.training.run.test_reproduce import ToyConfig, train_toy
from unisono_models.training.config.serialization import config_from_json, read_json
from unisono_models.training.distributed.launch import start_ranks

assert sys.argv[1] == "train"
given = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
config = config_from_json(ToyConfig, read_json(Path(given["--config"]))["config"])
stop = given.get("--run.stop-after")
run = replace(config.run, dir=Path(given["--run.dir"]), stop_after=stop and int(stop))
with start_ranks(timeout=60) as ranks:
    train_toy(replace(config, run=run), ranks)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    folder = tmp_path / "toys/toy"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    yield train_toy(ToyConfig(RunConfig(steps=12, seed=5, dir=tmp_path / "run")), SimpleNamespace(rank=0, size=1, first=True))
    for name in [name for name in sys.modules if name.split(".")[0] == "toys"]:
        del sys.modules[name]


def test_run_again_alone_is_bitwise_equal(toy, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    verdict = reproduce(toy, _package="toys")
    assert verdict.good and "Reproduced: bitwise equal." in verdict.text and "environments" not in verdict.text, verdict.text
    out = toy.with_name("run-reproduced")
    assert read_provenance(out)["starts"][0]["threads"] == read_provenance(toy)["starts"][0]["threads"]
    assert f"-m toys.toy train --config {toy}/config.json --run.dir {out}" in capfd.readouterr().out


def test_run_again_on_two_ranks_for_some_steps_is_within_rounding(toy, tmp_path):
    verdict = reproduce(toy, nproc=2, steps=3, dir=tmp_path / "again", _package="toys")
    assert verdict.good and "world_size 1 and 2" in verdict.text and "within 1e-06" in verdict.text, verdict.text
    assert sum(line["kind"] == "train" for line in read_metrics(tmp_path / "again")) == 3
    assert read_provenance(tmp_path / "again")["starts"][0]["torchrun"] is True
