"""Windows of sequences: what they hold, that all of it is learned from, and that the left out items are in none."""

from pathlib import Path

import pytest
import torch

from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.dataset import Datasets, build_datasets
from unisono_models.recommender.data.ratings import Ratings, Vocabulary
from unisono_models.recommender.data.sequences import SequenceDataset, items_by_user, train_on_sequences
from unisono_models.training.distributed.launch import Ranks

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
LENGTHS = [30, 3, 7, 1, 2]  # of the users' sequences


def make_ratings(lengths):
    """User u has the items 100 u + 1, 100 u + 2, … one after the other; the rows are shuffled."""
    users = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    steps = torch.cat([torch.arange(1, length + 1) for length in lengths])
    order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0))
    users, steps = users[order], steps[order]
    ones, known = torch.ones(len(users)), {"u": Vocabulary("abcdefgh"), "i": Vocabulary(map(str, range(900)))}
    return Ratings(
        Path("x.inter"), (), known, users, users * 100 + steps, ones.double(), ones, {}, "u", "i", 0, times=steps.double()
    )


def windows_of(data, epoch):
    """The windows of an epoch, in order."""
    steps = -(-data.rows // 3)
    batches = [data.batch(epoch * steps + step, 0, 1) for step in range(steps)]
    bags = [batch.ids["i"] for batch in batches]
    lists = [bag.values[a:b].tolist() for bag in bags for a, b in zip(bag.offsets, bag.offsets[1:], strict=False)]
    index = torch.cat([batch.index for batch in batches])
    assert sorted(index.tolist()) == list(range(data.rows))  # each window once
    return [lists[place] for place in index.argsort().tolist()]


def test_windows_are_parts_of_sequences_and_all_items_are_targets():
    ratings = make_ratings(LENGTHS)
    data = SequenceDataset(ratings, torch.arange(len(ratings)), length=6, batch=3, seed=0)
    assert data.rows == 5 + 1 + 1 + 0 + 1  # of 29, 2, 6, 0 and 1 targets
    found = [windows_of(data, epoch) for epoch in range(60)]
    for windows in found:
        for window in windows:
            assert window == list(range(window[0], window[0] + len(window)))  # in order of time, of one user
        assert [len(window) for window in windows] == [7, 7, 7, 7, 7, 3, 7, 2]
    targets = [item for windows in found for window in windows for item in window[1:]]
    counts = torch.tensor(targets).bincount(minlength=131)[102:131]  # of the user with 30 items
    assert counts.min() > 30 and counts.max() < 120  # about once in each epoch
    assert found[0] == windows_of(data, 0) != found[1]  # elsewhere in each epoch, but the same again


def test_windows_of_a_step_do_not_depend_on_ranks():
    ratings = make_ratings(LENGTHS)
    data = SequenceDataset(ratings, torch.arange(len(ratings)), length=6, batch=3, seed=0)
    whole = data.batch(4, 0, 1)
    parts = [data.batch(4, rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [1, 1, 1, 0]
    assert torch.cat([part.ids["i"].values for part in parts]).tolist() == whole.ids["i"].values.tolist()


def test_users_without_two_items_in_a_row_are_an_error():
    ratings = make_ratings([1, 1])
    data = SequenceDataset(ratings, torch.arange(2), length=6, batch=3, seed=0)
    with pytest.raises(ValueError, match="no user has two items in a row"):
        data.batch(0, 0, 1)


def split_ratings(path, held_out) -> Datasets:
    """Five users with ten items each, of which the last two are `held_out`."""
    lines = ["user,item,timestamp"]
    for user in range(5):
        items = [(user + step) % 9 for step in range(8)] + held_out
        lines += [f"u{user},m{item},{step}" for step, item in enumerate(items)]
    path.write_text("\n".join(lines))
    config = DataConfig(str(path), split="leave_one_out", batch=3)
    return train_on_sequences(build_datasets(config, seed=0, ranks=ALONE), length=4, seed=0)


def test_left_out_items_are_in_no_window_and_in_no_earlier_history(tmp_path):
    """Whatever they are, training sees the same; validation knows the items of training, the test those of validation, too."""
    one, other = split_ratings(tmp_path / "a.csv", [1, 2]), split_ratings(tmp_path / "b.csv", [7, 3])
    assert one.train.rows == 10
    for step in range(8):
        batches = [datasets.train.batch(step, 0, 1) for datasets in (one, other)]
        assert torch.equal(*(batch.ids["item"].values for batch in batches))
    names = one.ratings.vocabularies["item"]
    by_split = [items_by_user(one.ratings, one.rows_of(split)) for split in (one.train, one.valid, one.test)]
    train, valid, test = ([names.value(int(item)) for item in bags.values] for bags in by_split)
    assert [bags.lengths()[1:].tolist() for bags in by_split] == [[8] * 5, [1] * 5, [1] * 5]
    assert train[:8] == [f"m{item}" for item in range(8)] and valid == ["m1"] * 5 and test == ["m2"] * 5
