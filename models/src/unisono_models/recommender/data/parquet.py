"""Rows in parquet files: ids as integers or strings, lists of them, numbers, and a label."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.embedding import Ragged, hash_strings
from unisono_models.datasets.parquet import RowGroupReader
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids, empty_batch, take_ids
from unisono_models.recommender.data.features import Feature, FeatureKind

NO_ID = -1
_EXPECTED: dict[FeatureKind, str] = {"id": "integers or strings", "ids": "lists of integers or strings", "number": "numbers"}


class ParquetChunks:
    """Chunks (see chunks.py) of parquet files. The name of a feature is the name of its column.

    Ids are integers as they are, or strings, which are hashed (unisono.embedding.hash_strings); null is -1. Bags are lists of
    either; null is an empty bag. Numbers are taken as they are; null is 0. A row is bad if its label is not 0 or 1, or if a
    number is not finite as float32.

    A row group is read whole, and the most recent ones are cached. So all chunks of one row group are a group (see
    `Chunks.groups`). Small row groups mix better, and every rank has to read all of a large one: `notes` warns of them.

    Args:
        label: A column of booleans, or of numbers 0 and 1.
        rows_per_chunk: A chunk is a row group, or a part of it of at most so many rows.

    Raises: ImportError without pyarrow; ValueError if a column is missing or has another type, or if a file is not parquet.
    """

    def __init__(
        self, paths: Sequence[Path], features: Sequence[Feature], *, label: str = "label", rows_per_chunk: int = 4096
    ) -> None:
        if rows_per_chunk < 1:
            raise ValueError(f"ParquetChunks: rows_per_chunk={rows_per_chunk} must be at least 1")
        self._reader = RowGroupReader(paths, what="ParquetChunks")
        self._features = tuple(features)
        self._label = label
        self._columns = list(dict.fromkeys([label, *(feature.name for feature in features)]))
        self.notes: tuple[str, ...] = ()
        chunks: list[_Chunk] = []
        row_groups = 0
        for file, path in enumerate(self._reader.paths):
            self._validate_columns(file)
            metadata = self._reader.file(file).metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            rows_before = 0
            for group, rows in enumerate(sizes):
                for start in range(0, rows, rows_per_chunk):
                    size = min(rows_per_chunk, rows - start)
                    chunks.append(_Chunk(file, group, rows_before, start, size, row_groups))
                rows_before += rows
                row_groups += 1
            if max(sizes, default=0) > 4 * rows_per_chunk:
                note = f"row groups of up to {max(sizes):,} rows, read whole by every rank: write smaller ones"
                self.notes += (f"{path.name}: {note}",)
        self._chunks = torch.tensor(chunks, dtype=torch.int64).reshape(-1, len(_Chunk._fields))
        self._rows_before = torch.nn.functional.pad(self.sizes.cumsum(0), (1, 0))

    @property
    def sizes(self) -> Tensor:
        return self._chunks[:, _Chunk._fields.index("size")]

    @property
    def groups(self) -> Tensor:
        return self._chunks[:, _Chunk._fields.index("row_group")]

    def read(self, chunk: int, start: int, stop: int) -> Batch:
        """Read rows `start` to `stop` of a chunk. All rows of a damaged row group are bad."""
        place = _Chunk(*self._chunks[chunk].tolist())
        if not 0 <= start <= stop <= place.size:
            raise IndexError(
                f"ParquetChunks.read: start={start} and stop={stop} must be within the {place.size} rows of chunk {chunk}"
            )
        path = self._reader.paths[place.file]
        name = path.name if path.name.isprintable() else ascii(path.name)
        line = place.rows_before + place.start + start + 1
        count = stop - start
        try:
            table = self._reader.read(place.file, place.group, self._columns)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            message = ascii(str(error)[:160])
            damaged = [SkippedSample(line + row, name, "damaged row group", message) for row in range(count)]
            return empty_batch(self._features, skipped=damaged)
        columns = {key: table.column(key).slice(place.start + start, count).combine_chunks() for key in self._columns}
        numbers, labels, bad = self._find_bad_rows(columns, count)
        good = torch.ones(count, dtype=torch.bool)
        good[list(bad)] = False
        rows = good.nonzero().squeeze(1)
        ids: dict[str, Ids] = {}
        for feature in self._features:
            if feature.kind != "number":
                column = columns[feature.name]
                ids[feature.name] = take_ids(read_bags(column) if feature.kind == "ids" else read_ids(column), rows)
        return Batch(
            ids,
            numbers=numbers[rows],
            labels=labels[rows],
            index=rows + (int(self._rows_before[chunk]) + start),
            skipped=tuple(SkippedSample(line + row, name, *bad[row]) for row in sorted(bad)),
        )

    def _find_bad_rows(self, columns: dict[str, Any], count: int) -> tuple[Tensor, Tensor, dict[int, tuple[str, str]]]:
        """Numbers and labels of all rows, and the reason and detail of each bad row."""
        bad: dict[int, tuple[str, str]] = {}
        names = [feature.name for feature in self._features if feature.kind == "number"]
        numbers = np.empty((count, len(names)), dtype=np.float32)
        for place, name in enumerate(names):
            numbers[:, place] = read_numbers(columns[name], null=0.0)
        for row, place in np.argwhere(~np.isfinite(numbers)).tolist():
            bad[row] = "number not finite", f"{names[place]} is {columns[names[place]][row]}"
        labels = read_numbers(columns[self._label], null=float("nan"))
        for row in np.flatnonzero((labels != 0) & (labels != 1)).tolist():
            bad[row] = "label not 0 or 1", f"{self._label} is {columns[self._label][row]}"
        return torch.from_numpy(numbers), torch.from_numpy(labels), bad

    def _validate_columns(self, file: int) -> None:
        path, schema = self._reader.paths[file], self._reader.file(file).schema_arrow
        for name, kind in [(self._label, "number"), *((feature.name, feature.kind) for feature in self._features)]:
            if name not in schema.names:
                raise ValueError(f"ParquetChunks: {path}: no column {name!r}; there are {', '.join(schema.names)}")
            column = schema.field(name).type
            if not _fits(column, kind):
                raise ValueError(f"ParquetChunks: {path}: column {name!r} is {column}, expected {_EXPECTED[kind]}")


class _Chunk(NamedTuple):
    file: int
    group: int
    """The row group in the file."""
    rows_before: int
    """Rows of the file before this row group."""
    start: int
    """The first row of the chunk in its row group."""
    size: int
    row_group: int
    """The row group, counted over all files."""


def _fits(column: Any, kind: FeatureKind) -> bool:
    """Whether a pyarrow type can be a feature of this kind."""
    from pyarrow import types  # type: ignore[import-untyped]

    if kind == "ids":
        is_list = types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column)
        return bool(is_list) and _fits(column.value_type, "id")
    if kind == "id" and types.is_dictionary(column):
        column = column.value_type
    if _is_integer(column):
        return True
    if kind == "id":
        return bool(types.is_string(column) or types.is_large_string(column) or types.is_string_view(column))
    return bool(types.is_floating(column) or types.is_decimal(column))


def _is_integer(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(column) or types.is_boolean(column))


def read_ids(column: Any) -> Tensor:
    """Convert a column to int64 (rows,): integers as they are (uint64 wraps around), strings hashed, -1 for null.

    Example:
        >>> import pyarrow
        >>> read_ids(pyarrow.array([7, None, 9]))
        tensor([ 7, -1,  9])
    """
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    from pyarrow import types

    if _is_integer(column.type):
        return torch.from_numpy(_read_integers(column))
    if not types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)  # each string is hashed once
    distinct = column.dictionary
    if _is_integer(distinct.type):
        values = _read_integers(distinct)
    else:
        # Strings that are not UTF-8 get ids as well: as bytes they do not raise, and the escapes keep them apart.
        strings = distinct.cast("large_string").cast("large_binary").to_pylist()
        values = hash_strings([(text or b"").decode(errors="surrogateescape") for text in strings]).numpy()
        values = np.where(distinct.is_null().to_numpy(zero_copy_only=False), NO_ID, values)
    return torch.from_numpy(np.append(values, NO_ID)[_read_integers(column.indices)])  # null has index -1: the last one


def read_bags(column: Any) -> Ragged:
    """Convert a column of lists to bags of ids; null becomes an empty bag.

    Example:
        >>> import pyarrow
        >>> read_bags(pyarrow.array([[7, 8], None, [9]]))
        Ragged(values=tensor([7, 8, 9]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return Ragged.from_lengths(read_ids(pc.list_flatten(column)), torch.from_numpy(lengths.astype(np.int64)))


def read_numbers(column: Any, *, null: float) -> NDArray[np.float32]:
    """Convert a column to float32 (rows,), with `null` for null. What float32 cannot hold becomes infinite."""
    import pyarrow.compute as pc

    found = pc.fill_null(column.cast("float64", safe=False), null).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return found.astype(np.float32)  # type: ignore[no-any-return]


def _read_integers(column: Any) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    if str(column.type) == "bool":
        column = column.cast("int8")
    found = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)  # uint64 wraps around
    return np.where(column.is_null().to_numpy(zero_copy_only=False), NO_ID, found)
