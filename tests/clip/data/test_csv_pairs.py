"""CSV and TSV files of paths and captions."""

import os
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clip.image_files import COLOURS, colours_of, encode_image, write_csv
from unisono_models.clip.data.csv_pairs import CsvPairs
from unisono_models.clip.data.files import open_pairs
from unisono_models.clip.data.pairs import clean_text, concept_of_caption

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_tables_of_paths_and_captions(tmp_path):
    (tmp_path / "im").mkdir()
    for k in range(4):
        (tmp_path / "im" / f"{k}.png").write_bytes(encode_image(COLOURS[k]))
    write_csv(tmp_path / "a.csv", [["im/0.png", 'a "red",\nthing'], [], [" im/1.png", "x"]])
    (tmp_path / "b.tsv").write_bytes(
        b"\xef\xbb\xbftitle\tfilepath\tclass\r\n\r\nthird\tim/2.png\t7\r\ncaf\xe9\t./im/3.png\t\r\n"
    )
    pairs = open_pairs([tmp_path / "a.csv", tmp_path / "b.tsv"])
    batch = pairs.read([3, 0, 1, 2], 4)
    assert batch.captions == ["caf\ufffd", 'a "red",\nthing', "x", "third"] == pairs.captions([3, 0, 1, 2])
    assert colours_of(batch) == [3, 0, 1, 2]
    assert open_pairs(tmp_path / "b.tsv", concept="class").concepts([0, 1]).tolist() == [7, concept_of_caption("caf\ufffd")]
    assert pickle.loads(pickle.dumps(pairs)).captions([1]) == ["x"]


def test_paths_stay_within_the_root(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(encode_image())
    os.mkfifo(tmp_path / "in" / "pipe.png")
    paths = ["../out.png", str(tmp_path / "out.png"), "pipe.png", "absent.png", "a\0b.png", "", ".", "in/../../out.png"]
    table = write_csv(tmp_path / "in" / "a.csv", [[path, "x"] for path in paths])
    skipped = open_pairs(table).read(range(8), 4).skipped
    assert [skip.reason for skip in skipped] == ["unreadable file"] * 8
    assert (
        "--data.root must be the folder that contains all images" in skipped[1].error and "not a plain file" in skipped[2].error
    )
    assert "a.csv, row 4: absent.png" in skipped[3].name
    assert open_pairs(table, root=tmp_path).read([1], 4).index.tolist() == [1]


def test_rows_that_are_no_rows_are_skipped(tmp_path):
    (tmp_path / "0.png").write_bytes(encode_image())
    lines = ["image,caption", "0.png,good", "0.png", '0.png,"open' + "x" * 200_000, "0.png,good", "0.png,", ",", "0.png,\0"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    pairs = open_pairs(tmp_path / "a.csv")
    batch = pairs.read(range(len(pairs)), 4)
    assert batch.captions == ["good"] * 2
    reasons = [skip.reason for skip in batch.skipped]
    assert reasons == ["broken row", "broken row", "empty caption", "empty caption", "empty caption"]
    assert pairs.captions(range(len(pairs))).count("") == 5 and len(pairs.concepts(range(len(pairs)))) == 7


@fuzz
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1), min_size=1))
def test_any_captions_survive_a_csv(tmp_path, captions):
    path = write_csv(tmp_path / "a.csv", [["0.png", text] for text in captions])
    assert CsvPairs([path]).captions(range(len(captions))) == [clean_text(text) for text in captions]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "--data.source .*a.csv: the file is empty"),
        (b"a,caption\n", r"--data.image: say which column has the image: none is called image or filepath .*are: a, caption$"),
        (b"image,words\n", r"--data.caption: say which column has the caption: .* are: image, words$"),
        (b"image,caption\n\n\n", "no rows below the header"),
        ("image,caption\n".encode("utf-16"), "save it as UTF-8"),
    ],
)
def test_tables_without_columns_or_rows_are_refused(tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        open_pairs(tmp_path)
