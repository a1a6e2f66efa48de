"""A map of items: the two main directions of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.recommender.data.ratings import Ratings
from unisono_models.recommender.neighbours import most_rated, title_of
from unisono_models.training.run.plots import COLOURS, INKS

SHOWN, NAMED, GROUPS, LETTERS = 400, 34, 6, 34


def draw_map(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], path: Path) -> None:
    """Draw the most rated items as a PNG, in the colours of the most frequent values of their first bag of ids (genres)."""
    from matplotlib.figure import Figure

    rows = most_rated(ratings, SHOWN)
    points = _flatten(vectors[rows])
    background, ink, faint, _ = INKS["light"]
    figure = Figure(figsize=(10, 7), dpi=120, facecolor=background)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.axis("off")
    groups, names = _group(ratings, rows)
    for number, name in enumerate(names):
        chosen = groups == number
        colour = COLOURS["light"][number] if number < len(names) - 1 else faint
        x, y = points[chosen].T.tolist()
        axes.scatter(x, y, s=26, color=colour, alpha=0.75, linewidths=0, label=name)
    taken: list[tuple[float, float]] = []
    for place, row in enumerate(rows.tolist()):
        at = (float(points[place, 0]), float(points[place, 1]))
        if len(taken) < NAMED and all(abs(at[0] - a) > 0.34 or abs(at[1] - b) > 0.055 for a, b in taken):
            taken.append(at)
            text = shorten(title_of(row, ratings, titles), LETTERS, placeholder=" …")
            axes.annotate(text, at, xytext=(4, 3), textcoords="offset points", fontsize=7.5, color=ink)
    if len(names) > 1:
        axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=ink)
    figure.savefig(path)


def _flatten(vectors: Tensor) -> Tensor:
    """(items, 2), within -1 and 1, by principal components; signs are those that make the largest weight positive."""
    if not len(vectors):
        return torch.zeros(0, 2)
    centred = (vectors - vectors.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    directions = directions * directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    points = centred @ directions.T
    points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
    return points / points.abs().amax(0).clamp(min=1e-9)


def _group(ratings: Ratings, rows: Tensor) -> tuple[Tensor, list[str]]:
    """The group of each item, by number, and the names of the groups, "other" last."""
    for feature in ratings.features:
        side, column = ratings.columns[feature.name]
        if side == "item" and isinstance(column, Ragged):
            bags = [column.values[a:b].tolist() for a, b in zip(column.offsets[rows], column.offsets[rows + 1], strict=True)]
            flat = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
            frequent = flat.bincount().argsort(descending=True, stable=True)[: GROUPS - 1].tolist()
            # The rarest of an item's frequent values says most about it: of "Comedy Drama Sci-Fi", the last.
            groups = [max((frequent.index(v) for v in bag if v in frequent), default=len(frequent)) for bag in bags]
            names = [ratings.vocabularies[feature.name].value(value) for value in frequent]
            return torch.tensor(groups), [*names, "other"]
    return torch.zeros(len(rows), dtype=torch.int64), ["items"]
