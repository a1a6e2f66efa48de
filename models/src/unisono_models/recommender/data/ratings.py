"""Interactions of users with items, in memory, read from RecBole's atomic files.

An atomic file is tab-separated text under a header of NAME:TYPE. NAME.inter has the interactions; NAME.user and NAME.item, if
they exist, have further columns of users and items.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids, take_ids
from unisono_models.recommender.data.features import Feature, FeatureKind
from unisono_models.training.errors import UserError

Side = Literal["inter", "user", "item"]
UNKNOWN = 0  # the row of values that are missing or not in the vocabulary
KIND_OF_TYPE: dict[str, FeatureKind] = {"token": "id", "token_seq": "ids", "float": "number"}
TYPES = (*KIND_OF_TYPE, "float_seq")
TITLE_COLUMNS = ("movie_title", "title", "name", "item_name", "product_name")
LARGEST = torch.finfo(torch.float32).max
_INTERVAL = re.compile(r"\s*([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])\s*")


class Vocabulary:
    """The distinct values of a column, sorted, which have rows 1, 2, … of an embedding table. Row 0 is for all other values.

    Example:
        >>> genres = Vocabulary(["Drama", "Comedy", "Drama", ""])
        >>> genres.rows(["Comedy", "Western", "Drama", ""]), len(genres)
        (tensor([1, 0, 2, 0]), 3)
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = sorted({value for value in values if value})
        self._rows = {value: row for row, value in enumerate(self.values, UNKNOWN + 1)}

    def __len__(self) -> int:
        """The rows that a table needs."""
        return len(self.values) + 1

    def row(self, value: str) -> int:
        return self._rows.get(value, UNKNOWN)

    def rows(self, values: Sequence[str]) -> Tensor:
        find = self._rows.get
        return torch.tensor([find(value, UNKNOWN) for value in values], dtype=torch.int64)

    def value(self, row: int) -> str:
        """The value of a row; the empty string for row 0."""
        return self.values[row - 1] if row > UNKNOWN else ""


@dataclass(frozen=True)
class Ratings:
    """Rows of (user, item, value) with their features.

    Columns of users and items are stored once for each user and item, by its row in the vocabulary. `batch` and `join` look
    them up.
    """

    path: Path
    """The .inter file, or the first file of a table of ratings."""
    features: tuple[Feature, ...]
    """With the number of rows of their tables."""
    vocabularies: dict[str, Vocabulary]
    users: Tensor
    """int64 (rows,): row in the vocabulary of users."""
    items: Tensor
    values: Tensor
    """float64 (rows,): what the model predicts, such as a rating."""
    labels: Tensor
    """float32 (rows,): 0 or 1."""
    columns: dict[str, tuple[Side, Ids]]
    """By feature: whether it belongs to interactions, users or items, and its ids or numbers, one for each of them."""
    user: str
    """The name of the column of users."""
    item: str
    read: int
    """The rows of the file, bad ones included."""
    skipped: tuple[SkippedSample, ...] = ()
    times: Tensor | None = None
    """float64 (rows,), if a column of times was read."""
    titles: dict[str, str] | None = None
    """The titles of items by their ids, if they were read with the ratings."""
    unused: tuple[str, ...] = ()
    """The columns that were not read."""

    def __len__(self) -> int:
        return len(self.users)

    def batch(self, rows: Tensor) -> Batch:
        return self.join(self.users[rows], self.items[rows], rows)

    def join(self, users: Tensor, items: Tensor, rows: Tensor | None = None) -> Batch:
        """Make a batch of any users with any items, by their rows in the vocabularies.

        rows: The interactions they belong to. None: features of interactions are unknown.
        """
        places = {"user": users, "item": items, "inter": rows}
        ids: dict[str, Ids] = {}
        numbers: list[Tensor] = []
        for feature in self.features:
            side, column = self.columns[feature.name]
            place = places[side]
            taken = unknown_column(feature, len(users)) if place is None else take_ids(column, place)
            if feature.kind == "number" and isinstance(taken, Tensor):
                numbers.append(taken)
            else:
                ids[feature.name] = taken
        return Batch(
            ids,
            numbers=torch.stack(numbers, 1) if numbers else torch.empty(len(users), 0),
            labels=torch.zeros(len(users)) if rows is None else self.labels[rows],
            index=torch.arange(len(users)) if rows is None else rows,
        )

    def select(self, rows: Tensor) -> Ratings:
        """Keep only these rows. Vocabularies, and the columns of users and items, stay as they are."""
        columns = {name: (side, take_ids(x, rows) if side == "inter" else x) for name, (side, x) in self.columns.items()}
        users, items, values, labels = (x[rows] for x in (self.users, self.items, self.values, self.labels))
        times = None if self.times is None else self.times[rows]
        return replace(self, users=users, items=items, values=values, labels=labels, columns=columns, times=times)

    def with_threshold(self, threshold: float) -> Ratings:
        """The same rows, with the label 1 where the value is at least `threshold`."""
        return replace(self, labels=(self.values >= threshold).float())


