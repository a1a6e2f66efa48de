"""Tables of ratings: CSV or parquet files with a column of users, one of items, and others. They are read into memory.

pyarrow does the work on whole columns: a million rows take about two seconds.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.parquet import import_pyarrow, open_parquet
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Ids, cat_ids, take_ids
from unisono_models.recommender.data.columns import RatingColumns
from unisono_models.recommender.data.features import Feature, FeatureKind
from unisono_models.recommender.data.ratings import LARGEST, TITLE_COLUMNS, Ratings, Side, Vocabulary, unknown_column, with_rows
from unisono_models.training.errors import UserError

_DELIMITERS = ",\t;|"
_HEADER_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 24  # a line must be shorter
_LIST_SEPARATOR = "\x1f"  # between the values of a list of parquet, when it is joined to a text
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


@dataclass
class _Rows:
    """Rows of several files: columns of texts, numbers or lists as pyarrow has them, and where each row stands."""

    table: Any
    lines: NDArray[np.int64]
    """The line of a CSV, of which the header is the first, or the row of a parquet file, counted from 1."""
    files: NDArray[np.int64]
    names: list[str]
    """The names of the files."""
    skipped: list[SkippedSample] = field(default_factory=list)

    def without(self, bad: Mapping[int, str], reason: str) -> _Rows:
        """Leave out some rows, and note each of them with its error."""
        if not bad:
            return self
        skipped = [SkippedSample(int(self.lines[k]), self.names[self.files[k]], reason, error) for k, error in bad.items()]
        kept = np.ones(len(self.lines), dtype=bool)
        kept[list(bad)] = False
        return _Rows(self.table.filter(kept), self.lines[kept], self.files[kept], self.names, self.skipped + skipped)


def read_column_names(path: Path) -> list[str]:
    """Read the names of the columns of a CSV or parquet file. Raises: UserError if it has no header."""
    if path.suffix.lower() == ".parquet":
        return list(open_parquet(path, what="--data.source").schema_arrow.names)
    return _read_header(path)[0]


def read_rating_table(
    paths: Sequence[Path],
    features: Sequence[Feature],
    *,
    columns: RatingColumns,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> Ratings:
    """Read ratings from one or more files with the same columns. Every label is 1: the caller knows the threshold.

    Texts lose the spaces around them. A row is skipped if it has another number of fields than the header, no user or no item,
    or a rating, time or number that is not one. A blank number of a feature counts as 0. A feature that has one value for each
    user (or item) belongs to users (or items), so that it is known for any pair of both.

    Args:
        features: Those of kind "auto" become ids, or numbers if the column has fractions.
        columns: The names of the columns of users, items, ratings and times. Without ratings, every value is 1.
        vocabularies: Those that a model was trained with. Values that they lack are unknown, in row 0.

    Raises: UserError if a column is missing, or if no row is left.
    """
    names = read_column_names(paths[0])
    for feature in features:
        if feature.name not in names:
            raise UserError(f"--data.features: there is no column {feature.name!r} in {paths[0].name}: {', '.join(names)}")
    title = next((name for name in names if name.lower() in TITLE_COLUMNS), "")
    given = [columns.user, columns.item, columns.label, columns.timestamp, title, *(feature.name for feature in features)]
    rows = _read_files(paths, names, [name for name in dict.fromkeys(given) if name])
    read = len(rows.lines) + len(rows.skipped)
    blank = _is_blank(rows.table[columns.user]) | _is_blank(rows.table[columns.item])
    rows = rows.without(dict.fromkeys(np.flatnonzero(blank).tolist(), ""), "no user or no item")
    rows = _without_bad_numbers(rows, columns.label)
    rows = _without_bad_numbers(rows, columns.timestamp, parse=_times)
    features = [_resolve_kind(feature, rows.table[feature.name], columns) for feature in features]
    for feature in features:
        if feature.kind == "number":
            rows = _without_bad_numbers(rows, feature.name, allow_blank=True)
    if not len(rows.lines):
        counts = Counter(skip.reason for skip in rows.skipped)
        reasons = "; ".join(f"{reason} in {count:,} of them" for reason, count in counts.most_common())
        example = next((f", such as {skip.error}" for skip in rows.skipped if skip.reason == counts.most_common()[0][0]), "")
        raise UserError(f"--data.source {paths[0]}: none of its {read:,} rows can be used. {reasons}{example}")
    known = dict(vocabularies or {})
    encoded = {name: _encode(rows.table[name], name, known) for name in (columns.user, columns.item)}
    sides = {"user": encoded[columns.user].numpy(), "item": encoded[columns.item].numpy()}
    placed = {feature.name: _place(feature, rows.table[feature.name], sides, columns, known) for feature in features}
    count = len(rows.lines)
    values = _numbers(rows.table[columns.label]) if columns.label else np.ones(count)
    times = torch.from_numpy(_times(rows.table[columns.timestamp]).copy()) if columns.timestamp else None
    return Ratings(
        paths[0],
        features=tuple(with_rows(feature, known) for feature in features),
        vocabularies=known,
        users=encoded[columns.user],
        items=encoded[columns.item],
        values=torch.from_numpy(values.copy()),
        labels=torch.ones(count),
        columns=placed,
        user=columns.user,
        item=columns.item,
        read=read,
        skipped=tuple(rows.skipped),
        times=times,
        titles=_read_titles(rows.table, columns.item, title) if title not in ("", columns.item) else None,
        unused=tuple(name for name in names if name not in given),
    )


def _read_files(paths: Sequence[Path], names: Sequence[str], wanted: Sequence[str]) -> _Rows:
    pa = import_pyarrow(paths[0], what="--data.source")
    parts: list[tuple[Any, NDArray[np.int64]]] = []
    skipped: list[SkippedSample] = []
    for path in paths:
        if path.suffix.lower() == ".parquet":
            parts.append(_read_parquet(path, wanted))
        else:
            table, lines, bad = _read_csv(path, names, wanted)
            parts.append((table, lines))
            skipped += bad
    files = np.repeat(np.arange(len(paths)), [len(lines) for _, lines in parts])
    try:
        table = pa.concat_tables([table for table, _ in parts], promote_options="permissive")
    except pa.ArrowInvalid as error:
        raise UserError(f"--data.source: the columns of the files differ: {str(error)[:200]}") from error
    lines = np.concatenate([lines for _, lines in parts])
    shown = [path.name if path.name.isprintable() else ascii(path.name) for path in paths]
    return _Rows(table.combine_chunks(), lines, files, shown, skipped)


def _read_parquet(path: Path, wanted: Sequence[str]) -> tuple[Any, NDArray[np.int64]]:
    file = open_parquet(path, what="--data.source")
    if missing := [name for name in wanted if name not in file.schema_arrow.names]:
        raise UserError(f"--data.source: {path} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
    try:
        table = file.read(columns=list(wanted), use_threads=False)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"--data.source {path}: damaged: {str(error)[:160]!a}") from error
    return table, np.arange(1, len(table) + 1)


def _read_header(path: Path) -> tuple[list[str], str]:
    """The names of the columns of a CSV, and its delimiter: the one that gives the most columns."""
    pa = import_pyarrow(path, what="--data.source")
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            start = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise UserError(f"--data.source {path}: cannot be read: {error}") from error
    first = start.decode("utf-8-sig", "replace").splitlines()[:1] or [""]
    found = {delimiter: next(csv.reader(first, delimiter=delimiter), []) for delimiter in _DELIMITERS}
    delimiter = max(found, key=lambda each: len(found[each]))
    names = [name.strip() for name in found[delimiter]]
    shown = f"{first[0][:80]!r}"
    if not names or "\0" in first[0]:
        raise UserError(f"--data.source {path}: the file is empty, or not text: its first line is {shown}")
    if any(not name or _is_number(name) for name in names):
        raise UserError(
            f"--data.source {path}: the first line is not a header: {shown}. It has to name the columns, such as "
            f"{delimiter.join(('user', 'item', 'rating', 'timestamp'))}"
        )
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--data.source {path}: two columns are called {repeated[0]!r} in the header {shown}")
    return names, delimiter


def _read_csv(path: Path, names: Sequence[str], wanted: Sequence[str]) -> tuple[Any, NDArray[np.int64], list[SkippedSample]]:
    """Read columns as texts, with the line of each row. Empty lines are not rows."""
    pa = import_pyarrow(path, what="--data.source")
    from pyarrow import csv as arrow_csv  # type: ignore[import-untyped]

    own_names, delimiter = _read_header(path)
    if missing := [name for name in wanted if name not in own_names]:
        raise UserError(f"--data.source: {path} has no column {missing[0]!r}; it has {', '.join(own_names)}")
    skipped: list[SkippedSample] = []
    broken: list[int] = []
    unclosed: list[str] = []

    def skip(row: Any) -> str:
        if row.text.count("\n") > 1:
            unclosed.append(f"line {row.number}: a quotation mark is not closed: {row.text[:80]!r}")
        error = f"{row.actual_columns} fields instead of {row.expected_columns}"
        skipped.append(SkippedSample(row.number, path.name, "wrong number of fields", error))
        broken.append(row.number)
        return "skip"

    def read(encoding: str) -> Any:
        skipped.clear()
        broken.clear()
        options = {
            # One thread: rows are numbered only then, and ranks share the cores.
            "read_options": arrow_csv.ReadOptions(
                use_threads=False, column_names=own_names, skip_rows=1, encoding=encoding, block_size=_BLOCK_BYTES
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=skip
            ),
            "convert_options": arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(own_names, pa.string()), include_columns=list(wanted), strings_can_be_null=False
            ),
        }
        with pa.input_stream(str(path), compression="detect") as stream:
            return arrow_csv.read_csv(stream, **options)

    try:
        try:
            table = read("utf8")
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            table = read("latin-1")
    except pa.ArrowInvalid as error:
        if "Empty CSV file" not in str(error):
            raise UserError(f"--data.source {path}: cannot be read as a table: {str(error)[:200]}") from error
        table = pa.table({name: pa.array([], pa.string()) for name in wanted})
    if unclosed:
        raise UserError(f"--data.source {path}: {unclosed[0]}")
    lines = np.setdiff1d(np.arange(2, len(table) + len(broken) + 2), np.array(broken, dtype=np.int64), assume_unique=True)
    empty = np.logical_and.reduce([_is_blank(table[name]) for name in wanted])
    return table.filter(~empty), lines[~empty], skipped


def _is_blank(column: Any) -> NDArray[np.bool_]:
    """Which rows of a column have null, or nothing but spaces."""
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    return pc.equal(_text_column(column), "").to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _text_column(column: Any) -> Any:
    """Convert a column to texts without spaces around them. Lists become texts with separators; null the empty text."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_list(column.type) or types.is_large_list(column.type):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), _LIST_SEPARATOR)
    if types.is_floating(column.type) and pc.all(pc.equal(column, pc.floor(column))).as_py():
        column = column.cast(pa.int64(), safe=False)  # pandas stores integers with gaps as floats
    column = pc.fill_null(column.cast(pa.string()), "")
    return pc.utf8_trim_whitespace(column)


