"""Parquet files: columns become features, bad rows are skipped."""

import pickle
import sys

import pytest

from tests.recommender.data.click_files import read_all, rows_of
from unisono.embedding import Ragged, hash_strings
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import StreamingDataset
from unisono_models.recommender.data.features import Feature
from unisono_models.training.errors import UserError


def write_parquet(path, rows_per_group=3, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def parquet(paths, features, **options):
    from unisono_models.recommender.data.parquet import ParquetChunks

    return ParquetChunks(paths if isinstance(paths, list) else [paths], features, **options)


def test_parquet_columns_become_features(tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = ["x", None, "y", "x", ""]
    columns = {
        "label": [True, False, True, False, True],
        "user": pa.array([7, -3, None, 2**62, 0]),
        "word": texts,
        "kind": pa.array(texts).dictionary_encode(),
        "huge": pa.array([1, 2, 2**64 - 2, None, 5], pa.uint64()),
        "tags": [[3, 4], None, [], [None, 5], [6]],
        "words": pa.array([["x"], ["y", "x"], None, [None], []], pa.large_list(pa.string())),
        "age": pa.array([1, None, 3, 4, 5], pa.int8()),
        "price": pa.array([0.5, 1.5, None, -2.0, 3.0], pa.float32()),
    }
    names = [
        ("tags", "ids"),
        ("age", "number"),
        ("user", "id"),
        ("word", "id"),
        ("kind", "id"),
        ("huge", "id"),
        ("words", "ids"),
    ]
    features = [*(Feature(name, kind) for name, kind in names), Feature("price", "number")]
    chunks = parquet(write_parquet(tmp_path / "a.parquet", **columns), features, rows_per_chunk=2)
    assert chunks.sizes.tolist() == [2, 1, 2] and chunks.notes == ()
    batch = read_all(pickle.loads(pickle.dumps(chunks)))
    x, y, blank = hash_strings(["x", "y", ""]).tolist()
    assert batch.ids["user"].tolist() == [7, -3, -1, 2**62, 0]
    assert batch.ids["word"].tolist() == batch.ids["kind"].tolist() == [x, -1, y, x, blank]
    assert batch.ids["huge"].tolist() == [1, 2, -2, -1, 5]
    assert batch.ids["tags"].values.tolist() == [3, 4, -1, 5, 6] and batch.ids["tags"].lengths().tolist() == [2, 0, 0, 2, 1]
    assert batch.ids["words"].values.tolist() == [x, y, x, -1] and batch.ids["words"].lengths().tolist() == [1, 2, 0, 1, 0]
    assert batch.numbers.tolist() == [[1, 0.5], [0, 1.5], [3, 0], [4, -2], [5, 3]] and batch.labels.tolist() == [1, 0, 1, 0, 1]
    parts = [chunks.read(2, 0, 1), chunks.read(0, 1, 2), chunks.read(1, 0, 0)]
    assert rows_of(Batch.cat(parts)) == [rows_of(batch)[3], rows_of(batch)[1]]
    stream = StreamingDataset(
        chunks, features=[Feature(f.name, f.kind, 9 * (f.kind != "number")) for f in features], ids="hashed", batch=2, seed=0
    )
    hashed = Batch.cat([stream.batch(0, rank, 3) for rank in range(3)])
    assert isinstance(hashed.ids["tags"], Ragged) and len(hashed) == 2 and stream.rows == 5
    words = next(stream.scan(0, 1)).ids["words"].values.tolist()
    assert words[-1] == 0 and all(1 <= row <= 8 for row in words[:-1])  # null, and others


def test_bad_rows_of_parquet_are_skipped(tmp_path):
    first = write_parquet(tmp_path / "a.parquet", label=[1.0, 0.0], x=[0.0, 1.0], u=[1, 2])
    labels, numbers = [1.0, None, 2.0, 0.0, 0.5, float("nan"), 1.0], [0.0, 0.0, 0.0, float("nan"), 0.0, 0.0, 1e300]
    second = write_parquet(tmp_path / "b.parquet", label=labels, x=numbers, u=list(range(7)))
    chunks = parquet([first, second], [Feature("x", "number"), Feature("u")])
    batch = read_all(chunks)
    assert batch.index.tolist() == [0, 1, 2] and batch.ids["u"].tolist() == [1, 2, 0]
    reasons = {"label": "label not 0 or 1", "x": "number not finite"}
    assert [(skip.index, skip.name, skip.reason) for skip in batch.skipped] == [
        (row, "b.parquet", reasons[column])
        for row, column in [(2, "label"), (3, "label"), (4, "x"), (5, "label"), (6, "label"), (7, "x")]
    ]
    assert batch.skipped[0].error == "label is None" and batch.skipped[5].error == "x is 1e+300"
    data = bytearray(second.read_bytes())
    data[4:60] = bytes(56)
    second.write_bytes(data)
    damaged = parquet(second, [Feature("x", "number"), Feature("u")]).read(0, 1, 3)
    assert len(damaged) == 0 and [(s.index, s.reason) for s in damaged.skipped] == [
        (2, "damaged row group"),
        (3, "damaged row group"),
    ]


def test_bad_parquet_raises(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", rows_per_group=99, label=[1] * 9, x=["a"] * 9, day=[0.5] * 9)
    assert (
        parquet(path, [], rows_per_chunk=2)
        .notes[0]
        .startswith("a.parquet: row groups of up to 9 rows, read whole by every rank")
    )
    for feature, words in [
        (Feature("user"), r"a\.parquet: no column 'user'; there are label, x, day"),
        (Feature("x", "number"), "column 'x' is string, expected numbers"),
        (Feature("day"), "column 'day' is double, expected integers or strings"),
        (Feature("x", "ids"), "column 'x' is string, expected lists of integers or strings"),
    ]:
        with pytest.raises(ValueError, match=words):
            parquet(path, [feature])
    with pytest.raises(ValueError, match="no column 'click'"):
        parquet(path, [], label="click")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet: not a whole parquet file"):
        parquet(path, [])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'unisono-models\[parquet\]'"):
        parquet(path, [])
