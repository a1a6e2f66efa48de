"""Ratings from RecBole's atomic files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.atomic import Column, Table, read_atomic
from unisono_models.recommender.data.batch import Ids
from unisono_models.recommender.data.ratings import Ratings, Side
from unisono_models.recommender.data.vocabulary import Vocabulary
from unisono_models.recommender.features import Feature, Kind

KINDS: dict[str, Kind] = {"token": "id", "token_seq": "ids", "float": "number"}
_LARGEST = torch.finfo(torch.float32).max


def find_tables(source: Path) -> dict[Side, Path]:
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
    paths = find_tables(source)
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


def _settle(feature: Feature, tables: Mapping[Side, Table], user: str, item: str) -> Feature:
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


def _with_numbers(table: Table, names: Sequence[str], *, blank: bool) -> Table:
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


def _by_row(table: Table, key: str, vocabulary: Vocabulary) -> Table:
    """The rows of a table of users or items in the order of their vocabulary; empty where there is none."""
    keys = table.column(key)
    first: dict[str, int] = {}
    for place, name in enumerate(keys):
        first.setdefault(name, place)
    again = [place for place, name in enumerate(keys) if first[name] != place]
    skipped = [*table.skipped, *(SkippedSample(table.lines[k], table.path.name, "seen before", repr(keys[k])) for k in again)]
    places = [first.get(vocabulary.value(row)) if row else None for row in range(len(vocabulary))]
    columns = {
        name: Column(x.type, [x.values[k] if k is not None else "" for k in places])
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
