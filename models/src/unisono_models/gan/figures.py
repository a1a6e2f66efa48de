"""Image files that show generated images: grids, and the animation of a training."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.run.plots import INKS, dejavu_sans

_MIN_CELL = 56  # smallest size of an image in a grid, in pixels
GAP = 4
MARGIN = 12
FONT_SIZE = 15
MAX_NAME_WIDTH = 240  # pixels; longer row names are shortened
BACKGROUND, INK = INKS["dark"][:2]  # dark on light and dark pages alike, since the digits are light on dark
# The animation: durations are in milliseconds.
FIRST_FRAME = 900
LAST_FRAME = 3000
_FRAMES_BETWEEN = 7000
_SHORTEST_FRAME = 90
_LONGEST_FRAME = 400
_MAX_FRAMES = 60
_MAX_BYTES = 1_000_000
_STRIP_HEIGHT = FONT_SIZE + MARGIN + 2
_BAR = "#5ab0e8"
_TRACK = "#2c313c"


def draw_grid(images: Tensor, *, columns: int, row_names: Sequence[str] = (), column_names: Sequence[str] = ()) -> Image.Image:
    """Draw images (n, 1 or 3, size, size) in [-1, 1] in rows of `columns`, in reading order.

    Each image is enlarged by the smallest whole number that makes it 56 pixels or more, without smoothing. Row names stand
    on the left, column names above.

    Example:
        >>> draw_grid(torch.zeros(6, 1, 16, 16), columns=3).size  # 3 x 2 of 64 pixels, with gaps and a margin
        (224, 156)
    """
    count, channels, size, _ = images.shape
    rows = math.ceil(count / columns) if columns > 0 else 0
    if not count or columns < 1 or channels not in (1, 3):
        raise ValueError(
            f"draw_grid: images of shape {tuple(images.shape)} in {columns} columns: expected (n, 1 or 3, size, size) with one "
            "image or more, in one column or more"
        )
    for argument, names, expected in (("row_names", row_names, rows), ("column_names", column_names, columns)):
        if names and len(names) != expected:
            raise ValueError(f"draw_grid: {len(names)} {argument}, expected {expected}")
    side = size * max(1, math.ceil(_MIN_CELL / size))
    row_names = [_shorten(name, MAX_NAME_WIDTH) for name in row_names]
    left = MARGIN + (math.ceil(max(dejavu_sans(FONT_SIZE).getlength(name) for name in row_names)) + MARGIN if row_names else 0)
    top = MARGIN + (FONT_SIZE + GAP * 2 if column_names else 0)
    width = left + columns * (side + GAP) - GAP + MARGIN
    height = top + rows * (side + GAP) - GAP + MARGIN
    grid = Image.new("RGB", (width, height), BACKGROUND)
    for index, image in enumerate(to_uint8(images)):
        row, column = divmod(index, columns)
        # Pillow takes numpy arrays of shape (h, w) for grey and (h, w, 3) for colour
        array = image[0].numpy() if channels == 1 else image.permute(1, 2, 0).contiguous().numpy()
        enlarged = Image.fromarray(array).resize((side, side), Image.Resampling.NEAREST)
        grid.paste(enlarged, (left + column * (side + GAP), top + row * (side + GAP)))
    draw = ImageDraw.Draw(grid)
    for row, name in enumerate(row_names):
        draw.text((left - MARGIN, top + row * (side + GAP) + side // 2), name, INK, dejavu_sans(FONT_SIZE), anchor="rm")
    for column, name in enumerate(column_names):
        position = (left + column * (side + GAP) + side // 2, MARGIN + FONT_SIZE // 2)
        draw.text(position, _shorten(name, side), INK, dejavu_sans(FONT_SIZE), anchor="mm")
    return grid


def save_png(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically. The directory is created if necessary."""
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content.getvalue())


