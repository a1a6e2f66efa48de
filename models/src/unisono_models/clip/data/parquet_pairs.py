"""Pairs in parquet files, as Hugging Face has them: image: struct<bytes, path>, caption: string."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono_models.clip.data.csv_pairs import CAPTION_COLUMNS, IMAGE_COLUMNS, choose_column, resolve_path
from unisono_models.clip.data.images import read_file
from unisono_models.clip.data.pairs import (
    PairBatch,
    Record,
    check_indices,
    clean_text,
    concept_from,
    make_batch,
    printable,
    skip,
)
from unisono_models.datasets.parquet import open_parquet
from unisono_models.datasets.skip_report import SkippedSample

_CACHE_BYTES = 256 * 2**20
_OPEN_FILES = 16
_LARGE_GROUP = 64 * 2**20


class ParquetPairs:
    """Pairs (see CaptionedPairs) of one or several parquet files, as one data set.

    image, caption, concept: the columns' names. None: the first of the usual names that is there (see tables); pairs with the
    same caption show the same. The image column holds bytes, or a struct of `bytes` and `path`; paths are treated as in
    TablePairs, with the same `root`. Of a list of captions the first counts.

    What is read is a row group at a time, the last few being kept. A random order is as fast as row groups are small: for
    pictures a hundred rows are usual, and `notes` says if they are much larger.

    Raises: ImportError without pyarrow; ValueError for a file without these columns, or that is no parquet.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        image: str | None = None,
        caption: str | None = None,
        concept: str | None = None,
        root: Path | None = None,
    ) -> None:
        self._paths = list(paths)
        self._roots = [root or path.absolute().parent for path in paths]
        self._forget()
        self._names: list[tuple[str, str, str | None]] = []
        groups: list[tuple[int, int, int]] = []  # file, row group in it, rows
        self.notes: tuple[str, ...] = ()
        for number, path in enumerate(self._paths):
            metadata = self._file(number).metadata
            there = list(self._file(number).schema_arrow.names)
            self._names.append(
                (
                    there[choose_column(image, IMAGE_COLUMNS, there, what="image", path=path)],
                    there[choose_column(caption, CAPTION_COLUMNS, there, what="caption", path=path)],
                    None if concept is None else there[choose_column(concept, (), there, what="concept", path=path)],
                )
            )
            self._check_image_type(number)
            sizes = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            groups += [(number, group, size.num_rows) for group, size in enumerate(sizes)]
            if (largest := max((size.total_byte_size for size in sizes), default=0)) > _LARGE_GROUP:
                note = (
                    f"{path.name}: row groups of up to {largest >> 20} MiB, each read whole for one picture: write smaller ones"
                )
                self.notes += (note,)
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self._starts = np.concatenate([[0], self._groups[:, 2].cumsum()])
        if not len(self):
            raise ValueError(f"ParquetPairs: {', '.join(str(path) for path in paths[:3])}: no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        found = check_indices(indices, len(self))
        records: dict[int, Record | SkippedSample] = {}
        for where, index, row in self._rows(found, pictures=True):
            broken = isinstance(row, Exception)
            records[where] = skip(index, self._name(index), "broken row", row) if broken else self._record(index, row)
        return make_batch((records.pop(where) for where in range(len(found))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        """The captions at `indices`; empty where there is none."""
        found = check_indices(indices, len(self))
        texts = [""] * len(found)
        for where, _, row in self._rows(found, pictures=False):
            texts[where] = "" if isinstance(row, Exception) else _caption(row[0])
        return texts

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The concepts at `indices`, by reading the columns of texts."""
        found = check_indices(indices, len(self))
        concepts = np.zeros(len(found), dtype=np.int64)
        for where, _, row in self._rows(found, pictures=False):
            concepts[where] = concept_from(None, "") if isinstance(row, Exception) else concept_from(row[1], _caption(row[0]))
        return concepts

    def _rows(self, indices: NDArray[np.int64], *, pictures: bool) -> Iterator[tuple[int, int, Any]]:
        """Place in `indices`, index, and (caption, concept, image) or the error: by row group, each read once."""
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        for where in np.argsort(groups, kind="stable").tolist():
            group, index = int(groups[where]), int(indices[where])
            try:
                columns = self._columns(group, pictures)
                row: Any = [None if c is None else c[index - int(self._starts[group])].as_py() for c in columns]
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                row = error
            yield where, index, row

    def _columns(self, group: int, pictures: bool) -> tuple[Any, ...]:
        key = group, pictures
        if key not in self._cache:
            number, inner, _ = self._groups[group].tolist()
            image, caption, concept = self._names[number]
            names = [caption, concept, image if pictures else None]
            # One thread: ranks and workers share the cores, and the pool of threads does not survive a fork.
            table = self._file(number).read_row_group(inner, columns=list({n for n in names if n}), use_threads=False)
            self._cache[key] = table.nbytes, tuple(_bytes(table.column(name)) if name else None for name in names)
            while len(self._cache) > 1 and sum(size for size, _ in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key][1]

    def _record(self, index: int, row: Sequence[Any]) -> Record | SkippedSample:
        caption, image = _caption(row[0]), row[2]
        data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
        if caption and data is None:
            try:
                group = int(np.searchsorted(self._starts, index, side="right")) - 1
                data = read_file(resolve_path(path or "", self._roots[int(self._groups[group, 0])]))
            except (OSError, ValueError) as error:
                return skip(index, f"{self._name(index)}: {path}", "unreadable file", error)
        return Record(index, data or b"", caption, concept_from(row[1], caption))

    def _name(self, index: int) -> str:
        number = int(self._groups[int(np.searchsorted(self._starts, index, side="right")) - 1, 0])
        first = int(np.searchsorted(self._groups[:, 0], number))
        return f"{self._paths[number].name}, row {index - int(self._starts[first]) + 1}"

    def _file(self, number: int) -> Any:
        file = self._files.pop(number, None) or open_parquet(self._paths[number], what="open_pairs")
        self._files[number] = file
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        return file

    def _check_image_type(self, number: int) -> None:
        name = self._names[number][0]
        kind = str(self._file(number).schema_arrow.field(name).type)
        if not kind.startswith(("struct<bytes: ", "struct<path: ", "binary", "large_binary")):
            raise ValueError(
                f"open_pairs: {self._paths[number]}: column {name!r} is {printable(kind, 80)}, expected binary or "
                "struct<bytes: binary, path: string>. Tables of paths or addresses are read from CSV"
            )

    def _forget(self) -> None:
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[tuple[int, bool], tuple[int, tuple[Any, ...]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_files", "_cache")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _bytes(column: Any) -> Any:
    """Strings as they are in the file: pyarrow would raise for those that are not UTF-8."""
    kinds = {"string": "binary", "large_string": "large_binary"}
    return column.cast(kinds[str(column.type)]) if str(column.type) in kinds else column


def _caption(value: Any) -> str:
    return clean_text(value[0] if isinstance(value, list) and value else value if not isinstance(value, list) else None)
