"""Data too large for memory: read in blocks, the same rows for any number of ranks, from any step on."""

import math
import pickle
import random
import sys
import tracemalloc
from dataclasses import dataclass

import pytest
import torch

from unisono.collectives.groups import resolve_group
from unisono.embedding import Ragged, hash_strings
from unisono_models.datasets.file_patterns import find_files
from unisono_models.recommender.data import criteo
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import ChunkOrder, StreamingDataset, share
from unisono_models.recommender.data.criteo import HEX_COLUMNS, INTEGER_COLUMNS, CriteoChunks, index_lines
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.data.splits import split_chunks

SOME = (Feature("I2", "number"), Feature("C26", "id", 50), Feature("I1", "number"), Feature("C1", "id", 100))
EVERYTHING = (*(Feature(n, "number") for n in INTEGER_COLUMNS), *(Feature(n, "id", 10) for n in HEX_COLUMNS))


def line(label="1", **fields):
    return "\t".join([label, *(str(fields.get(name, "")) for name in (*INTEGER_COLUMNS, *HEX_COLUMNS))])


def write(path, lines, end="\n", last="\n"):
    path.write_bytes(end.join(lines).encode("latin-1") + (last.encode() if lines else b""))
    return path


def criteo_chunks(paths, features=SOME, lines_per_block=4):
    paths = [paths] if not isinstance(paths, list) else paths
    return CriteoChunks(paths, features, index=index_lines(paths, lines_per_block=lines_per_block))


def read_all(blocks):
    return Batch.join([blocks.read(block, 0, size) for block, size in enumerate(blocks.sizes.tolist())])


def rows_of(batch):
    """Everything about each row, to compare and to sort."""
    ids = [
        x.tolist() if not isinstance(x, Ragged) else [b.tolist() for b in x.values.split(x.lengths().tolist())]
        for x in batch.ids.values()
    ]
    return list(zip(batch.index.tolist(), batch.labels.tolist(), batch.numbers.tolist(), *ids, strict=True))


# Criteo's lines


