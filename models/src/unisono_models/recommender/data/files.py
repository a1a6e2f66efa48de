"""Which files `data.source` means: those of a registered dataset, or the user's own, in one of four formats."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unisono_models.datasets.file_patterns import find_files
from unisono_models.datasets.registry import Registry
from unisono_models.recommender.config import DataConfig
from unisono_models.training.errors import UserError

TEXT = (".csv", ".tsv", ".txt", "")
SUFFIXES = {
    "atomic": (".inter",),
    "parquet": (".parquet",),
    "criteo": TEXT,
    "ratings": (*TEXT, ".gz", ".bz2", ".zst", ".parquet"),
}
UNDERSTOOD = (
    "Understood are: ratings in .csv, .tsv, .txt (also .gz) or .parquet with a column of users and one of items; RecBole's "
    "atomic files (.inter); click logs in Criteo's TSV (40 columns, no header), or in .parquet with "
    "--data.features NAME:KIND:ROWS"
)
_CRITEO_COLUMNS = 40


@dataclass(frozen=True)
class DatasetFiles:
    """A file, folder or pattern, and the format of the files: one of SUFFIXES, or "auto", which goes by suffix and columns."""

    source: str
    format: Literal["auto", "ratings", "atomic", "criteo", "parquet"] = "auto"
    notes: tuple[str, ...] = ()
    """What the log and the report should say about the data, such as its licence."""


DATASETS: Registry[Callable[[], DatasetFiles]] = Registry("recommender")
"""Functions that find the files of a dataset, by the name that `data.source` has. movielens.py is an example to copy."""


def find_dataset_files(config: DataConfig) -> DatasetFiles:
    """Look up a registered dataset, or take the source as a file, folder or pattern. Find the format if it is "auto".

    Raises: UserError that lists what is understood.
    """
    files = DATASETS[config.source]() if config.source in DATASETS else DatasetFiles(config.source, config.format)
    return replace(files, format=_find_format(files.source, config)) if files.format == "auto" else files


def find_source_files(source: str, format: str) -> list[Path]:
    """Find the files of a format. Raises: UserError if there are none."""
    try:
        return find_files(source, kinds=dict.fromkeys(SUFFIXES[format], format), what="--data.source")[1]
    except ValueError as error:
        raise UserError(f"{error}.{_suggest(source)}") from error


def _find_format(source: str, config: DataConfig) -> Literal["ratings", "atomic", "criteo", "parquet"]:
    kinds = {".inter": "atomic", ".parquet": "parquet"} | dict.fromkeys(SUFFIXES["ratings"][:-1], "text")
    try:
        kind, paths = find_files(source, kinds=kinds, what="--data.source")
    except ValueError as error:
        if not Path(source).exists() and not set("*?[{") & set(source):
            raise UserError(f"--data.source {source}: there is no such file or folder.{_suggest(source)}") from error
        raise UserError(f"{error}. {UNDERSTOOD}") from error
    if kind == "atomic":
        return "atomic"
    if kind == "parquet":
        return "parquet" if any(text.count(":") == 2 for text in config.features) else "ratings"
    with paths[0].open("rb") as file:
        first = file.readline(1 << 16).split(b"\t")
    return "criteo" if len(first) == _CRITEO_COLUMNS and first[0] in (b"0", b"1") else "ratings"


def _suggest(source: str) -> str:
    if "/" in source:
        return ""
    return f" The datasets with a name are {', '.join(DATASETS.names())}."
