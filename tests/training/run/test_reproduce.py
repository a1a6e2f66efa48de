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
from unisono_models.training.run import reproduce as reproduction
from unisono_models.training.run.log import RunLog, read_metrics
from unisono_models.training.run.reproduce import main, reproduce
from unisono_models.training.run.run_directory import open_run, read_config, read_provenance


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
    monkeypatch.setenv(
        "PYTHONPATH", ":".join([str(tmp_path), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    )
    yield train_toy(
        ToyConfig(RunConfig(steps=12, seed=5, dir=tmp_path / "run")), SimpleNamespace(rank=0, world_size=1, first=True)
    )
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
