"""How the generator has learned: the pictures of a run one after the other, as one animated picture."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from unisono_models.gan.pictures.grid import BACKGROUND, INK, LETTERS, MARGIN, font
from unisono_models.training.checkpoint.atomic_file import atomic_write

FIRST, LAST = 900, 3000  # milliseconds
_ALL, _SHORTEST, _LONGEST = 7000, 90, 400  # of those between
_MOST = 60  # frames
_BYTES = 1_000_000
_STRIP = LETTERS + MARGIN + 2
_BAR, _TRACK = "#5ab0e8", "#2c313c"


def frame_path(folder: Path, step: int) -> Path:
    """Where the picture of `step` is kept."""
    return folder / f"step-{step:08d}.png"


def find_frames(folder: Path) -> dict[int, Path]:
    """The pictures in `folder` by their steps, in order."""
    found = {
        int(match[1]): path for path in folder.glob("step-*.png") if (match := re.fullmatch(r"step-(\d+)\.png", path.name))
    }
    return dict(sorted(found.items()))


def write_animation(frames: Mapping[int, Path], path: Path, *, most_bytes: int = _BYTES) -> None:
    """The pictures `frames`, by step and in order, as an animated WebP that begins again at its end.

    Each says its step; the first and the last stay longer. Of many, as many as can be looked at are taken, evenly. It is
    lossless, unless that would be larger than `most_bytes`; what is larger with some loss, too, has fewer frames, 2 at least.

    Raises: ValueError if there are none.
    """
    if not frames:
        raise ValueError("write_animation: frames is empty: it needs the picture of one step at least")
    steps = choose_evenly(list(frames), _MOST)
    while True:
        pictures = [_with_step(frames[step], step, steps[-1]) for step in steps]
        content = _encode(pictures, lossless=True)
        for quality in (75, 40):  # large pixels are smaller without loss, fine drawings with some
            if len(content) > most_bytes:
                content = min(content, _encode(pictures, quality=quality), key=len)
        if len(content) <= most_bytes or len(steps) <= 2:
            break
        steps = choose_evenly(steps, max(2, len(steps) // 2))
    atomic_write(path, content)


def choose_evenly(steps: list[int], most: int) -> list[int]:
    """At most `most` of `steps`, the first and the last among them.

    Example:
        >>> choose_evenly([0, 1, 2, 3, 4, 5, 6], 3)
        [0, 3, 6]
    """
    if len(steps) <= most:
        return steps
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def durations(count: int) -> list[int]:
    """Milliseconds for each of `count` frames."""
    between = max(_SHORTEST, min(_LONGEST, _ALL // max(1, count - 2)))
    return [FIRST, *[between] * (count - 2), LAST] if count > 1 else [LAST]


def _with_step(path: Path, step: int, last: int) -> Image.Image:
    """The picture with a line below: how far the training has come."""
    with Image.open(path) as opened:
        frame = opened.convert("RGB")
    sheet = Image.new("RGB", (frame.width, frame.height + _STRIP), BACKGROUND)
    sheet.paste(frame)
    pen, middle = ImageDraw.Draw(sheet), frame.height + LETTERS // 2 + 1
    letters = font(LETTERS)
    pen.text((MARGIN, middle), f"step {step:,}", INK, letters, anchor="lm")
    left, right = 2 * MARGIN + int(letters.getlength(f"step {last:,}")), frame.width - MARGIN
    if right > left:
        pen.rectangle((left, middle - 1, right, middle + 1), _TRACK)
        pen.rectangle((left, middle - 1, left + (right - left) * step // max(1, last), middle + 1), _BAR)
    return sheet


def _encode(pictures: list[Image.Image], **loss: float) -> bytes:
    content = io.BytesIO()
    first, *others = pictures
    times = durations(len(pictures))
    first.save(content, "WEBP", save_all=True, append_images=others, duration=times, loop=0, method=4, **loss)
    return content.getvalue()
