"""What a user might like: python -m unisono_models.recommender.commands.recommend RUN_DIR --user 1m_10 --top 10"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from unisono_models.recommender.config import Config
from unisono_models.recommender.data.dataset import build_datasets
from unisono_models.recommender.data.ratings import UNKNOWN, Ratings, read_titles
from unisono_models.recommender.export import FILES, ExportedModel, exported_data, read_export
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.run import run_directory as finished_run
from unisono_models.training.run.run_directory import RunError

find_run = partial(finished_run.find_run, model="recommender", kind=Config, files=FILES)


@dataclass(frozen=True)
class Options:
    """Print the items that a user has not seen yet and that a trained model scores highest."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of a run."""
    user: str = ""
    """As the data calls them. Empty: the one with the most interactions."""
    top: int = 10
    """How many items."""


@dataclass(frozen=True)
class Recommendation:
    """An item, by its id and by what to call it, with the model's score."""

    item: str
    title: str
    score: float


@torch.no_grad()
def score_items(exported: ExportedModel, ratings: Ratings, user: int, items: Tensor) -> Tensor:
    """Of one user with these items: the probability of a click, or the product of two towers' vectors."""
    model = exported.model
    batch = ratings.join(torch.full_like(items, user), items)
    if isinstance(model, TwoTower):
        users, found = model(batch)
        scores: Tensor = (users * found).sum(1)
        return scores
    return torch.sigmoid(model(batch))


def recommend(
    exported: ExportedModel, ratings: Ratings, user: str, *, top: int, titles: dict[str, str]
) -> list[Recommendation]:
    """The `top` items, best first, that `user` has no interaction with in all of the data.

    Raises: RunError if the data does not know the user.
    """
    row = ratings.vocabularies[ratings.user].row(user)
    if not row:
        known = ", ".join(ratings.vocabularies[ratings.user].values[:3])
        raise RunError(f"--user {user}: the data does not know them; it knows {known}, …")
    items = ratings.items[ratings.items > UNKNOWN].unique()  # what came after the training has no embedding
    seen = ratings.items[ratings.users == row]
    items = items[~torch.isin(items, seen)]
    scores = score_items(exported, ratings, row, items)
    best = scores.argsort(descending=True, stable=True)[:top]
    names = [ratings.vocabularies[ratings.item].value(int(items[place])) for place in best]
    return [Recommendation(n, titles.get(n, n), float(scores[place])) for n, place in zip(names, best, strict=True)]


def most_active(ratings: Ratings) -> str:
    """The user with the most interactions."""
    return ratings.vocabularies[ratings.user].value(int(ratings.users[ratings.users > UNKNOWN].bincount().argmax()))


def best_liked(ratings: Ratings, user: str, titles: dict[str, str], *, top: int = 5) -> list[str]:
    """The titles of what a user gave the highest values, those with the most interactions of all first."""
    mine = (ratings.users == ratings.vocabularies[ratings.user].row(user)).nonzero().squeeze(1)
    counts = ratings.items.bincount()[ratings.items[mine]]
    order = counts.argsort(descending=True, stable=True)
    order = order[ratings.values[mine][order].argsort(descending=True, stable=True)]
    names = dict.fromkeys(ratings.vocabularies[ratings.item].value(int(item)) for item in ratings.items[mine[order]])
    return [titles.get(name, name) for name in names if name][:top]


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender.commands.recommend", args=args)
    try:
        if options.top < 1:
            raise RunError(f"--top {options.top}: at least 1")
        config, folder = find_run(options.run), options.run / "export"
        exported = read_export(folder)
        everything = replace(exported_data(folder), keep="(-inf,inf)")  # what training left out is seen all the same
        alone = Ranks(0, 1, 0, torch.device("cpu"))
        source = build_datasets(everything, seed=config.run.seed, ranks=alone, vocabularies=exported.vocabularies)
        if source.ratings is None:
            raise RunError(f"{options.run}: its data has no users and items to recommend: it was trained on rows of clicks")
        titles = read_titles(config.data)
        user = options.user or most_active(source.ratings)
        found = recommend(exported, source.ratings, user, top=options.top, titles=titles)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    _show(user, best_liked(source.ratings, user, titles), found)


def _show(user: str, liked: Sequence[str], found: Sequence[Recommendation]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"User {user} liked {'; '.join(liked)}", highlight=False, markup=False)
    table = Table(title="and might like")
    for name, side in (("", "right"), ("item", "left"), ("score", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for place, each in enumerate(found, 1):
        table.add_row(str(place), each.title, f"{each.score:.4f}")
    console.print(table)


if __name__ == "__main__":
    main()
