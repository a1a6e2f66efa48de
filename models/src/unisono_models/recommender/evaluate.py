"""Evaluator: the metrics of a model on validation and test, exact over the rows of all ranks. train.py calls it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.data.batch import Batch, move_ids, take_ids
from unisono_models.recommender.data.dataset import Datasets, RowDataset, split_for_rank
from unisono_models.recommender.data.ratings import UNKNOWN, Ratings
from unisono_models.recommender.data.sequences import items_by_user
from unisono_models.recommender.loss import TrainingModule
from unisono_models.recommender.metrics.auc import click_metrics
from unisono_models.recommender.metrics.ranking import ranking_metrics, top_items
from unisono_models.recommender.model.click_model import ClickModel
from unisono_models.recommender.model.sasrec import SASRec
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.watchdog import Watchdog

Split = Literal["valid", "test"]
KS = (10, 50)


@dataclass(frozen=True)
class Evaluator:
    """Computes the metrics of a model on a split that it was not trained on: the same on every rank."""

    module: TrainingModule
    datasets: Datasets
    ranks: Ranks
    watchdog: Watchdog | None = None
    dtype: torch.dtype = torch.float32
    rows: int = 8192
    """Rows of a batch on each rank."""
    max_broken: float = 1.0
    """Raise if more than this fraction of the rows is bad."""
    repeats: bool = False
    """Rank a user's earlier items, too."""

    @torch.no_grad()
    def __call__(self, split: Split) -> dict[str, float]:
        """Compute the metrics by name: "valid/auc" and so on. All ranks call."""
        self.module.eval()
        dataset = self.datasets.valid if split == "valid" else self.datasets.test
        model = self.module.model
        metrics = self._predict(dataset, split) if isinstance(model, ClickModel) else self._rank(model, dataset, split)
        return {f"{split}/{name}": value for name, value in metrics.items()}

    def _predict(self, dataset: RowDataset, split: Split) -> dict[str, float]:
        logits, labels = [], []
        skipped = SkipReport(what=f"rows of {split}", place="line")
        for batch in dataset.scan(self.ranks.rank, self.ranks.world_size, self.rows):
            skipped.add(batch)
            batch = batch.to(self.ranks.device, self.dtype)
            logits.append(self.module.model(batch))
            labels.append(batch.labels)
            self._beat()
        skipped.check(self.max_broken)
        metrics = click_metrics(torch.cat(logits), torch.cat(labels))
        bad = sum(skipped.summary()["reasons"].values())
        return metrics | ({"bad_rows": float(bad)} if bad else {})

    def _rank(self, model: TwoTower | SASRec, dataset: RowDataset, split: Split) -> dict[str, float]:
        """Rank all items for each user (full sort), unless `repeats` except the user's earlier ones.

        These are the items of training and, in the test, of validation. They are what a SASRec knows of a user.
        """
        ratings = self.datasets.ratings
        assert ratings is not None
        earlier = [self.datasets.train] if split == "valid" else [self.datasets.train, self.datasets.valid]
        seen = items_by_user(ratings, torch.cat([self.datasets.rows_of(each) for each in earlier]))
        relevant = items_by_user(ratings, self.datasets.rows_of(dataset))
        items = self.datasets.items
        vectors = self._encode_items(model, ratings, items)
        users = relevant.lengths().nonzero().squeeze(1)
        users = users[users > UNKNOWN]
        top, right = [], []
        for share in split_for_rank(len(users), self.ranks.rank, self.ranks.world_size, self.rows):
            mine = users[share]
            if isinstance(model, SASRec):
                batch = Batch({ratings.item: take_ids(seen, mine)}, torch.empty(len(mine), 0), torch.zeros(len(mine)), mine)
            else:
                batch = ratings.join(mine, mine.new_zeros(len(mine)))
            queries = model.encode_users(batch.to(self.ranks.device).ids)
            known = None if self.repeats else move_ids(_item_indices(seen, mine, items), self.ranks.device)
            top.append(top_items(queries, vectors, k=max(KS), seen=known)[1])
            right.append(move_ids(_item_indices(relevant, mine, items), self.ranks.device))
            self._beat()
        all_right = Ragged.from_lengths(torch.cat([x.values for x in right]), torch.cat([x.lengths() for x in right]))
        return ranking_metrics(torch.cat(top), all_right, ks=KS)

    def _encode_items(self, model: TwoTower | SASRec, ratings: Ratings, items: Tensor) -> Tensor:
        """The vectors of all items, on every rank. Each rank encodes a share."""
        vectors = []
        for share in split_for_rank(len(items), self.ranks.rank, self.ranks.world_size, self.rows):
            mine = items[share]
            vectors.append(model.encode_items(ratings.join(mine.new_zeros(len(mine)), mine).to(self.ranks.device).ids))
            self._beat()
        return all_gather(torch.cat(vectors))

    def _beat(self) -> None:
        if self.watchdog is not None:
            self.watchdog.beat()


def _item_indices(bags: Ragged, users: Tensor, items: Tensor) -> Ragged:
    """The bags of these users, as indices into `items`, which are sorted."""
    taken = take_ids(bags, users)
    assert isinstance(taken, Ragged)
    return taken._replace(values=torch.searchsorted(items, taken.values))
