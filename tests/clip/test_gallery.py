"""What a search finds, and which features are cached."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.clip.colour_gallery import colour_gallery
from tests.clip.conftest import COLOURS
from unisono_models.clip import gallery as gallery_module
from unisono_models.clip.data.emoji import emoji_gallery
from unisono_models.clip.data.files import sample_gallery
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.gallery import Gallery, find_export, open_gallery
from unisono_models.clip.model import Clip
from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.training.run.run_directory import RunError


def as_png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_search_ranks_by_the_mean_of_a_things_drawings():
    gallery, _ = colour_gallery()
    hits = gallery.search("orange", top=3)
    assert [hit.label for hit in hits] == ["orange heart", "yellow heart", "red heart"]
    orange = torch.tensor([1, 0.5, 0]) / math.sqrt(1.25)
    plain, bold = (gallery.features[place] @ orange for place in (2, 3))
    assert hits[0].score == pytest.approx(float(plain + bold) / 2, abs=1e-6) and bold < plain
    assert (hits[0].index, hits[0].others, hits[0].vendor, hits[0].emoji) == (2, (3,), "plain", "🧡")


def test_search_by_image_ranks_by_the_closest_drawing():
    gallery, _ = colour_gallery()
    for place in (0, 3, 5, 8):
        image = gallery.draw(place, 40)
        for query in (image, as_png(image)):
            best = gallery.search(query, top=1)[0]
            assert best.index == place and best.score == pytest.approx(1, abs=1e-3)


def test_search_takes_features():
    gallery, _ = colour_gallery()
    assert gallery.search(torch.tensor([0.0, 0.0, 1.0]), top=1)[0].label == "blue heart"
    with pytest.raises(ValueError, match=r"features of shape \(2,\): expected \(3,\)"):
        gallery.search(torch.zeros(2))


def test_search_keeps_to_a_vendor():
    gallery, _ = colour_gallery()
    hits = gallery.search("red", vendor="bold", top=99)
    assert {hit.vendor for hit in hits} == {"bold"} and len(hits) == 5 and hits[0].others == ()


def test_search_shows_skin_tones_if_they_are_named():
    gallery, _ = colour_gallery()

    def toned(query, **options):
        return any(gallery.items[hit.index].toned for hit in gallery.search(query, top=99, **options))

    assert not toned("red hand") and not toned("skinny") and not toned(Image.new("RGB", (9, 9), "brown"))
    assert toned("a hand with dark Skin") and toned("✋🏿") and toned("red hand", tones="all")


def test_search_takes_an_emoji_for_its_name():
    gallery, clip = colour_gallery()
    for spelling in ("❤️", "❤", " ❤️ "):
        assert gallery.search(spelling, top=1)[0].label == "red heart"
    assert clip.read == ["red heart"] * 3


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        (" \n", {}, "the query is empty"),
        ("x" * 301, {}, "301 characters, more than 300"),
        ("red", {"top": 0}, "top=0 must be at least 1"),
        ("red", {"vendor": "apple"}, "vendor='apple': the gallery has plain, bold"),
        (b"not an image", {}, "not an image in a known format"),
    ],
)
def test_search_rejects(query, options, message):
    with pytest.raises(ValueError, match=message):
        colour_gallery()[0].search(query, **options)


def test_gallery_rejects_features_of_another_number():
    gallery, clip = colour_gallery()
    with pytest.raises(ValueError, match=r"features of shape \(2, 3\) for 12 items"):
        Gallery(clip, gallery.items, gallery.features[:2], draw=gallery.draw)


def test_emoji_gallery_finds_each_concept_once_with_all_drawings(clip, few_emoji, tmp_path):
    concepts, drawings = few_emoji
    gallery = Gallery.build(clip, emoji_gallery(16, cache=tmp_path))
    hits = gallery.search("a red heart", top=999, tones="all")
    assert sorted(place for hit in hits for place in (hit.index, *hit.others)) == list(range(len(drawings)))
    assert [hit.label for hit in hits] != [concept.name for concept in concepts] and len(hits) == len(concepts)
    for hit in hits:
        assert all(concepts[drawings[k].concept].name == hit.label for k in (hit.index, *hit.others))
    assert "☎️" in {hit.emoji for hit in hits}, "to be copied as they are written, with U+FE0F"
    assert any(concept.toned for concept in concepts) and not any("skin" in hit.label for hit in gallery.search("a", top=999))
    pixels = load_emoji_images(16, cache=tmp_path)
    torch.testing.assert_close(gallery.features, clip.encode_images(pixels), atol=1e-5, rtol=0)
    assert gallery.draw(7, 16).tobytes() == pixels[7].permute(1, 2, 0).contiguous().numpy().tobytes()


class FivePairs:
    """Pairs of which the second has no image, as a part of a larger dataset: `index` is not the row."""

    notes = ()

    def __len__(self):
        return 5

    def read(self, indices, size):
        rows = [k for k in indices if k != 1]
        images = (
            torch.stack([torch.full((3, size, size), 50 * k) for k in rows]).byte() if rows else torch.zeros(0, 3, size, size)
        )
        return PairBatch(images.byte(), self.captions(rows), torch.tensor(rows), torch.tensor(rows) + 100)

    def captions(self, indices):
        return [f"grey {k}" for k in indices]

    def concepts(self, indices):
        raise NotImplementedError


def five_pairs(key="a", limit=99):
    return sample_gallery(FivePairs(), limit=limit, key=key)


def test_gallery_of_pairs_leaves_broken_ones_out(clip):
    gallery = Gallery.build(clip, five_pairs())
    assert [item.label for item in gallery.items] == ["grey 0", "grey 2", "grey 3", "grey 4"]
    assert gallery.draw(1, 4).getpixel((0, 0)) == (100, 100, 100)
    found = gallery.search(gallery.draw(3, 16), top=1)[0]
    assert found.score == pytest.approx(1, abs=1e-5) and gallery.features[3] @ gallery.features[found.index] > 0.9999
    assert [item.label for item in Gallery.build(clip, five_pairs(limit=2)).items] == ["grey 0", "grey 4"]


def test_features_are_kept_and_computed_again_if_anything_changed(clip, tmp_path, monkeypatch):
    computed = []
    encode = gallery_module.encode_images
    monkeypatch.setattr(gallery_module, "encode_images", lambda *args: computed.append(1) or encode(*args))
    file = tmp_path / "gallery.safetensors"

    def times(data="a", clip=clip):
        before = len(computed)
        gallery = Gallery.build(clip, five_pairs(data), cache=file)
        assert torch.equal(gallery.features, first) and [item.label for item in gallery.items][1] == "grey 2"
        return len(computed) - before

    first = Gallery.build(clip, five_pairs(), cache=file).features
    assert times() == 0
    assert (times("b"), times("b"), times("a")) == (1, 0, 1)
    whole = file.read_bytes()
    for damaged in (whole[:-9], b"", whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]):
        file.write_bytes(damaged)
        assert (times(), times()) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["gallery.safetensors"]

    with torch.no_grad():
        other = Clip(clip.config, clip.tokenizer).eval()
        other.load_state_dict(clip.state_dict())
        assert times(clip=other) == 0, "the same weights are the same model"
        next(other.image.parameters()).add_(1.0)
    assert not torch.equal(Gallery.build(other, five_pairs(), cache=file).features, first)


def test_features_that_cannot_be_kept_are_no_error(clip, tmp_path, capsys):
    assert Gallery.build(clip, five_pairs(), cache=tmp_path / "gone" / "x.safetensors").features.shape == (4, 8)
    assert "cannot be written" in capsys.readouterr().err


def test_open_gallery_of_a_run_on_files(finished_run):
    gallery, folder = open_gallery(finished_run)
    assert folder == finished_run and (finished_run / "gallery.safetensors").exists()
    assert [item.label for item in gallery.items] == [f"a {name} wall" for name in COLOURS]
    for path in (finished_run / "export", Path(str(finished_run / "export") + "/")):
        assert find_export(path)[1].absolute() == finished_run.absolute(), "the export folder of a run is the run"


def test_open_gallery_says_what_is_wrong(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def is_rejected(path, message):
        with pytest.raises(RunError, match=message):
            open_gallery(path)

    is_rejected(tmp_path / "none", r"none: no such directory. Here are runs/clip-mine")
    is_rejected(tmp_path / "data", "data is not a run: .* Here are runs/clip-mine")
    (finished_run / "export" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    is_rejected(finished_run, "the run has not finished: export/tokenizer.json is not there yet")
    (tmp_path / "tokenizer.json").rename(finished_run / "export" / "tokenizer.json")
    whole = (finished_run / "export" / "model.safetensors").read_bytes()
    (finished_run / "export" / "model.safetensors").write_bytes(whole[:100])
    is_rejected(finished_run, "export cannot be loaded: .*model.safetensors: damaged")
    (finished_run / "export" / "model.safetensors").write_bytes(whole)
    (tmp_path / "data" / "table.csv").unlink()
    is_rejected(finished_run, "the data that the run was trained on cannot be read from here: .*table.csv")
    config = json.loads((finished_run / "config.json").read_text())
    (finished_run / "config.json").write_text(json.dumps(config | {"model": "gan"}))
    is_rejected(finished_run, "holds a run of gan, not of clip")
