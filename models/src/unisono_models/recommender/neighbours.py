"""Items that a model holds for alike: those whose embeddings point the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono_models.recommender.click_model import HEADS
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.ratings import Ratings

NEAREST = 4


def item_vectors(model: ModelConfig, ratings: Ratings, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The embedding of each item by its row, of unit length; None if the model has none."""
    name = f"tables.collection.tables.table_{ratings.item}.weight"
    if name not in weights or model.kind == "lr":
        return None
    linear = model.kind != "two_tower" and HEADS[model.kind].linear
    vectors = weights[name].float()
    return F.normalize(vectors[:, 1:] if linear else vectors, dim=1)


def most_rated(ratings: Ratings, count: int) -> Tensor:
    """The rows of the items with the most interactions, and at least ten."""
    counts = ratings.items.bincount(minlength=len(ratings.vocabularies[ratings.item]))
    chosen = counts.argsort(descending=True, stable=True)[:count]
    return chosen[counts[chosen] >= 10]


def title_of(row: int, ratings: Ratings, titles: Mapping[str, str]) -> str:
    """What to call the item of a row."""
    name = ratings.vocabularies[ratings.item].value(row)
    return titles.get(name, name)


def nearest_items(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], *, count: int = 10) -> list[dict[str, Any]]:
    """For the most rated items, those that are nearest to them among the thousand most rated: rows of a table."""
    known = most_rated(ratings, 1000)
    rows = []
    for item in known[:count].tolist():
        near = (vectors[known] @ vectors[item]).masked_fill(known == item, -torch.inf)
        found = known[near.topk(min(NEAREST, max(len(known) - 1, 0))).indices].tolist()
        names = [title_of(row, ratings, titles) for row in (item, *found)]
        rows.append({"item": names[0]} | {f"{place}": name for place, name in enumerate(names[1:], 1)})
    return rows
