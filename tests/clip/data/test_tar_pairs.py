"""Webdataset tars: read at random, damaged and hostile ones, and the cached index."""

import io
import os
import pickle
import tarfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clip.image_files import COLOURS, colours_of, encode_image, sample, write_tars
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data import tar_pairs
from unisono_models.clip.data.files import open_pairs
from unisono_models.clip.data.pairs import concept_of_caption
from unisono_models.clip.data.tar_pairs import TarPairs, TextFields, index_tar

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_webdataset_tars_are_read_at_any_place(tmp_path):
    write_tars(tmp_path)
    pairs = open_pairs(tmp_path)
    assert len(pairs) == 8 and pairs.notes == ()
    batch = pairs.read([6, 0, 5, 0], 6)
    assert colours_of(batch) == [6, 0, 5, 0] and batch.index.tolist() == [6, 0, 5, 0] and batch.skipped == ()
    assert batch.captions == [f"a {COLOURS[k]} thing" for k in (6, 0, 5, 0)] == pairs.captions([6, 0, 5, 0])
    assert (
        batch.concepts.tolist()
        == [concept_of_caption(text) for text in batch.captions]
        == pairs.concepts([6, 0, 5, 0]).tolist()
    )
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
    assert batch.skipped[0].name == "00000.tar/000000001.png" and "not an image in a known format" in batch.skipped[0].error


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
    data = [encode_image("red"), encode_image("blue"), b"?", b"second", b"first", b"?", encode_image("lime"), b"third"]
    write_members(tmp_path / "a.tar", zip(names, data, strict=True), form)
    with pytest.warns(UserWarning, match="keys without an image: 1"):
        pairs = open_pairs(tmp_path / "a.tar")
    batch = pairs.read(range(len(pairs)), 4)
    assert batch.captions == ["first", "second", "third"] and colours_of(batch) == [0, 2, 1]


def test_hostile_names_and_links_are_only_names(tmp_path):
    (tmp_path / "secret.png").write_bytes(encode_image("blue"))
    (tmp_path / "in").mkdir()
    link, device = tarfile.TarInfo("link.png"), tarfile.TarInfo("device.png")
    link.type, link.linkname, device.type = tarfile.SYMTYPE, str(tmp_path / "secret.png"), tarfile.CHRTYPE
    members = [(link, b""), ("link.txt", b"x"), (device, b""), ("device.txt", b"x")]
    for name in ("../../up", "/etc/abs", "a\nb\x1b[31m", "x" * 98):
        members += [(f"{name}.png", encode_image("red")), (f"{name}.txt", b"fine")]
    write_members(tmp_path / "in" / "a.tar", members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="links and special files, ignored: 2"):
        pairs = open_pairs(tmp_path / "in")
    assert pairs.captions(range(len(pairs))) == ["fine"] * 4 and colours_of(pairs.read(range(4), 4)) == [0] * 4
    assert pairs.notes[1] == "a.tar: keys without an image: 2"
    assert sorted(tmp_path.rglob("*")) == before


@fuzz
@given(st.floats(0, 1))
def test_truncated_tars_give_what_is_whole(tmp_path, part):
    path = tmp_path / "cut.tar"
    write_members(path, [(f"{k}.{kind}", data) for k in range(4) for kind, data in (("png", encode_image()), ("txt", b"x"))])
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
    with pytest.raises(ValueError, match="no image in any of 2 tars"):
        open_pairs([tmp_path / "00002.tar", tmp_path / "00003.tar"])


def header(name, size, kind=b"0"):
    """A header with any size and the right checksum."""
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
    path = write_members(tmp_path / "a.tar", [("0.png", encode_image()), ("0.txt", b"x")])
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
    pairs = TarPairs(
        [path], torch.from_numpy(rows), torch.tensor([0, len(rows)]), fields=TextFields(), notes=(), index_file=None
    )
    assert len(pairs.read(range(len(rows)), 4).skipped) == len(rows)


def test_index_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    first, second = write_tars(tmp_path, (2, 2))
    calls = []
    monkeypatch.setattr(tar_pairs, "index_tar", lambda path, fields: calls.append(path) or index_tar(path, fields))
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


def keeps_index(folder, caches):
    """Whether this rank wrote the index of all tars, where its pairs are mapped from, and what it reads."""
    written, save, cache = [], tar_pairs.save_index, caches[resolve_group(None).rank]

    def saving(path, *index):
        if path.name.startswith("tars-"):  # the others are of single tars
            written.append(path.parent.name)
        return save(path, *index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_pairs, "save_index", saving)
        pairs = open_pairs(folder, cache=cache)
    return written, pairs._index_file and pairs._index_file.parent.name, pairs.captions(range(len(pairs)))


def test_index_is_written_once_for_each_cache_of_a_host(ranks, tmp_path):
    write_tars(tmp_path, (2, 3))
    expected = open_pairs(tmp_path).captions(range(5))
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    found = ranks(keeps_index, tmp_path, [one, one, two], world_size=3)
    assert found == [(["one"], "one", expected), ([], "one", expected), (["two"], "two", expected)]
    assert ranks(keeps_index, tmp_path, [one, two], world_size=2) == [([], "one", expected), ([], "two", expected)]
    none.write_text("a file, where no folder can be")
    assert ranks(keeps_index, tmp_path, [none, none], world_size=2) == [(["none"], None, expected), ([], None, expected)]
