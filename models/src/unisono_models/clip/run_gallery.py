"""The gallery of a run: its exported model, over the pictures that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unisono_models.clip.data.sources import find_files, open_pairs
from unisono_models.clip.gallery import Gallery
from unisono_models.clip.model import FILES, Clip
from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.run.run_directory import read_config


class RunError(ValueError):
    """A directory that holds nothing to search with. The message says what to do."""


@dataclass(frozen=True)
class Found:
    """An exported model. `folder`: where what is made of it is kept. `data`: the run's DataConfig, as JSON."""

    export: Path
    folder: Path
    data: Json = field(default_factory=dict)

    @property
    def source(self) -> str:
        return str(self.data.get("source", "emoji"))


def find_export(path: Path) -> Found:
    """The exported model of a run directory, or in the folder `path` itself. What is exported alone is taken for one of emoji.

    Raises: RunError if there is none, or not yet.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs()}")
    try:
        run = read_config(path)
    except (OSError, ValueError):
        if all((path / name).is_file() for name in FILES):
            above = path.absolute().parent
            if path.absolute().name == "export" and (above / "config.json").is_file():
                return find_export(above)
            return Found(path, path)
        raise RunError(f"{path} is neither a run (no config.json of one) nor an exported model.{_list_runs()}") from None
    if run["model"] != "clip":
        raise RunError(f"{path} holds a run of {run['model']}, not of clip.{_list_runs()}")
    missing = [name for name in FILES if not (path / "export" / name).is_file()]
    if missing:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or start the training "
            "again with the same options, which continues it"
        )
    return Found(path / "export", path, run["config"].get("data", {}))


def open_gallery(path: Path, *, limit: int = 20_000) -> tuple[Gallery, Path]:
    """The gallery of the run (or exported model) at `path`, and the directory to keep results in.

    Of emoji: all drawings of all vendors. Of other data: at most `limit` of its pictures. Their features are computed once and
    kept in gallery.safetensors there.

    Raises: RunError that says what is wrong.
    """
    found = find_export(path)
    try:
        clip = Clip.from_pretrained(found.export)
    except Exception as error:  # json, safetensors, torch and transformers each have their own for a damaged file
        raise RunError(f"{found.export} cannot be loaded: {type(error).__name__}: {error}") from error
    cache = found.folder / "gallery.safetensors"
    if found.source == "emoji":
        return Gallery.from_emoji(clip, cache=cache), found.folder
    try:
        columns = {name: found.data.get(name) for name in ("image", "caption", "concept")}
        pairs = open_pairs(found.source, **columns)
        stamps = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in find_files(found.source)[1]]
        return Gallery.from_pairs(clip, pairs, limit=limit, cache=cache, data=repr([columns, stamps])), found.folder
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the data that the run was trained on cannot be read from here: {error}") from error


def _list_runs() -> str:
    runs = sorted(str(export.parent) for export in Path("runs").glob("*/export") if (export / FILES[0]).is_file())
    return f" Here are {', '.join(runs[:5])}" if runs else " Train one: ./scripts/train clip"
