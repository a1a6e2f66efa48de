"""Data that users bring: read as it is meant, and whatever is wrong with it is counted and said."""

import io
import json
import os
import pickle
import struct
import sys
import tarfile
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.clip.pictures import COLOURS, colours_of, noise, picture, sample, write_parquet, write_table, write_tars
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data import images
from unisono_models.clip.data import tar_pairs as tar_index
from unisono_models.clip.data import tar_pairs as tars
from unisono_models.clip.data.csv_pairs import TablePairs
from unisono_models.clip.data.files import expand_braces, find_files, open_pairs, split_pairs
from unisono_models.clip.data.images import BrokenImageError, decode_image
from unisono_models.clip.data.pairs import PairBatch, clean_text, concept_from, concept_of, printable
from unisono_models.clip.data.tar_pairs import TextFields, index_tar
from unisono_models.datasets.skip_report import SkippedSample, SkipReport

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# pictures


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr", "L", "LA", "1", "I;16"])
def test_every_mode_becomes_rgb(mode):
    kind = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    if mode == "I;16":
        data = io.BytesIO()
        Image.fromarray(np.full((8, 12), 20000, dtype=np.uint16)).save(data, "PNG")
        found, expected = decode_image(data.getvalue(), 4), [round(20000 / 65535 * 255)] * 3
    else:
        grey = mode in ("L", "LA", "1")
        found = decode_image(picture("white" if grey else "orange", mode=mode, kind=kind), 4)
        expected = [255] * 3 if grey else [255, 165, 0]
    assert found.shape == (3, 4, 4) and found.dtype == torch.uint8
    assert (found[:, 2, 2].int() - torch.tensor(expected)).abs().max() <= (40 if mode in ("P", "YCbCr", "CMYK") else 0)


def test_sixteen_bits_of_grey_are_scaled_not_clipped():
    data = io.BytesIO()
    Image.fromarray(np.array([[0, 257, 32896, 65535]] * 4, dtype=np.uint16)).save(data, "PNG")
    assert decode_image(data.getvalue(), 4)[0, 0].tolist() == [0, 1, 128, 255]


def test_transparent_parts_are_white():
    data = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(data, "PNG")
    assert (decode_image(data.getvalue(), 4) == 255).all()
    data = io.BytesIO()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(data, "PNG", transparency=1)
    assert (decode_image(data.getvalue(), 4) == 255).all()


def test_exif_orientation_turns_the_picture():
    image = Image.new("RGB", (8, 8), "red")
    image.paste("blue", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    data = io.BytesIO()
    image.save(data, "PNG", exif=exif)
    found = decode_image(data.getvalue(), 8)
    assert found[:, 0, 0].tolist() == [255, 0, 0] and found[:, 7, 0].tolist() == [0, 0, 255]


def test_the_centre_is_what_resize_and_crop_give():
    data = noise((64, 128))
    whole = Image.open(io.BytesIO(data)).resize((64, 32), Image.Resampling.BICUBIC).crop((16, 0, 48, 32))
    found = decode_image(data, 32).permute(1, 2, 0).numpy().astype(int)
    assert (found[:, 1:-1] == np.asarray(whole)[:, 1:-1]).all()  # at the cut the filter has no pixels beyond


def test_large_jpeg_by_a_fraction_is_the_same_picture():
    data = io.BytesIO()
    ramp = np.linspace(0, 255, 512)
    Image.fromarray(np.stack([np.add.outer(ramp, ramp) / 2] * 3, -1).astype(np.uint8)).save(data, "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data.getvalue())).resize((32, 32), Image.Resampling.BICUBIC)
    found = decode_image(data.getvalue(), 32).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(found - np.asarray(whole)).max() <= 3


def test_long_strip_needs_no_memory():
    assert decode_image(picture("lime", (1, 60000)), 224)[:, 9, 9].tolist() == [0, 255, 0]


def png_that_claims(width, height):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a picture in a known format"),
        (b"<html>404</html>", "not a picture in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture in a known format"),
        (noise()[:3000], "truncated"),
        (noise(kind="JPEG")[:1000], "truncated"),
        (noise(kind="WEBP")[:1000], "Error"),
        (png_that_claims(60000, 60000), "60000 x 60000|DecompressionBomb"),
        (png_that_claims(9000, 9000), "9000 x 9000 pixels"),
    ],
    ids=["empty", "html", "eps", "png", "jpeg", "webp", "bomb", "large"],
)
def test_broken_pictures_say_why(data, words):
    with pytest.raises(BrokenImageError, match=words):
        decode_image(data, 8)


