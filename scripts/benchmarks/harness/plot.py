"""Draw the plot of a benchmark: one panel of horizontal bars for each column of a table that has a `plot` title."""

from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.harness.benchmark import Benchmark, Column, Section
from benchmarks.harness.results import Ratio, Results

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# By Okabe and Ito, distinguishable for the colour-blind: ours are blue and green, the others warm and grey.
OUR_COLOURS = ("#0072b2", "#56b4e9", "#009e73")
OTHER_COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#f0e442", "#999999", "#666666")


def draw(benchmark: Benchmark, results: Results, path: Path) -> None:
    """Draw a row of panels for each section; two sections in a row if they have one panel each."""
    rows = []
    for section in benchmark.sections(results):
        panels = [(section, column) for column in section.columns if column.plot]
        if len(panels) == 1 and rows and len(rows[-1]) == 1:
            rows[-1] += panels
        elif panels:
            rows.append(panels)
    heights = [0.9 + 0.21 * max(len(section.rows) for section, _ in row) for row in rows]
    figure = plt.figure(figsize=(4 * max(len(row) for row in rows) + 4, sum(heights) + 0.5), layout="constrained")
    subfigures = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    colours = choose_colours(benchmark, [m.contender for row in rows for section, _ in row for m in section.rows])
    for subfigure, row in zip(subfigures, rows, strict=True):
        for place, axes in enumerate(subfigure.subplots(1, len(row), squeeze=False)[0]):
            has_labels = place == 0 or row[place][0] is not row[0][0]
            draw_panel(axes, benchmark, *row[place], colours, has_labels=has_labels)
    figure.suptitle(f"{benchmark.plot_title}. Ours are blue and green")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def choose_colours(benchmark: Benchmark, contenders: Sequence[str]) -> dict[str, str]:
    ours = cycle(OUR_COLOURS)
    others = cycle(OTHER_COLOURS)
    return {name: next(ours if benchmark.is_ours(name) else others) for name in dict.fromkeys(contenders)}


def axis_limit(values: Sequence[float]) -> float:
    """Choose how far the axis goes. It cuts a value far beyond all others, so that these can be told apart."""
    ordered = sorted(values)
    far = [shorter for shorter, longer in pairwise(ordered) if longer == ordered[-1] > 4 * shorter > 0]
    return 1.25 * max(far[0] if far else ordered[-1], 1e-3)


def draw_panel(
    axes: Axes, benchmark: Benchmark, section: Section, column: Column, colours: dict[str, str], *, has_labels: bool
) -> None:
    found = [column.value(m) for m in section.rows]
    values = [value.median if isinstance(value, Ratio) else value for value in found]
    limit = axis_limit([value for value in values if value is not None] or [1.0])
    for place, (m, value) in enumerate(zip(section.rows, values, strict=True)):
        where: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.barh(place, min(value or 0, limit), 0.8, color=colours[m.contender], edgecolor="black", linewidth=0.4)
        text = "-" if value is None else column.form.replace("fx", "f").format(value)
        if value is not None and value > limit:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.annotate(f"{text} ▸", (limit, place), (-3, 0), ha="right", bbox=box, **where)
        else:
            axes.annotate(text, (value or 0, place), (3, 0), ha="left", **where)
        if isinstance(found[place], Ratio):
            axes.plot([found[place].least, found[place].most], [place + 0.25] * 2, color="black", linewidth=1)
    if "x" in column.form or "ratio" in column.head:
        axes.axvline(1, color="black", linewidth=1)
    axes.set_title(f"{section.heading}: {column.plot}" if has_labels else column.plot, fontsize=10)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_yticks(range(len(values)), [section.label(m) if has_labels else "" for m in section.rows])
    for label, m in zip(axes.get_yticklabels(), section.rows, strict=True):
        label.set(fontsize=8, fontweight="bold" if benchmark.is_ours(m.contender) else "normal")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
