"""Search results as one image: a row for each query, with its results to the right."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from unisono_models.clip.gallery import Gallery, SearchHit
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.run.plots import dejavu_sans

RESULT_SIZE = 96  # pixels; most drawings have 72 and would look soft if they were larger
_PADDING, _GAP, _MARGIN, _LEFT = 14, 12, 36, 268
_TILE = RESULT_SIZE + 2 * _PADDING
_NAMES = 46  # two lines below a tile
_ROW = _TILE + _NAMES + 22
_PAPER, _CARD, _EDGE, _RULE = "#f6f5f2", "#ffffff", "#e4e2dc", "#e4e2dc"
_INK, _SOFT, _ACCENT = "#1d1d21", "#6e6c68", "#c2410c"


@dataclass(frozen=True)
class SearchRow:
    """A query and its results."""

    query: str
    """The words, or the name of the image that was searched by."""
    hits: Sequence[SearchHit]
    images: Sequence[Image.Image]
    """One for each hit."""
    query_image: Image.Image | None = None


def draw_searches(gallery: Gallery, queries: Sequence[str], path: Path, *, top: int = 8) -> None:
    """Search for each of `queries` and draw the results into the PNG file `path`.

    Example:
        draw_searches(gallery, ["a red heart", "something cold", "party!"], Path("search.png"))
    """
    rows = [make_search_row(gallery, query, gallery.search(query, top=top)) for query in queries]
    draw_search_rows(rows, path, credits=gallery.credits)


def make_search_row(
    gallery: Gallery, query: str, hits: Sequence[SearchHit], *, query_image: Image.Image | None = None
) -> SearchRow:
    """Make a row with the gallery's images of `hits`."""
    return SearchRow(query, hits, [gallery.draw(hit.index, RESULT_SIZE) for hit in hits], query_image)


def draw_search_rows(rows: Sequence[SearchRow], path: Path, *, credits: Sequence[str] = ()) -> None:
    """Draw `rows` into the PNG file `path`, which is written atomically. `credits` go below in small print.

    Letters that DejaVu Sans does not have, such as Chinese ones, become boxes.
    """
    if not rows:
        raise ValueError("draw_search_rows: rows is empty: there is nothing to draw")
    across = max(1, *(len(row.hits) for row in rows))
    width = max(2 * _MARGIN + _LEFT + across * (_TILE + _GAP) - _GAP, 2 * _MARGIN + _LEFT + 2 * _TILE)
    small = _fit(" · ".join(credits), dejavu_sans(13), width - 2 * _MARGIN, lines=3)
    foot = 20 * len(small) + 14 if small else 0
    image = Image.new("RGB", (width, 2 * _MARGIN + len(rows) * _ROW - 22 + foot), _PAPER)
    pen = ImageDraw.Draw(image)
    for number, row in enumerate(rows):
        top = _MARGIN + number * _ROW
        if number:
            pen.line([(_MARGIN, top - 12), (width - _MARGIN, top - 12)], fill=_RULE)
        _draw_query(image, pen, row, top)
        for column, (hit, shown) in enumerate(zip(row.hits, row.images, strict=True)):
            _draw_hit(image, pen, hit, shown, _MARGIN + _LEFT + column * (_TILE + _GAP), top, best=column == 0)
    for line, text in enumerate(small):
        pen.text((_MARGIN, image.height - _MARGIN + 12 - 20 * (len(small) - line) + 6), text, font=dejavu_sans(13), fill=_SOFT)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data.getvalue())


def _draw_query(image: Image.Image, pen: ImageDraw.ImageDraw, row: SearchRow, top: int) -> None:
    room = _LEFT - 28
    if row.query_image is not None:
        thumb = row.query_image.convert("RGB")
        thumb.thumbnail((_TILE, _TILE))
        image.paste(thumb, (_MARGIN, top + (_TILE - thumb.height) // 2))
        for line, text in enumerate(_fit(row.query, dejavu_sans(15), room, lines=2)):
            pen.text((_MARGIN, top + _TILE + 8 + 19 * line), text, font=dejavu_sans(15), fill=_SOFT)
        return
    for size in (30, 26, 22, 18):  # the largest that fits
        lines = _fit(row.query, dejavu_sans(size, bold=True), room, lines=4)
        if len(lines) <= 3 and not lines[-1].endswith("…"):
            break
    height = round(size * 1.25)
    start = top + (_TILE - height * len(lines)) / 2
    for line, text in enumerate(lines):
        pen.text((_MARGIN, start + line * height), text, font=dejavu_sans(size, bold=True), fill=_INK)


def _draw_hit(
    image: Image.Image, pen: ImageDraw.ImageDraw, hit: SearchHit, shown: Image.Image, left: int, top: int, *, best: bool
) -> None:
    _draw_card(image, left, top, edge=_ACCENT if best else _EDGE, width=2 if best else 1)
    image.paste(shown.convert("RGB"), (left + _PADDING, top + _PADDING))
    font = dejavu_sans(14)
    for line, text in enumerate(_fit(hit.label, font, _TILE + 4, lines=2)):
        pen.text((left + _TILE / 2, top + _TILE + 8 + 18 * line), text, font=font, fill=_INK if best else _SOFT, anchor="ma")


def _draw_card(image: Image.Image, left: int, top: int, *, edge: str, width: int) -> None:
    """Draw a tile with round corners, four times too large and then reduced: Pillow's own corners are jagged."""
    scale, size = 4, _TILE
    card = Image.new("RGB", (size * scale, size * scale), _PAPER)
    box = (0, 0, size * scale - 1, size * scale - 1)
    ImageDraw.Draw(card).rounded_rectangle(box, radius=16 * scale, fill=_CARD, outline=edge, width=width * scale)
    image.paste(card.resize((size, size), Image.Resampling.LANCZOS), (left, top))


def _fit(text: str, font: ImageFont.FreeTypeFont, room: float, *, lines: int) -> list[str]:
    """Break `text` into at most `lines` lines of `room` pixels. If it does not fit, it ends in "…"."""
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
    """Break a word into parts that fit."""
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
