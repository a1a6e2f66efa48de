"""What a search finds, what is kept of it, what it draws, and its command line."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.clip.colours import HOSTILE, colour_gallery
from tests.clip.small_clip import small_config, small_tokenizer
from unisono_models.clip import gallery as gallery_features
from unisono_models.clip import gallery as gallery_module
from unisono_models.clip.commands.search import main, slug
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.gallery import Gallery, RunError, find_export, open_gallery
from unisono_models.clip.model import Clip
from unisono_models.clip.report import Row, draw_results, draw_searches
from unisono_models.datasets.emoji import concepts as emoji_concepts
from unisono_models.datasets.emoji import images as emoji_drawings

COLOURS = ("red", "green", "blue", "white")


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    return Clip(small_config(), small_tokenizer()).eval()


@pytest.fixture
def few_emoji(monkeypatch):
    """The first concepts only, toned ones among them: all would take a while to draw."""
    concepts, drawings = emoji_concepts.list_emoji()
    few = concepts[:120], tuple(drawing for drawing in drawings if drawing.concept < 120)
    for module in (gallery_module, emoji_drawings):
        monkeypatch.setattr(module, "list_emoji", lambda: few)
    return few


@pytest.fixture
def run(tmp_path, clip):
    """A finished run whose data is a table of five pictures, one of them broken."""
    path, data = tmp_path / "runs" / "clip-mine", tmp_path / "data"
    data.mkdir()
    for colour in COLOURS:
        Image.new("RGB", (20, 30), colour).save(data / f"{colour}.png")
    (data / "broken.png").write_bytes(b"no picture")
    rows = [f"{name}.png,a {name} wall" for name in (*COLOURS[:2], "broken", *COLOURS[2:])]
    (data / "table.csv").write_text("\n".join(["shot,what", *rows]))
    clip.save_pretrained(path / "export")
    config = {
        "model": "clip",
        "recipe": "mine",
        "config": {"data": {"source": str(data / "table.csv"), "image": "shot", "caption": "what"}},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


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


def test_search_by_picture_ranks_by_the_closest_drawing():
    gallery, _ = colour_gallery()
    for place in (0, 3, 5, 8):
        picture = gallery.draw(place, 40)
        for query in (picture, as_png(picture)):
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
        (b"no picture", {}, "not a picture"),
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
    gallery = Gallery.from_emoji(clip, drawings=tmp_path)
    hits = gallery.search("a red heart", top=999, tones="all")
    assert sorted(place for hit in hits for place in (hit.index, *hit.others)) == list(range(len(drawings)))
    assert [hit.label for hit in hits] != [concept.name for concept in concepts] and len(hits) == len(concepts)
    for hit in hits:
        assert all(concepts[drawings[k].concept].name == hit.label for k in (hit.index, *hit.others))
    assert "☎️" in {hit.emoji for hit in hits}, "to be copied as they are written, with U+FE0F"
    assert any(concept.toned for concept in concepts) and not any("skin" in hit.label for hit in gallery.search("a", top=999))
    pixels = emoji_drawings.load_emoji_images(16, cache=tmp_path)
    torch.testing.assert_close(gallery.features, clip.encode_images(pixels), atol=1e-5, rtol=0)
    assert gallery.draw(7, 16).tobytes() == pixels[7].permute(1, 2, 0).contiguous().numpy().tobytes()


class FivePairs:
    """Pairs of which the second has no picture, as a part of a larger data set: `index` is not the row."""

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


def test_gallery_of_pairs_leaves_broken_ones_out(clip):
    gallery = Gallery.from_pairs(clip, FivePairs())
    assert [item.label for item in gallery.items] == ["grey 0", "grey 2", "grey 3", "grey 4"]
    assert gallery.draw(1, 4).getpixel((0, 0)) == (100, 100, 100)
    found = gallery.search(gallery.draw(3, 16), top=1)[0]
    assert found.score == pytest.approx(1, abs=1e-5) and gallery.features[3] @ gallery.features[found.index] > 0.9999
    assert [item.label for item in Gallery.from_pairs(clip, FivePairs(), limit=2).items] == ["grey 0", "grey 4"]


def test_features_are_kept_and_computed_again_if_anything_changed(clip, tmp_path, monkeypatch):
    computed = []
    encode = gallery_features._encode
    monkeypatch.setattr(gallery_features, "_encode", lambda *args: computed.append(1) or encode(*args))
    file = tmp_path / "gallery.safetensors"

    def times(data="a", clip=clip):
        before = len(computed)
        gallery = Gallery.from_pairs(clip, FivePairs(), cache=file, data=data)
        assert torch.equal(gallery.features, first) and [item.label for item in gallery.items][1] == "grey 2"
        return len(computed) - before

    first = Gallery.from_pairs(clip, FivePairs(), cache=file, data="a").features
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
    assert not torch.equal(Gallery.from_pairs(other, FivePairs(), cache=file, data="a").features, first)


def test_features_that_cannot_be_kept_are_no_error(clip, tmp_path, capsys):
    assert Gallery.from_pairs(clip, FivePairs(), cache=tmp_path / "gone" / "x.safetensors").features.shape == (4, 8)
    assert "cannot be written" in capsys.readouterr().err


def test_open_gallery_of_a_run_of_other_data(run):
    gallery, folder = open_gallery(run)
    assert folder == run and (run / "gallery.safetensors").exists()
    assert [item.label for item in gallery.items] == [f"a {name} wall" for name in COLOURS]
    for path in (run / "export", Path(str(run / "export") + "/")):
        assert find_export(path).folder.absolute() == run.absolute(), "the export folder of a run is the run"


def test_open_gallery_says_what_is_wrong(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(path, message):
        with pytest.raises(RunError, match=message):
            open_gallery(path)

    refused(tmp_path / "none", r"none: no such directory. Here are runs/clip-mine")
    refused(tmp_path / "data", "neither a run .* nor an exported model. Here are runs/clip-mine")
    (run / "export" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    refused(run, "the run has not finished: export/tokenizer.json is not there yet")
    (tmp_path / "tokenizer.json").rename(run / "export" / "tokenizer.json")
    whole = (run / "export" / "model.safetensors").read_bytes()
    (run / "export" / "model.safetensors").write_bytes(whole[:100])
    refused(run, "export cannot be loaded: .*model.safetensors: damaged")
    (run / "export" / "model.safetensors").write_bytes(whole)
    (tmp_path / "data" / "table.csv").unlink()
    refused(run, "the data that the run was trained on cannot be read from here: .*table.csv")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": "gan"}))
    refused(run, "holds a run of gan, not of clip")


def test_command_searches_an_exported_model_of_emoji(run, few_emoji, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export = (run / "export").rename(tmp_path / "taken-away")
    main([str(export), "Red heart!", "a cat", "--top", "5", "--vendor", "openmoji"])
    path = export / "samples" / "search-red-heart-and-1-more.png"
    printed = capsys.readouterr().out
    assert f"drawn in {path}" in printed and printed.count("openmoji") == 10
    assert "Red heart!" in printed and "a cat" in printed
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > 900
    assert (export / "gallery.safetensors").exists()


def test_command_searches_by_picture(run, tmp_path, capsys):
    main([str(run), "--image", str(tmp_path / "data" / "green.png"), "--top", "2", "--out", str(tmp_path / "new" / "g.png")])
    rows = [line for line in capsys.readouterr().out.splitlines() if "wall" in line]
    assert "a green wall" in rows[0] and "1.000" in rows[0] and len(rows) == 2
    assert (tmp_path / "new" / "g.png").exists() and not (run / "samples").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to look for"),
        (["red", " "], "a query is empty"),
        (["red", "--top", "0"], "--top 0 must be between 1 and 100"),
        (["red", "--out", "x.jpg"], "has to end in .png"),
        (["red", "--vendor", "noto"], "vendor='noto': the gallery has no vendors"),
        (["--image", "none.png"], "none.png cannot be read as a picture: No such file"),
        (["--image", "."], "cannot be read as a picture"),
        (["--image", "broken.png"], "broken.png cannot be read as a picture"),
    ],
)
def test_command_rejects(run, args, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(SystemExit, match=message):
        main([str(run), *args])


def test_drawing_has_query_and_pictures_where_they_belong(tmp_path):
    gallery, _ = colour_gallery()
    draw_searches(gallery, ["red", "blue and a great many more words than there is room for " * 4], tmp_path / "a.png", top=4)
    draw_searches(gallery, ["red"], tmp_path / "b.png", top=4)
    with Image.open(tmp_path / "a.png") as two, Image.open(tmp_path / "b.png") as one:
        colours = [[two.getpixel((304 + 14 + 48 + k * 136, top + 14 + 48)) for k in range(4)] for top in (36, 36 + 192)]
        assert one.size == (two.width, two.height - 192)
        assert one.crop((0, 0, one.width, 190)).tobytes() == two.crop((0, 0, one.width, 190)).tobytes()
        between = two.crop((282, 0, 302, 190)), two.crop((282, 240, 302, 400))
    assert colours[0][:3] == [(255, 0, 0), (255, 128, 0), (255, 255, 0)] and colours[1][0] == (0, 0, 255)
    assert all(len(part.getcolors()) == 1 for part in between), "words run into the pictures"


def test_drawing_takes_hostile_names_and_odd_queries(tmp_path):
    gallery, _ = colour_gallery()
    hit = gallery.search(torch.tensor([0.2, 0.1, 0.9]), top=1)[0]
    assert hit.label == HOSTILE
    rows = [Row("漢字 \x00 " + "w" * 500, [hit], [gallery.draw(hit.index, 96)], None), Row("nothing", [], [])]
    rows.append(Row("a picture", [hit], [gallery.draw(0, 96)], shown=Image.new("RGBA", (300, 9))))
    draw_results(rows, tmp_path / "a.png", credits=["by nobody " * 60])
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    with pytest.raises(ValueError, match="rows is empty"):
        draw_results([], tmp_path / "b.png")


def test_slug_is_fit_for_a_file_name():
    assert slug(["Red heart!"]) == "red-heart" and slug(["../../etc/passwd", "x"]) == "etc-passwd-and-1-more"
    assert slug(["❤️"]) == "query" and slug(["漢字"]) == "漢字" and len(slug(["ab " * 99])) <= 40
