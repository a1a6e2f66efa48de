"""python -m unisono_models.recommender recommend RUN_DIR: print the items that a user might like."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from unisono_models.recommender.config import Config, DataConfig
from unisono_models.recommender.data.batch import take_ids
from unisono_models.recommender.data.dataset import build_datasets, select_core, select_kept
from unisono_models.recommender.data.ratings import UNKNOWN, Ratings, read_titles
from unisono_models.recommender.data.sequences import items_by_user
from unisono_models.recommender.model.export import FILES, ExportedModel, read_data_config, read_export
from unisono_models.recommender.model.sasrec import SASRec
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.errors import UserError
from unisono_models.training.run.run_directory import RunError, find_run


@dataclass(frozen=True)
class Options:
    """Print the items with the highest scores among those that a user has not rated yet."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of a finished run."""
    user: str = ""
    """The id of the user in the data. Empty: the user with the most interactions."""
    top: int = 10
    """The number of items."""


@dataclass(frozen=True)
class Recommendation:
    item: str
    """The id of the item."""
    title: str
    score: float


def read_all_ratings(export: Path, exported: ExportedModel, *, seed: int) -> Ratings:
    """Read the data of an exported model, with the interactions that training left out.

    Raises: RunError if the data has no users and items.
    """
    data = replace(read_data_config(export), keep="", k_core=None)
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    ratings = build_datasets(data, seed=seed, ranks=ranks, vocabularies=exported.vocabularies).ratings
    if ratings is None:
        raise RunError(f"{export.parent}: the model was trained on rows of clicks, which have no users and items to recommend")
    return ratings


@torch.no_grad()
def score_items(exported: ExportedModel, ratings: Ratings, user: int, items: Tensor) -> Tensor:
    """Score items for one user: the probability of a click, or the dot product of two vectors.

    A SASRec takes the user's items among these `ratings` in order of time.
    """
    model = exported.model
    if isinstance(model, SASRec):
        history = take_ids(items_by_user(ratings, torch.arange(len(ratings))), torch.tensor([user]))
        return model.encode_items({ratings.item: items}) @ model.encode_users({ratings.item: history})[0]
    batch = ratings.join(torch.full_like(items, user), items)
    if isinstance(model, TwoTower):
        user_vectors, item_vectors = model(batch)
        scores: Tensor = (user_vectors * item_vectors).sum(1)
        return scores
    return torch.sigmoid(model(batch))


def recommend(
    exported: ExportedModel, ratings: Ratings, user: str, *, top: int, titles: dict[str, str], data: DataConfig | None = None
) -> list[Recommendation]:
    """Return the `top` items, best first, among those that `user` has no interaction with.

    data: Which of the ratings a SASRec was trained with. It knows no other items.

    Raises: RunError if the user is not in the data.
    """
    row = ratings.vocabularies[ratings.user].row(user)
    if row == UNKNOWN:
        known = ", ".join(ratings.vocabularies[ratings.user].values[:3])
        raise RunError(f"--user {user}: there is no such user in the data; there are {known}, …")
    used = ratings if data is None else select_core(select_kept(ratings, data), data)
    items = used.items[used.items > UNKNOWN].unique()  # items that are newer than the model have no embedding
    seen = ratings.items[ratings.users == row]
    items = items[~torch.isin(items, seen)]
    scores = score_items(exported, used, row, items)
    best = scores.argsort(descending=True, stable=True)[:top]
    names = [ratings.vocabularies[ratings.item].value(item) for item in items[best].tolist()]
    return [Recommendation(n, titles.get(n, n), score) for n, score in zip(names, scores[best].tolist(), strict=True)]


def most_active_user(ratings: Ratings) -> str:
    return ratings.vocabularies[ratings.user].value(int(ratings.users[ratings.users > UNKNOWN].bincount().argmax()))


def best_rated_titles(ratings: Ratings, user: str, titles: dict[str, str], *, top: int = 5) -> list[str]:
    """The titles of the items that a user rated highest. Among equal ratings, popular items come first."""
    mine = (ratings.users == ratings.vocabularies[ratings.user].row(user)).nonzero().squeeze(1)
    popularity = ratings.items.bincount()[ratings.items[mine]]
    order = popularity.argsort(descending=True, stable=True)
    order = order[ratings.values[mine][order].argsort(descending=True, stable=True)]
    names = dict.fromkeys(ratings.vocabularies[ratings.item].value(int(item)) for item in ratings.items[mine[order]])
    return [titles.get(name, name) for name in names if name][:top]


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender recommend", args=args)
    try:
        if options.top < 1:
            raise RunError(f"--top {options.top}: must be at least 1")
        config = find_run(options.run, model="recommender", kind=Config, files=FILES)
        exported = read_export(options.run / "export")
        ratings = read_all_ratings(options.run / "export", exported, seed=config.run.seed)
        titles = read_titles(ratings)
        user = options.user or most_active_user(ratings)
        data = read_data_config(options.run / "export") if isinstance(exported.model, SASRec) else None
        found = recommend(exported, ratings, user, top=options.top, titles=titles, data=data)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    _print(user, best_rated_titles(ratings, user, titles), found)


def _print(user: str, liked: Sequence[str], found: Sequence[Recommendation]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"User {user} liked {'; '.join(liked)}", highlight=False, markup=False)
    table = Table(title="and might like")
    table.add_column("", justify="right")
    table.add_column("item", justify="left")
    table.add_column("score", justify="right")
    for place, each in enumerate(found, 1):
        table.add_row(str(place), each.title, f"{each.score:.4f}")
    console.print(table)
