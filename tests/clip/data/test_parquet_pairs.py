"""Parquet files as Hugging Face writes them."""

import pickle
import sys

import pytest

from tests.clip.image_files import colours_of, encode_image, sample, write_parquet
from unisono_models.clip.data.files import open_pairs
from unisono_models.clip.data.pairs import concept_of_caption
from unisono_models.datasets import parquet


def test_hugging_face_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 1)  # one row group at a time
    for part in range(2):
        samples = [sample(k) for k in range(part * 4, part * 4 + 4)]
        write_parquet(tmp_path / f"train-{part:05d}-of-00002.parquet", samples, label=[7] * 4)
    pairs = open_pairs(tmp_path)
    order = [7, 3, 0, 4, 6, 1, 7]
    batch = pairs.read(order, 6)
    assert colours_of(batch) == order == batch.index.tolist() and batch.captions == pairs.captions(order)
    assert batch.concepts.tolist() == pairs.concepts(order).tolist() == [concept_of_caption(text) for text in batch.captions]
    assert open_pairs(str(tmp_path / "train-*.parquet"), concept="label").concepts(range(8)).tolist() == [7] * 8
    assert pickle.loads(pickle.dumps(pairs)).captions([5]) == ["a magenta thing"]
    write_parquet(tmp_path / "test-00000-of-00001.parquet", samples)
    with pytest.raises(ValueError, match=r"files of several splits \(test, train\).*such as .*/test-\*.parquet"):
        open_pairs(tmp_path)


def test_odd_parquet_rows(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "0.png").write_bytes(encode_image("blue"))
    good = {"bytes": encode_image(), "path": None}
    rows = [good, {"bytes": None, "path": "0.png"}, {"bytes": None, "path": "../x"}, None, {"bytes": b"?", "path": ""}, good]
    captions = pa.array([b"caf\xe9", b"b", b"c", b"d", b"e", None]).view(pa.string())
    pq.write_table(pa.table({"image": pa.array(rows), "text": captions}), tmp_path / "a.parquet")
    batch = open_pairs(tmp_path).read(range(6), 4)
    assert batch.captions == ["caf\ufffd", "b"] and colours_of(batch) == [0, 2]
    reasons = [skip.reason for skip in batch.skipped]
    assert reasons == ["unreadable file", "unreadable file", "broken image", "empty caption"]
    assert batch.skipped[2].name == "a.parquet, row 5"

    pq.write_table(pa.table({"image": [encode_image()], "caption": [["one", "two"]]}), tmp_path / "b.parquet")
    assert open_pairs(tmp_path / "b.parquet").read([0], 4).captions == ["one"]
    pq.write_table(pa.table({"image": ["http://x"], "caption": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="column 'image' is string, expected binary or struct"):
        open_pairs(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"d.parquet: not a whole parquet file"):
        open_pairs(tmp_path / "d.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'unisono-models\[parquet\]'"):
        open_pairs(tmp_path / "a.parquet")


def test_damaged_row_group_is_skipped(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [sample(k) for k in range(6)])
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    batch = open_pairs(path).read(range(6), 4)
    assert batch.index.tolist() == [3, 4, 5] and {skip.reason for skip in batch.skipped} == {"broken row"}
