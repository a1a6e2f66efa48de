"""Search results as a picture: a row for each query, what was found to its right."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from unisono_models.clip.config import Config
from unisono_models.clip.data.dataset import Source
from unisono_models.clip.data.emoji import emoji_pairs
from unisono_models.clip.evaluate import Encoder, pixel_floor
from unisono_models.clip.gallery import Gallery, Hit
from unisono_models.clip.loss import Learner
from unisono_models.clip.model import Clip
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.report import ReportImage, write_report
from unisono_models.training.run.run_directory import RunDirectory

PICTURE = 96  # pixels; most drawings have 72, which is as far as they go without looking soft
_PADDING, _GAP, _MARGIN, _LEFT = 14, 12, 36, 268
_TILE = PICTURE + 2 * _PADDING
_NAMES = 46  # below a tile: two lines
_ROW = _TILE + _NAMES + 22
_PAPER, _CARD, _EDGE, _RULE = "#f6f5f2", "#ffffff", "#e4e2dc", "#e4e2dc"
_INK, _SOFT, _ACCENT = "#1d1d21", "#6e6c68", "#c2410c"


@dataclass(frozen=True)
class Row:
    """A query and what it found. `pictures`: one for each hit. `shown`: the query if that is a picture, `query` its name."""

    query: str
    hits: Sequence[Hit]
    pictures: Sequence[Image.Image]
    shown: Image.Image | None = None


def draw_searches(gallery: Gallery, queries: Sequence[str], path: Path, *, top: int = 8) -> None:
    """Search for each of `queries` and draw the results into the PNG file `path`.

    Example:
        draw_searches(gallery, ["a red heart", "something cold", "party!"], Path("search.png"))
    """
    draw_results([make_row(gallery, query, gallery.search(query, top=top)) for query in queries], path, credits=gallery.credits)


def make_row(gallery: Gallery, query: str, hits: Sequence[Hit], *, shown: Image.Image | None = None) -> Row:
    """A row with the pictures that the gallery has for `hits`."""
    return Row(query, hits, [gallery.draw(hit.index, PICTURE) for hit in hits], shown)


def draw_results(rows: Sequence[Row], path: Path, *, credits: Sequence[str] = ()) -> None:
    """Draw `rows` into the PNG file `path`: all at once, so that nobody sees half of it. `credits` go below in small print.

    Letters that DejaVu Sans has not, such as Chinese ones, come out as boxes.
    """
    if not rows:
        raise ValueError("draw_results: rows is empty: there is nothing to draw")
    across = max(1, *(len(row.hits) for row in rows))
    width = max(2 * _MARGIN + _LEFT + across * (_TILE + _GAP) - _GAP, 2 * _MARGIN + _LEFT + 2 * _TILE)
    small = _fit(" · ".join(credits), _font(13), width - 2 * _MARGIN, lines=3)
    foot = 20 * len(small) + 14 if small else 0
    image = Image.new("RGB", (width, 2 * _MARGIN + len(rows) * _ROW - 22 + foot), _PAPER)
    pen = ImageDraw.Draw(image)
    for number, row in enumerate(rows):
        top = _MARGIN + number * _ROW
        if number:
            pen.line([(_MARGIN, top - 12), (width - _MARGIN, top - 12)], fill=_RULE)
        _draw_query(image, pen, row, top)
        for place, (hit, picture) in enumerate(zip(row.hits, row.pictures, strict=True)):
            _draw_hit(image, pen, hit, picture, _MARGIN + _LEFT + place * (_TILE + _GAP), top, best=place == 0)
    for line, text in enumerate(small):
        pen.text((_MARGIN, image.height - _MARGIN + 12 - 20 * (len(small) - line) + 6), text, font=_font(13), fill=_SOFT)
    _save(image, path)


def _draw_query(image: Image.Image, pen: ImageDraw.ImageDraw, row: Row, top: int) -> None:
    room = _LEFT - 28
    if row.shown is not None:
        thumb = row.shown.convert("RGB")
        thumb.thumbnail((_TILE, _TILE))
        image.paste(thumb, (_MARGIN, top + (_TILE - thumb.height) // 2))
        for line, text in enumerate(_fit(row.query, _font(15), room, lines=2)):
            pen.text((_MARGIN, top + _TILE + 8 + 19 * line), text, font=_font(15), fill=_SOFT)
        return
    for size in (30, 26, 22, 18):  # as large as it goes
        lines = _fit(row.query, _font(size, bold=True), room, lines=4)
        if len(lines) <= 3 and not lines[-1].endswith("…"):
            break
    height = round(size * 1.25)
    start = top + (_TILE - height * len(lines)) / 2
    for line, text in enumerate(lines):
        pen.text((_MARGIN, start + line * height), text, font=_font(size, bold=True), fill=_INK)


def _draw_hit(
    image: Image.Image, pen: ImageDraw.ImageDraw, hit: Hit, picture: Image.Image, left: int, top: int, *, best: bool
) -> None:
    _draw_card(image, left, top, edge=_ACCENT if best else _EDGE, width=2 if best else 1)
    image.paste(picture.convert("RGB"), (left + _PADDING, top + _PADDING))
    font = _font(14)
    for line, text in enumerate(_fit(hit.label, font, _TILE + 4, lines=2)):
        pen.text((left + _TILE / 2, top + _TILE + 8 + 18 * line), text, font=font, fill=_INK if best else _SOFT, anchor="ma")


def _draw_card(image: Image.Image, left: int, top: int, *, edge: str, width: int) -> None:
    """A tile with round corners, drawn four times too large and reduced: Pillow's own are jagged."""
    scale, size = 4, _TILE
    card = Image.new("RGB", (size * scale, size * scale), _PAPER)
    box = (0, 0, size * scale - 1, size * scale - 1)
    ImageDraw.Draw(card).rounded_rectangle(box, radius=16 * scale, fill=_CARD, outline=edge, width=width * scale)
    image.paste(card.resize((size, size), Image.Resampling.LANCZOS), (left, top))


