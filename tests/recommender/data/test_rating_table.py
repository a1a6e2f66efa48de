"""Tables of ratings: CSV and parquet, columns by their usual names, bad rows with their lines, the sides of features."""

import gzip
import re

import pytest
import torch

from unisono_models.recommender.config import USUAL_NAMES, DataConfig
from unisono_models.recommender.data.columns import find_rating_columns
from unisono_models.recommender.data.dataset import build_datasets, guess_threshold
from unisono_models.recommender.data.features import parse_features
from unisono_models.recommender.data.rating_table import read_column_names, read_rating_table
from unisono_models.recommender.recipes import RECIPES
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.errors import UserError

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
TEXT = """userId,movieId,rating,when,genres,price
 anna ,"Jaws, 2",5,2024-01-02,Drama|Horror,1.5
bob,Alien,2.5,2024-01-01T10:00:00Z,Sci-Fi,

anna,Alien,good,3,Sci-Fi,2
bob,,4,3,Sci-Fi,2
bob,Alien
bob,"Jaws, 2",4,2024-01-01,Drama|Horror,1e39
carl,Heat,+3,1704067200,,-2
dora,Alien,4,soon,Sci-Fi,2
"""


def read(path, *features, **columns):
    config = DataConfig(**columns)
    found = find_rating_columns(read_column_names(path), config, where=path.name)
    return read_rating_table([path], parse_features(features or [found.user, found.item]), columns=found)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text(TEXT)
    return path


def test_rows_of_a_csv_are_read_and_bad_ones_are_counted_with_their_lines(path):
    ratings = read(path, "userId", "movieId", "genres:ids", "price", timestamp="when")
    words = {name: vocabulary.values for name, vocabulary in ratings.vocabularies.items()}
    assert words["userId"] == ["anna", "bob", "carl"] and words["movieId"] == ["Alien", "Heat", "Jaws, 2"]
    assert words["genres"] == ["Drama", "Horror", "Sci-Fi"] and ratings.values.tolist() == [5, 2.5, 3]
    assert ratings.times.tolist() == [1704153600, 1704103200, 1704067200]
    assert [feature.kind for feature in ratings.features] == ["id", "id", "ids", "number"]
    assert ratings.read == 8 and {(skip.index, skip.reason) for skip in ratings.skipped} == {
        (5, "rating is not a number"),
        (6, "no user or no item"),
        (7, "wrong number of fields"),
        (8, "price is not a number"),
        (10, "when is not a time"),
    }
    assert [skip.error for skip in ratings.skipped if skip.index == 5] == ["'good'"]
    batch = ratings.batch(torch.arange(3))
    assert batch.numbers.tolist() == [[1.5], [0], [-2]] and batch.ids["genres"].lengths().tolist() == [2, 1, 0]


def test_features_belong_to_users_or_items_if_they_depend_on_them_alone(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("user,item,genre,age,hour\na,x,D,30,1\na,y,C,30,2\nb,x,D,40,3\nb,x,D,40,4\n")
    ratings = read(path, "user", "item", "genre", "age", "hour")
    assert {name: side for name, (side, _) in ratings.columns.items()} == {
        "user": "user",
        "item": "item",
        "genre": "item",
        "age": "user",
        "hour": "inter",
    }
    joined = ratings.join(ratings.users, ratings.items)
    whole = ratings.batch(torch.arange(4))
    assert all(torch.equal(joined.ids[name], whole.ids[name]) for name in ("user", "item", "genre", "age"))
    assert joined.ids["hour"].tolist() == [0, 0, 0, 0] and ratings.values.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"user\titem\trating\na\tx\t1\nb\ty\t2.5\n",
        b'\xef\xbb\xbf"User ID";Item;Rating\r\na;x;1\r\n"b";y;2,5\r\n',
        b"user | item | rating\n a | x | 1\n b | y | 2.5",
        gzip.compress(b"user,item,rating\na,x,1\nb,y,2.5\n"),
    ],
    ids=["tabs", "semicolons", "bars", "gzip"],
)
def test_delimiters_quotes_spaces_and_packed_files(tmp_path, content):
    path = tmp_path / ("r.csv.gz" if content[:2] == b"\x1f\x8b" else "r.txt")
    path.write_bytes(content)
    ratings = read(path)
    assert [ratings.vocabularies[name].values for name in (ratings.user, ratings.item)] == [["a", "b"], ["x", "y"]]
    assert ratings.values.tolist() == [1, 2.5] and not ratings.skipped


def test_latin_1_is_read(tmp_path):
    (tmp_path / "r.csv").write_bytes("user,item\nJosé,x\n".encode("latin-1"))
    assert read(tmp_path / "r.csv").vocabularies["user"].values == ["José"]


