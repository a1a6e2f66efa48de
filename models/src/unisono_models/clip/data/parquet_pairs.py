"""Pairs in parquet files as Hugging Face writes them: image: struct<bytes, path>, caption: string."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono_models.clip.data.csv_pairs import CAPTION_COLUMNS, IMAGE_COLUMNS, choose_column, resolve_path
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
from unisono_models.datasets.parquet import RowGroupReader
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.training.errors import UserError

_LARGE_GROUP = 64 * 2**20


class ParquetPairs:
    """The pairs (see CaptionedPairs) of one or several parquet files, as one dataset.

    image, caption, concept: names of columns. None: as in CsvPairs. The image column holds bytes, or a struct of `bytes` and
        `path`. Of a list of captions the first one is taken.
    root: the folder of the images that are given by path, as in CsvPairs.

    Whole row groups are read, and the last ones are cached. So the smaller the row groups, the faster a random order: for
    images a hundred rows are usual. If they are much larger, `notes` says so.

    Raises: ImportError without pyarrow; UserError for a file that is not parquet or does not have these columns.
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
        self._reader = RowGroupReader(paths, what="--data.source")
        self._roots = [root or path.absolute().parent for path in paths]
        self._columns: list[tuple[str, str, str | None]] = []  # image, caption, concept of each file
        self.notes: tuple[str, ...] = ()
        groups: list[tuple[int, int, int]] = []  # file, row group in it, rows
        for number, path in enumerate(paths):
            file = self._reader.file(number)
            names = list(file.schema_arrow.names)
            self._columns.append(
                (
                    names[choose_column(image, IMAGE_COLUMNS, names, what="image", path=path)],
                    names[choose_column(caption, CAPTION_COLUMNS, names, what="caption", path=path)],
                    None if concept is None else names[choose_column(concept, (), names, what="concept", path=path)],
                )
            )
            _check_image_type(file, self._columns[-1][0], path)
            sizes = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            groups += [(number, group, size.num_rows) for group, size in enumerate(sizes)]
            largest = max((size.total_byte_size for size in sizes), default=0)
            if largest > _LARGE_GROUP:
                self.notes += (
                    f"{path.name}: a row group has up to {largest >> 20} MiB, all of which is read for one image. "
                    "Write smaller row groups",
                )
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self._starts = np.concatenate([[0], self._groups[:, 2].cumsum()])
        if not len(self):
            raise UserError(f"--data.source {', '.join(str(path) for path in paths[:3])}: there are no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        found = check_indices(indices, len(self))
        rows: dict[int, EncodedPair | SkippedSample] = {}
        for position, index, row in self._rows(found, images=True):
            if isinstance(row, Exception):
                rows[position] = make_skip(index, self._name(index), "broken row", row)
            else:
                rows[position] = self._encoded_pair(index, row)
        return make_batch((rows.pop(position) for position in range(len(found))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        found = check_indices(indices, len(self))
        captions = [""] * len(found)
        for position, _, row in self._rows(found, images=False):
            captions[position] = "" if isinstance(row, Exception) else _caption(row[0])
        return captions

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        found = check_indices(indices, len(self))
        concepts = np.zeros(len(found), dtype=np.int64)
        for position, _, row in self._rows(found, images=False):
            caption, concept = ("", None) if isinstance(row, Exception) else (_caption(row[0]), row[1])
            concepts[position] = parse_concept(concept, caption)
        return concepts

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return check_indices(indices, len(self))

    def _rows(self, indices: NDArray[np.int64], *, images: bool) -> Iterator[tuple[int, int, Any]]:
        """Yield position in `indices`, index, and (caption, concept, image) or the error. Each row group is read once."""
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        for position in np.argsort(groups, kind="stable").tolist():
            group, index = int(groups[position]), int(indices[position])
            try:
                row: Any = self._row(group, index - int(self._starts[group]), images=images)
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                row = error
            yield position, index, row

    def _row(self, group: int, row: int, *, images: bool) -> list[Any]:
        number, inner, _ = self._groups[group].tolist()
        image, caption, concept = self._columns[number]
        names = [caption, concept, image if images else None]
        table = self._reader.read(number, inner, sorted({name for name in names if name}))
        return [None if name is None else _cell(table.column(name), row) for name in names]

    def _encoded_pair(self, index: int, row: Sequence[Any]) -> EncodedPair | SkippedSample:
        caption, image = _caption(row[0]), row[2]
        data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
        if caption and data is None:
            try:
                data = read_image_bytes(resolve_path(path or "", self._roots[self._file_of(index)]))
            except (OSError, ValueError) as error:
                return make_skip(index, f"{self._name(index)}: {path}", "unreadable file", error)
        return EncodedPair(index, data or b"", caption, parse_concept(row[1], caption))

    def _file_of(self, index: int) -> int:
        return int(self._groups[int(np.searchsorted(self._starts, index, side="right")) - 1, 0])

    def _name(self, index: int) -> str:
        number = self._file_of(index)
        first = int(np.searchsorted(self._groups[:, 0], number))
        return f"{self._reader.paths[number].name}, row {index - int(self._starts[first]) + 1}"


def _check_image_type(file: Any, column: str, path: Path) -> None:
    kind = str(file.schema_arrow.field(column).type)
    if not kind.startswith(("struct<bytes: ", "struct<path: ", "binary", "large_binary")):
        raise UserError(
            f"--data.image {column}: {path}: column {column!r} is {printable(kind, 80)}, expected binary or "
            "struct<bytes: binary, path: string>. Tables of paths are read from CSV"
        )


def _cell(column: Any, row: int) -> Any:
    """Strings as the bytes that are in the file: pyarrow would raise for those that are not UTF-8."""
    binary = {"string": "binary", "large_string": "large_binary"}.get(str(column.type))
    part = column.slice(row, 1)
    return (part.cast(binary) if binary else part)[0].as_py()


def _caption(value: Any) -> str:
    if isinstance(value, list):
        value = value[0] if value else None
    return clean_text(value)