@pytest.mark.parametrize(("end", "last"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", ""), ("\r\n", "")])
def test_fields_become_numbers_and_ids(tmp_path, end, last):
    lines = [
        line("0", I1=-7, I2="0", C1="00ff", C26="FFFFFFFFFFFFFFFE"),
        line(I1="17", I2="1234567890123", C26="68fd1e64"),
        line(),
    ]
    batch = read_all(criteo_chunks(write(tmp_path / "day_0", lines, end, last)))
    assert batch.labels.tolist() == [0, 1, 1] and batch.skipped == () and list(batch.ids) == ["C26", "C1"]
    assert batch.ids["C26"].tolist() == [-2, 0x68FD1E64, -1] and batch.ids["C1"].tolist() == [255, -1, -1]
    expected = torch.tensor([[3.0, 1.0], [1234567890126.0, 20.0], [3.0, 3.0]], dtype=torch.float64).log().float()
    torch.testing.assert_close(batch.numbers, expected, rtol=1e-7, atol=0)
    assert batch.numbers.dtype == batch.labels.dtype == torch.float32 and batch.index.tolist() == [0, 1, 2]


def test_bad_lines_are_skipped_by_number_and_reason(tmp_path):
    bad = {
        "wrong number of columns": ["", "1\t2", line() + "\t", line().split("\t", 1)[1]],
        "label not 0 or 1": [line("2"), line(""), line("01"), line("-"), line("1.0")],
        "not an integer": [
            line(I1="x"),
            line(I2="1.5"),
            line(I1="-"),
            line(I1="1" * 19),
            line(I2=" 1"),
            line(I1="1e3"),
            line(I1="a"),
        ],
        "not hex of at most 16 digits": [line(C1="0x1"), line(C26="g"), line(C1="1" * 17), line(C1="-1"), line(C26="a\rb")],
        "not UTF-8": [line(C2="caf\xe9")],
    }
    wrong = [(reason, text) for reason, texts in bad.items() for text in texts]
    lines = [text for k, (_, wrong_line) in enumerate(wrong) for text in (wrong_line, line(C1=f"{k:x}"))]
    blocks = criteo_chunks([write(tmp_path / "day_0", [line()] * 6), write(tmp_path / "day_1", lines, "\r\n")])
    batch = read_all(blocks)
    assert [(skip.index, skip.name, skip.reason) for skip in batch.skipped] == [
        (2 * k + 1, "day_1", reason) for k, (reason, _) in enumerate(wrong)
    ]
    assert batch.index.tolist() == [*range(6), *range(7, 6 + len(lines), 2)]
    assert batch.ids["C1"][6:].tolist() == list(range(len(wrong)))
    errors = {skip.error for skip in batch.skipped}
    assert {"2 columns, expected 40", "39 columns, expected 40", "I2 is '1.5'", "C26 is 'g'", "C26 is 'a\\rb'", "'2'"} <= errors
    alone = read_all(criteo_chunks([tmp_path / "day_0", tmp_path / "day_1"], lines_per_block=1))
    assert rows_of(alone) == rows_of(batch) and alone.skipped == batch.skipped
    shares = [blocks.read(3, 0, 1), blocks.read(3, 1, 3), blocks.read(3, 3, 4)]
    assert rows_of(Batch.join(shares)) == rows_of(blocks.read(3, 0, 4))
    assert Batch.join(shares).skipped == blocks.read(3, 0, 4).skipped != ()


def test_columns_not_asked_for_are_not_looked_at(tmp_path):
    path = write(tmp_path / "a.tsv", [line(I1="x", C1="7", C2="zz")])
    assert read_all(criteo_chunks(path, [Feature("C1")])).ids["C1"].tolist() == [7]
    assert read_all(criteo_chunks(path, [])).labels.tolist() == [1]


def test_many_lines_at_once_are_as_line_by_line():
    draw = random.Random(0)
    whole, parts = 0, (list(range(13)), list(range(26)))
    for trial in range(60):
        lines = []
        for _ in range(8):
            integers = [str(draw.randint(-(10**k), 10**k)) if (k := draw.randint(0, 16)) else "" for _ in range(13)]
            hexes = ["".join(draw.choices("0123456789abcdefABCDEF", k=draw.randint(0, 16))) for _ in range(26)]
            lines.append("\t".join([draw.choice("01"), *integers, *hexes]))
        end = draw.choice(["\n", "\r\n"])
        data = bytearray((end.join(lines) + end).encode())
        if trial % 2:
            data[draw.randrange(len(data) - 1)] = draw.choice(b"\t\n\r-+ x7fG\xff")
        slow = criteo._parse_each(bytes(data), *parts)
        fast = criteo._parse_all(bytes(data), range(1, 14), range(14, 40))
        if fast is not None:
            whole += 1
            assert not slow.bad and all((a == b).all() for a, b in zip(fast[:4], slow[:4], strict=True))
        assert trial % 2 or fast is not None
    assert 30 <= whole < 55


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (Feature("I14", "number"), "'I14' of kind 'number'"),
        (Feature("I1"), "'I1' of kind 'id'"),
        (Feature("C1", "ids"), "C1 to C26"),
    ],
)
def test_criteo_refuses_other_features(tmp_path, feature, words):
    with pytest.raises(ValueError, match=words):
        criteo_chunks(write(tmp_path / "a", [line()]), [feature])


# the index of lines


def naive_blocks(paths, every):
    return [
        (file, b"".join(lines[k : k + every]), k)
        for file, path in enumerate(paths)
        for lines in [path.read_bytes().splitlines(keepends=True)]
        for k in range(0, len(lines), every)
    ]


def write_texts(folder):
    texts = ["", "\n", "a", "a\r\nbb\r\n\r\nccc", "\n\n\nx\n", "".join(f"{'y' * (k % 7)}\n" for k in range(40)), "z" * 30]
    return [write(folder / str(k), [text], last="") for k, text in enumerate(texts)]


