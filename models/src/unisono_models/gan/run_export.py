"""What a run has left behind, for the commands that use it."""

from __future__ import annotations

from pathlib import Path

from unisono_models.gan.config import Config
from unisono_models.gan.export import FILES
from unisono_models.training.config_json import config_from_json
from unisono_models.training.run_directory import read_config


class RunError(ValueError):
    """A directory without a finished run. The message says what to do."""


def find_run(path: Path) -> Config:
    """The config of the run in the directory `path`, which has to have an exported generator.

    Raises: RunError if there is none, or not yet.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs()}")
    try:
        saved = read_config(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is no run: {error}.{_list_runs()}") from None
    if saved["model"] != "gan":
        raise RunError(f"{path} holds a run of {saved['model']}, not of gan.{_list_runs()}")
    if missing := [name for name in FILES if not (path / "export" / name).is_file()]:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or start the training "
            "again with the same options, which continues it"
        )
    return config_from_json(Config, saved["config"])


def _list_runs() -> str:
    """Those that could have been meant. Other models' have an export of the same files."""
    found = [str(file.parents[1]) for file in sorted(Path("runs").glob(f"*/export/{FILES[1]}")) if _is_ours(file.parents[1])]
    return f" Here are {', '.join(found[:5])}" if found else " Train one: ./scripts/train gan"


def _is_ours(path: Path) -> bool:
    try:
        return bool(read_config(path)["model"] == "gan")
    except (OSError, ValueError):
        return False
