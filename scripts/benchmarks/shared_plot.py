"""Bars and axes of the plots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes


def room_for(values: Sequence[float]) -> float:
    """How far the axis goes: one that is far beyond the others is cut, so that these can be told apart."""
    ordered = sorted(values)
    far = [shorter for shorter, longer in pairwise(ordered) if longer == ordered[-1] > 4 * shorter > 0]
    longest = far[0] if far else ordered[-1]
    return 1.25 * max(longest, 1e-3)


def draw_bar(
    axes: Axes, place: float, value: float, colour: str, limit: float, form: str, *, height: float, alpha: float
) -> None:
    is_cut = value > limit
    axes.barh(place, min(value, limit), height, color=colour, alpha=alpha, edgecolor="black", linewidth=0.4)
    text, anchor = (f"{form.format(value)} ▸", limit) if is_cut else (form.format(value), value)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1} if is_cut else None
    where = {"ha": "right" if is_cut else "left", "va": "center", "fontsize": 8, "bbox": box}
    axes.annotate(text, (anchor, place), (-3 if is_cut else 3, 0), textcoords="offset points", **where)


def dress(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
