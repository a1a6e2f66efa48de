"""Criteo's lines and their index: every line once, bad ones by number and reason, in little memory."""

import random
import tracemalloc

import pytest
import torch

from tests.recommender.data.click_files import CLICK_FEATURES, criteo_chunks, line, read_all, rows_of, write_lines
from unisono.collectives.groups import resolve_group
from unisono_models.recommender.data import criteo
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import StreamingDataset
from unisono_models.recommender.data.criteo import index_lines
from unisono_models.recommender.data.features import Feature


@pytest.mark.parametrize(("end", "last"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", ""), ("\r\n", "")])
def test_fields_become_numbers_and_ids(tmp_path, end, last):
    lines = [
        line("0", I1=-7, I2="0", C1="00ff", C26="FFFFFFFFFFFFFFFE"),
        line(I1="17", I2="1234567890123", C26="68fd1e64"),
        line(),
    ]
    batch = read_all(criteo_chunks(write_lines(tmp_path / "day_0", lines, end, last)))
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
    chunks = criteo_chunks([write_lines(tmp_path / "day_0", [line()] * 6), write_lines(tmp_path / "day_1", lines, "\r\n")])
    batch = read_all(chunks)
    assert [(skip.index, skip.name, skip.reason) for skip in batch.skipped] == [
        (2 * k + 1, "day_1", reason) for k, (reason, _) in enumerate(wrong)
    ]
    assert batch.index.tolist() == [*range(6), *range(7, 6 + len(lines), 2)]
    assert batch.ids["C1"][6:].tolist() == list(range(len(wrong)))
    errors = {skip.error for skip in batch.skipped}
    assert {"2 columns, expected 40", "39 columns, expected 40", "I2 is '1.5'", "C26 is 'g'", "C26 is 'a\\rb'", "'2'"} <= errors
    alone = read_all(criteo_chunks([tmp_path / "day_0", tmp_path / "day_1"], lines_per_chunk=1))
    assert rows_of(alone) == rows_of(batch) and alone.skipped == batch.skipped
    shares = [chunks.read(3, 0, 1), chunks.read(3, 1, 3), chunks.read(3, 3, 4)]
    assert rows_of(Batch.cat(shares)) == rows_of(chunks.read(3, 0, 4))
    assert Batch.cat(shares).skipped == chunks.read(3, 0, 4).skipped != ()


def test_columns_that_are_not_features_are_not_parsed(tmp_path):
    path = write_lines(tmp_path / "a.tsv", [line(I1="x", C1="7", C2="zz")])
    assert read_all(criteo_chunks(path, [Feature("C1")])).ids["C1"].tolist() == [7]
    assert read_all(criteo_chunks(path, [])).labels.tolist() == [1]


def test_parsing_all_lines_at_once_matches_line_by_line():
    draw = random.Random(0)
    whole, columns = 0, (list(range(1, 14)), list(range(14, 40)))
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
        slow = criteo._parse_each(bytes(data), *columns)
        fast = criteo._parse_all(bytes(data), *columns)
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
def test_other_features_raise(tmp_path, feature, words):
    with pytest.raises(ValueError, match=words):
        criteo_chunks(write_lines(tmp_path / "a", [line()]), [feature])


def naive_chunks(paths, every):
    return [
        (file, b"".join(lines[k : k + every]), k)
        for file, path in enumerate(paths)
        for lines in [path.read_bytes().splitlines(keepends=True)]
        for k in range(0, len(lines), every)
    ]


def write_texts(folder):
    texts = ["", "\n", "a", "a\r\nbb\r\n\r\nccc", "\n\n\nx\n", "".join(f"{'y' * (k % 7)}\n" for k in range(40)), "z" * 30]
    return [write_lines(folder / str(k), [text], last="") for k, text in enumerate(texts)]


@pytest.mark.parametrize("every", [1, 3, 512])
def test_index_has_every_line_once(tmp_path, every, monkeypatch):
    paths = write_texts(tmp_path)
    monkeypatch.setattr(criteo, "_READ_BYTES", 5)
    index = index_lines(paths, lines_per_chunk=every)
    places = [index.locate(chunk) for chunk in range(len(index.sizes))]
    found = [(p.file, paths[p.file].read_bytes()[p.start : p.stop], p.line) for p in places]
    assert found == naive_chunks(paths, every)
    assert index.sizes.tolist() == [len(text.splitlines()) for _, text, _ in found] and int(index.sizes.max()) <= every
    assert len(index_lines(paths[:1]).sizes) == len(index_lines([]).sizes) == 0


def indexes(paths, segment, gone):
    ranks = resolve_group(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo, "_SEGMENT_BYTES", segment)
        index = index_lines(paths, lines_per_chunk=3)
    with pytest.raises(Exception, match=r"index_lines: rank 1: FileNotFoundError" if ranks.size > 1 else "No such file"):
        index_lines([gone if ranks.rank == min(1, ranks.size - 1) else paths[3]])
    return [index.locate(chunk) for chunk in range(len(index.sizes))], index.sizes.tolist()


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


def test_compressed_and_changed_files_raise(tmp_path):
    with pytest.raises(ValueError, match=r"day_0.gz: a compressed file cannot be .*: unpack it, or convert it to parquet"):
        index_lines([write_lines(tmp_path / "day_0.gz", ["x"])])
    path = write_lines(tmp_path / "day_0", [line()] * 9)
    chunks = criteo_chunks(path)
    write_lines(path, [line()] * 9, last="")
    with pytest.raises(OSError, match=r"day_0 has changed since it was indexed"):
        chunks.read(2, 0, 1)
    with pytest.raises(IndexError, match="stop=5 must be within the 4 rows of chunk 0"):
        chunks.read(0, 0, 5)


def test_memory_does_not_grow_with_the_file(tmp_path):
    path, text = tmp_path / "day_0", "".join(f"{line(I1=k, C1=f'{k:08x}', C2='f' * 150)}\n" for k in range(1000))
    with path.open("w") as file:
        for _ in range(140):
            file.write(text)
    assert path.stat().st_size > 28e6
    tracemalloc.start()
    try:
        stream = StreamingDataset(
            criteo_chunks(path, CLICK_FEATURES, 512), features=CLICK_FEATURES, ids="hashed", batch=512, seed=0
        )
        indexed = tracemalloc.get_traced_memory()[1]
        read = sum(len(stream.batch(step, 0, 1)) for step in range(40)) + sum(
            len(b) for b, _ in zip(stream.scan(0, 9), "abc", strict=False)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read > 35_000 and indexed < 4e6 and peak < 6e6
