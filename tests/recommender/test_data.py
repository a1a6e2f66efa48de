"""Ratings in memory: atomic files, joins, protocols, splits."""

import pytest
import torch

from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch, take_ids
from unisono_models.recommender.data.dataset import InMemoryDataset, build_datasets, prefetch, split_for_rank
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.data.movielens import movielens_folder
from unisono_models.recommender.data.ratings import in_intervals, read_ratings
from unisono_models.recommender.data.splits import split_groups, split_rows
from unisono_models.recommender.recipes import RECIPES
from unisono_models.training.distributed.launch import Ranks

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
FILES = {
    "x.inter": "user_id:token\titem_id:token\trating:float\thour:float\n"
    "b\tJaws\t5\t1\na\tAlien\t2\t2\n\nb\tAlien\tgood\t3\na\tJaws\t4\na\tHeat\t3\t0.5\n\tHeat\t3\t0\nb\tHeat\t1\tnan\na\tJaws\t4\t7\r\n",
    "x.user": "user_id:token\tage:float\nb\t33\nzoe\t20\na\t44\nb\t99\n",
    "x.item": "item_id:token\tgenre:token_seq\tweight:float\nAlien\tHorror Sci-Fi\t1.5\nJaws\tHorror\t\n",
}
COLUMNS = {"user": "user_id", "item": "item_id", "value": "rating"}
FEATURES = parse_features(["user_id", "item_id", "age:id", "genre", "hour", "weight:number"])


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


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
        ("x.inter", 5, "rating is no number"),
        ("x.inter", 6, "another number of fields"),
        ("x.inter", 8, "no user or no item"),
        ("x.inter", 9, "hour is no number"),
        ("x.user", 5, "seen before"),
    }
    assert len(ratings) == 4 and ratings.read == 8


def test_kinds_are_those_of_the_header_unless_one_says_otherwise(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    assert [feature.kind for feature in ratings.features] == ["id", "id", "id", "ids", "number", "number"]
    (folder / "x.item").write_text("item_id:token\tprices:float_seq\nJaws\t1 2\n")
    with pytest.raises(ValueError, match=r"prices: x\.item has it as float_seq, which is no kind of feature"):
        read_ratings(folder, [Feature("prices", "auto")], **COLUMNS, threshold=4)
    with pytest.raises(ValueError, match="users and items are of kind id"):
        read_ratings(folder, [Feature("user_id", "ids")], **COLUMNS, threshold=4)


def test_a_trained_models_rows_outlast_changes_of_the_data(folder):
    """A new user would shift all rows behind it: known values keep theirs, new ones are unknown."""
    before = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    (folder / "x.inter").write_text(FILES["x.inter"] + "aa\tBambi\t5\t1\n")
    after = read_ratings(folder, FEATURES, **COLUMNS, threshold=4, vocabularies=before.vocabularies)
    assert after.features == before.features and torch.equal(after.users[:-1], before.users)
    assert (int(after.users[-1]), int(after.items[-1])) == (0, 0)
    anew = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    assert not torch.equal(anew.users[:-1], before.users)


def test_numbers_are_those_of_float32(folder):
    (folder / "x.item").write_text("item_id:token\tweight:float\nAlien\t1e39\nJaws\tabc\nHeat\t\n")
    ratings = read_ratings(folder, parse_features(["weight"]), **COLUMNS, threshold=4)
    assert ratings.columns["weight"][1].tolist() == [0, 0, 0, 0]
    assert [(skip.index, skip.reason) for skip in ratings.skipped if skip.name == "x.item"] == [
        (2, "weight is no number"),
        (3, "weight is no number"),
    ]


def test_too_many_bad_rows_stop_a_run(folder):
    from unisono_models.recommender.train import main

    options = ["--data.source", str(folder), "--data.features", "user_id", "item_id", "--run.dir", str(folder / "run")]
    with pytest.raises(ValueError, match=r"4 of 8 rows skipped(.|\n)*x.inter \(line 6\): 3 fields instead of 4"):
        main(["tiny", *options])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x.inter": "user_id\titem_id:token\thour:float\n"}, "has no column 'rating'; it has user_id, item_id, hour"),
        ({"x.inter": "user_id:token\tuser_id:token\n"}, "line 1 is no header of an atomic file"),
        ({"x.inter": "user_id:text\titem_id:token\n"}, "line 1 is no header of an atomic file"),
        ({"x.inter": ""}, "line 1 is no header of an atomic file"),
        ({"y.inter": "user_id:token\n"}, "expected one .inter file of RecBole's, or the path of one, found 2"),
    ],
    ids=["no column", "twice", "no type", "empty", "two files"],
)
def test_files_that_are_none_are_refused(folder, change, expected):
    for name, text in change.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_ratings(folder, FEATURES, **COLUMNS, threshold=4)