def _numbers(column: Any) -> NDArray[np.float64]:
    """A column as float64, with NaN where there is no number. A decimal comma is understood."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type):
        return pc.fill_null(column.cast(pa.float64(), safe=False), math.nan).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    if types.is_boolean(column.type):
        return _numbers(column.cast(pa.int8()))
    texts = pc.replace_substring(_text_column(column), ",", ".")
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, pa.scalar(None, pa.string()))
    texts = pc.replace_substring_regex(texts, r"^\+", "")
    return _numbers(texts.cast(pa.float64()))


def _times(column: Any) -> NDArray[np.float64]:
    """A column of times as float64: numbers as they are, dates as seconds; NaN where there is neither."""
    import pyarrow as pa
    from pyarrow import types

    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if types.is_timestamp(column.type) or types.is_date(column.type):
        return _numbers(column.cast(pa.timestamp("us")).cast(pa.int64())) / 1e6
    found = _numbers(column).copy()
    for row in np.flatnonzero(np.isnan(found)).tolist():
        found[row] = _seconds(str(column[row].as_py()).strip())
    return found


def _seconds(text: str) -> float:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _without_bad_numbers(rows: _Rows, name: str, *, parse: Any = _numbers, allow_blank: bool = False) -> _Rows:
    """Leave out the rows in which a column is not a number that float32 can hold."""
    if not name:
        return rows
    column = rows.table[name]
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(parse(column)) <= LARGEST)
    if allow_blank:
        bad &= ~_is_blank(column)
    what = "not a time" if parse is _times else "not a number"
    return rows.without({row: repr(column[row].as_py()) for row in np.flatnonzero(bad).tolist()}, f"{name} is {what}")


def _resolve_kind(feature: Feature, column: Any, columns: RatingColumns) -> Feature:
    """Replace the kind "auto": lists are bags, fractions are numbers, and everything else is an id."""
    from pyarrow import types

    if feature.name in (columns.user, columns.item):
        if feature.kind not in ("id", "auto"):
            raise UserError(f"--data.features {feature.name}:{feature.kind}: users and items have to be of kind id")
        return feature.with_default_kind("id")
    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    if is_list and feature.kind not in ("ids", "auto"):
        raise UserError(f"--data.features {feature.name}:{feature.kind}: the column has lists, which are of kind ids")
    if feature.kind != "auto":
        return feature
    kind: FeatureKind = "ids" if is_list else "id"
    if not is_list and not types.is_boolean(column.type):
        numbers = _numbers(column)
        whole = np.isnan(numbers) | (numbers == np.floor(numbers))
        kind = "number" if not whole.all() and not np.isnan(numbers[~_is_blank(column)]).any() else "id"
    return feature.with_default_kind(kind)


def _encode(column: Any, name: str, vocabularies: dict[str, Vocabulary]) -> Tensor:
    """Convert texts to the rows of their vocabulary. Make it if there is none yet."""
    codes, distinct = _distinct(column)
    return vocabularies.setdefault(name, Vocabulary(distinct)).rows(distinct)[codes]


def _distinct(column: Any) -> tuple[Tensor, list[str]]:
    """The distinct texts of a column, and the number of each row's text among them."""
    encoded = _text_column(column).dictionary_encode()
    return torch.from_numpy(encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)), encoded.dictionary.to_pylist()


