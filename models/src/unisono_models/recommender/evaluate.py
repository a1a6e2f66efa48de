"""How well a model predicts, or ranks: exact, over the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.data.batch import move_ids, take_ids
from unisono_models.recommender.data.dataset import Datasets, RowDataset, split_for_rank
from unisono_models.recommender.data.ratings import UNKNOWN, Ratings
from unisono_models.recommender.loss import TrainingModule
from unisono_models.recommender.metrics.auc import click_metrics
from unisono_models.recommender.metrics.ranking import ranking_metrics, top_items
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.watchdog import Watchdog

Which = Literal["valid", "test"]
KS = (10, 50)


@dataclass(frozen=True)
class Evaluator:
    """Figures of a learner on the parts of its data that it is not trained on: the same on every rank."""

    learner: TrainingModule
    source: Datasets
    ranks: Ranks
    heartbeat: Watchdog | None = None
    dtype: torch.dtype = torch.float32
    rows: int = 8192
    max_broken: float = 1.0
    """An error if a larger part of the rows is bad."""

    @torch.no_grad()
    def __call__(self, which: Which) -> dict[str, float]:
        """By "valid/auc" and so on. All ranks call."""
        self.learner.eval()
        part = self.source.valid if which == "valid" else self.source.test
        model = self.learner.model
        found = self._rank(model, part, which) if isinstance(model, TwoTower) else self._predict(part, which)
        return {f"{which}/{name}": value for name, value in found.items()}

    def _predict(self, part: RowDataset, which: Which) -> dict[str, float]:
        logits, labels, skipped = [], [], SkipReport(what=f"rows of {which}", place="line")
        for batch in part.scan(self.ranks.rank, self.ranks.size, self.rows):
            skipped.add(batch)
            batch = batch.to(self.ranks.device, self.dtype)
            logits.append(self.learner.model(batch))
            labels.append(batch.labels)
            self._beat()
        skipped.check(self.max_broken)
        found = click_metrics(torch.cat(logits), torch.cat(labels))
        bad = sum(skipped.summary()["reasons"].values())
        return found | ({"bad_rows": float(bad)} if bad else {})

    def _rank(self, model: TwoTower, part: RowDataset, which: Which) -> dict[str, float]:
        """Full sort: each user ranks all items but those of earlier parts: of training, and for the test of validation, too."""
        ratings = self.source.ratings
        assert ratings is not None
        before = [self.source.train, *([self.source.valid] if which == "test" else [])]
        seen = _items_by_user(ratings, torch.cat([self.source.rows_of(each) for each in before]))
        relevant = _items_by_user(ratings, self.source.rows_of(part))
        items = ratings.items[ratings.items > UNKNOWN].unique()  # what nobody touched is no candidate
        vectors = self._encode_items(model, ratings, items)
        users = relevant.lengths().nonzero().squeeze(1)
        users = users[users > UNKNOWN]
        places, right = [], []
        for share in split_for_rank(len(users), self.ranks.rank, self.ranks.size, self.rows):
            mine = users[share]
            queries = model.encode_users(ratings.join(mine, mine.new_zeros(len(mine))).to(self.ranks.device).ids)
            known, wanted = (move_ids(_places(bags, mine, items), self.ranks.device) for bags in (seen, relevant))
            places.append(top_items(queries, vectors, k=max(KS), seen=known)[1])
            right.append(wanted)
            self._beat()
        whole = Ragged.from_lengths(torch.cat([x.values for x in right]), torch.cat([x.lengths() for x in right]))
        return ranking_metrics(torch.cat(places), whole, ks=KS)

    def _encode_items(self, model: TwoTower, ratings: Ratings, items: Tensor) -> Tensor:
        """The vectors of all items, on every rank; each rank makes its share."""
        parts = []
        for share in split_for_rank(len(items), self.ranks.rank, self.ranks.size, self.rows):
            mine = items[share]
            parts.append(model.encode_items(ratings.join(mine.new_zeros(len(mine)), mine).to(self.ranks.device).ids))
            self._beat()
        return all_gather(torch.cat(parts))

    def _beat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat()


def _items_by_user(ratings: Ratings, rows: Tensor) -> Ragged:
    """The items of each user among these rows, by the user's row in the vocabulary."""
    rows = rows[ratings.items[rows] > UNKNOWN]
    users, order = ratings.users[rows].sort(stable=True)
    counts = users.bincount(minlength=len(ratings.vocabularies[ratings.user]))
    return Ragged.from_lengths(ratings.items[rows][order], counts)


def _places(bags: Ragged, users: Tensor, items: Tensor) -> Ragged:
    """The bags of these users, as places among `items`, which are sorted."""
    taken = take_ids(bags, users)
    assert isinstance(taken, Ragged)
    return taken._replace(values=torch.searchsorted(items, taken.values))
