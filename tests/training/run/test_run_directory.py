"""Which directory a run gets, and what it writes there."""

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from unisono_models.training.checkpoint.manifest import Manifest, write_manifest
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.serialization import config_from_json, config_to_json
from unisono_models.training.errors import UserError
from unisono_models.training.run import run_directory
from unisono_models.training.run.provenance import cpu_model, versions
from unisono_models.training.run.run_directory import config_differences, open_run, read_config, read_provenance


@dataclass(frozen=True)
class Emoji:
    vendors: tuple[str, ...] = ("noto", "twemoji")


@dataclass(frozen=True)
class Table:
    file: Path
    columns: tuple[str, int] = ("image", 1)


@dataclass(frozen=True)
class Config:
    run: RunConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rate: float = 1e-3
    loss: Literal["clip", "sigmoid"] = "clip"
    data: Emoji | Table = Emoji()
    width: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    places: list[Path] = field(default_factory=list)


CONFIG = Config(RunConfig(steps=10))
ALONE = SimpleNamespace(rank=0, world_size=1, first=True)


def opened(config=CONFIG, recipe="emoji"):
    return open_run(config, model="clip", recipe=recipe, ranks=ALONE)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_run(**changes):
    return replace(CONFIG, run=replace(CONFIG.run, **changes))


def test_first_run_is_named_after_model_and_recipe(tmp_path):
    run = opened()
    assert run.path == tmp_path / "runs/clip-emoji" and not run.resumes
    assert {path.name for path in run.path.iterdir() if path.is_dir()} == {
        "plots",
        "samples",
        "checkpoints",
        "export",
        "tensorboard",
    }
    saved = read_config(run.path)
    assert (saved["model"], saved["recipe"]) == ("clip", "emoji")
    assert config_from_json(Config, saved["config"]) == CONFIG


def test_interrupted_run_goes_on_and_a_finished_one_is_left_alone():
    first = opened()
    again = opened()
    assert again.path == first.path and again.resumes
    again.finish({"recall": 0.1 + 0.2})
    assert json.loads((first.path / "summary.json").read_text()) == {"recall": 0.1 + 0.2}
    second = opened()
    assert second.path.name == "clip-emoji-2" and not second.resumes
    assert opened().path == second.path and opened().resumes
    (second.path / "tokenizer.json").touch()
    other = opened(replace(CONFIG, rate=2e-3))
    assert other.path.name == "clip-emoji-3" and not other.resumes
    assert opened(recipe="tiny").path.name == "clip-tiny"


def test_given_directory_goes_on(tmp_path):
    config = with_run(dir=Path("here"))
    assert opened(config).path == tmp_path / "here"
    assert opened(config).resumes
    moved = (tmp_path / "here").rename(tmp_path / "there")
    assert opened(with_run(dir=moved, timeout=5.0)).resumes, "where it lies and how long it waits is no other config"
    assert read_config(moved)["config"]["run"]["dir"] is None


def test_given_directory_with_another_config_is_rejected_and_the_fields_named():
    (opened(with_run(dir=Path("here"))).path / "tokenizer.json").touch()
    with pytest.raises(UserError, match=r"--run\.dir here .* --rate \(0\.001 there, 0\.003 here\)") as caught:
        opened(replace(with_run(dir=Path("here"), seed=7), rate=0.003))
    assert "run.seed (0 there, 7 here)" in str(caught.value) and "run.dir (" not in str(caught.value)
    with pytest.raises(UserError, match="holds a run of clip emoji, this is clip tiny"):
        opened(with_run(dir=Path("here")), recipe="tiny")


def test_given_directory_that_is_finished_or_no_run_is_rejected(tmp_path):
    opened(with_run(dir=Path("here"))).finish({})
    with pytest.raises(UserError, match="holds a finished run: choose another, or remove it"):
        opened(with_run(dir=Path("here")))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    with pytest.raises(UserError, match=r"not empty and not a run \(it has cat\.png\)"):
        opened(with_run(dir=Path("photos")))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        opened(with_run(dir=Path("file")))


@pytest.mark.parametrize("name", ["tensorboard", "plots"])
def test_a_file_where_the_run_needs_a_folder_is_named(tmp_path, name):
    path = opened().path
    (path / name).rmdir()
    (path / name).write_text("")
    with pytest.raises(UserError, match=rf"--run\.dir .*/{name} is a file, and the run needs a folder there: remove it"):
        opened()


def test_a_longer_run_without_a_directory_is_a_new_run_and_a_hint(tmp_path):
    first = opened()
    (first.checkpoints / "step-00000010").mkdir()
    write_manifest(first.checkpoints / "step-00000010", Manifest(10, 1, None, {}))
    first.finish({})
    longer = opened(with_run(steps=20))
    assert longer.path.name == "clip-emoji-2" and longer.changed_steps is None
    assert longer.hint == (
        "runs/clip-emoji has the same run with another number of steps: to extend it, add --run.dir runs/clip-emoji"
    )
    assert opened(with_run(steps=20)).resumes
    extended = opened(with_run(steps=20, dir=first.path))
    assert extended.resumes and extended.changed_steps == (10, 20) and not extended.hint
    assert (first.path / "summary.json").exists() and read_config(first.path)["config"]["run"]["steps"] == 10
    extended.record_start(first_step=10)
    assert not (first.path / "summary.json").exists() and read_config(first.path)["config"]["run"]["steps"] == 20


