"""Repeating a run: what is launched, and the verdict."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.run.test_compare import make_run
from unisono_models.training.config import ParallelConfig, RunConfig
from unisono_models.training.errors import UserError
from unisono_models.training.run import reproduce as reproduction
from unisono_models.training.run.log import RunLog, read_metrics
from unisono_models.training.run.reproduce import _stages, _working_directory, main, reproduce
from unisono_models.training.run.run_directory import open_run, read_config, read_provenance


@pytest.mark.parametrize("model", ["os", "../clip", "clip.data", "training", "Clip", "", 3, "clip;ls"])
def test_models_that_are_not_ours_are_rejected_before_anything_runs(tmp_path, model, monkeypatch):
    monkeypatch.setattr(reproduction.subprocess, "run", lambda *_, **__: pytest.fail("launched"))
    path = make_run(tmp_path / "a", [1.0])
    saved = read_config(path) | {"model": model}
    (path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"config\.json names the model"):
        reproduce(path)


def test_rejects_what_is_no_run_and_directories_that_are_not_fresh(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        reproduce(tmp_path)
    with pytest.raises(UserError, match="is not a run directory"):
        main([str(tmp_path)])
    path = make_run(tmp_path / "a", [])
    with pytest.raises(ValueError, match="has taken no step"):
        reproduce(path)
    path = make_run(tmp_path / "b", [1.0])
    with pytest.raises(ValueError, match="--steps 2: must be at least 1 and at most 1"):
        reproduce(path, steps=2)
    with pytest.raises(UserError, match=r"--dir .* is not empty"):
        reproduce(path, dir=path)


# A model whose training is a few numbers, launched as a real one is. What differs between worlds is its rounding.


@dataclass(frozen=True)
class ToyConfig:
    run: RunConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def train_toy(config, ranks):
    assert Path("numbers.txt").exists(), "data whose path is relative to where the run was started"
    run = open_run(config, model="toy", recipe="tiny", ranks=ranks)
    with RunLog(run, ranks, steps=config.run.steps) as log:
        for step in range(config.run.stop_after or config.run.steps):
            log.step(step, {"loss": (1 + config.run.seed) / (step + 1) * (1 + 1e-9 * ranks.world_size)}, samples=4)
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
    (folder / "train.py").touch()
    (folder / "__main__.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/numbers.txt").touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv(
        "PYTHONPATH", ":".join([str(tmp_path), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    )
    yield train_toy(
        ToyConfig(RunConfig(steps=12, seed=5, dir=tmp_path / "run")), SimpleNamespace(rank=0, world_size=1, first=True)
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "toys"]:
        del sys.modules[name]


def test_run_again_alone_and_from_another_directory_is_bitwise_equal(toy, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.chdir(tmp_path)
    verdict = reproduce(toy, _package="toys")
    assert verdict.good and "Reproduced: bitwise equal." in verdict.text and "environments" not in verdict.text, verdict.text
    out = toy.with_name("run-reproduced")
    assert read_provenance(out)["starts"][0]["threads"] == read_provenance(toy)["starts"][0]["threads"]
    assert f"-m toys.toy train --config {toy}/config.json --run.dir {out}" in capfd.readouterr().out


def test_run_again_on_two_ranks_for_some_steps_is_within_rounding(toy, tmp_path):
    verdict = reproduce(toy, nproc=2, steps=3, dir=tmp_path / "again", _package="toys")
    assert verdict.good and "world_size 1 and 2" in verdict.text and "within 1e-06" in verdict.text, verdict.text
    assert f"{tmp_path}/again is left as it is: unfinished, after 3 steps" in verdict.text
    assert sum(line["kind"] == "train" for line in read_metrics(tmp_path / "again")) == 3
    assert read_provenance(tmp_path / "again")["starts"][0]["torchrun"] is True


def test_a_run_that_was_extended_is_repeated_in_its_stages():
    starts = [{"first_step": 0}, {"first_step": 7, "changed_steps": {"from": 10, "to": 20}}, {"first_step": 9}]
    starts += [{"first_step": 20, "changed_steps": {"from": 20, "to": 30}}, {"time": "a start that was refused"}]
    first, second = ["--run.steps", "10", "--run.stop-after", "7"], ["--run.steps", "20", "--run.stop-after", "20"]
    assert _stages(starts, None) == [first, second, []]
    assert _stages(starts, 25) == [first, second, ["--run.stop-after", "25"]]
    assert _stages(starts, 7) == [first] and _stages(starts, 8) == [first, ["--run.steps", "20", "--run.stop-after", "8"]]
    assert _stages([], None) == [[]] and _stages([{}], 3) == [["--run.stop-after", "3"]]


def test_a_working_directory_that_is_gone_is_said(tmp_path, capsys):
    assert _working_directory({"directory": str(tmp_path)}) == str(tmp_path) and not capsys.readouterr().out
    assert _working_directory({"directory": "/no/such/place"}) is None
    assert "/no/such/place, where the run was started, does not exist here" in capsys.readouterr().out
