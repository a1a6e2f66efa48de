"""The parts of a page that needs nothing else: tables, pictures and numbers as HTML, with everything escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Row = Mapping[str, object]
KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".svg": "svg+xml"}


def table(rows: Sequence[Row]) -> str:
    """A table of `rows`, whose columns are their keys in the order in which they first come. Numbers stand to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in columns if all(_is_number(row.get(name, 0)) for row in rows)}
    heads = "".join(f"<th{_class(name in numeric)}>{escape(name)}</th>" for name in columns)
    lines = []
    texts = {name: _aligned([row.get(name, "") for row in rows]) for name in columns}
    for i in range(len(rows)):
        cells = [f"<td{_class(name in numeric)}>{escape(texts[name][i])}</td>" for name in columns]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def pairs(values: Mapping[str, object], *, code: bool = False) -> str:
    """A table of names and values. code: the values as they would be typed."""
    lines = []
    for name, value in values.items():
        kind = ' class="code"' if code else _class(_is_number(value))
        lines.append(f"<tr><th>{escape(name)}</th><td{kind}>{escape(str(value) if code else number(value))}</td></tr>")
    return f'<div class="scroll"><table><tbody>{"".join(lines)}</tbody></table></div>'


def picture(path: Path, caption: str) -> str:
    """The picture file `path` itself, with a caption. Raises: ValueError if it is of no kind that pages can show."""
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"write_report: picture {path} is none of {', '.join(KINDS)}")
    link = data_link(path.read_bytes(), KINDS[path.suffix.lower()])
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{link}" alt="{escape(caption)}">{below}</figure>'


def data_link(content: bytes, kind: str = "png") -> str:
    """A link that carries the picture in itself."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def number(value: object) -> str:
    """`value` as one reads it: four digits that matter.

    Example:
        >>> number(0.20483), number(1633.0), number(12345.678), number(3e-9), number("a")
        ('0.2048', '1,633', '12,346', '3e-09', 'a')
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return f"{value:,}" if _is_number(value) and isinstance(value, int) else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _aligned(values: Sequence[object]) -> list[str]:
    """A column: as many decimals in each as the longest has, if they are shares and the like. Empty cells stay empty."""
    texts = [number(value) for value in values]
    given = [(value, text) for value, text in zip(values, texts, strict=True) if text]
    if all(isinstance(value, float) and abs(value) < 1000 and "e" not in text for value, text in given):
        decimals = max((len(text.partition(".")[2]) for _, text in given), default=0)
        return [f"{value:.{decimals}f}" if text else "" for value, text in zip(values, texts, strict=True)]
    return texts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""