def test_a_finished_run_without_checkpoints_cannot_be_extended():
    opened(with_run(dir=Path("here"))).finish({})
    with pytest.raises(UserError, match="finished run without a checkpoint, which cannot be extended"):
        opened(with_run(dir=Path("here"), steps=20))


def test_a_run_of_an_older_version_that_lacks_a_field_goes_on(tmp_path):
    path = opened().path
    saved = read_config(path)
    del saved["config"]["run"]["init_from"], saved["config"]["width"]
    (path / "config.json").write_text(json.dumps(saved))
    assert opened().resumes and opened().path == path
    (path / "tokenizer.json").touch()
    assert opened(replace(CONFIG, width=3)).path != path


@pytest.mark.parametrize("directory", [None, Path("here")])
def test_a_start_that_left_nothing_does_not_stand_in_the_way_of_another_config(directory):
    """The first start had a mistake, such as a wrong file: the next one has another config and the same --run.dir."""
    path = opened(with_run(dir=directory, seed=1)).path
    (path / "errors.log").touch()
    again = opened(with_run(dir=directory, seed=2))
    assert again.path == path and not again.resumes
    assert read_config(path)["config"]["run"]["seed"] == 2 and len(read_provenance(path)["starts"]) == 1


@pytest.mark.parametrize("below", ["", "checkpoints/step-00000003"])
def test_a_run_that_starts_from_weights_takes_their_tokenizer(tmp_path, below):
    source = opened(with_run(dir=Path("source"))).path
    (source / "tokenizer.json").write_text("{}")
    path = opened(with_run(init_from=Path("source") / below)).path
    assert (path / "tokenizer.json").read_text() == "{}"
    assert read_config(path)["config"]["run"]["init_from"] == str(source / below)
    assert opened(with_run(init_from=tmp_path / "source" / below)).resumes


def test_directory_that_a_kill_left_without_config_is_begun_anew(tmp_path):
    path = tmp_path / "runs/clip-emoji"
    path.mkdir(parents=True)
    (path / "config.json.part").write_text('{"model"')
    (path / ".lock").touch()
    run = opened()
    assert run.path == path and not run.resumes


def test_broken_config_is_passed_over(tmp_path):
    (opened().path / "config.json").write_text("{")
    assert opened().path.name == "clip-emoji-2"
    with pytest.raises(UserError, match="config cannot be read"):
        opened(with_run(dir=tmp_path / "runs/clip-emoji"))


def test_directory_in_use_by_another_process_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "WAIT", 0.5)
    path = opened().path
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", holder, str(path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        with pytest.raises(UserError, match="in use by process"):
            opened()
        child.kill()
        child.wait()
        assert opened().resumes, "a kill frees it"
    finally:
        child.kill()
        child.communicate()


def test_provenance_has_a_record_for_each_start():
    opened()
    path = opened(with_run(seed=0)).path
    found = read_provenance(path)
    assert found["seed"] == 0 and len(found["starts"]) == 2
    start = found["starts"][0]
    assert start["world_size"] == 1 and sum(start["hosts"].values()) == 1 and start["command"]
    assert start["versions"]["torch"] == versions()["torch"] and start["machine"]["cpu"] == cpu_model()
    (path / "provenance.json").write_text("[")
    assert len(read_provenance(opened().path)["starts"]) == 1


def all_ranks(folder):
    import torch.distributed as dist

    ranks = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size(), first=dist.get_rank() == 0)
    with contextlib.chdir(folder):
        run = open_run(CONFIG, model="clip", recipe="emoji", ranks=ranks)
    run.finish({"recall": 0.5})
    try:
        open_run(with_run(dir=run.path), model="clip", recipe="emoji", ranks=ranks)
    except UserError as error:
        return str(run.path), str(error)
    return None


def test_rank_0_decides_and_errors_reach_every_rank(ranks, tmp_path):
    found = ranks(all_ranks, str(tmp_path), world_size=3)
    assert len(set(found)) == 1
    path, error = found[0]
    assert path == str(tmp_path / "runs/clip-emoji") and error.startswith("--run.dir ") and "finished run" in error
    assert sum(read_provenance(Path(path))["starts"][0]["hosts"].values()) == 3


def test_differences_are_named_and_numbers_compared_as_numbers():
    old = config_to_json(CONFIG)
    assert config_differences(old, config_to_json(with_run(dir=Path("x")))) == []
    new = config_to_json(replace(with_run(steps=11), checkpoint=CheckpointConfig(keep=3), data=Table(Path("x"))))
    assert config_differences(old, new) == [
        *("run.steps", "checkpoint.keep", "data.class", "data.vendors", "data.file", "data.columns")
    ]
    assert config_differences({"a": 1, "b": True}, {"a": 1.0, "b": 1}) == ["b"]
    assert config_differences({"a": None}, {}) == ["a"]
