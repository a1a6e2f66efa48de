"""Ratings: interactions in memory, with the tables of users and items beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.recommender.data.atomic import Table, read_atomic
from unisono_models.recommender.data.batch import Batch, Ids, take_ids
from unisono_models.recommender.data.vocabulary import Vocabulary
from unisono_models.recommender.features import Feature
from unisono_models.training.skipped import Skip

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
    skipped: tuple[Skip, ...] = ()

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


def read_ratings(folder: Path, features: Sequence[Feature], *, user: str, item: str, value: str, threshold: float) -> Ratings:
    """Read NAME.inter in `folder`, with NAME.user and NAME.item where they are; or `folder` itself, if it is an .inter file.

    A row's label is whether its value is at least `threshold`. A feature is looked for among the columns of interactions, then
    of users, then of items. Rows with a value or number that is none, or without user or item, are skipped.
    """
    inter = _find_inter(folder)
    wanted = {user, item, value} | {feature.name for feature in features}
    table = read_atomic(inter, wanted)
    table = _with_numbers(table, [value, *(f.name for f in features if f.kind == "number" and f.name in table.columns)])
    lost = [row for row, key in enumerate(zip(table.column(user), table.column(item), strict=True)) if not all(key)]
    table = table.without(lost, "no user or no item", [""] * len(lost))
    vocabularies = {name: Vocabulary(table.column(name)) for name in (user, item)}
    sides = {"inter": table}
    for side, key in (("user", user), ("item", item)):
        path = inter.with_suffix(f".{side}")
        if path.is_file():
            sides[side] = _by_row(read_atomic(path, wanted), key, vocabularies[key])
    columns: dict[str, tuple[Side, Ids]] = {}
    known = []
    for feature in features:
        if feature.name in (user, item) and feature.kind == "id":  # of the user or item, though interactions have the column
            columns[feature.name] = ("user" if feature.name == user else "item", torch.arange(len(vocabularies[feature.name])))
            known.append(replace(feature, rows=_rows_for(feature, vocabularies[feature.name])))
            continue
        side = next((side for side, x in sides.items() if feature.name in x.columns), "")
        if not side:
            have = "; ".join(f"{x.path.name}: {', '.join(read_atomic(x.path).columns)}" for x in sides.values())
            raise ValueError(f"data.features: there is no column {feature.name!r}. {have}")
        column, rows = _encode(feature, sides[side].column(feature.name), vocabularies)
        columns[feature.name] = (side, column)
        known.append(replace(feature, rows=rows))
    values = torch.tensor([float(text) for text in table.column(value)], dtype=torch.float64)
    users, items = (vocabularies[name].rows(table.column(name)) for name in (user, item))
    skipped = tuple(skip for x in sides.values() for skip in x.skipped)
    labels = (values >= threshold).float()
    return Ratings(tuple(known), vocabularies, users, items, values, labels, columns, user, item, skipped)


def _find_inter(folder: Path) -> Path:
    if folder.is_file():
        return folder
    found = sorted(folder.glob("*.inter"))
    if len(found) != 1:
        raise ValueError(f"{folder}: expected one .inter file of RecBole's, or the path of one, found {len(found)}")
    return found[0]


def _with_numbers(table: Table, names: Sequence[str]) -> Table:
    """Without the rows in which one of these columns has no finite number."""
    for name in names:
        column = table.column(name)
        bad = [row for row, text in enumerate(column) if not _is_number(text)]
        table = table.without(bad, f"{name} is no number", [repr(column[row]) for row in bad])
    return table


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) < float("inf")
    except ValueError:
        return False


def _by_row(table: Table, key: str, vocabulary: Vocabulary) -> Table:
    """The rows of a table of users or items in the order of their vocabulary; empty where there is none."""
    keys = table.column(key)
    first: dict[str, int] = {}
    for place, name in enumerate(keys):
        first.setdefault(name, place)
    again = [place for place, name in enumerate(keys) if first[name] != place]
    skipped = [*table.skipped, *(Skip(table.lines[k], table.path.name, "seen before", repr(keys[k])) for k in again)]
    places = [first.get(vocabulary.value(row)) if row else None for row in range(len(vocabulary))]
    columns = {
        name: replace(x, values=[x.values[k] if k is not None else "" for k in places])
        for name, x in table.columns.items()
        if name != key
    }
    return Table(table.path, columns, [0 if k is None else table.lines[k] for k in places], skipped)


def _encode(feature: Feature, texts: Sequence[str], vocabularies: dict[str, Vocabulary]) -> tuple[Ids, int]:
    """A column as ids or numbers, and the rows that its table needs."""
    if feature.kind == "number":
        return torch.tensor([float(text) if _is_number(text) else 0.0 for text in texts]), 0
    bags = [text.split() for text in texts] if feature.kind == "ids" else None
    words = texts if bags is None else [word for bag in bags for word in bag]
    vocabulary = vocabularies.setdefault(feature.name, Vocabulary(words))
    rows = vocabulary.rows(words)
    if feature.rows and feature.rows < len(vocabulary):
        raise ValueError(
            f"feature {feature.name!r}: rows={feature.rows}, but there are {len(vocabulary)} with that of the unknown"
        )
    ids = rows if bags is None else Ragged.from_lengths(rows, torch.tensor([len(bag) for bag in bags], dtype=torch.int64))
    return ids, _rows_for(feature, vocabulary)


def _rows_for(feature: Feature, vocabulary: Vocabulary) -> int:
    if feature.rows and feature.rows < len(vocabulary):
        raise ValueError(f"feature {feature.name!r}: rows={feature.rows} are too few: it needs {len(vocabulary)}")
    return feature.rows or len(vocabulary)


def _nothing(feature: Feature, rows: int) -> Ids:
    if feature.kind == "number":
        return torch.zeros(rows)
    empty = torch.zeros(rows, dtype=torch.int64)
    return empty if feature.kind == "id" else Ragged.from_lengths(empty[:0], empty)
