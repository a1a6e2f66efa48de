"""What a finished run has left behind, for the commands that use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from unisono_models.training.config_json import config_from_json
from unisono_models.training.run_directory import read_config

T = TypeVar("T")


class RunError(ValueError):
    """A directory without a finished run, or a command that its model cannot follow. The message says what to do."""


def find_run(path: Path, *, model: str, kind: type[T], files: Sequence[str]) -> T:
    """The config, a `kind`, of the run in the directory `path`, which has to be of `model` and to have exported `files`.

    Raises: RunError if there is none, or not yet.

    Example:
        find_run(Path("runs/gan-digits"), model="gan", kind=Config, files=FILES).data.source  ->  "mnist-5k"
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs(model, files)}")
    try:
        saved = read_config(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is no run: {error}.{_list_runs(model, files)}") from None
    if saved["model"] != model:
        raise RunError(f"{path} holds a run of {saved['model']}, not of {model}.{_list_runs(model, files)}")
    if missing := [name for name in files if not (path / "export" / name).is_file()]:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or start the training "
            "again with the same options, which continues it"
        )
    return config_from_json(kind, saved["config"])


def _list_runs(model: str, files: Sequence[str]) -> str:
    """Those that could have been meant."""
    paths = [file.parents[1] for file in sorted(Path("runs").glob(f"*/export/{files[0]}"))]
    found = [str(path) for path in paths if _is_of(model, path)]
    return f" Here are {', '.join(found[:5])}" if found else f" Train one: ./scripts/train {model}"


def _is_of(model: str, path: Path) -> bool:
    try:
        return bool(read_config(path)["model"] == model)
    except (OSError, ValueError):
        return False