@pytest.mark.parametrize("every", [1, 3, 512])
def test_index_has_every_line_once(tmp_path, every, monkeypatch):
    paths = write_texts(tmp_path)
    monkeypatch.setattr(criteo, "_CHUNK", 5)
    index = index_lines(paths, lines_per_block=every)
    places = [index.locate(block) for block in range(len(index.sizes))]
    found = [(p.file, paths[p.file].read_bytes()[p.start : p.stop], p.line) for p in places]
    assert found == naive_blocks(paths, every)
    assert index.sizes.tolist() == [len(text.splitlines()) for _, text, _ in found] and int(index.sizes.max()) <= every
    assert len(index_lines(paths[:1]).sizes) == len(index_lines([]).sizes) == 0


def indexes(paths, segment, gone):
    ranks = resolve_group(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo, "_SEGMENT", segment)
        index = index_lines(paths, lines_per_block=3)
    with pytest.raises(Exception, match=r"index_lines: rank 1: FileNotFoundError" if ranks.size > 1 else "No such file"):
        index_lines([gone if ranks.rank == min(1, ranks.size - 1) else paths[3]])
    return [index.locate(block) for block in range(len(index.sizes))], index.sizes.tolist()


def test_ranks_share_the_index_and_agree(ranks, tmp_path):
    paths = write_texts(tmp_path)
    for segment in (1, 2, 7, 16):
        places, sizes = alone = indexes(paths, segment, tmp_path / "gone")
        for file, path in enumerate(paths):
            data = path.read_bytes()
            of_file = [(p, size) for p, size in zip(places, sizes, strict=True) if p.file == file]
            assert b"".join(data[p.start : p.stop] for p, _ in of_file) == data
            assert [p.line for p, _ in of_file] == [sum(size for _, size in of_file[:k]) for k in range(len(of_file))]
            assert [len(data[p.start : p.stop].split(b"\n")) - data[: p.stop].endswith(b"\n") for p, _ in of_file] == [
                size for _, size in of_file
            ]
    assert ranks(indexes, paths, 16, tmp_path / "gone", world_size=3) == [alone] * 3


def test_compressed_and_changed_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"day_0.gz: a compressed file cannot be .*: unpack it, or convert it to parquet"):
        index_lines([write(tmp_path / "day_0.gz", ["x"])])
    path = write(tmp_path / "day_0", [line()] * 9)
    blocks = criteo_chunks(path)
    write(path, [line()] * 9, last="")
    with pytest.raises(OSError, match=r"day_0 has changed since it was indexed"):
        blocks.read(2, 0, 1)
    with pytest.raises(IndexError, match="stop=5 must be within the 4 rows of block 0"):
        blocks.read(0, 0, 5)


