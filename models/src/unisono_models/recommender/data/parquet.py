"""Columns of parquet as features: ids, bags of ids, numbers and labels from what pyarrow read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.embedding import Ragged, hash_strings
from unisono_models.datasets.parquet import open_parquet
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids, empty_batch, take_ids
from unisono_models.recommender.data.features import Feature

NO_ID = -1


def is_integers(kind: Any) -> bool:
    """Whether a type of pyarrow's has whole numbers."""
    from pyarrow import types  # type: ignore[import-untyped]

    return bool(types.is_integer(kind) or types.is_boolean(kind))


def is_ids(kind: Any) -> bool:
    """Whether a type of pyarrow's has ids: whole numbers or texts."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return is_integers(kind) or bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bags(kind: Any) -> bool:
    """Whether a type of pyarrow's has lists of ids."""
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists) and is_ids(kind.value_type)


def is_numbers(kind: Any) -> bool:
    """Whether a type of pyarrow's has quantities."""
    from pyarrow import types

    return is_integers(kind) or bool(types.is_floating(kind) or types.is_decimal(kind))


def read_ids(column: Any) -> Tensor:
    """int64 (rows,): numbers as they are, those of uint64 wrapped, texts hashed, -1 for null.

    Example:
        >>> import pyarrow
        >>> read_ids(pyarrow.array([7, None, 9]))
        tensor([ 7, -1,  9])
    """
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    from pyarrow import types

    if is_integers(column.type):
        return torch.from_numpy(_whole(column))
    if not types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)  # each text is hashed once
    distinct = column.dictionary
    if is_integers(distinct.type):
        values = _whole(distinct)
    else:
        # Texts that are not UTF-8 have ids as well: as bytes they do not raise, and the escapes keep them apart.
        texts = distinct.cast("large_string").cast("large_binary").to_pylist()
        values = hash_strings([(text or b"").decode(errors="surrogateescape") for text in texts]).numpy()
        values = np.where(distinct.is_null().to_numpy(zero_copy_only=False), NO_ID, values)
    return torch.from_numpy(np.append(values, NO_ID)[_whole(column.indices)])  # the last one is that of null


