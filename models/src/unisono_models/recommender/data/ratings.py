"""Ratings: interactions in memory, with the tables of users and items beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids, take_ids
from unisono_models.recommender.data.vocabulary import Vocabulary
from unisono_models.recommender.features import Feature

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
