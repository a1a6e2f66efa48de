"""Pairs in CSV and TSV files: a column of paths to pictures and one of captions."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

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
from unisono_models.datasets.skip_report import SkippedSample

IMAGE_COLUMNS = ("image", "filepath", "file_name", "image_path", "path", "file")
CAPTION_COLUMNS = ("caption", "text", "title")
_LONGEST_LINE = 1 << 20
_END = ["the end", *"\0" * 8]  # what no file has as a row


class TablePairs:
    """Pairs (see CaptionedPairs) of one or several CSV (or TSV) files with a header, as one data set.

    image, caption, concept: the columns' names. None: the first of IMAGE_COLUMNS and CAPTION_COLUMNS that is there; pairs
    with the same caption show the same.
    root: paths are relative to it and may not lead out of it: rows with others, such as /etc/x or ../x, are skipped. None:
    the folder of the file. With absolute paths, name the folder that they are all in, or "/". Symbolic links are followed.
    delimiter: None: a tab in .tsv, a comma in .csv unless the header has tabs and no comma.

    Only where the rows start is kept in memory, eight bytes each.

    Raises: ValueError for a file without these columns or without rows.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        image: str | None = None,
        caption: str | None = None,
        concept: str | None = None,
        root: Path | None = None,
        delimiter: str | None = None,
    ) -> None:
        self._tables = [_Table(path, image, caption, concept, root, delimiter) for path in paths]
        self._starts = np.array([0, *accumulate(len(table) for table in self._tables)], dtype=np.int64)
        if not len(self):
            raise ValueError(f"TablePairs: {', '.join(str(path) for path in paths[:3])}: no rows below the header")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        return make_batch(self._records(check_indices(indices, len(self))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        """The captions at `indices`; empty where there is none."""
        return [row[1] for row in self._texts(check_indices(indices, len(self)))]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The concepts at `indices`, by reading their rows."""
        found = check_indices(indices, len(self))
        return np.fromiter((concept_from(row[2], row[1]) for row in self._texts(found)), dtype=np.int64, count=len(found))

    def _place(self, index: int) -> tuple[_Table, int]:
        table = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._tables[table], index - int(self._starts[table])

    def _texts(self, indices: NDArray[np.int64]) -> Iterator[tuple[str, str, str]]:
        for index in indices.tolist():
            table, row = self._place(index)
            try:
                yield table.texts(row)
            except (OSError, ValueError):
                yield "", "", ""

    def _records(self, indices: NDArray[np.int64]) -> Iterator[Record | SkippedSample]:
        for index in indices.tolist():
            table, row = self._place(index)
            try:
                path, caption, concept = table.texts(row)
            except (OSError, ValueError) as error:
                yield skip(index, self._name(index), "broken row", error)
                continue
            image = b""
            try:
                if caption:
                    image = read_file(resolve_path(path, table.root))
            except (OSError, ValueError) as error:
                yield skip(index, f"{self._name(index)}: {path}", "unreadable file", error)
                continue
            yield Record(index, image, caption, concept_from(concept, caption))

    def _name(self, index: int) -> str:
        table, row = self._place(index)
        return f"{table.path.name}, row {row + 1}"


def resolve_path(path: str, root: Path) -> str:
    """Where `path`, relative to `root`, leads. Raises ValueError if that is outside of it."""
    base = os.path.abspath(root)
    full = os.path.normpath(os.path.join(base, path.strip()))
    if not path.strip() or "\0" in path or os.path.commonpath([base, full]) != base or full == base:
        raise ValueError(f"not in {base}; name the folder that all are in by root=")
    return full


def choose_column(given: str | None, usual: Sequence[str], there: Sequence[str], *, what: str, path: Path) -> int:
    """The place of the column `given`, or of the first of the usual ones. Raises ValueError that lists those there."""
    for name in [given] if given is not None else usual:
        if name in there:
            return there.index(name)
    wanted = repr(given) if given is not None else f"of the usual ones ({', '.join(usual)})"
    raise ValueError(
        f"open_pairs: {path}: no column {wanted} for the {what}; there are {printable(list(there), 400)}. Name it by {what}="
    )


class _Table:
    """One file: its columns, and where its rows start."""

    def __init__(
        self, path: Path, image: str | None, caption: str | None, concept: str | None, root: Path | None, delimiter: str | None
    ) -> None:
        self.path, self.root = path, root or path.absolute().parent
        self._file: FileIO | None = None
        with path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError(f"open_pairs: {path}: text in UTF-16; save it as UTF-8")
            file.seek(0)
            first = file.readline(_LONGEST_LINE).decode("utf-8-sig", "replace")
            tabs = path.suffix.lower() == ".tsv" or ("\t" in first and "," not in first)
            self._delimiter = delimiter or ("\t" if tabs else ",")
            lines = _Lines(file)
            rows = csv.reader(lines, delimiter=self._delimiter)
            header = [name.removeprefix("\ufeff").strip() for name in _next_row(rows) or ()]
            self._columns = (
                choose_column(image, IMAGE_COLUMNS, header, what="image", path=path),
                choose_column(caption, CAPTION_COLUMNS, header, what="caption", path=path),
                -1 if concept is None else choose_column(concept, (), header, what="concept", path=path),
            )
            starts = array("q", [lines.place])
            while (row := _next_row(rows)) != _END:
                if row == []:  # an empty line: the next row starts later
                    starts[-1] = lines.place
                else:
                    starts.append(lines.place)
            self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def texts(self, row: int) -> tuple[str, str, str]:
        """Path, caption and concept as they stand there. Raises ValueError for a row that cannot be parsed."""
        start, stop = (int(x) for x in self._starts[row : row + 2])
        self._file = self._file or FileIO(self.path)
        text = os.pread(self._file.fileno(), stop - start, start).decode("utf-8", "replace")
        fields = _next_row(csv.reader((line + "\n" for line in text.split("\n")), delimiter=self._delimiter))
        if fields is None:
            raise ValueError("not parsed: perhaps a quotation mark without its partner")
        if len(fields) <= max(self._columns):
            raise ValueError(f"{len(fields)} columns, expected at least {max(self._columns) + 1}")
        path, caption, concept = (fields[column] if column >= 0 else "" for column in self._columns)
        return path, clean_text(caption), concept

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}


class _Lines:
    """The lines of a file as text. `place` is how far it was read: csv takes no line before it needs it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.seek(0)
        self.place = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LONGEST_LINE)
        if not line:
            raise StopIteration
        self.place += len(line)
        return line.decode("utf-8", "replace")


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    """The next row: None if it cannot be parsed, _END if there is none."""
    try:
        return next(rows, _END)
    except csv.Error:
        return None
