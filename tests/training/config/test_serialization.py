"""Configs as JSON and back."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json


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


def test_config_survives_json_exactly():
    config = Config(
        RunConfig(steps=3, dir=Path("a/b")),
        rate=0.1 + 0.2,
        data=Table(Path("x.csv"), ("i", 2)),
        kwargs={"p": [1, {"q": None}]},
        places=[Path("/")],
    )
    value = json.loads(json.dumps(config_to_json(config)))
    assert value["data"] == {"class": "Table", "file": "x.csv", "columns": ["i", 2]}
    assert config_from_json(Config, value) == config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"run": {"steps": 1}, "lr": 1}, "lr: Config has no such field, only run, checkpoint"),
        ({"run": {"steps": 1, "stps": 1}}, r"run\.stps: RunConfig has no such field"),
        ({"run": {}}, r"run\.steps: RunConfig needs this field"),
        ({"run": {"steps": 1.0}}, r"run\.steps: 1\.0 is not int"),
        ({"run": {"steps": True}}, r"run\.steps: True is not int"),
        ({"run": 3}, "run: 3 is not the fields of RunConfig"),
        ({"run": {"steps": 1}, "rate": "0.1"}, "rate: '0.1' is not a number"),
        ({"run": {"steps": 1}, "loss": "hinge"}, "loss: 'hinge' is not one of 'clip', 'sigmoid'"),
        ({"run": {"steps": 1}, "width": "4"}, "width: '4' is not int"),
        ({"run": {"steps": 1}, "data": {"class": "os.system"}}, r"data\.class: 'os.system' is not one of Emoji, Table"),
        ({"run": {"steps": 1}, "data": {"class": "Emoji", "vendors": [1]}}, r"data\.vendors\.0: 1 is not str"),
        ({"run": {"steps": 1}, "data": {"class": "Table", "file": "x", "columns": ["a"]}}, "is not a list of 2"),
        ({"run": {"steps": 1}, "places": "a"}, "places: 'a' is not a list"),
        ([], "the config: .* is not the fields of Config"),
    ],
)
def test_config_from_json_rejects(value, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(Config, value)


def test_config_to_json_rejects_what_json_does_not_have():
    with pytest.raises(ValueError, match=r"kwargs\.f: set cannot be converted to JSON"):
        config_to_json(Config(RunConfig(steps=1), kwargs={"f": {1}}))


def test_read_json_names_the_file(tmp_path):
    (tmp_path / "x.json").write_text("{'a': 1}")
    with pytest.raises(ValueError, match=r"x\.json is not JSON"):
        read_json(tmp_path / "x.json")
