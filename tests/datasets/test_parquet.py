"""The cache of row groups."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono_models.datasets import parquet
from unisono_models.datasets.parquet import RowGroupReader

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def paths(tmp_path):
    for name in "ab":
        pq.write_table(pa.table({"x": [f"{name}{i}" for i in range(6)], "y": range(6)}), tmp_path / name, row_group_size=2)
    return [tmp_path / name for name in "ab"]


def test_reads_the_columns_asked_for_and_reads_each_row_group_once(paths, monkeypatch):
    reader = RowGroupReader(paths, what="test")
    opened = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *args, **kw: opened.append(args[1]) or read(*args, **kw))
    assert reader.read(1, 2, ["x"]).to_pydict() == {"x": ["b4", "b5"]}
    assert reader.read(0, 0, ["y", "x"]).to_pydict() == {"y": [0, 1], "x": ["a0", "a1"]}
    reader.read(1, 2, ["x"])
    assert opened == [2, 0]


def test_old_row_groups_and_files_are_dropped(paths, monkeypatch):
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 1)
    monkeypatch.setattr(parquet, "_OPEN_FILES", 1)
    reader = RowGroupReader(paths, what="test")
    for file in (0, 1, 0):
        reader.read(file, 1, ["x"])
        assert len(reader._cache) == len(reader._files) == 1


def test_a_pickled_copy_reads_and_threads_may_share_one(paths):
    reader = RowGroupReader(paths, what="test")
    reader.read(0, 0, ["x"])
    copy = pickle.loads(pickle.dumps(reader))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda place: copy.read(place % 2, place % 3, ["y"]).num_rows, range(30)))
    assert found == [2] * 30


def test_says_what_is_wrong_with_a_file(tmp_path):
    (tmp_path / "a").write_text("no parquet")
    with pytest.raises(ValueError, match=r"test: .*not a whole parquet file"):
        RowGroupReader([tmp_path / "a"], what="test").read(0, 0, ["x"])
    with pytest.raises(FileNotFoundError):
        RowGroupReader([tmp_path / "b"], what="test").file(0)
