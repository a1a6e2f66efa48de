"""Ratings in memory: atomic files, vocabularies, joins, intervals, the rows of MovieLens."""

from pathlib import Path

import pytest
import torch

from tests.recommender.data.rating_files import COLUMNS, FEATURES, FILES, write_rating_files
from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data import movielens as movielens
from unisono_models.recommender.data.batch import take_ids
from unisono_models.recommender.data.dataset import select_core
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.data.files import find_dataset_files
from unisono_models.recommender.data.ratings import in_intervals, read_ratings
from unisono_models.recommender.data.splits import split_rows
from unisono_models.recommender.protocols import apply_protocol
from unisono_models.recommender.recipes import RECIPES


@pytest.fixture
def folder(tmp_path):
    return write_rating_files(tmp_path)


def test_rows_are_joined_with_their_users_and_items(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    words = {name: vocabulary.values for name, vocabulary in ratings.vocabularies.items()}
    assert words["user_id"] == ["a", "b"] and words["item_id"] == ["Alien", "Heat", "Jaws"]
    assert words["age"] == ["33", "44"] and words["genre"] == ["Horror", "Sci-Fi"]
    assert [feature.rows for feature in ratings.features] == [3, 4, 3, 3, 0, 0]
    batch = ratings.batch(torch.tensor([3, 0, 1]))
    assert batch.ids["user_id"].tolist() == [1, 2, 1] and batch.ids["age"].tolist() == [2, 1, 2]
    assert batch.ids["genre"].values.tolist() == [1, 1, 1, 2] and batch.ids["genre"].offsets.tolist() == [0, 1, 2, 4]
    assert batch.numbers.tolist() == [[7, 0], [1, 0], [2, 1.5]] and batch.labels.tolist() == [1, 1, 0]
    assert batch.index.tolist() == [3, 0, 1]
    unknown = ratings.batch(torch.tensor([2]))  # Heat is not among the items
    assert unknown.ids["genre"].values.tolist() == [] and unknown.ids["item_id"].tolist() == [2]


def test_any_user_joins_any_item(folder):
    """As in evaluation and recommendation: all but what belongs to an interaction is as in the rows that there are."""
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    rows = torch.arange(len(ratings))
    whole, joined = ratings.batch(rows), ratings.join(ratings.users, ratings.items)
    for name in ("user_id", "item_id", "age"):
        assert torch.equal(whole.ids[name], joined.ids[name])
    assert all(map(torch.equal, whole.ids["genre"][:2], joined.ids["genre"][:2]))
    assert joined.numbers[:, 0].tolist() == [0] * 4 and torch.equal(whole.numbers[:, 1], joined.numbers[:, 1])


def test_bad_rows_are_skipped_with_their_lines(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    found = {(skip.name, skip.index, skip.reason) for skip in ratings.skipped}
    assert found == {
        ("x.inter", 5, "rating is not a number"),
        ("x.inter", 6, "wrong number of fields"),
        ("x.inter", 8, "no user or no item"),
        ("x.inter", 9, "hour is not a number"),
        ("x.user", 5, "repeated id"),
    }
    assert len(ratings) == 4 and ratings.read == 8


def test_kinds_come_from_the_header_unless_they_are_given(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    assert [feature.kind for feature in ratings.features] == ["id", "id", "id", "ids", "number", "number"]
    (folder / "x.item").write_text("item_id:token\tprices:float_seq\nJaws\t1 2\n")
    with pytest.raises(ValueError, match=r"prices: its type in x\.item is float_seq, which cannot be a feature"):
        read_ratings(folder, [Feature("prices", "auto")], **COLUMNS, threshold=4)
    with pytest.raises(ValueError, match="users and items have to be of kind id"):
        read_ratings(folder, [Feature("user_id", "ids")], **COLUMNS, threshold=4)


def test_given_vocabularies_keep_their_rows(folder):
    """A new user would shift all rows behind it: known values keep theirs, new ones are unknown."""
    before = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    (folder / "x.inter").write_text(FILES["x.inter"] + "aa\tBambi\t5\t1\n")
    after = read_ratings(folder, FEATURES, **COLUMNS, threshold=4, vocabularies=before.vocabularies)
    assert after.features == before.features and torch.equal(after.users[:-1], before.users)
    assert (int(after.users[-1]), int(after.items[-1])) == (0, 0)
    anew = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    assert not torch.equal(anew.users[:-1], before.users)


def test_numbers_beyond_float32_are_bad(folder):
    (folder / "x.item").write_text("item_id:token\tweight:float\nAlien\t1e39\nJaws\tabc\nHeat\t\n")
    ratings = read_ratings(folder, parse_features(["weight"]), **COLUMNS, threshold=4)
    assert ratings.columns["weight"][1].tolist() == [0, 0, 0, 0]
    assert [(skip.index, skip.reason) for skip in ratings.skipped if skip.name == "x.item"] == [
        (2, "weight is not a number"),
        (3, "weight is not a number"),
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x.inter": "user_id\titem_id:token\thour:float\n"}, "has no column 'rating'; it has user_id, item_id, hour"),
        ({"x.inter": "user_id:token\tuser_id:token\n"}, "line 1 is not the header of an atomic file"),
        ({"x.inter": "user_id:text\titem_id:token\n"}, "line 1 is not the header of an atomic file"),
        ({"x.inter": ""}, "line 1 is not the header of an atomic file"),
        ({"y.inter": "user_id:token\n"}, "expected one .inter file of RecBole's, or the path of one, found 2"),
    ],
    ids=["no column", "twice", "no type", "empty", "two files"],
)
def test_files_that_are_not_atomic_raise(folder, change, expected):
    for name, text in change.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_ratings(folder, FEATURES, **COLUMNS, threshold=4)


def test_movielens_has_the_rows_of_the_published_protocols():
    """739,012 of RecBole's context protocol; 836,478 of 6,039 users and 3,628 items of its general one; 834,449 of its
    sequential one, with 3,123 items (its table counts the padding, too)."""
    features = parse_features(["user_id", "item_id"])
    ratings = read_ratings(Path(find_dataset_files(DataConfig("ml-1m")).source), features, **COLUMNS, threshold=4)
    context = ratings.select(in_intervals(ratings.values, apply_protocol(RECIPES["deepfm"]).data.keep).nonzero().squeeze(1))
    assert (len(ratings), len(context), int(context.labels.sum())) == (1_000_209, 739_012, 575_281)
    assert [len(part) for part in split_rows(len(context), (0.8, 0.1, 0.1), seed=0)] == [591_210, 73_901, 73_901]
    general = ratings.select(in_intervals(ratings.values, apply_protocol(RECIPES["two_tower"]).data.keep).nonzero().squeeze(1))
    assert (len(general), len(general.users.unique()), len(general.items.unique())) == (836_478, 6_039, 3_628)
    core = select_core(general, apply_protocol(RECIPES["sasrec"]).data)
    assert (len(core), len(core.users.unique()), len(core.items.unique())) == (834_449, 6_033, 3_123)
    assert min(int(x[x > 0].min()) for x in (core.users.bincount(), core.items.bincount())) == 10


def test_take_ids_selects_bags():
    bags = Ragged.from_lists([[7, 8], [], [9]])
    taken = take_ids(bags, torch.tensor([2, 1, 0, 0]))
    assert taken.values.tolist() == [9, 7, 8, 7, 8] and taken.offsets.tolist() == [0, 1, 1, 3, 5]
    assert take_ids(bags, torch.tensor([], dtype=torch.int64)).offsets.tolist() == [0]


@pytest.mark.parametrize("text", ["", "a/b", "a:idz", "a:id:x", "a:id:1", "a:number:5", "a.b", "[0,3", "0,3", "(a,3)"])
def test_bad_features_and_intervals_raise(text):
    with pytest.raises(ValueError, match=r"[Ff]eature|interval"):
        in_intervals(torch.zeros(1), text) if "," in text else Feature.parse(text)