def _fit(text: str, font: ImageFont.FreeTypeFont, room: float, *, lines: int) -> list[str]:
    """`text` on at most `lines` lines, each within `room` pixels; what does not fit ends in "…"."""
    words = [piece for word in text.split() for piece in _pieces(word, font, room)]
    found: list[str] = []
    for place, word in enumerate(words):
        longer = f"{found[-1]} {word}" if found else word
        if found and font.getlength(longer) <= room:
            found[-1] = longer
        elif len(found) < lines:
            found.append(word)
        else:
            found[-1] = _shorten(f"{found[-1]} {' '.join(words[place:])}", font, room)
            break
    return found


def _pieces(word: str, font: ImageFont.FreeTypeFont, room: float) -> list[str]:
    """A word in parts that each fit."""
    parts = [""]
    for letter in word[:200]:
        if parts[-1] and font.getlength(parts[-1] + letter) > room:
            parts.append("")
        parts[-1] += letter
    return parts


def _shorten(text: str, font: ImageFont.FreeTypeFont, room: float) -> str:
    text = text[:200]
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


@cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings: the same on every machine."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    try:
        image.save(temporary, "PNG", optimize=True)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


QUERIES = ("red heart", "happy dog", "fruit", "rain and thunder", "I am so tired", "fish in the sea", "let's party")
FIGURES = ("recall@1", "recall@5", "recall@10", "median_rank")