def test_parquet_gives_the_same_ratings_as_csv(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {
        "user": pa.array([7.0, 8.0, None, 7.0]),  # pandas stores integers with gaps as floats
        "item": pa.array(["x", "y", "x", " y "]).dictionary_encode(),
        "rating": pa.array([1, 2, 3, None], pa.int8()),
        "tags": [["a", "b"], [], ["a"], None],
        "time": pa.array([1, 2, 3, 4], pa.timestamp("s")),
    }
    pq.write_table(pa.table(table), tmp_path / "r.parquet")
    ratings = read(tmp_path / "r.parquet", "user", "item", "tags")
    assert [ratings.vocabularies[name].values for name in ("user", "item", "tags")] == [["7", "8"], ["x", "y"], ["a", "b"]]
    assert ratings.users.tolist() == [1, 2] and ratings.values.tolist() == [1, 2] and ratings.times.tolist() == [1, 2]
    assert [(skip.index, skip.reason) for skip in ratings.skipped] == [(3, "no user or no item"), (4, "rating is not a number")]
    assert ratings.batch(torch.arange(2)).ids["tags"].lengths().tolist() == [2, 0]


def test_titles_are_those_of_items(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,title\na,x,Jaws\nb,y,Heat\nb,x,Jaws\n")
    (tmp_path / "reviews.csv").write_text("user,item,title\na,x,good\nb,y,bad\nb,x,bad\n")
    assert read(tmp_path / "r.csv").titles == {"x": "Jaws", "y": "Heat"} and read(tmp_path / "reviews.csv").titles is None


def test_columns_are_found_by_their_usual_names_or_as_given():
    names = ["idx", "Customer ID", "ASIN", "Overall", "unixReviewTime"]
    found = find_rating_columns(names, DataConfig(), where="r.csv")
    assert (found.user, found.item, found.label, found.timestamp) == tuple(names[1:])
    assert find_rating_columns(["a", "b"], DataConfig(user="b", item="a"), where="r.csv").user == "b"


def test_help_lists_the_usual_names(capsys):
    with pytest.raises(SystemExit):
        RECIPES.choose(["deepfm", "--help"])
    words = re.sub(r"[\W│]+", " ", capsys.readouterr().out)
    for usual in USUAL_NAMES.values():
        assert " ".join(usual) in words


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            "who,item\na,b\n",
            {},
            r"--data.user: r.csv has no column with a usual name of users \(user, user_id.*It has who, item",
        ),
        ("user,item\na,b\n", {"item": "itme"}, "--data.item itme: r.csv has no such column. Did you mean item"),
        ("user,item\na,b\n", {"item": "user"}, "--data.user and --data.item are both the column 'user'"),
        ("1,2,5\n1,3,4\n", {}, "the first line is not a header: '1,2,5'"),
        ("user,user\n", {}, "two columns are called 'user'"),
        ("", {}, "r.csv: the file is empty"),
        ("user,item,rating\n", {}, "none of its 0 rows can be used"),
        (
            "user,item,rating\na,b,good\n",
            {},
            "none of its 1 rows can be used. rating is not a number in 1 of them, such as 'good'",
        ),
        ("user,item,rating\na,b,5\n", {"keep": "[7,9]"}, r"--data.keep '\[7,9\]': no interaction of .* is left"),
        ("user,item\na,b\n", {"split": "time"}, "--data.split time: there is no column of times"),
        ("user,item\na,b\n", {"features": ("user", "age")}, "--data.features: there is no column 'age' in r.csv: user, item"),
        ('user,item\n"a,b\nc,d\ne,f\ng,h\n', {}, "line 2: a quotation mark is not closed"),
    ],
)
def test_mistakes_name_the_option(tmp_path, text, options, expected):
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(UserError, match=expected):
        build_datasets(DataConfig(str(tmp_path / "r.csv"), **options), seed=0, ranks=ALONE)


def test_unknown_sources_are_told_what_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ratings.xlsx").write_text("")
    for source in ("ratings.xlsx", "rating.csv", "ml-10m"):
        with pytest.raises(
            UserError,
            match=r"--data.source.*(Understood are: ratings in|no such file or folder. The datasets with a name are ml-1m)",
        ):
            build_datasets(DataConfig(source), seed=0, ranks=ALONE)


def test_threshold_is_the_first_rating_above_the_mean():
    assert guess_threshold(torch.tensor([0.0, 1.0, 1.0])) == 1 and guess_threshold(torch.tensor([2.0, 2.0])) == 2
    assert guess_threshold(torch.tensor([0.5, 3.0, 3.5, 5.0])) == 3.5


@pytest.mark.parametrize("split", ["rows", "per_user", "time", "leave_one_out"])
def test_splits_of_a_table_do_not_depend_on_the_ranks(path, split):
    lines = ["user,item,rating,timestamp", *(f"u{k % 5},i{k % 7},{k % 2},{100 - k}" for k in range(40))]
    path.write_text("\n".join(lines))
    config = DataConfig(str(path), split=split)
    one, other = (build_datasets(config, seed=0, ranks=Ranks(rank, 4, 0, torch.device("cpu"))) for rank in (0, 3))
    rows = [[datasets.rows_of(x) for x in (datasets.train, datasets.valid, datasets.test)] for datasets in (one, other)]
    assert all(map(torch.equal, *rows)) and sorted(torch.cat(rows[0]).tolist()) == list(range(40))
    if split == "time":  # the newest are the first lines
        assert rows[0][2].tolist() == [0, 1, 2, 3] and rows[0][1].tolist() == [4, 5, 6, 7]
    if split == "leave_one_out":
        assert rows[0][2].tolist() == [0, 1, 2, 3, 4] and rows[0][1].tolist() == [5, 6, 7, 8, 9]
