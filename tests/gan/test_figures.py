"""Grids of images and the animation."""

import pytest
import torch
from PIL import Image

from tests.gan.small_runs import SIDE, cells, draw_images
from unisono_models.gan.figures import (
    BACKGROUND,
    FIRST_FRAME,
    GAP,
    LAST_FRAME,
    MARGIN,
    draw_grid,
    find_frames,
    frame_path,
    write_animation,
)


@pytest.mark.parametrize("channels", [1, 3])
def test_grid_has_the_pixels_of_its_images(channels):
    images = draw_images(5, channels=channels)
    image = draw_grid(images.floats(torch.arange(5)), columns=3)
    assert image.size == (2 * MARGIN + 3 * SIDE + 2 * GAP, 2 * MARGIN + 2 * SIDE + GAP)
    shown = cells(image, rows=2, columns=3)
    assert torch.equal(shown[:5], images.pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1))
    assert image.getpixel((MARGIN + SIDE, MARGIN)) == image.getpixel((0, 0)) == tuple(bytes.fromhex(BACKGROUND[1:]))
    assert shown[5].unique(dim=0).shape[0] == 1  # an empty place


def test_names_do_not_change_the_images_of_a_grid():
    images = draw_images(6).floats(torch.arange(6))
    plain = draw_grid(images, columns=3)
    named = draw_grid(images, columns=3, row_names=["cat", "an owl " * 50], column_names=["a", "b", "c" * 99])
    dx, dy = named.width - plain.width, named.height - plain.height
    assert 240 < dx + MARGIN < 300 and dy > 0
    inner = named.crop((MARGIN + dx, MARGIN + dy, named.width, named.height))
    assert inner.tobytes() == plain.crop((MARGIN, MARGIN, plain.width, plain.height)).tobytes()
    with pytest.raises(ValueError, match="1 row_names, expected 2"):
        draw_grid(images, columns=3, row_names=["cat"])


def test_animation_has_all_frames_and_shows_the_ends_longer(tmp_path):
    images = draw_images(5).floats(torch.arange(5))
    for place, step in enumerate((100, 9, 20)):  # by number, not by name or age
        draw_grid(images[place : place + 1], columns=1).save(frame_path(tmp_path, step))
    (tmp_path / "step-x.png").touch()
    frames = find_frames(tmp_path)
    assert list(frames) == [9, 20, 100]
    write_animation(frames, tmp_path / "all.webp")
    with Image.open(tmp_path / "all.webp") as film:
        times = []
        for number, path in enumerate(frames[step] for step in (100, 9, 20)):  # a still shows the result
            film.seek(number)
            film.load()
            times.append(film.info["duration"])
            with Image.open(path) as frame:
                assert film.convert("RGB").crop((0, 0, *frame.size)).tobytes() == frame.tobytes()
        assert film.n_frames == 3 and film.info["loop"] == 0
    assert times[0] == LAST_FRAME and times[1] == FIRST_FRAME and 0 < times[2] < FIRST_FRAME


def test_large_animation_gets_fewer_frames(tmp_path):
    for step in range(8):
        draw_grid(draw_images(9, channels=3, seed=step).floats(torch.arange(9)), columns=3).save(frame_path(tmp_path, step))
    write_animation(find_frames(tmp_path), path := tmp_path / "all.webp")
    whole = path.stat().st_size
    write_animation(find_frames(tmp_path), path, max_bytes=whole * 2 // 3)
    assert path.stat().st_size <= whole * 2 // 3
    with Image.open(path) as film:
        assert film.n_frames == 4