@fuzz
@given(st.data())
def test_damaged_pictures_decode_or_are_broken(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
    found = bytearray(noise((9, 7), kind=kind))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(found) - 1), st.integers(0, 255)), max_size=8)):
        found[place] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(BrokenImageError):
            assert decode_image(bytes(found), 5).shape == (3, 5, 5)


# captions and concepts


@fuzz
@given(st.one_of(st.binary(), st.text(st.characters(codec=None, exclude_categories=()))))
def test_any_caption_becomes_text_that_encodes(value):
    text = clean_text(value)
    text.encode()
    assert "\0" not in text and text == text.strip() and 0 <= concept_of(text) < 2**63
    assert printable(value).isprintable() and len(printable(value)) <= 160


def test_concepts_by_caption_and_by_column():
    assert concept_of("Caf\u00e9  au\nlait") == concept_of("CAFE\u0301 au lait") != concept_of("cafe au lait")
    assert concept_of("a red heart") == 4820560657803151834  # the same on every machine and in every version
    assert concept_from(17, "x") == concept_from("17", "y") == concept_from(b" 17", "z") == 17
    assert concept_from(None, "x") == concept_from("", "x") == concept_of("x")
    assert concept_from("9" * 30, "x") == concept_of("9" * 30)


# what was skipped


def batch_with(kept, skips):
    empty = torch.zeros(kept, dtype=torch.int64)
    return PairBatch(torch.zeros(kept, 3, 2, 2, dtype=torch.uint8), ["x"] * kept, empty, empty, tuple(skips))


def counts_and_raises_alike():
    rank = resolve_group(None).rank
    skipped = SkipReport()
    skipped.add(batch_with(100 - rank, [SkippedSample(k, f"r{rank}", "broken image", "no") for k in range(rank)]))
    summary = skipped.summary()
    assert summary["read"] == 300 and summary["reasons"] == {"broken image": 3}
    assert [name for _, name, _ in summary["examples"]["broken image"]] == ["r1", "r2", "r2"]
    skipped.check(0.01)
    with pytest.raises(ValueError, match=r"3 of 300 pairs skipped. broken image: 3, such as r1 \(row 0\): no;.*\nThis is more"):
        skipped.check(0.009)
    resumed = SkipReport(before=json.loads(json.dumps(summary)))
    resumed.add(batch_with(9, [SkippedSample(1, "late", "empty caption")]))
    return resumed.report()


def test_skips_are_counted_over_ranks_and_stop_all_of_them(ranks):
    reports = ranks(counts_and_raises_alike, world_size=3)
    assert reports == [reports[0]] * 3
    assert "6 of 330 pairs skipped." in reports[0] and "empty caption: 3, such as late (row 1)" in reports[0]


def test_first_broken_pair_does_not_end_a_run():
    skipped = SkipReport()
    skipped.add(batch_with(1, [SkippedSample(0, "a", "broken image")]))
    skipped.check(0.01)
    with pytest.raises(ValueError, match="1 of 2"):
        skipped.check(0.01, at_least=0)
    with pytest.raises(ValueError, match=r"threshold=1\.5"):
        skipped.check(1.5)


# tars


def test_webdataset_tars_are_read_at_any_place(tmp_path):
    write_tars(tmp_path)
    pairs = open_pairs(tmp_path)
    assert len(pairs) == 8 and pairs.notes == ()
    batch = pairs.read([6, 0, 5, 0], 6)
    assert colours_of(batch) == [6, 0, 5, 0] and batch.index.tolist() == [6, 0, 5, 0] and batch.skipped == ()
    assert batch.captions == [f"a {COLOURS[k]} thing" for k in (6, 0, 5, 0)] == pairs.captions([6, 0, 5, 0])
    assert batch.concepts.tolist() == [concept_of(text) for text in batch.captions] == pairs.concepts([6, 0, 5, 0]).tolist()
    assert pairs.read([], 6).images.shape == (0, 3, 6, 6)
    assert pickle.loads(pickle.dumps(pairs)).captions(range(8)) == pairs.captions(range(8))
    assert len(pickle.dumps(pairs)) < 1000  # a worker maps the index
    with pytest.raises(IndexError, match="from 3 to 8: expected them within 0 and 7"):
        pairs.read([3, 8], 6)