def unknown_column(feature: Feature, rows: int) -> Ids:
    if feature.kind == "number":
        return torch.zeros(rows)
    unknown = torch.zeros(rows, dtype=torch.int64)
    return unknown if feature.kind == "id" else Ragged.from_lengths(unknown[:0], unknown)


def in_intervals(values: Tensor, intervals: str) -> Tensor:
    """Test which values lie in one of the intervals, written as in RecBole's configs. A round bracket excludes the limit.

    Example:
        >>> in_intervals(torch.tensor([1.0, 3.0, 4.0]), "[0,3);(3,inf)")
        tensor([ True, False,  True])
    """
    found = torch.zeros_like(values, dtype=torch.bool)
    for text in intervals.split(";"):
        match = _INTERVAL.fullmatch(text)
        if match is None or not (_is_float(match[2]) and _is_float(match[3])):
            raise UserError(f"--data.keep: interval {text!r}: expected intervals like [0,3) or (3,inf), separated by ;")
        low, high = float(match[2]), float(match[3])
        above = values >= low if match[1] == "[" else values > low
        below = values <= high if match[4] == "]" else values < high
        found |= above & below
    return found


def k_core(users: Tensor, items: Tensor, k: int) -> Tensor:
    """The rows that are left when users and items with fewer than `k` rows are left out, again and again.

    Example:
        >>> k_core(torch.tensor([1, 1, 2, 2, 3, 3]), torch.tensor([7, 8, 7, 8, 8, 9]), 2)  # without item 9 user 3 has one row
        tensor([0, 1, 2, 3])
    """
    rows = torch.arange(len(users))
    while True:
        counts = [x[rows].bincount()[x[rows]] for x in (users, items)]
        enough = (counts[0] >= k) & (counts[1] >= k)
        if bool(enough.all()):
            return rows
        rows = rows[enough]


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class AtomicColumn:
    type: str
    """One of TYPES, from the header."""
    values: list[str]


