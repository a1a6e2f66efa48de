"""Vocabulary: rows of an embedding table for the values of a column that is known as a whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch, Ids, take_ids
from unisono_models.recommender.data.features import Feature, Kind
from unisono_models.recommender.data.movielens import PACKAGES, movielens_folder

UNKNOWN = 0  # the row of all values that are not in the vocabulary, and of missing ones


class Vocabulary:
    """The different values of a column, sorted, from row 1 on; row 0 is that of all others. Empty values are none.

    Example:
        >>> genres = Vocabulary(["Drama", "Comedy", "Drama", ""])
        >>> genres.rows(["Comedy", "Western", "Drama", ""]), len(genres)
        (tensor([1, 0, 2, 0]), 3)
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = sorted({value for value in values if value})
        self._rows = {value: row for row, value in enumerate(self.values, UNKNOWN + 1)}

    def __len__(self) -> int:
        """Rows that a table needs."""
        return len(self.values) + 1

    def row(self, value: str) -> int:
        return self._rows.get(value, UNKNOWN)

    def rows(self, values: Sequence[str]) -> Tensor:
        find = self._rows.get
        return torch.tensor([find(value, UNKNOWN) for value in values], dtype=torch.int64)

    def value(self, row: int) -> str:
        """The value of a row; of row 0, nothing."""
        return self.values[row - 1] if row > UNKNOWN else ""


TYPES = ("token", "token_seq", "float", "float_seq")


@dataclass(frozen=True)
class AtomicColumn:
    """A column of text. `type`: as the header says."""

    type: str
    values: list[str]