def conclude(
    run: RunDirectory,
    config: Config,
    learner: Learner,
    encoder: Encoder,
    source: Source,
    figures: Mapping[str, float],
    skipped: SkipReport,
) -> None:
    """Write what the run leaves behind, and say where it is. Every rank calls this; rank 0 writes."""
    ranks, is_emoji = encoder.ranks, config.data.source == "emoji"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(encoder.model, options=options)  # whole, on rank 0
    floor = pixel_floor(source.tests, ranks, size=encoder.size)
    broken = skipped.report()
    features = encoder.all_pictures(emoji_pairs()).float().cpu() if is_emoji else None
    pictures = []
    with raise_together("conclude"):
        if ranks.first:
            clip = _whole(learner, weights)
            clip.save_pretrained(run.export)
            if is_emoji:
                path = run.samples / "search.png"
                gallery = Gallery.from_emoji(clip, cache=run.path / "gallery.safetensors", features=features)
                draw_searches(gallery, QUERIES, path)
                pictures.append(ReportImage(path, "Typed words, and the emoji that the model finds for them"))
    rows = table_rows({**figures, **floor})
    write_report(
        run,
        title="A contrastive learner of pictures and captions",
        intro=_intro(config, source),
        images=pictures,
        tables={"Retrieval on held-out data": rows},
        notes=[broken, *source.notes],
        summary={**figures, **floor},
        highlights=[name for name in figures if name.endswith(("text_to_image/recall@1", "text_to_image/recall@10"))],
    )
    if ranks.first:
        _show(rows, run)
    run.finish({**figures, **floor})  # last: from here on, whatever happens, it is not run again


def table_rows(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each task of each test, for the report and the terminal."""
    tasks = dict.fromkeys(name.rpartition("/")[0] for name in figures if name.endswith("recall@1"))
    return [
        {"test": task.partition("/")[0], "task": task.partition("/")[2].replace("_", " ")}
        | {name: figures[f"{task}/{name}"] for name in FIGURES}
        for task in sorted(tasks)
    ] + [
        {"test": name.partition("/")[0], "task": "zero-shot by group", "recall@1": value}
        for name, value in figures.items()
        if name.endswith("zero_shot/accuracy")
    ]


def _whole(learner: Learner, weights: Mapping[str, Any]) -> Clip:
    """The model with all its weights, on the CPU and in float32, however it was spread."""
    clip = Clip(learner.clip.portable_config(), learner.clip.tokenizer)
    own = {name.removeprefix("clip."): value for name, value in weights.items() if name.startswith("clip.")}
    clip.load_state_dict(own)
    clip.scale = min(float(weights["pairs.log_scale"].exp()), learner.pairs.max_scale or math.inf)
    if "pairs.bias" in weights:
        clip.bias = float(weights["pairs.bias"])
    return clip.eval()


def _intro(config: Config, source: Source) -> str:
    image, text = config.model.image, config.model.text
    tests = ", ".join(f"{name} ({len(test.pairs):,} pairs)" for name, test in source.tests.items())
    return (
        f"An image tower ({image.model} at {image.size} pixels) and a text tower ({text.model or text.config.get('model_type')}"
        f"{', frozen' if text.frozen else ''}) were trained on {len(source.train):,} pairs, {config.run.steps:,} steps of "
        f"{config.data.batch:,}, with the {config.objective.loss} loss over the global batch.\n\nTests: {tests}."
    )


def _show(rows: Sequence[Mapping[str, Any]], run: RunDirectory) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Retrieval on held-out data")
    for name in ("test", "task", *FIGURES):
        table.add_column(name.replace("_", " "), justify="left" if name in ("test", "task") else "right")
    for row in rows:
        cells = [row.get(name, "") for name in ("test", "task", *FIGURES)]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells))
    console = Console(width=None if Console().is_terminal else 110)
    console.print(table)
    python = "python" if shutil.which("python") == sys.executable else sys.executable  # of a checkout: not on the path
    for what, command in (
        ("Report", str(run.path / "report.html")),
        ("Search", f'{python} -m unisono_models.clip.commands.search {run.path} "red heart"'),
        ("Type and see", f"{python} -m unisono_models.clip.commands.serve {run.path}"),
    ):
        console.print(f"{what}:  {command}", soft_wrap=True, highlight=False)