def test_movielens_has_the_rows_of_the_published_protocols():
    """739,012 of RecBole's context protocol; 836,478 of 6,039 users and 3,628 items of its general one."""
    features = parse_features(["user_id", "item_id"])
    ratings = read_ratings(movielens_folder("ml-1m"), features, **COLUMNS, threshold=4)
    context = ratings.keep(in_intervals(ratings.values, RECIPES["deepfm"].data.keep).nonzero().squeeze(1))
    assert (len(ratings), len(context), int(context.labels.sum())) == (1_000_209, 739_012, 575_281)
    assert [len(part) for part in split_rows(len(context), (0.8, 0.1, 0.1), seed=0)] == [591_210, 73_901, 73_901]
    general = ratings.keep(in_intervals(ratings.values, RECIPES["two_tower"].data.keep).nonzero().squeeze(1))
    assert (len(general), len(general.users.unique()), len(general.items.unique())) == (836_478, 6_039, 3_628)


def test_small_movielens_opens_as_the_config_says():
    source = build_datasets(RECIPES["tiny"].data, seed=0, ranks=ALONE)
    assert (source.train.rows, source.valid.rows, source.test.rows) == (58_285, 7_285, 7_285) and source.ratings.read == 100_000
    assert sorted(torch.cat([source.rows_of(part) for part in (source.train, source.valid, source.test)]).tolist()) == list(
        range(72_855)
    )
    other = build_datasets(DataConfig("ml-100k", features=("user_id", "class:ids"), split_seed=1), seed=0, ranks=ALONE)
    assert not torch.equal(source.rows_of(source.test), other.rows_of(other.test))


def counts_of(count, parts):
    """RecBole's rounding, step by step."""
    counts = [int(count * part) for part in parts]
    counts[0] = count - sum(counts[1:])
    for number in range(1, len(parts)):
        if counts[0] <= 1:
            break
        if 0 < parts[-number] * count < 1:
            counts[-number] += 1
            counts[0] -= 1
    return counts


@pytest.mark.parametrize("parts", [(0.8, 0.1, 0.1), (0.7, 0.05, 0.25), (1.0, 0.0, 0.0)])
def test_each_users_rows_are_split_by_themselves(parts):
    sizes = [1, 2, 3, 4, 9, 10, 11, 29, 100, 0, 1]
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    found = split_groups(groups, parts, seed=3)
    assert sorted(torch.cat(found).tolist()) == list(range(len(groups)))
    for group, size in enumerate(sizes):
        assert [int((groups[part] == group).sum()) for part in found] == counts_of(size, parts)
    again, other = split_groups(groups, parts, seed=3), split_groups(groups, parts, seed=4)
    assert all(map(torch.equal, found, again)) and (parts[0] == 1 or not torch.equal(found[2], other[2]))
    with pytest.raises(ValueError, match="must be three shares that add up to 1"):
        split_groups(groups, (0.8, 0.1, 0.2), seed=0)


def test_ranks_share_every_batch_and_every_row(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    part = InMemoryDataset(ratings, torch.tensor([0, 2, 3]), batch=2, seed=0)
    for step in range(4):
        whole = part.batch(step, 0, 1)
        for size in (2, 3, 4):
            joined = Batch.join([part.batch(step, rank, size) for rank in range(size)])
            assert torch.equal(joined.index, whole.index) and torch.equal(joined.ids["genre"].values, whole.ids["genre"].values)
        assert len(whole) == part.size_of(step) == (2, 1)[step % 2]
    for size in (1, 2, 4):
        scans = [list(part.scan(rank, size, rows=1)) for rank in range(size)]
        assert len({len(scan) for scan in scans}) == 1  # models communicate in each
        assert [int(i) for scan in scans for batch in scan for i in batch.index] == [0, 2, 3]
    assert [len(piece) for piece in split_for_rank(0, 0, 2, 5)] == [0]


def test_bags_of_rows():
    bags = Ragged.from_lists([[7, 8], [], [9]])
    taken = take_ids(bags, torch.tensor([2, 1, 0, 0]))
    assert taken.values.tolist() == [9, 7, 8, 7, 8] and taken.offsets.tolist() == [0, 1, 1, 3, 5]
    assert take_ids(bags, torch.tensor([], dtype=torch.int64)).offsets.tolist() == [0]


@pytest.mark.parametrize("text", ["", "a/b", "a:idz", "a:id:x", "a:id:1", "a:number:5", "a.b", "[0,3", "0,3", "(a,3)"])
def test_bad_declarations_are_refused(text):
    with pytest.raises(ValueError, match=r"[Ff]eature|interval"):
        in_intervals(torch.zeros(1), text) if "," in text else Feature.parse(text)


def test_errors_of_reading_are_raised_in_turn():
    def read(step):
        if step == 3:
            raise OSError("gone")
        return step

    seen = []
    with pytest.raises(OSError, match="gone"):
        seen.extend(now for now, _ in prefetch(read, 0, 9))
    assert seen == [0, 1]  # the third comes with the fourth