def test_fields_of_json_give_caption_and_concept(tmp_path):
    def make(number):
        text = None if number == 1 else "x"
        fields = {"text": f"t{number}", "label": number % 2, "title": f"title {number}"}
        made = {**sample(number), "txt": text, "json": fields}
        return {key: value for key, value in made.items() if value is not None}

    write_tars(tmp_path, (3,), make)
    assert open_pairs(tmp_path).captions(range(3)) == ["x", "t1", "x"]
    pairs = open_pairs(tmp_path, caption="title", concept="label")
    assert pairs.captions(range(3)) == ["title 0", "title 1", "title 2"]
    assert pairs.concepts(range(3)).tolist() == pairs.read(range(3), 4).concepts.tolist() == [0, 1, 0]
    nothing = open_pairs(tmp_path, caption="absent").read(range(3), 4)
    assert [skip.reason for skip in nothing.skipped] == ["empty caption"] * 3


def test_broken_rows_of_tars_are_skipped_by_name(tmp_path):
    def make(number):
        changes = {1: {"png": b"junk"}, 2: {"txt": "  "}, 3: {"txt": b"caf\xe9 \x00 x"}, 4: {"json": b"[" * 9999, "txt": None}}
        made = {**sample(number), **changes.get(number, {})}
        return {key: value for key, value in made.items() if value is not None}

    write_tars(tmp_path, (5,), make)
    batch = open_pairs(tmp_path).read(range(5), 4)
    assert batch.index.tolist() == [0, 3] and batch.captions[1] == "caf\ufffd   x"
    assert [(skip.index, skip.reason) for skip in batch.skipped] == [
        (1, "broken image"),
        (2, "empty caption"),
        (4, "broken caption"),
    ]
    assert batch.skipped[0].name == "00000.tar/000000001.png" and "not a picture in a known format" in batch.skipped[0].error


