"""Sequences: the items of each user in order of time, and windows of them to train on."""

from dataclasses import replace

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.recommender.data.batch import Batch, take_slices
from unisono_models.recommender.data.dataset import Datasets, InMemoryDataset
from unisono_models.recommender.data.ratings import UNKNOWN, Ratings
from unisono_models.recommender.data.splits import sort_groups_by_time
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import uniform
from unisono_models.training.sampler import StepSampler


def items_by_user(ratings: Ratings, rows: Tensor) -> Ragged:
    """The items of each user among these rows, by the user's row in the vocabulary. Unknown items are left out.

    They are in order of time, if the ratings have times; equal times keep the order of the rows.
    """
    rows = rows[ratings.items[rows] > UNKNOWN]
    users, times = ratings.users[rows], None if ratings.times is None else ratings.times[rows]
    counts = users.bincount(minlength=len(ratings.vocabularies[ratings.user]))
    return Ragged.from_lengths(ratings.items[rows][sort_groups_by_time(users, times)], counts)


class SequenceDataset(InMemoryDataset):
    """Windows of at most `length` + 1 items that a user had one after the other: each but the last is followed by a target.

    A user with n targets has n / `length` windows, rounded up. They lie at random in equal parts of the user's sequence,
    elsewhere in each epoch, so that an item is not always at the same distance from the beginning. `batch` gives them as
    bags of the item's feature; their `index` is the number of the window.
    """

    def __init__(self, ratings: Ratings, numbers: Tensor, *, length: int, batch: int, seed: int) -> None:
        super().__init__(ratings, numbers, batch=batch, seed=seed)
        self.sequences, self.length, self.seed = items_by_user(ratings, numbers), length, seed
        targets = (self.sequences.lengths() - 1).clamp(min=0)
        windows = -(-targets // length)
        self._user = torch.arange(len(windows)).repeat_interleave(windows)
        self._part = torch.arange(len(self._user)) - (windows.cumsum(0) - windows)[self._user]
        self._targets, self._windows = targets, windows
        self._sampler = StepSampler(len(self._user), batch, seed) if len(self._user) else None

    @property
    def rows(self) -> int:
        return len(self._user)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        if self._sampler is None:
            raise UserError("--data.source: no user has two items in a row, so there is nothing that sasrec could learn")
        chosen = self._sampler.share(step, rank, world_size)
        windows = self._read(chosen, self._sampler.epoch_of(step))
        return Batch({self.ratings.item: windows}, torch.empty(len(chosen), 0), torch.zeros(len(chosen)), chosen)

    def _read(self, chosen: Tensor, epoch: int) -> Ragged:
        user = self._user[chosen]
        random = uniform(self.seed, "windows", epoch, chosen).double()
        spare = (self._targets[user] - self.length).clamp(min=0)
        # Half a window beyond both ends, then back inside: else the first and the last items would be targets too rarely.
        start = (spare + self.length) * (self._part[chosen] + random) / self._windows[user] - self.length / 2
        start = torch.minimum(start.round().long().clamp(min=0), spare)
        lengths = self._targets[user].clamp(max=self.length) + 1
        return take_slices(self.sequences, user, start, lengths)


def train_on_sequences(datasets: Datasets, *, length: int, seed: int) -> Datasets:
    """Replace the rows to train on by windows of the same ratings."""
    assert datasets.ratings is not None
    numbers = datasets.rows_of(datasets.train)
    train = SequenceDataset(datasets.ratings, numbers, length=length, batch=datasets.config.batch, seed=seed)
    return replace(datasets, train=train)
