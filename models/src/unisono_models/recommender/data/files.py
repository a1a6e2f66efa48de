"""Which files `data.source` means: those of a registered dataset, or the user's own, in one of three formats."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from unisono_models.datasets.file_patterns import find_files
from unisono_models.datasets.registry import Registry

SUFFIXES = {"atomic": (".inter",), "parquet": (".parquet",), "criteo": (".tsv", ".txt", ".csv", "")}


@dataclass(frozen=True)
class DatasetFiles:
    """A file, folder or pattern, and the format of the files: one of SUFFIXES, or "auto", which goes by the suffix."""

    source: str
    format: str = "auto"
    notes: tuple[str, ...] = ()
    """What the log and the report should say about the data, such as its licence."""


DATASETS: Registry[Callable[[], DatasetFiles]] = Registry("recommender")
"""Functions that find the files of a dataset, by the name that `data.source` has. movielens.py is an example to copy."""


def find_dataset_files(source: str, format: str) -> DatasetFiles:
    """Look up a registered dataset, or take `source` as a file, folder or pattern. Find the format if it is "auto"."""
    files = DATASETS[source]() if source in DATASETS else DatasetFiles(source, format)
    if files.format == "auto":
        kinds = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}
        files = replace(files, format=find_files(files.source, kinds=kinds, what="data.source")[0])
    return files