def test_memory_does_not_grow_with_the_file(tmp_path):
    path, text = tmp_path / "day_0", "".join(f"{line(I1=k, C1=f'{k:08x}', C2='f' * 150)}\n" for k in range(1000))
    with path.open("w") as file:
        for _ in range(140):
            file.write(text)
    assert path.stat().st_size > 28e6
    tracemalloc.start()
    try:
        stream = StreamingDataset(criteo_chunks(path, SOME, 512), features=SOME, ids="hashed", batch=512, seed=0)
        indexed = tracemalloc.get_traced_memory()[1]
        read = sum(len(stream.batch(step, 0, 1)) for step in range(40)) + sum(
            len(b) for b, _ in zip(stream.scan(0, 9), "abc", strict=False)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read > 35_000 and indexed < 4e6 and peak < 6e6


# the order of blocks


SIZES = torch.tensor([4, 0, 7, 1, 1, 9, 2])


def step_rows(order, step, size):
    """The rows of a step, over all ranks, by (block, place)."""
    return [(b, k) for rank in range(size) for b, start, stop in order.parts(step, rank, size) for k in range(start, stop)]


@pytest.mark.parametrize("batch", [1, 5, 24, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_has_every_row_once_an_epoch_on_any_ranks(batch, shuffle):
    order = ChunkOrder(SIZES, batch=batch, seed=3, shuffle=shuffle)
    every = [(block, place) for block, size in enumerate(SIZES.tolist()) for place in range(size)]
    steps = order.steps_per_epoch
    assert steps == math.ceil(len(every) / batch) and sum(map(order.size_of, range(steps))) == len(every)
    epochs = [[row for step in range(e * steps, (e + 1) * steps) for row in step_rows(order, step, 1)] for e in range(3)]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert (epochs[0] == every) != shuffle and (epochs[1] != epochs[2]) == shuffle
    for step in reversed(range(2 * steps)):  # from any step on, with no memory of those before
        expected = step_rows(order, step, 1)
        assert len(expected) == min(batch, len(every) - step % steps * batch)
        for size in (2, 3, 4):
            again = ChunkOrder(SIZES, batch=batch, seed=3, shuffle=shuffle)
            assert step_rows(again, step, size) == expected
            counts = [sum(stop - start for _, start, stop in again.parts(step, rank, size)) for rank in range(size)]
            assert counts == [len(x) for x in torch.arange(len(expected)).tensor_split(size)]


def test_order_keeps_groups_together():
    sizes, groups = torch.ones(60, dtype=torch.int64), torch.arange(60) // 5
    order = ChunkOrder(sizes, batch=60, seed=0, groups=groups)
    blocks = torch.tensor([[block for block, _, _ in order.parts(epoch, 0, 1)] for epoch in range(2)])
    assert (blocks.sort().values == torch.arange(60)).all() and (blocks[0] != blocks[1]).any()
    found = groups[blocks].view(2, 12, 5)
    assert (found == found[:, :, :1]).all() and (found[0, :, 0].diff() != 1).any()
    assert (blocks.view(2, 12, 5).diff() != 1).any(-1).float().mean() > 0.5


def test_order_goes_by_the_seed_and_refuses_nonsense():
    assert ChunkOrder(SIZES, batch=24, seed=0).parts(0, 0, 1) != ChunkOrder(SIZES, batch=24, seed=1).parts(0, 0, 1)
    with pytest.raises(ValueError, match="batch=0"):
        ChunkOrder(SIZES, batch=0, seed=0)
    with pytest.raises(ValueError, match="without any row"):
        ChunkOrder(SIZES[1:2], batch=1, seed=0).parts(0, 0, 1)
    with pytest.raises(ValueError, match="rank=2 must be"):
        share(3, 2, 2)


# streams


@pytest.fixture
def three_days(tmp_path):
    """23 lines, of which the 8th is bad, in three files, one of them empty."""
    days = [
        [line(str(k % 2), I1=k, C1=f"{k:x}") if k != 7 else "bad" for k in range(15)],
        [],
        [line(C1=f"{k:x}") for k in range(15, 23)],
    ]
    return [write(tmp_path / f"day_{k}", lines, last="") for k, lines in enumerate(days)]


def test_batches_and_scans_do_not_depend_on_ranks(three_days):
    blocks = criteo_chunks(three_days)
    stream = StreamingDataset(blocks, features=SOME, ids="mapped", batch=6, seed=1)
    assert stream.rows == 23 and [stream.size_of(step) for step in range(5)] == [6, 6, 6, 5, 6]
    steps = [stream.batch(step, 0, 1) for step in range(8)]
    for epoch in (steps[:4], steps[4:]):
        assert sorted(i for batch in epoch for i in batch.index.tolist()) == [k for k in range(23) if k != 7]
        assert [skip.index for batch in epoch for skip in batch.skipped] == [8]
        assert all((batch.ids["C1"] == batch.index).all() for batch in epoch)
    assert torch.cat([b.index for b in steps[:4]]).tolist() != torch.cat([b.index for b in steps[4:]]).tolist()
    whole = rows_of(read_all(blocks))
    for size in (1, 2, 3, 4, 30):
        again = StreamingDataset(blocks, features=SOME, ids="mapped", batch=6, seed=1)
        for step in (6, 2):
            parts = [again.batch(step, rank, size) for rank in range(size)]
            assert rows_of(Batch.join(parts)) == rows_of(steps[step])
        scans = [list(again.scan(rank, size, 5)) for rank in range(size)]
        assert len({len(scan) for scan in scans}) == 1 and len(scans[0]) == math.ceil(math.ceil(23 / size) / 5)
        joined = Batch.join([batch for scan in scans for batch in scan])
        assert rows_of(joined) == whole and [skip.index for skip in joined.skipped] == [8]


def test_some_blocks_and_no_rows(three_days):
    blocks = criteo_chunks(three_days)
    chosen = torch.tensor([5, 0, 2])
    stream = StreamingDataset(blocks, chosen, features=SOME, ids="mapped", batch=100, seed=0)
    expected = [0, 1, 2, 3, 8, 9, 10, 11, 19, 20, 21, 22]
    assert stream.rows == 12 and sorted(stream.batch(0, 0, 1).index.tolist()) == expected
    assert next(stream.scan(0, 1)).index.tolist() == expected
    none = StreamingDataset(blocks, chosen[:0], features=SOME, ids="mapped", batch=1, seed=0)
    assert none.rows == 0 and [len(batch) for batch in none.scan(0, 1)] == [0]
    assert none.batch is not None and next(none.scan(0, 1)).numbers.shape == (0, 2)
    with pytest.raises(ValueError, match="without any row"):
        none.batch(0, 0, 1)
    with pytest.raises(ValueError, match="expected different numbers from 0 to 5, got"):
        StreamingDataset(blocks, torch.tensor([1, 1]), features=SOME, ids="mapped", batch=1, seed=0)


def test_hashed_ids_are_rows_of_their_tables(three_days):
    blocks = criteo_chunks(three_days)
    raw = next(StreamingDataset(blocks, features=SOME, ids="mapped", batch=1, seed=0).scan(0, 1))
    found = next(StreamingDataset(blocks, features=SOME, ids="hashed", batch=1, seed=0).scan(0, 1))
    rows = found.ids["C1"]
    assert int(rows.min()) >= 1 and int(rows.max()) <= 99 and 15 < len(rows.unique()) <= 22
    assert raw.ids["C26"].unique().tolist() == [-1] and found.ids["C26"].unique().tolist() == [0]  # blank
    with pytest.raises(ValueError, match="C2: ids='hashed' needs the number of rows"):
        StreamingDataset(blocks, features=[Feature("C2")], ids="hashed", batch=1, seed=0)
    with pytest.raises(ValueError, match="ids='hash' must be"):
        StreamingDataset(blocks, features=SOME, ids="hash", batch=1, seed=0)


@dataclass
class Sizes:
    sizes: torch.Tensor
    groups: torch.Tensor | None = None


def test_held_out_blocks_are_disjoint_and_about_as_many_as_asked():
    blocks = Sizes(torch.tensor([5, 3, 0, 8, 4] * 100))
    train, valid, test = split_chunks(blocks, 0.1, seed=0)
    filled = blocks.sizes.nonzero().squeeze(1).tolist()
    assert sorted(torch.cat([train, valid, test]).tolist()) == filled and train.tolist() == sorted(train.tolist())
    assert all(200 <= int(blocks.sizes[part].sum()) < 208 for part in (valid, test))
    assert split_chunks(blocks, 0.1, seed=0)[1].tolist() == valid.tolist() != split_chunks(blocks, 0.1, seed=1)[1].tolist()
    assert [len(part) for part in split_chunks(blocks, 0, seed=0)] == [len(filled), 0, 0]
    groups = torch.arange(500) // 10
    kept = [set(groups[x].tolist()) for x in split_chunks(Sizes(blocks.sizes, groups), 0.1, seed=0)]
    assert [len(x) for x in kept] == [40, 5, 5] and not kept[0] & kept[1] and not kept[1] & kept[2] and not kept[0] & kept[2]
    torn = split_chunks(Sizes(blocks.sizes, groups // 10), 0.1, seed=0)  # of 5 groups half a one: blocks of all of them
    assert [x.tolist() for x in torn] == [x.tolist() for x in (train, valid, test)]
    few = Sizes(torch.tensor([9, 9, 9]))
    assert [len(part) for part in split_chunks(few, 0.01, seed=0)] == [1, 1, 1]
    with pytest.raises(ValueError, match="2 blocks with 18 rows are too few"):
        split_chunks(Sizes(few.sizes[:2]), 0.01, seed=0)
    with pytest.raises(ValueError, match=r"part=0\.5 must"):
        split_chunks(few, 0.5, seed=0)


# parquet


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
    blocks = parquet(write_parquet(tmp_path / "a.parquet", **columns), features, rows_per_block=2)
    assert blocks.sizes.tolist() == [2, 1, 2] and blocks.notes == ()
    batch = read_all(pickle.loads(pickle.dumps(blocks)))
    x, y, blank = hash_strings(["x", "y", ""]).tolist()
    assert batch.ids["user"].tolist() == [7, -3, -1, 2**62, 0]
    assert batch.ids["word"].tolist() == batch.ids["kind"].tolist() == [x, -1, y, x, blank]
    assert batch.ids["huge"].tolist() == [1, 2, -2, -1, 5]
    assert batch.ids["tags"].values.tolist() == [3, 4, -1, 5, 6] and batch.ids["tags"].lengths().tolist() == [2, 0, 0, 2, 1]
    assert batch.ids["words"].values.tolist() == [x, y, x, -1] and batch.ids["words"].lengths().tolist() == [1, 2, 0, 1, 0]
    assert batch.numbers.tolist() == [[1, 0.5], [0, 1.5], [3, 0], [4, -2], [5, 3]] and batch.labels.tolist() == [1, 0, 1, 0, 1]
    parts = [blocks.read(2, 0, 1), blocks.read(0, 1, 2), blocks.read(1, 0, 0)]
    assert rows_of(Batch.join(parts)) == [rows_of(batch)[3], rows_of(batch)[1]]
    stream = StreamingDataset(
        blocks, features=[Feature(f.name, f.kind, 9 * (f.kind != "number")) for f in features], ids="hashed", batch=2, seed=0
    )
    hashed = Batch.join([stream.batch(0, rank, 3) for rank in range(3)])
    assert isinstance(hashed.ids["tags"], Ragged) and len(hashed) == 2 and stream.rows == 5
    words = next(stream.scan(0, 1)).ids["words"].values.tolist()
    assert words[-1] == 0 and all(1 <= row <= 8 for row in words[:-1])  # null, and others


def test_bad_rows_of_parquet_are_skipped(tmp_path):
    first = write_parquet(tmp_path / "a.parquet", label=[1.0, 0.0], x=[0.0, 1.0], u=[1, 2])
    labels, numbers = [1.0, None, 2.0, 0.0, 0.5, float("nan"), 1.0], [0.0, 0.0, 0.0, float("nan"), 0.0, 0.0, 1e300]
    second = write_parquet(tmp_path / "b.parquet", label=labels, x=numbers, u=list(range(7)))
    blocks = parquet([first, second], [Feature("x", "number"), Feature("u")])
    batch = read_all(blocks)
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


def test_parquet_says_what_is_wrong(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", rows_per_group=99, label=[1] * 9, x=["a"] * 9, day=[0.5] * 9)
    assert (
        parquet(path, [], rows_per_block=2)
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
    with pytest.raises(ImportError, match=r"pip install 'unisono-models\[parquet\]'"):
        parquet(path, [])


# files


def test_days_are_found_by_patterns(tmp_path):
    kinds = {".parquet": "parquet", ".tsv": "text", ".txt": "text", ".csv": "text", "": "text"}
    for name in [*(f"day_{k}" for k in (0, 2, 10)), "x.json", "day_3.gz"]:
        (tmp_path / name).write_text("")
    days = [tmp_path / f"day_{k}" for k in (0, 2, 10)]
    assert find_files(f"{tmp_path}/day_{{0,2,10}}", kinds=kinds, what="f") == ("text", days)
    assert find_files(tmp_path, kinds=kinds, what="f") == ("text", [days[0], days[2], days[1]])
    with pytest.raises(ValueError, match=r"f: .*day_3.gz: not a .parquet, .tsv, .txt, .csv or suffixless file. Unpack it"):
        find_files(tmp_path / "day_*", kinds=kinds, what="f")
    (tmp_path / "a.parquet").write_text("")
    assert find_files(tmp_path, kinds=kinds, what="f")[0] == "parquet"