@dataclass(frozen=True)
class AtomicFile:
    """The columns that were read, by name, and the rows that were left out."""

    path: Path
    columns: dict[str, AtomicColumn]
    lines: list[int]
    """The line of each row, for messages. The header is line 1."""
    names: tuple[str, ...]
    """All columns of the file, read or not."""
    skipped: list[SkippedSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """The values of a column. Raises: UserError that lists the columns of the file."""
        if name not in self.columns:
            raise UserError(f"{self.path} has no column {name!r}; it has {', '.join(self.names)}")
        return self.columns[name].values

    def without(self, errors: Mapping[int, str], reason: str) -> AtomicFile:
        """Leave out some rows, by number, and note each of them as skipped, with its error."""
        if not errors:
            return self
        rows = [row for row in range(len(self)) if row not in errors]
        skipped = [SkippedSample(self.lines[row], self.path.name, reason, error) for row, error in errors.items()]
        columns = {name: AtomicColumn(x.type, [x.values[row] for row in rows]) for name, x in self.columns.items()}
        return replace(self, columns=columns, lines=[self.lines[row] for row in rows], skipped=self.skipped + skipped)


def read_atomic(path: Path, columns: Collection[str] | None = None) -> AtomicFile:
    """Read some columns, or all, of an atomic file. Lines with a wrong number of fields are skipped.

    A column without a type in the header is a token.

    Raises: UserError if the first line is not a header.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as text:
        types = _read_header(path, next(text, ""))
        wanted = [(place, name) for place, name in enumerate(types) if columns is None or name in columns]
        values: dict[str, list[str]] = {name: [] for _, name in wanted}
        lines, skipped = [], []
        for number, line in enumerate(text, 2):
            fields = line.rstrip("\r\n").split("\t")
            if fields == [""]:  # an empty line is not a row
                continue
            if len(fields) != len(types):
                error = f"{len(fields)} fields instead of {len(types)}"
                skipped.append(SkippedSample(number, path.name, "wrong number of fields", error))
                continue
            for place, name in wanted:
                values[name].append(fields[place])
            lines.append(number)
    found = {name: AtomicColumn(types[name], column) for name, column in values.items()}
    return AtomicFile(path, found, lines, tuple(types), skipped)


def _read_header(path: Path, line: str) -> dict[str, str]:
    """The type of each column by name, in order."""
    parts = [part.partition(":") for part in line.lstrip("\ufeff").rstrip("\r\n").split("\t")]
    types = {name.strip(): kind.strip() or "token" for name, _, kind in parts}
    if len(types) < len(parts) or any(not name or kind not in TYPES for name, kind in types.items()):
        raise UserError(
            f"{path}: line 1 is not the header of an atomic file ({line.strip()[:80]!r}): it needs different NAME:TYPE with "
            f"tabs between, and TYPE is one of {', '.join(TYPES)}"
        )
    return types


def find_atomic_files(source: Path) -> dict[Side, Path]:
    """Find the files of a folder, or beside the .inter file `source`: "inter", and "user" and "item" where they exist."""
    inter = source
    if not source.is_file():
        found = sorted(source.glob("*.inter"))
        if len(found) != 1:
            raise UserError(f"{source}: expected one .inter file of RecBole's, or the path of one, found {len(found)}")
        inter = found[0]
    paths: dict[Side, Path] = {"inter": inter, "user": inter.with_suffix(".user"), "item": inter.with_suffix(".item")}
    return {side: path for side, path in paths.items() if path.is_file()}


def read_ratings(
    source: Path,
    features: Sequence[Feature],
    *,
    user: str,
    item: str,
    value: str,
    time: str = "",
    threshold: float = -math.inf,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> Ratings:
    """Read NAME.inter in the folder `source`, or `source` itself, with NAME.user and NAME.item where they exist.

    A feature is looked up among the columns of interactions, then of users, then of items. Rows without user or item, or with
    a value or number that is not a number, are skipped.

    Args:
        user, item, value: The names of these columns. If `value` is empty, every value is 1.
        time: The name of the column of times; empty reads none.
        threshold: The label of a row is 1 if its value is at least this.
        vocabularies: Those that a model was trained with. Values that they lack are unknown, in row 0.
    """
    wanted = {user, item, value, time} | {feature.name for feature in features}
    files = {side: read_atomic(path, wanted) for side, path in find_atomic_files(source).items()}
    features = [_resolve_kind(feature, files, user, item) for feature in features]
    read = len(files["inter"]) + len(files["inter"].skipped)
    for side, file in files.items():
        numbers = [f.name for f in features if f.kind == "number" and f.name in file.columns]
        if side == "inter":
            files[side] = _without_bad_numbers(file, [name for name in (value, time) if name] + numbers, allow_blank=False)
        else:
            files[side] = _without_bad_numbers(file, numbers, allow_blank=True)
    inter = files["inter"]
    keys = zip(inter.column(user), inter.column(item), strict=True)
    inter = inter.without({row: "" for row, key in enumerate(keys) if not all(key)}, "no user or no item")
    files["inter"] = inter
    known = dict(vocabularies or {})
    for name in (user, item):
        known.setdefault(name, Vocabulary(inter.column(name)))
    if "user" in files:
        files["user"] = _order_by_vocabulary(files["user"], user, known[user])
    if "item" in files:
        files["item"] = _order_by_vocabulary(files["item"], item, known[item])
    columns: dict[str, tuple[Side, Ids]] = {}
    for feature in features:
        if feature.name in (user, item):  # the column stands in .inter, but the id belongs to the user or item
            columns[feature.name] = ("user" if feature.name == user else "item", torch.arange(len(known[feature.name])))
        else:
            side = next(side for side, file in files.items() if feature.name in file.columns)
            columns[feature.name] = (side, _encode(feature, files[side].column(feature.name), known))
    values = _to_float64(inter.column(value)) if value else torch.ones(len(inter), dtype=torch.float64)
    return Ratings(
        inter.path,
        features=tuple(with_rows(feature, known) for feature in features),
        vocabularies=known,
        users=known[user].rows(inter.column(user)),
        items=known[item].rows(inter.column(item)),
        values=values,
        labels=(values >= threshold).float(),
        columns=columns,
        user=user,
        item=item,
        read=read,
        skipped=tuple(skip for file in files.values() for skip in file.skipped),
        times=_to_float64(inter.column(time)) if time else None,
    )


def _to_float64(texts: Sequence[str]) -> Tensor:
    return torch.tensor([float(text) for text in texts], dtype=torch.float64)


def _resolve_kind(feature: Feature, files: Mapping[Side, AtomicFile], user: str, item: str) -> Feature:
    """Replace the kind "auto" by that of the column's header."""
    if feature.name in (user, item):
        if feature.kind not in ("id", "auto"):
            raise UserError(f"--data.features: {feature.name}:{feature.kind}: users and items have to be of kind id")
        return replace(feature, kind="id")
    for file in files.values():
        if feature.name in file.columns:
            kind = file.columns[feature.name].type
            if feature.kind == "auto" and kind not in KIND_OF_TYPE:
                raise UserError(
                    f"--data.features: {feature.name}: its type in {file.path.name} is {kind}, which cannot be a feature"
                )
            return feature.with_default_kind(KIND_OF_TYPE.get(kind, "id"))
    columns = "; ".join(f"{file.path.name}: {', '.join(file.names)}" for file in files.values())
    raise UserError(f"--data.features: there is no column {feature.name!r}. {columns}")


def _without_bad_numbers(file: AtomicFile, names: Sequence[str], *, allow_blank: bool) -> AtomicFile:
    """Leave out the rows in which one of these columns is not a number that float32 can hold."""
    for name in names:
        column = file.column(name)
        bad = {row: repr(text) for row, text in enumerate(column) if not (_fits_float32(text) or (allow_blank and not text))}
        file = file.without(bad, f"{name} is not a number")
    return file


def _fits_float32(text: str) -> bool:
    return _is_float(text) and abs(float(text)) <= LARGEST


def _order_by_vocabulary(file: AtomicFile, key: str, vocabulary: Vocabulary) -> AtomicFile:
    """Put the rows of users or items in the order of their vocabulary, with empty values where the file has none."""
    keys = file.column(key)
    first: dict[str, int] = {}
    for row, name in enumerate(keys):
        first.setdefault(name, row)
    repeated = [row for row, name in enumerate(keys) if first[name] != row]
    skipped = [SkippedSample(file.lines[row], file.path.name, "repeated id", repr(keys[row])) for row in repeated]
    rows = [first.get(vocabulary.value(row)) if row else None for row in range(len(vocabulary))]
    columns = {
        name: AtomicColumn(x.type, [x.values[row] if row is not None else "" for row in rows])
        for name, x in file.columns.items()
        if name != key
    }
    lines = [0 if row is None else file.lines[row] for row in rows]
    return replace(file, columns=columns, lines=lines, skipped=file.skipped + skipped)


def _encode(feature: Feature, texts: Sequence[str], vocabularies: dict[str, Vocabulary]) -> Ids:
    """Convert a column to ids or numbers. Make its vocabulary if there is none yet."""
    if feature.kind == "number":
        return torch.tensor([float(text) if text else 0.0 for text in texts])
    if feature.kind == "id":
        return vocabularies.setdefault(feature.name, Vocabulary(texts)).rows(texts)
    bags = [text.split() for text in texts]
    words = [word for bag in bags for word in bag]
    rows = vocabularies.setdefault(feature.name, Vocabulary(words)).rows(words)
    return Ragged.from_lengths(rows, torch.tensor([len(bag) for bag in bags], dtype=torch.int64))


def with_rows(feature: Feature, vocabularies: Mapping[str, Vocabulary]) -> Feature:
    if feature.kind == "number":
        return feature
    needed = len(vocabularies[feature.name])
    if feature.rows and feature.rows < needed:
        raise UserError(f"feature {feature.name!r}: rows={feature.rows} are too few: it needs {needed}")
    return replace(feature, rows=feature.rows or needed)


def read_titles(ratings: Ratings) -> dict[str, str]:
    """Read the titles of items by their ids, with the year if the title lacks it. Empty if the data has no titles."""
    if ratings.titles is not None:
        return ratings.titles
    path = ratings.path.with_suffix(".item")
    if not path.is_file():
        return {}
    file = read_atomic(path)
    column = next((name for name in TITLE_COLUMNS if name in file.columns), None)
    if column is None or ratings.item not in file.columns:
        return {}
    years = file.column("release_year") if "release_year" in file.columns else [""] * len(file)
    rows = zip(file.column(ratings.item), file.column(column), years, strict=True)
    return {key: title if not year or year in title else f"{title} ({year})" for key, title, year in rows}
