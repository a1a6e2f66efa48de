"""Which files a source means, and how pairs are split, on any number of ranks."""

import pytest

from tests.clip.image_files import COLOURS, encode_image, write_csv, write_tars
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.files import find_pair_files, open_pairs, split_pairs
from unisono_models.clip.data.tar_pairs import TextFields, index_tar
from unisono_models.datasets.file_patterns import expand_braces
from unisono_models.training.errors import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_source_is_told_from_its_files(tmp_path):
    write_tars(tmp_path, (1, 1, 1))
    (tmp_path / "00000.parquet").write_bytes(b"what img2dataset puts beside")
    assert find_pair_files(tmp_path) == ("tar", [tmp_path / f"0000{k}.tar" for k in range(3)])
    assert find_pair_files(f"{tmp_path}/{{00001..00002}}.tar")[1] == [tmp_path / "00001.tar", tmp_path / "00002.tar"]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_csv(tmp_path / "deep" / "er" / "a.CSV", [])
    assert find_pair_files(str(tmp_path / "deep"))[0] == "csv"
    (tmp_path / "{1..2}.tar").write_bytes(b"")
    assert find_pair_files(tmp_path / "{1..2}.tar")[1] == [tmp_path / "{1..2}.tar"]
    assert list(expand_braces("{9..11},{x},{a,b}")) == ["9,{x},a", "9,{x},b", "10,{x},a", "10,{x},b", "11,{x},a", "11,{x},b"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "without .tar, .parquet, .csv or .tsv files"),
        ("absent", "--data.source .*absent: there is no such file or folder"),
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


def reads_on_ranks(folder, cache, own):
    rank = resolve_group(None).rank
    pairs = open_pairs(folder, cache=cache)
    train, held_out = split_pairs(pairs, 0.3, seed=1)
    with pytest.raises(Exception, match=r"ranks \[1(, 2)?\] see other files than rank 0"):
        open_pairs(f"{own}/{min(rank, 1)}.csv")
    with pytest.raises(Exception, match=r"rank 1: --data.source .*absent.csv: there is no such file"):
        open_pairs(f"{own}/{'absent' if rank == 1 else '0'}.csv")
    return pairs.notes, pairs.captions(range(len(pairs))), train.indices.tolist(), held_out.indices.tolist()


def test_ranks_share_the_work_and_agree(ranks, tmp_path):
    paths = write_tars(tmp_path, (5, 0, 3, 7))
    with paths[2].open("r+b") as file:
        file.truncate(index_tar(paths[2], TextFields())[0][2, 0])
    for k in range(2):
        write_csv(tmp_path / f"{k}.csv", [["0.png", "x" * (k + 1)]])
    with pytest.warns(UserWarning, match=r"00002.tar: damaged"):
        pairs = open_pairs(tmp_path / "*.tar", cache=tmp_path / "one")
    train, held_out = split_pairs(pairs, 0.3, seed=1)
    expected = (pairs.notes, pairs.captions(range(len(pairs))), train.indices.tolist(), held_out.indices.tolist())
    assert len(expected[1]) == 14
    for world in (2, 3):
        for _ in range(2):  # indexed, and from the cache
            assert (
                ranks(reads_on_ranks, str(tmp_path / "*.tar"), tmp_path / f"w{world}", tmp_path, world_size=world)
                == [expected] * world
            )


def test_split_keeps_concepts_together(tmp_path):
    rows = [["0.png", f"Thing  {k % 200}" if k % 2 else f"thing {k % 200}"] for k in range(1000)]
    (tmp_path / "0.png").write_bytes(encode_image())
    pairs = open_pairs(write_csv(tmp_path / "a.csv", rows))
    train, held_out = split_pairs(pairs, 0.25, seed=3)
    sides = [set(part.concepts(range(len(part))).tolist()) for part in (train, held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and 30 <= len(sides[1]) <= 70
    assert sorted([*train.indices, *held_out.indices]) == list(range(1000))
    batch = held_out.read([1, 0], 4)
    assert batch.index.tolist() == held_out.indices[[1, 0]].tolist() and batch.captions == held_out.captions([1, 0])
    grown = open_pairs(write_csv(tmp_path / "b.csv", [["0.png", "new"], *rows]))
    assert (split_pairs(grown, 0.25, seed=3)[1].indices - 1).tolist()[-len(held_out) :] == held_out.indices.tolist()
    assert split_pairs(pairs, 0.25, seed=4)[1].indices.tolist() != held_out.indices.tolist()


def test_split_of_few_concepts_holds_out_pairs(tmp_path):
    """With three captions, such as names of classes, no fraction of concepts can be held out: it was an error."""
    rows = [["0.png", f"class {k % 3}"] for k in range(60)]
    pairs = open_pairs(write_csv(tmp_path / "a.csv", rows))
    train, held_out = split_pairs(pairs, 0.1, seed=0)
    assert 2 <= len(held_out) <= 12 and sorted([*train.indices, *held_out.indices]) == list(range(60))
    assert split_pairs(pairs, 0.1, seed=1)[1].indices.tolist() != held_out.indices.tolist()


def test_split_refuses_what_leaves_a_side_empty(tmp_path):
    pairs = open_pairs(write_csv(tmp_path / "a.csv", [["0.png", "same"]]))
    with pytest.raises(UserError, match=r"--data.held-out 0.5: (0|1) of 1 pairs would be held out. There are too few pairs"):
        split_pairs(pairs, 0.5, seed=0)
    with pytest.raises(UserError, match=r"--data.held-out 0 must"):
        split_pairs(pairs, 0, seed=0)


def write_image_folder(folder):
    """Three folders with images, two of which have captions of their own."""
    for number, name in enumerate(("cats/1.png", "cats/2 é.PNG", "dogs_at-play/x.jpg", "dogs_at-play/.hidden.png")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encode_image(COLOURS[number], kind="JPEG" if name.endswith("jpg") else "PNG"))
    (folder / "cats/1.txt").write_text(" a red cat\n", encoding="utf-8")


def test_folder_of_images_has_captions_in_files_or_in_names_of_folders(tmp_path):
    write_image_folder(tmp_path)
    pairs = open_pairs(tmp_path)
    assert pairs.captions(range(len(pairs))) == ["a red cat", "cats", "dogs at play"]
    (tmp_path / "cats/2 é.PNG").write_bytes(b"no image")
    batch = pairs.read([2, 1, 0], 4)
    assert batch.captions == ["dogs at play", "a red cat"] and batch.index.tolist() == [2, 0] == batch.index.tolist()
    assert [(skip.name, skip.reason) for skip in batch.skipped] == [("cats/2 é.PNG", "broken image")]
    assert batch.concepts.tolist() == pairs.concepts([2, 0]).tolist()
    (tmp_path / "top.png").write_bytes(encode_image())
    with pytest.raises(UserError, match=r"1 of 4 images have no caption, such as top.png. Write it into top.txt"):
        open_pairs(tmp_path)
