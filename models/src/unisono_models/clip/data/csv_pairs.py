"""Pairs in CSV and TSV files: one column has paths of images, another has captions."""

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

from unisono_models.clip.data.pairs import (
    EncodedPair,
    PairBatch,
    check_indices,
    clean_text,
    make_batch,
    make_skip,
    parse_concept,
    printable,
)
from unisono_models.datasets.images import read_image_bytes
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.training.errors import UserError

IMAGE_COLUMNS = ("image", "filepath", "file_name", "image_path", "path", "file")
CAPTION_COLUMNS = ("caption", "text", "title")
_LONGEST_LINE = 1 << 20
_END = ["the end", *"\0" * 8]  # a row that no file has


class CsvPairs:
    """The pairs (see CaptionedPairs) of one or several CSV or TSV files with a header, as one dataset.

    image, caption, concept: names of columns. None: the first of IMAGE_COLUMNS and CAPTION_COLUMNS that the file has; pairs
        with equal captions have the same concept.
    root: paths are relative to this folder and may not lead out of it: rows with other paths, such as /etc/x or ../x, are
        skipped. None: the folder of the file. For absolute paths, give the folder that contains all of them, or "/".
        Symbolic links are followed.
    delimiter: None: a tab in .tsv; a comma in .csv unless the header has tabs and no comma.

    Only the place where each row starts is kept in memory, eight bytes a row.

    Raises: UserError for a file without these columns or without rows.
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
        self._files = [_CsvFile(path, image, caption, concept, root, delimiter) for path in paths]
        self._starts = np.array([0, *accumulate(len(file) for file in self._files)], dtype=np.int64)
        if not len(self):
            raise UserError(f"--data.source {', '.join(str(path) for path in paths[:3])}: there are no rows below the header")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        return make_batch(self._encoded_pairs(check_indices(indices, len(self))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return [caption for _, caption, _ in self._texts(check_indices(indices, len(self)))]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        found = check_indices(indices, len(self))
        concepts = (parse_concept(concept, caption) for _, caption, concept in self._texts(found))
        return np.fromiter(concepts, dtype=np.int64, count=len(found))

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return check_indices(indices, len(self))

    def _locate(self, index: int) -> tuple[_CsvFile, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._files[number], index - int(self._starts[number])

    def _texts(self, indices: NDArray[np.int64]) -> Iterator[tuple[str, str, str]]:
        for index in indices.tolist():
            file, row = self._locate(index)
            try:
                yield file.texts(row)
            except (OSError, ValueError):
                yield "", "", ""

    def _encoded_pairs(self, indices: NDArray[np.int64]) -> Iterator[EncodedPair | SkippedSample]:
        for index in indices.tolist():
            file, row = self._locate(index)
            try:
                path, caption, concept = file.texts(row)
            except (OSError, ValueError) as error:
                yield make_skip(index, self._name(index), "broken row", error)
                continue
            image = b""
            try:
                if caption:
                    image = read_image_bytes(resolve_path(path, file.root))
            except (OSError, ValueError) as error:
                yield make_skip(index, f"{self._name(index)}: {path}", "unreadable file", error)
                continue
            yield EncodedPair(index, image, caption, parse_concept(concept, caption))

    def _name(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{file.path.name}, row {row + 1}"


def resolve_path(path: str, root: Path) -> str:
    """Return the absolute path of `path`, relative to `root`. Raises: ValueError if it leads out of `root`."""
    base = os.path.abspath(root)
    full = os.path.normpath(os.path.join(base, path.strip()))
    if not path.strip() or "\0" in path or os.path.commonpath([base, full]) != base or full == base:
        raise ValueError(f"not in {base}; --data.root must be the folder that contains all images")
    return full


def choose_column(given: str | None, usual: Sequence[str], columns: Sequence[str], *, what: str, path: Path) -> int:
    """Find the column `given`, or the first of the usual ones. Raises: UserError that lists the columns there are."""
    for name in [given] if given is not None else usual:
        if name in columns:
            return columns.index(name)
    there = f"The columns of {path} are: {printable(', '.join(columns), 400)}"
    if given is None:
        raise UserError(f"--data.{what}: say which column has the {what}: none is called {' or '.join(usual)}. {there}")
    raise UserError(f"--data.{what} {given}: there is no such column. {there}")


class _CsvFile:
    """One file: its columns, and where its rows start."""

    def __init__(
        self, path: Path, image: str | None, caption: str | None, concept: str | None, root: Path | None, delimiter: str | None
    ) -> None:
        self.path, self.root = path, root or path.absolute().parent
        self._file: FileIO | None = None
        with path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise UserError(f"--data.source {path}: the text is UTF-16; save it as UTF-8")
            file.seek(0)
            first = file.readline(_LONGEST_LINE).decode("utf-8-sig", "replace")
            tabs = path.suffix.lower() == ".tsv" or ("\t" in first and "," not in first)
            self._delimiter = delimiter or ("\t" if tabs else ",")
            lines = _Lines(file)
            rows = csv.reader(lines, delimiter=self._delimiter)
            first_row = _next_row(rows)
            if first_row == _END:
                raise UserError(f"--data.source {path}: the file is empty")
            header = [name.removeprefix("\ufeff").strip() for name in first_row or ()]
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
        """Read path, caption and concept of a row. Raises: ValueError for a row that cannot be parsed."""
        start, stop = (int(x) for x in self._starts[row : row + 2])
        self._file = self._file or FileIO(self.path)
        text = os.pread(self._file.fileno(), stop - start, start).decode("utf-8", "replace")
        fields = _next_row(csv.reader((line + "\n" for line in text.split("\n")), delimiter=self._delimiter))
        if fields is None:
            raise ValueError("the row cannot be parsed: perhaps a quotation mark is not closed")
        if len(fields) <= max(self._columns):
            raise ValueError(f"{len(fields)} columns, expected at least {max(self._columns) + 1}")
        path, caption, concept = (fields[column] if column >= 0 else "" for column in self._columns)
        return path, clean_text(caption), concept

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}


class _Lines:
    """The lines of a file as text. `place`: how many bytes were read; csv reads no line before it needs it."""

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
    """Read the next row: None if it cannot be parsed, _END after the last one."""
    try:
        return next(rows, _END)
    except csv.Error:
        return None
