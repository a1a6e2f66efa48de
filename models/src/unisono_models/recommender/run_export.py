"""What a run has left behind, for the commands that use it."""

from __future__ import annotations

from pathlib import Path

from unisono_models.recommender.config import Config
from unisono_models.recommender.export import FILES
from unisono_models.training.config_json import config_from_json
from unisono_models.training.run_directory import read_config


class RunError(ValueError):
    """A directory without a finished run. The message says what to do."""


def find_run(path: Path) -> Config:
    """The config of the run in the directory `path`, which has to have an exported model.

    Raises: RunError if there is none, or not yet.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs()}")
    try:
        saved = read_config(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is no run: {error}.{_list_runs()}") from None
    if saved["model"] != "recommender":
        raise RunError(f"{path} holds a run of {saved['model']}, not of recommender.{_list_runs()}")
    if missing := [name for name in FILES if not (path / "export" / name).is_file()]:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or start the training "
            "again with the same options, which continues it"
        )
    return config_from_json(Config, saved["config"])


def _list_runs() -> str:
    runs = sorted(str(x.parents[1]) for x in Path("runs").glob(f"*/export/{FILES[2]}"))
    return f" Here are {', '.join(runs[:5])}" if runs else " Train one: ./scripts/train recommender"