def _place(
    feature: Feature,
    column: Any,
    sides: Mapping[str, NDArray[np.int64]],
    columns: RatingColumns,
    vocabularies: dict[str, Vocabulary],
) -> tuple[Side, Ids]:
    """A feature's ids or numbers, and what it belongs to: one value for each user, item or interaction."""
    for side, name in (("user", columns.user), ("item", columns.item)):
        if feature.name == name:
            return ("user" if side == "user" else "item"), torch.arange(len(vocabularies[name]))
    codes, distinct = _distinct(column)
    ids: Ids
    if feature.kind == "number":
        ids = torch.from_numpy(np.nan_to_num(_numbers(column))).float()
    elif feature.kind == "id":
        ids = vocabularies.setdefault(feature.name, Vocabulary(distinct)).rows(distinct)[codes]
    else:
        bags = [_split_bag(text) for text in distinct]
        words = [word for bag in bags for word in bag]
        rows = vocabularies.setdefault(feature.name, Vocabulary(words)).rows(words)
        ids = take_ids(Ragged.from_lengths(rows, torch.tensor([len(bag) for bag in bags], dtype=torch.int64)), codes)
    keys: tuple[tuple[Side, str], ...] = (("item", columns.item), ("user", columns.user))
    for owner, name in keys:
        first = _first_rows(codes.numpy(), sides[owner], len(vocabularies[name]))
        if first is not None:
            return owner, take_ids(cat_ids([ids, unknown_column(feature, 1)]), first)
    return "inter", ids


def _split_bag(text: str) -> list[str]:
    separator = next((each for each in (_LIST_SEPARATOR, "|") if each in text), None)
    return [word.strip() for word in text.split(separator) if word.strip()]


def _first_rows(codes: NDArray[np.int64], owners: NDArray[np.int64], count: int) -> Tensor | None:
    """The first row of each owner, or len(codes) if it has none; None if an owner has rows with different codes.

    Owner 0 is unknown: it stands for several.
    """
    first = np.full(count, len(codes))
    first[owners[::-1]] = np.arange(len(codes))[::-1]  # the last assignment counts, which is that of the first row
    first[0] = len(codes)
    known = owners > 0
    return torch.from_numpy(first) if (codes[first[owners[known]]] == codes[known]).all() else None


def _read_titles(table: Any, item: str, title: str) -> dict[str, str] | None:
    """The title of each item by its id; None if an item has several, as where each review has its own title."""
    codes, names = _distinct(table[item])
    titles, texts = _distinct(table[title])
    first = _first_rows(titles.numpy(), codes.numpy() + 1, len(names) + 1)
    return None if first is None else {name: texts[titles[row]] for name, row in zip(names, first[1:].tolist(), strict=True)}