def to_uint8(images: Tensor) -> Tensor:
    """Convert numbers in [-1, 1] to uint8 on the CPU, the inverse of ImageDataset.floats. NaN becomes grey.

    Example:
        >>> to_uint8(torch.tensor([-1.0, 0.0, 1.0, 7.0, float("nan")])).tolist()
        [0, 128, 255, 255, 128]
    """
    levels = (images.detach().float().nan_to_num(0.0) + 1) * 127.5
    return levels.round().clamp(0, 255).to("cpu", torch.uint8)


def frame_path(folder: Path, step: int) -> Path:
    """Return the path of the sample grid of `step`."""
    return folder / f"step-{step:08d}.png"


def find_frames(folder: Path) -> dict[int, Path]:
    """Return the sample grids in `folder` by step, sorted."""
    matches = ((re.fullmatch(r"step-(\d+)\.png", path.name), path) for path in folder.glob("step-*.png"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write_animation(frames: Mapping[int, Path], path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
    """Write the sample grids `frames`, by step and sorted, as an animated WebP that repeats.

    Each frame shows its step; the first and the last step stay longer. The file begins with the last step, then come the others
    in order: what does not play the animation (a printer, a preview) shows the result. At most 60 frames are used. The file is
    lossless if that fits into `max_bytes`, else lossy, and if that is not enough it has fewer frames, at least 2.

    Raises: ValueError if `frames` is empty.
    """
    if not frames:
        raise ValueError("write_animation: frames is empty; one step at least is needed")
    steps = choose_evenly(list(frames), _MAX_FRAMES)
    while True:
        images = [_draw_frame(frames[step], step, steps[-1]) for step in (steps[-1], *steps[:-1])]
        content = _encode(images, lossless=True)
        for quality in (75, 40):  # large pixels are smaller lossless, detailed images lossy
            if len(content) > max_bytes:
                content = min(content, _encode(images, quality=quality), key=len)
        if len(content) <= max_bytes or len(steps) <= 2:
            break
        steps = choose_evenly(steps, max(2, len(steps) // 2))
    atomic_write(path, content)


def choose_evenly(steps: list[int], count: int) -> list[int]:
    """Return at most `count` of `steps`, with the first and the last.

    Example:
        >>> choose_evenly([0, 1, 2, 3, 4, 5, 6], 3)
        [0, 3, 6]
    """
    if len(steps) <= count:
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _durations(count: int) -> list[int]:
    between = max(_SHORTEST_FRAME, min(_LONGEST_FRAME, _FRAMES_BETWEEN // max(1, count - 2)))
    return [LAST_FRAME, FIRST_FRAME, *[between] * (count - 2)][:count]


def _draw_frame(path: Path, step: int, last: int) -> Image.Image:
    """Return the grid at `path` with a strip below that shows the step and a progress bar."""
    with Image.open(path) as opened:
        grid = opened.convert("RGB")
    frame = Image.new("RGB", (grid.width, grid.height + _STRIP_HEIGHT), BACKGROUND)
    frame.paste(grid)
    draw = ImageDraw.Draw(frame)
    middle = grid.height + FONT_SIZE // 2 + 1
    draw.text((MARGIN, middle), f"step {step:,}", INK, dejavu_sans(FONT_SIZE), anchor="lm")
    left = 2 * MARGIN + int(dejavu_sans(FONT_SIZE).getlength(f"step {last:,}"))
    right = grid.width - MARGIN
    if right > left:
        draw.rectangle((left, middle - 1, right, middle + 1), _TRACK)
        draw.rectangle((left, middle - 1, left + (right - left) * step // max(1, last), middle + 1), _BAR)
    return frame


def _encode(images: list[Image.Image], **options: float) -> bytes:
    content = io.BytesIO()
    first, *others = images
    durations = _durations(len(images))
    first.save(content, "WEBP", save_all=True, append_images=others, duration=durations, loop=0, method=4, **options)
    return content.getvalue()


def _shorten(text: str, width: float) -> str:
    text = text[:200]
    if dejavu_sans(FONT_SIZE).getlength(text) <= width:
        return text
    while text and dejavu_sans(FONT_SIZE).getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