@dataclass(frozen=True)
class AtomicFile:
    """The columns of a file by name, and the rows that were left out."""

    path: Path
    columns: dict[str, AtomicColumn]
    lines: list[int]
    """Of each row, for messages: the header is line 1."""
    names: tuple[str, ...]
    """Of all columns of the file, read or not."""
    skipped: list[SkippedSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """The values of a column. Raises: ValueError with the columns that there are."""
        if name not in self.columns:
            raise ValueError(f"{self.path} has no column {name!r}; it has {', '.join(self.names)}")
        return self.columns[name].values

    def without(self, bad: Collection[int], reason: str, errors: list[str]) -> AtomicFile:
        """Without some rows, which are noted as skipped, with an error each."""
        if not bad:
            return self
        gone = dict(zip(bad, errors, strict=True))
        kept = [row for row in range(len(self)) if row not in gone]
        skips = [SkippedSample(self.lines[row], self.path.name, reason, error) for row, error in gone.items()]
        columns = {name: AtomicColumn(x.type, [x.values[row] for row in kept]) for name, x in self.columns.items()}
        return replace(self, columns=columns, lines=[self.lines[row] for row in kept], skipped=self.skipped + skips)


def read_atomic(path: Path, columns: Collection[str] | None = None) -> AtomicFile:
    """Read an atomic file (.inter, .user, .item): `columns` of it, or all. Lines of another number of fields are skipped.

    A file without types in its header is read, too: all its columns are tokens then.

    Raises: ValueError that names the file if its header is none.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        names = _read_header(path, next(lines, ""))
        wanted = [place for place, name in enumerate(names) if columns is None or name in columns]
        fields: list[list[str]] = [[] for _ in wanted]
        numbers, skipped = [], []
        for number, line in enumerate(lines, 2):
            parts = line.rstrip("\r\n").split("\t")
            if len(parts) != len(names):
                if parts != [""]:  # an empty line is no row
                    error = f"{len(parts)} fields instead of {len(names)}"
                    skipped.append(SkippedSample(number, path.name, "another number of fields", error))
                continue
            for values, place in zip(fields, wanted, strict=True):
                values.append(parts[place])
            numbers.append(number)
    kinds = list(names.items())
    found = {kinds[place][0]: AtomicColumn(kinds[place][1], values) for place, values in zip(wanted, fields, strict=True)}
    return AtomicFile(path, found, numbers, tuple(names), skipped)


def _read_header(path: Path, line: str) -> dict[str, str]:
    """The type of each column by name, in order."""
    parts = [part.partition(":") for part in line.lstrip("\ufeff").rstrip("\r\n").split("\t")]
    names = {name.strip(): kind.strip() or "token" for name, _, kind in parts}
    wrong = [f"{name}:{kind}" for name, kind in names.items() if not name or kind not in TYPES]
    if wrong or len(names) < len(parts):
        raise ValueError(
            f"{path}: line 1 is no header of an atomic file ({line.strip()[:80]!r}): it needs NAME:TYPE, different "
            f"names with tabs between, with a TYPE of {', '.join(TYPES)}"
        )
    return names


Side = str  # "inter", "user" or "item"


@dataclass(frozen=True)
class Ratings:
    """Rows of (user, item, value), and the features of each: its own, its user's and its item's.

    Columns of users and items are kept once for each of them, by their row in the vocabulary, and joined when a batch is made.
    """

    features: tuple[Feature, ...]
    """With the number of rows of their tables."""
    vocabularies: dict[str, Vocabulary]
    users: Tensor
    """int64 (rows,): row in the vocabulary of users."""
    items: Tensor
    values: Tensor
    """float64 (rows,): what is to be learned, such as a rating."""
    labels: Tensor
    """float32 (rows,): 0 or 1."""
    columns: dict[str, tuple[Side, Ids]]
    """By feature: whose it is, and its ids or numbers, one for each row, user or item."""
    user: str
    item: str
    read: int
    """Rows that were read, bad ones included, before any was dropped."""
    skipped: tuple[SkippedSample, ...] = ()

    def __len__(self) -> int:
        return len(self.users)

    def batch(self, rows: Tensor) -> Batch:
        """Some rows, by number."""
        return self.join(self.users[rows], self.items[rows], rows)

    def join(self, users: Tensor, items: Tensor, rows: Tensor | None = None) -> Batch:
        """Any users with any items, by their rows in the vocabularies. Without `rows` features of interactions are unknown."""
        places = {"user": users, "item": items, "inter": rows}
        found: dict[str, Ids] = {}
        for feature in self.features:
            side, column = self.columns[feature.name]
            place = places[side]
            found[feature.name] = _nothing(feature, len(users)) if place is None else take_ids(column, place)
        numbers = [x for f in self.features if f.kind == "number" and isinstance(x := found.pop(f.name), Tensor)]
        index = torch.arange(len(users)) if rows is None else rows
        labels = torch.zeros(len(users)) if rows is None else self.labels[rows]
        return Batch(found, torch.stack(numbers, 1) if numbers else torch.empty(len(users), 0), labels, index)

    def keep(self, rows: Tensor) -> Ratings:
        """Only these rows; vocabularies and tables of users and items stay as they are."""
        columns = {name: (side, take_ids(x, rows) if side == "inter" else x) for name, (side, x) in self.columns.items()}
        users, items, values, labels = (x[rows] for x in (self.users, self.items, self.values, self.labels))
        return replace(self, users=users, items=items, values=values, labels=labels, columns=columns)


def _nothing(feature: Feature, rows: int) -> Ids:
    if feature.kind == "number":
        return torch.zeros(rows)
    empty = torch.zeros(rows, dtype=torch.int64)
    return empty if feature.kind == "id" else Ragged.from_lengths(empty[:0], empty)


_ONE = re.compile(r"\s*([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])\s*")


def in_intervals(values: Tensor, intervals: str) -> Tensor:
    """Which of the values lie in one of the intervals; a round bracket leaves the limit out.

    Example:
        >>> inside(torch.tensor([1.0, 3.0, 4.0]), "[0,3);(3,inf)")
        tensor([ True, False,  True])
    """
    found = torch.zeros_like(values, dtype=torch.bool)
    for text in intervals.split(";"):
        match = _ONE.fullmatch(text)
        try:
            low, high = (float(match[2]), float(match[3])) if match else (1.0, 0.0)
        except ValueError:
            match = None
        if match is None:
            raise ValueError(f"interval {text!r}: expected such as [0,3) or (3,inf), several with ; between")
        above = values >= low if match[1] == "[" else values > low
        below = values <= high if match[4] == "]" else values < high
        found |= above & below
    return found


KINDS: dict[str, Kind] = {"token": "id", "token_seq": "ids", "float": "number"}
_LARGEST = torch.finfo(torch.float32).max


def find_atomic_files(source: Path) -> dict[Side, Path]:
    """The files of a folder, or beside the .inter file `source`: "inter", and "user" and "item" where they are."""
    inter = source
    if not source.is_file():
        found = sorted(source.glob("*.inter"))
        if len(found) != 1:
            raise ValueError(f"{source}: expected one .inter file of RecBole's, or the path of one, found {len(found)}")
        inter = found[0]
    beside = {side: inter.with_suffix(f".{side}") for side in ("user", "item")}
    return {"inter": inter} | {side: path for side, path in beside.items() if path.is_file()}


def read_ratings(
    source: Path,
    features: Sequence[Feature],
    *,
    user: str,
    item: str,
    value: str,
    threshold: float,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> Ratings:
    """Read NAME.inter in the folder `source`, or `source` itself, with NAME.user and NAME.item where they are.

    A row's label is whether its value is at least `threshold`. A feature is looked for among the columns of interactions, then
    of users, then of items. Rows with a value or number that is none, or without user or item, are skipped.

    vocabularies: those that a model was trained with: values that they lack are unknown, in row 0.
    """
    paths = find_atomic_files(source)
    wanted = {user, item, value} | {feature.name for feature in features}
    tables = {side: read_atomic(path, wanted) for side, path in paths.items()}
    features = [_settle(feature, tables, user, item) for feature in features]
    read, known = len(tables["inter"]) + len(tables["inter"].skipped), dict(vocabularies or {})
    for side, table in tables.items():
        numbers = [f.name for f in features if f.kind == "number" and f.name in table.columns]
        tables[side] = _with_numbers(table, [*([value] if side == "inter" else []), *numbers], blank=side != "inter")
    inter = tables["inter"]
    lost = [row for row, key in enumerate(zip(inter.column(user), inter.column(item), strict=True)) if not all(key)]
    inter = tables["inter"] = inter.without(lost, "no user or no item", [""] * len(lost))
    for name in (user, item):
        known.setdefault(name, Vocabulary(inter.column(name)))
    for side, key in (("user", user), ("item", item)):
        if side in tables:
            tables[side] = _by_row(tables[side], key, known[key])
    columns: dict[str, tuple[Side, Ids]] = {}
    for feature in features:
        if feature.name in (user, item):  # theirs, though it is interactions that have the column
            columns[feature.name] = ("user" if feature.name == user else "item", torch.arange(len(known[feature.name])))
        else:
            side = next(side for side, table in tables.items() if feature.name in table.columns)
            columns[feature.name] = (side, _encode(feature, tables[side].column(feature.name), known))
    values = torch.tensor([float(text) for text in inter.column(value)], dtype=torch.float64)
    users, items = (known[name].rows(inter.column(name)) for name in (user, item))
    skipped = tuple(skip for table in tables.values() for skip in table.skipped)
    labels, sized = (values >= threshold).float(), tuple(_with_rows(feature, known) for feature in features)
    return Ratings(sized, known, users, items, values, labels, columns, user, item, read, skipped)


def _settle(feature: Feature, tables: Mapping[Side, AtomicFile], user: str, item: str) -> Feature:
    """With the kind that the header of its column says, if it says none itself."""
    if feature.name in (user, item):
        if feature.kind not in ("id", "auto"):
            raise ValueError(f"data.features: {feature.name}:{feature.kind}: users and items are of kind id")
        return replace(feature, kind="id")
    for table in tables.values():
        if feature.name in table.columns:
            kind = table.columns[feature.name].type
            if feature.kind == "auto" and kind not in KINDS:
                raise ValueError(
                    f"data.features: {feature.name}: {table.path.name} has it as {kind}, which is no kind of feature"
                )
            return feature.settle(KINDS.get(kind, "id"))
    have = "; ".join(f"{table.path.name}: {', '.join(table.names)}" for table in tables.values())
    raise ValueError(f"data.features: there is no column {feature.name!r}. {have}")


def _with_numbers(table: AtomicFile, names: Sequence[str], *, blank: bool) -> AtomicFile:
    """Without the rows in which one of these columns has no number of float32. `blank`: an empty one is a 0."""
    for name in names:
        column = table.column(name)
        bad = [row for row, text in enumerate(column) if not (_is_number(text) or (blank and not text))]
        table = table.without(bad, f"{name} is no number", [repr(column[row]) for row in bad])
    return table


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= _LARGEST
    except ValueError:
        return False


def _by_row(table: AtomicFile, key: str, vocabulary: Vocabulary) -> AtomicFile:
    """The rows of a table of users or items in the order of their vocabulary; empty where there is none."""
    keys = table.column(key)
    first: dict[str, int] = {}
    for place, name in enumerate(keys):
        first.setdefault(name, place)
    again = [place for place, name in enumerate(keys) if first[name] != place]
    skipped = [*table.skipped, *(SkippedSample(table.lines[k], table.path.name, "seen before", repr(keys[k])) for k in again)]
    places = [first.get(vocabulary.value(row)) if row else None for row in range(len(vocabulary))]
    columns = {
        name: AtomicColumn(x.type, [x.values[k] if k is not None else "" for k in places])
        for name, x in table.columns.items()
        if name != key
    }
    return replace(table, columns=columns, lines=[0 if k is None else table.lines[k] for k in places], skipped=skipped)


def _encode(feature: Feature, texts: Sequence[str], vocabularies: dict[str, Vocabulary]) -> Ids:
    """A column as ids or numbers. A vocabulary that is not there yet is made."""
    if feature.kind == "number":
        return torch.tensor([float(text) if text else 0.0 for text in texts])
    bags = [text.split() for text in texts] if feature.kind == "ids" else None
    words = texts if bags is None else [word for bag in bags for word in bag]
    rows = vocabularies.setdefault(feature.name, Vocabulary(words)).rows(words)
    return rows if bags is None else Ragged.from_lengths(rows, torch.tensor([len(bag) for bag in bags], dtype=torch.int64))


def _with_rows(feature: Feature, vocabularies: Mapping[str, Vocabulary]) -> Feature:
    if feature.kind == "number":
        return feature
    needed = len(vocabularies[feature.name])
    if feature.rows and feature.rows < needed:
        raise ValueError(f"feature {feature.name!r}: rows={feature.rows} are too few: it needs {needed}")
    return replace(feature, rows=feature.rows or needed)


TITLES = ("movie_title", "title", "name")


def read_titles(config: DataConfig) -> dict[str, str]:
    """The titles of items by their ids, with the year if that is not in the title; none if there are no such columns."""
    folder = movielens_folder(config.source) if config.source in PACKAGES else Path(config.source)
    paths = [folder.with_suffix(".item")] if folder.is_file() else sorted(folder.glob("*.item"))
    if not paths or not paths[0].is_file():
        return {}
    table = read_atomic(paths[0])
    column = next((name for name in TITLES if name in table.columns), None)
    if column is None or config.item not in table.columns:
        return {}
    years = table.column("release_year") if "release_year" in table.columns else [""] * len(table)
    rows = zip(table.column(config.item), table.column(column), years, strict=True)
    return {key: title if not year or year in title else f"{title} ({year})" for key, title, year in rows}
