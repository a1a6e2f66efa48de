"""The image of search results."""

import pytest
import torch
from PIL import Image

from tests.clip.colour_gallery import HOSTILE, colour_gallery
from unisono_models.clip.figures import SearchRow, draw_search_rows, draw_searches


def test_drawing_has_query_and_images_where_they_belong(tmp_path):
    gallery, _ = colour_gallery()
    draw_searches(gallery, ["red", "blue and a great many more words than there is room for " * 4], tmp_path / "a.png", top=4)
    draw_searches(gallery, ["red"], tmp_path / "b.png", top=4)
    with Image.open(tmp_path / "a.png") as two, Image.open(tmp_path / "b.png") as one:
        colours = [[two.getpixel((304 + 14 + 48 + k * 136, top + 14 + 48)) for k in range(4)] for top in (36, 36 + 192)]
        assert one.size == (two.width, two.height - 192)
        assert one.crop((0, 0, one.width, 190)).tobytes() == two.crop((0, 0, one.width, 190)).tobytes()
        between = two.crop((282, 0, 302, 190)), two.crop((282, 240, 302, 400))
    assert colours[0][:3] == [(255, 0, 0), (255, 128, 0), (255, 255, 0)] and colours[1][0] == (0, 0, 255)
    assert all(len(part.getcolors()) == 1 for part in between), "words overlap the images"


def test_drawing_takes_hostile_names_and_odd_queries(tmp_path):
    gallery, _ = colour_gallery()
    hit = gallery.search(torch.tensor([0.2, 0.1, 0.9]), top=1)[0]
    assert hit.label == HOSTILE
    rows = [SearchRow("漢字 \x00 " + "w" * 500, [hit], [gallery.draw(hit.index, 96)], None), SearchRow("nothing", [], [])]
    rows.append(SearchRow("an image", [hit], [gallery.draw(0, 96)], query_image=Image.new("RGBA", (300, 9))))
    draw_search_rows(rows, tmp_path / "a.png", credits=["by nobody " * 60])
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    with pytest.raises(ValueError, match="rows is empty"):
        draw_search_rows([], tmp_path / "b.png")