def read_bags(column: Any) -> Ragged:
    """The ids of each row's list; none for null.

    Example:
        >>> import pyarrow
        >>> read_bags(pyarrow.array([[7, 8], None, [9]]))
        Ragged(values=tensor([7, 8, 9]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return Ragged.from_lengths(read_ids(pc.list_flatten(column)), torch.from_numpy(lengths.astype(np.int64)))


def read_numbers(column: Any, *, null: float) -> NDArray[np.float32]:
    """float32 (rows,), `null` where there is none."""
    import pyarrow.compute as pc

    found = pc.fill_null(column.cast("float64", safe=False), null).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # infinite: a bad row
        return found.astype(np.float32)  # type: ignore[no-any-return]


def _whole(column: Any) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    if str(column.type) == "bool":
        column = column.cast("int8")
    found = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)  # uint64 wraps around
    return np.where(column.is_null().to_numpy(zero_copy_only=False), NO_ID, found)


_OPEN_FILES = 16
_CACHE_BYTES = 256 * 2**20
_KINDS = {
    "id": (is_ids, "integers or strings"),
    "ids": (is_bags, "lists of integers or strings"),
    "number": (is_numbers, "numbers"),
}


class ParquetChunks:
    """Blocks (see blocks.Blocks) of one or several parquet files, with the features asked for, by the columns' names.

    Ids are integers as they are, or texts, which are hashed (unisono.embedding.hash_strings); null is -1. Bags are lists of
    either; null is an empty one. Numbers are as they are; null is 0. label: the column of booleans, or of numbers 0 and 1.
    A row is bad if its label is anything else or null, or a number is not finite as float32.

    rows_per_block: a block is a row group, or a part of it of at most so many rows. A row group is read whole, and the last
    ones are kept, as many as fit into 256 MiB. So the parts of one are a group, which an order does not tear apart. Small
    row groups mix better, and of large ones each rank reads all; `notes` says if they are.

    Raises: ImportError without pyarrow; ValueError for a file that lacks a column, or has another type of it, or is no parquet.
    """

    def __init__(
        self, paths: Sequence[Path], features: Sequence[Feature], *, label: str = "label", rows_per_block: int = 4096
    ) -> None:
        if rows_per_block < 1:
            raise ValueError(f"ParquetBlocks: rows_per_block={rows_per_block} must be at least 1")
        self._paths, self._features, self._label = [Path(path) for path in paths], tuple(features), label
        self.notes: tuple[str, ...] = ()
        self._forget()
        # File, row group in it, rows before in the file, rows before in the group, rows, row group of all.
        places: list[tuple[int, int, int, int, int, int]] = []
        count = 0
        for number in range(len(self._paths)):
            self._check_columns(number)
            metadata = self._file(number).metadata
            before, largest = 0, 0
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                starts = range(0, rows, rows_per_block)
                places += [(number, group, before, start, min(rows_per_block, rows - start), count) for start in starts]
                before, largest, count = before + rows, max(largest, rows), count + 1
            if largest > 4 * rows_per_block:
                note = f"row groups of up to {largest:,} rows, read whole by every rank: write smaller ones"
                self.notes += (f"{self._paths[number].name}: {note}",)
        self._places = torch.tensor(places, dtype=torch.int64).reshape(-1, 6)
        self._rows = torch.nn.functional.pad(self.sizes.cumsum(0), (1, 0))

    @property
    def sizes(self) -> Tensor:
        return self._places[:, 4]

    @property
    def groups(self) -> Tensor:
        return self._places[:, 5]

    def read(self, block: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of a block. Those of a row group that is damaged are bad."""
        number, group, before, first, size, _ = self._places[block].tolist()
        if not 0 <= start <= stop <= size:
            raise IndexError(
                f"ParquetBlocks.read: start={start} and stop={stop} must be within the {size} rows of block {block}"
            )
        path = self._paths[number]
        name = path.name if path.name.isprintable() else ascii(path.name)
        line, count = before + first + start + 1, stop - start
        try:
            whole = self._columns(number, group)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            message = ascii(str(error)[:160])
            damaged = (SkippedSample(line + row, name, "damaged row group", message) for row in range(count))
            return empty_batch(self._features, skipped=tuple(damaged))
        columns = {key: column.slice(first + start, count) for key, column in whole.items()}
        numbers, labels, bad = self._check(columns, count)
        good = torch.ones(count, dtype=torch.bool)
        good[list(bad)] = False
        keep = good.nonzero().squeeze(1)
        ids: dict[str, Ids] = {}
        for feature in self._features:
            if feature.kind != "number":
                column = columns[feature.name]
                ids[feature.name] = take_ids(read_bags(column) if feature.kind == "ids" else read_ids(column), keep)
        return Batch(
            ids,
            numbers=numbers[keep],
            labels=labels[keep],
            index=keep + (int(self._rows[block]) + start),
            skipped=tuple(SkippedSample(line + row, name, *bad[row]) for row in sorted(bad)),
        )

    def _check(self, columns: dict[str, Any], count: int) -> tuple[Tensor, Tensor, dict[int, tuple[str, str]]]:
        """Numbers and labels of all rows, and what is wrong with some of them."""
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

    def _columns(self, number: int, group: int) -> dict[str, Any]:
        """All columns of a row group, as arrays of pyarrow's."""
        with self._lock:  # one thread may read ahead for training while another reads for evaluation
            found = self._cache.pop((number, group), None)
            if found is None:
                names = list(dict.fromkeys([self._label, *(feature.name for feature in self._features)]))
                # One thread: ranks share the cores, and the pool of threads does not survive a fork.
                table = self._file(number).read_row_group(group, columns=names, use_threads=False)
                found = table.nbytes, {name: table.column(name).combine_chunks() for name in names}
            self._cache[number, group] = found
            while len(self._cache) > 1 and sum(size for size, _ in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
            return found[1]

    def _check_columns(self, number: int) -> None:
        path, schema = self._paths[number], self._file(number).schema_arrow
        wanted = [(self._label, is_numbers, "booleans or numbers")]
        wanted += [(feature.name, *_KINDS[feature.kind]) for feature in self._features]
        for name, fits, expected in wanted:
            if name not in schema.names:
                there = ", ".join(schema.names)
                raise ValueError(f"ParquetBlocks: {path}: no column {name!r}; there are {there}")
            if not fits(kind := schema.field(name).type):
                raise ValueError(f"ParquetBlocks: {path}: column {name!r} is {kind}, expected {expected}")

    def _file(self, number: int) -> Any:
        file = self._files.pop(number, None) or open_parquet(self._paths[number], what="ParquetBlocks")
        self._files[number] = file
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        return file

    def _forget(self) -> None:
        self._lock = Lock()
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[tuple[int, int], tuple[int, dict[str, Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_files", "_cache")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