def write_members(path, members, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_long_names_apart_from_each_other(tmp_path, form):
    long = "d" * 90 + "/" + "k" * 150
    other = long[:-1] + "é"
    names = [f"{long}.jpg", f"{other}.PNG", "./x.seg.png", f"{other}.txt", f"{long}.txt", "._x.jpg", "x.jpg", "x.txt"]
    data = [picture("red"), picture("blue"), b"?", b"second", b"first", b"?", picture("lime"), b"third"]
    write_members(tmp_path / "a.tar", zip(names, data, strict=True), form)
    with pytest.warns(UserWarning, match="keys without a picture: 1"):
        pairs = open_pairs(tmp_path / "a.tar")
    batch = pairs.read(range(len(pairs)), 4)
    assert batch.captions == ["first", "second", "third"] and colours_of(batch) == [0, 2, 1]


def test_hostile_names_and_links_are_only_names(tmp_path):
    (tmp_path / "secret.png").write_bytes(picture("blue"))
    (tmp_path / "in").mkdir()
    link, device = tarfile.TarInfo("link.png"), tarfile.TarInfo("device.png")
    link.type, link.linkname, device.type = tarfile.SYMTYPE, str(tmp_path / "secret.png"), tarfile.CHRTYPE
    members = [(link, b""), ("link.txt", b"x"), (device, b""), ("device.txt", b"x")]
    for name in ("../../up", "/etc/abs", "a\nb\x1b[31m", "x" * 98):
        members += [(f"{name}.png", picture("red")), (f"{name}.txt", b"fine")]
    write_members(tmp_path / "in" / "a.tar", members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="links and special files, ignored: 2"):
        pairs = open_pairs(tmp_path / "in")
    assert pairs.captions(range(len(pairs))) == ["fine"] * 4 and colours_of(pairs.read(range(4), 4)) == [0] * 4
    assert pairs.notes[1] == "a.tar: keys without a picture: 2"
    assert sorted(tmp_path.rglob("*")) == before


@fuzz
@given(st.floats(0, 1))
def test_truncated_tars_give_what_is_whole(tmp_path, part):
    path = tmp_path / "cut.tar"
    write_members(path, [(f"{k}.{kind}", data) for k in range(4) for kind, data in (("png", picture()), ("txt", b"x"))])
    whole = index_tar(path, TextFields())[0]
    ends = (whole[:, 2] + 512).tolist()  # the bytes of the caption, filled to a block
    data = path.read_bytes()[: int(part * 9000)]
    path.write_bytes(data)
    rows, notes = index_tar(path, TextFields())
    complete = sum(end <= len(data) for end in ends)
    assert complete <= len(rows) <= complete + 1 and (rows[:complete] == whole[:complete]).all()
    assert any(note.startswith("damaged after byte") for note in notes) == (len(data) < ends[-1] + 512)


def test_damage_within_a_tar_is_reported(tmp_path):
    first, second = write_tars(tmp_path, (4, 4))
    data = bytearray(second.read_bytes())
    data[index_tar(second, TextFields())[0][2, 0] - 512] ^= 255  # the first byte of a header: the checksum is off
    second.write_bytes(data)
    (tmp_path / "00002.tar").write_bytes(b"")
    (tmp_path / "00003.tar").write_bytes(b"\x1f\x8b gzip")
    with pytest.warns(UserWarning, match="00001.tar: damaged after byte"):
        pairs = open_pairs(tmp_path)
    assert len(pairs) == 6 and len(pairs.notes) == 4
    assert pairs.notes[2].startswith("00002.tar: damaged after byte 0 of 0: empty file")
    assert "unpack it first" in pairs.notes[3]
    assert len(open_pairs(first)) == 4
    with pytest.raises(ValueError, match="no picture in any of 2 tars"):
        open_pairs([tmp_path / "00002.tar", tmp_path / "00003.tar"])


def header(name, size, kind=b"0"):
    """A header with any size at all, the checksum right."""
    raw = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = b"\x80" + size.to_bytes(11, "big") if size >= 0 else b"\xff" + (256**11 + size).to_bytes(11, "big")
    raw[156:157] = kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


@pytest.mark.parametrize(
    "hostile",
    [
        header("loop.png", -1024),
        header("back", -512, b"x"),
        header("large.png", 1 << 60),
        header("pax", 1 << 40, b"x"),
        header("long", 1 << 70, b"L"),
        header("deep", 512, b"L") + bytes(512),
        b"".join(header("deep", 1, b"L") + b"a".ljust(512, b"\0") for _ in range(3000)),
    ],
    ids=["negative", "negative pax", "beyond", "huge pax", "huge name", "no name", "nested"],
)
def test_hostile_headers_end_the_tar(tmp_path, hostile):
    path = write_members(tmp_path / "a.tar", [("0.png", picture()), ("0.txt", b"x")])
    end = int(index_tar(path, TextFields())[0][0, 2]) + 512
    path.write_bytes(path.read_bytes()[:end] + hostile + bytes(2048))
    rows, notes = index_tar(path, TextFields())
    assert len(rows) == 1
    assert len(notes) == 1 and notes[0].startswith(f"damaged after byte {end:,}"), notes


@fuzz
@given(st.lists(st.tuples(st.integers(0, 5119), st.integers(0, 255)), max_size=6))
def test_damaged_tars_never_raise(tmp_path, damage):
    path = write_members(tmp_path / "a.tar", [(f"{k}{'é' * k}.{kind}", b"x") for k in range(2) for kind in ("png", "txt")])
    data = bytearray(path.read_bytes())
    for place, value in damage:
        data[place] = value
    path.write_bytes(data)
    rows, _ = index_tar(path, TextFields())
    pairs = tars.TarPairs(
        [path], torch.from_numpy(rows), torch.tensor([0, len(rows)]), fields=TextFields(), notes=(), kept=None
    )
    assert len(pairs.read(range(len(rows)), 4).skipped) == len(rows)


def test_index_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    first, second = write_tars(tmp_path, (2, 2))
    calls = []
    monkeypatch.setattr(tar_index, "index_tar", lambda path, fields: calls.append(path) or index_tar(path, fields))
    open_pairs(tmp_path), open_pairs(tmp_path)
    assert calls == [first, second]
    write_tars(tmp_path, (3,))
    assert len(open_pairs(tmp_path)) == 5 and calls == [first, second, first]
    kept = sorted((tmp_path / os.environ["XDG_CACHE_HOME"] / "unisono").iterdir())
    for file in kept:
        file.write_bytes(file.read_bytes()[:-8])
    assert len(open_pairs(tmp_path)) == 5 and len(calls) == 5
    assert all(not file.name.startswith(".") for file in kept)


def test_no_place_for_the_index_is_no_error(tmp_path):
    write_tars(tmp_path)
    (tmp_path / "file").write_text("")
    pairs = open_pairs(tmp_path, cache=tmp_path / "file" / "below")
    assert pickle.loads(pickle.dumps(pairs)).captions([7]) == pairs.captions([7]) == ["a white thing"]


def test_tar_that_shrinks_is_skipped(tmp_path):
    (path,) = write_tars(tmp_path, (3,))
    pairs = open_pairs(path)
    os.truncate(path, 100)
    assert {skip.reason for skip in pairs.read(range(3), 4).skipped} == {"broken caption"}
    assert pairs.captions([0]) == [""]


# tables


def test_tables_of_paths_and_captions(tmp_path):
    (tmp_path / "im").mkdir()
    for k in range(4):
        (tmp_path / "im" / f"{k}.png").write_bytes(picture(COLOURS[k]))
    write_table(tmp_path / "a.csv", [["im/0.png", 'a "red",\nthing'], [], [" im/1.png", "x"]])
    (tmp_path / "b.tsv").write_bytes(
        b"\xef\xbb\xbftitle\tfilepath\tclass\r\n\r\nthird\tim/2.png\t7\r\ncaf\xe9\t./im/3.png\t\r\n"
    )
    pairs = open_pairs([tmp_path / "a.csv", tmp_path / "b.tsv"])
    batch = pairs.read([3, 0, 1, 2], 4)
    assert batch.captions == ["caf\ufffd", 'a "red",\nthing', "x", "third"] == pairs.captions([3, 0, 1, 2])
    assert colours_of(batch) == [3, 0, 1, 2]
    assert open_pairs(tmp_path / "b.tsv", concept="class").concepts([0, 1]).tolist() == [7, concept_of("caf\ufffd")]
    assert pickle.loads(pickle.dumps(pairs)).captions([1]) == ["x"]


def test_paths_stay_within_the_root(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").write_bytes(picture())
    os.mkfifo(tmp_path / "in" / "pipe.png")
    paths = ["../out.png", str(tmp_path / "out.png"), "pipe.png", "absent.png", "a\0b.png", "", ".", "in/../../out.png"]
    table = write_table(tmp_path / "in" / "a.csv", [[path, "x"] for path in paths])
    skipped = open_pairs(table).read(range(8), 4).skipped
    assert [skip.reason for skip in skipped] == ["unreadable file"] * 8
    assert "name the folder that all are in by root=" in skipped[1].error and "not a plain file" in skipped[2].error
    assert "a.csv, row 4: absent.png" in skipped[3].name
    assert open_pairs(table, root=tmp_path).read([1], 4).index.tolist() == [1]


def test_rows_that_are_no_rows_are_skipped(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
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
    path = write_table(tmp_path / "a.csv", [["0.png", text] for text in captions])
    assert TablePairs([path]).captions(range(len(captions))) == [clean_text(text) for text in captions]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no column of the usual ones"),
        (b"image,words\n", r"for the caption; there are \['image', 'words'\]. Name it by caption="),
        (b"image,caption\n\n\n", "no rows below the header"),
        ("image,caption\n".encode("utf-16"), "save it as UTF-8"),
    ],
)
def test_tables_without_columns_or_rows_are_refused(tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        open_pairs(tmp_path)


# parquet


def test_hugging_face_parquet(tmp_path, monkeypatch):
    from unisono_models.clip.data import parquet_pairs as parquet

    monkeypatch.setattr(parquet, "_CACHE_BYTES", 1)  # one row group at a time
    for part in range(2):
        samples = [sample(k) for k in range(part * 4, part * 4 + 4)]
        write_parquet(tmp_path / f"train-{part:05d}-of-00002.parquet", samples, label=[7] * 4)
    pairs = open_pairs(tmp_path)
    order = [7, 3, 0, 4, 6, 1, 7]
    batch = pairs.read(order, 6)
    assert colours_of(batch) == order == batch.index.tolist() and batch.captions == pairs.captions(order)
    assert batch.concepts.tolist() == pairs.concepts(order).tolist() == [concept_of(text) for text in batch.captions]
    assert open_pairs(str(tmp_path / "train-*.parquet"), concept="label").concepts(range(8)).tolist() == [7] * 8
    assert pickle.loads(pickle.dumps(pairs)).captions([5]) == ["a magenta thing"]
    write_parquet(tmp_path / "test-00000-of-00001.parquet", samples)
    with pytest.raises(ValueError, match=r"several splits \(test, train\).*such as .*/test-\*.parquet"):
        open_pairs(tmp_path)


def test_odd_parquet_rows(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "0.png").write_bytes(picture("blue"))
    good = {"bytes": picture(), "path": None}
    rows = [good, {"bytes": None, "path": "0.png"}, {"bytes": None, "path": "../x"}, None, {"bytes": b"?", "path": ""}, good]
    captions = pa.array([b"caf\xe9", b"b", b"c", b"d", b"e", None]).view(pa.string())
    pq.write_table(pa.table({"image": pa.array(rows), "text": captions}), tmp_path / "a.parquet")
    batch = open_pairs(tmp_path).read(range(6), 4)
    assert batch.captions == ["caf\ufffd", "b"] and colours_of(batch) == [0, 2]
    reasons = [skip.reason for skip in batch.skipped]
    assert reasons == ["unreadable file", "unreadable file", "broken image", "empty caption"]
    assert batch.skipped[2].name == "a.parquet, row 5"

    pq.write_table(pa.table({"image": [picture()], "caption": [["one", "two"]]}), tmp_path / "b.parquet")
    assert open_pairs(tmp_path / "b.parquet").read([0], 4).captions == ["one"]
    pq.write_table(pa.table({"image": ["http://x"], "caption": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="column 'image' is string, expected binary or struct"):
        open_pairs(tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"d.parquet: not a whole parquet file"):
        open_pairs(tmp_path / "d.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'unisono-models\[parquet\]'"):
        open_pairs(tmp_path / "a.parquet")


def test_damaged_row_group_is_skipped(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [sample(k) for k in range(6)])
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    batch = open_pairs(path).read(range(6), 4)
    assert batch.index.tolist() == [3, 4, 5] and {skip.reason for skip in batch.skipped} == {"broken row"}


# sources


def test_source_is_told_from_its_files(tmp_path):
    write_tars(tmp_path, (1, 1, 1))
    (tmp_path / "00000.parquet").write_bytes(b"what img2dataset puts beside")
    assert find_files(tmp_path) == ("tar", [tmp_path / f"0000{k}.tar" for k in range(3)])
    assert find_files(f"{tmp_path}/{{00001..00002}}.tar")[1] == [tmp_path / "00001.tar", tmp_path / "00002.tar"]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_table(tmp_path / "deep" / "er" / "a.CSV", [])
    assert find_files(str(tmp_path / "deep"))[0] == "csv"
    (tmp_path / "{1..2}.tar").write_bytes(b"")
    assert find_files(tmp_path / "{1..2}.tar")[1] == [tmp_path / "{1..2}.tar"]
    assert list(expand_braces("{9..11},{x},{a,b}")) == ["9,{x},a", "9,{x},b", "10,{x},a", "10,{x},b", "11,{x},a", "11,{x},b"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "without .tar, .parquet, .csv or .tsv files"),
        ("absent", "1 of 1 files are missing, such as"),
        ("*.tar", "no file matches"),
        ("{0..3}.tar", "4 of 4 files are missing"),
        ("{0..99999999}.tar", "more than 1,000,000 files"),
        ("a.txt", "not a .tar, .parquet, .csv or .tsv file"),
        ("a.tar.gz", "Unpack it to a plain .tar"),
        ("{a.txt,a.tar.gz}", "not a .tar"),
    ],
)
def test_unknown_and_empty_sources_are_refused(tmp_path, source, words):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.tar.gz").write_text("")
    with pytest.raises(ValueError, match=words):
        open_pairs(tmp_path / source)


@pytest.mark.parametrize("source", ["https://x.org/a.tar", "s3://b/a.tar", "pipe:rm -rf x; cat a.tar"])
def test_addresses_and_commands_are_refused(source):
    with pytest.raises(ValueError, match="only local files"):
        open_pairs(source)


# ranks and splits


def reads_on_ranks(folder, cache, own):
    rank = resolve_group(None).rank
    pairs = open_pairs(folder, cache=cache)
    train, held_out = split_pairs(pairs, 0.3, seed=1)
    with pytest.raises(Exception, match=r"ranks \[1(, 2)?\] see other files than rank 0"):
        open_pairs(f"{own}/{min(rank, 1)}.csv")
    with pytest.raises(Exception, match=r"open_pairs: rank 1: .*not there|rank 1.*missing"):
        open_pairs(f"{own}/{'absent' if rank == 1 else '0'}.csv")
    return pairs.notes, pairs.captions(range(len(pairs))), train.rows.tolist(), held_out.rows.tolist()


def test_ranks_share_the_work_and_agree(ranks, tmp_path):
    paths = write_tars(tmp_path, (5, 0, 3, 7))
    with paths[2].open("r+b") as file:
        file.truncate(index_tar(paths[2], TextFields())[0][2, 0])
    for k in range(2):
        write_table(tmp_path / f"{k}.csv", [["0.png", "x" * (k + 1)]])
    with pytest.warns(UserWarning, match=r"00002.tar: damaged"):
        pairs = open_pairs(tmp_path / "*.tar", cache=tmp_path / "one")
    train, held_out = split_pairs(pairs, 0.3, seed=1)
    expected = (pairs.notes, pairs.captions(range(len(pairs))), train.rows.tolist(), held_out.rows.tolist())
    assert len(expected[1]) == 14
    for world in (2, 3):
        for _ in range(2):  # indexed, and from the cache
            assert (
                ranks(reads_on_ranks, str(tmp_path / "*.tar"), tmp_path / f"w{world}", tmp_path, world_size=world)
                == [expected] * world
            )


def keeps_index(folder, caches):
    """Whether this rank wrote the index of all tars, where its pairs are mapped from, and what it reads."""
    written, save, cache = [], tars.save_index, caches[resolve_group(None).rank]

    def saving(path, *index):
        if path.name.startswith("tars-"):  # the others are of single tars
            written.append(path.parent.name)
        return save(path, *index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tars, "save_index", saving)
        pairs = open_pairs(folder, cache=cache)
    return written, pairs._kept and pairs._kept.parent.name, pairs.captions(range(len(pairs)))


def test_index_is_written_once_for_each_cache_of_a_host(ranks, tmp_path):
    write_tars(tmp_path, (2, 3))
    expected = open_pairs(tmp_path).captions(range(5))
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    found = ranks(keeps_index, tmp_path, [one, one, two], world_size=3)
    assert found == [(["one"], "one", expected), ([], "one", expected), (["two"], "two", expected)]
    assert ranks(keeps_index, tmp_path, [one, two], world_size=2) == [([], "one", expected), ([], "two", expected)]
    none.write_text("a file, where no folder can be")
    assert ranks(keeps_index, tmp_path, [none, none], world_size=2) == [(["none"], None, expected), ([], None, expected)]


def test_split_keeps_concepts_together(tmp_path):
    rows = [["0.png", f"Thing  {k % 200}" if k % 2 else f"thing {k % 200}"] for k in range(1000)]
    (tmp_path / "0.png").write_bytes(picture())
    pairs = open_pairs(write_table(tmp_path / "a.csv", rows))
    train, held_out = split_pairs(pairs, 0.25, seed=3)
    sides = [set(part.concepts(range(len(part))).tolist()) for part in (train, held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and 30 <= len(sides[1]) <= 70
    assert sorted([*train.rows, *held_out.rows]) == list(range(1000))
    batch = held_out.read([1, 0], 4)
    assert batch.index.tolist() == held_out.rows[[1, 0]].tolist() and batch.captions == held_out.captions([1, 0])
    grown = open_pairs(write_table(tmp_path / "b.csv", [["0.png", "new"], *rows]))
    assert (split_pairs(grown, 0.25, seed=3)[1].rows - 1).tolist()[-len(held_out) :] == held_out.rows.tolist()
    assert split_pairs(pairs, 0.25, seed=4)[1].rows.tolist() != held_out.rows.tolist()


def test_split_refuses_what_leaves_a_side_empty(tmp_path):
    pairs = open_pairs(write_table(tmp_path / "a.csv", [["0.png", "same"]] * 9))
    with pytest.raises(ValueError, match=r"of 9 pairs (0|9) would be held out. There are too few concepts"):
        split_pairs(pairs, 0.5, seed=0)
    with pytest.raises(ValueError, match="fraction=0 must"):
        split_pairs(pairs, 0, seed=0)


def test_limits_are_those_that_the_errors_name():
    assert images.MAX_PIXELS * 3 < 2**28 and (Image.MAX_IMAGE_PIXELS or 0) > images.MAX_PIXELS
