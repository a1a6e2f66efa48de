"""Pictures side by side in one picture file, enlarged so that each of their pixels is seen."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.run.plots import INKS

CELL = 56  # pixels a side that a picture gets at least
GAP, MARGIN, LETTERS = 4, 12, 15
ROOM = 240  # for the name of a row: what is longer is shortened
BACKGROUND, INK = INKS["dark"][:2]  # on light and dark pages alike: digits are light on dark, and so is what is around them


def draw_grid(
    pictures: Tensor, *, columns: int, row_names: Sequence[str] = (), column_names: Sequence[str] = (), cell: int = CELL
) -> Image.Image:
    """`pictures` (n, 1 or 3, size, size) between -1 and 1 in rows of `columns`, in reading order, names beside and above them.

    Each is enlarged by the smallest whole number that makes it `cell` pixels or more, without smoothing.

    Example:
        >>> draw_grid(torch.zeros(6, 1, 16, 16), columns=3).size  # 3 x 2 of 64 pixels, with gaps and a margin
        (224, 156)
    """
    count, channels, size, _ = pictures.shape
    rows = math.ceil(count / columns) if columns > 0 else 0
    if not count or columns < 1 or channels not in (1, 3):
        raise ValueError(
            f"draw_grid: pictures of shape {tuple(pictures.shape)} in {columns} columns: must be (n, 1 or 3, size, size), "
            "at least one, in one column or more"
        )
    for what, names, wanted in (("row_names", row_names, rows), ("column_names", column_names, columns)):
        if names and len(names) != wanted:
            raise ValueError(f"draw_grid: {len(names)} {what}, but there are {wanted} to name")
    side = size * max(1, math.ceil(cell / size))
    row_names = [_shorten(name, ROOM) for name in row_names]
    left = MARGIN + (math.ceil(max(_font().getlength(name) for name in row_names)) + MARGIN if row_names else 0)
    top = MARGIN + (LETTERS + GAP * 2 if column_names else 0)
    width, height = left + columns * (side + GAP) - GAP + MARGIN, top + rows * (side + GAP) - GAP + MARGIN
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    for place, picture in enumerate(to_pixels(pictures)):
        row, column = divmod(place, columns)
        # numpy is what Pillow takes: (h, w) of grey, (h, w, 3) of colours
        array = picture[0].numpy() if channels == 1 else picture.permute(1, 2, 0).contiguous().numpy()
        enlarged = Image.fromarray(array).resize((side, side), Image.Resampling.NEAREST)
        sheet.paste(enlarged, (left + column * (side + GAP), top + row * (side + GAP)))
    pen = ImageDraw.Draw(sheet)
    for row, name in enumerate(row_names):
        pen.text((left - MARGIN, top + row * (side + GAP) + side // 2), name, INK, _font(), anchor="rm")
    for column, name in enumerate(column_names):
        at = (left + column * (side + GAP) + side // 2, MARGIN + LETTERS // 2)
        pen.text(at, _shorten(name, side), INK, _font(), anchor="mm")
    return sheet


def save_picture(picture: Image.Image, path: Path) -> None:
    """A PNG at `path`, which is whole or as it was before. Its directory is made if need be."""
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content.getvalue())


def to_pixels(pictures: Tensor) -> Tensor:
    """Numbers between -1 and 1 to uint8 on the CPU: the inverse of Images.floats. What is no number becomes grey.

    Example:
        >>> to_pixels(torch.tensor([-1.0, 0.0, 1.0, 7.0, float("nan")])).tolist()
        [0, 128, 255, 255, 128]
    """
    levels = (pictures.detach().float().nan_to_num(0.0) + 1) * 127.5
    return levels.round().clamp(0, 255).to("cpu", torch.uint8)


def _shorten(text: str, room: float) -> str:
    text = text[:200]
    if _font().getlength(text) <= room:
        return text
    while text and _font().getlength(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


@cache
def _font() -> ImageFont.FreeTypeFont:
    return font(LETTERS)


def font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings: the same on every machine."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


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
