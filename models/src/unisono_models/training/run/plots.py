"""The curves of a run, plotted from metrics.jsonl."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import ImageFont

from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.run.log import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
Points = tuple[list[int], list[float]]
INKS = {"light": ("#ffffff", "#1f2430", "#6b7280", "#e5e7eb"), "dark": ("#181b22", "#e6e8ee", "#9aa1af", "#2c313c")}
# Okabe and Ito's colours, which the colour-blind can tell apart, lightened for the dark theme.
COLOURS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9"),
    "dark": ("#5ab0e8", "#f08a4b", "#3cc79a", "#e39cc4", "#e6b93d", "#9fd3f5"),
}


@dataclass
class Panel:
    """One plot: curves of a quantity over steps. `lines` have a value for every step, `marks` for some."""

    name: str
    lines: dict[str, Points] = field(default_factory=dict)
    marks: dict[str, Points] = field(default_factory=dict)


def write_plots(metrics: Path, folder: Path, *, theme: Theme = "light") -> dict[str, Path]:
    """Draw the curves of the run directory or metrics file `metrics` as PNGs into `folder`. Return their paths by name.

    Example:
        write_plots(run.path, run.plots)
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, png in draw_plots(read_metrics(metrics), theme=theme).items():
        paths[name] = folder / f"{_file_name(name)}.png"
        paths[name].write_bytes(png)
    return paths


def draw_plots(lines: Sequence[dict[str, Json]], *, theme: Theme = "light") -> dict[str, bytes]:
    """Draw the curves of the metrics `lines` as PNGs. Return them by name, the loss first."""
    return {panel.name: _draw(panel, theme) for panel in collect_panels(lines)}


def collect_panels(lines: Sequence[dict[str, Json]]) -> list[Panel]:
    """Collect the plots: one for each value of training, one for each family of evaluation metrics, and one for the speed.

    "text_to_image/recall@1", "…@5" and so on are a family and share a plot. An evaluation metric that has the name of a value
    of training is drawn into the same plot.
    """
    trained, evaluated, speed = _series(lines, "train"), _series(lines, "evaluation"), _series(lines, "speed")
    panels = {name: Panel(name, lines={name: points}) for name, points in trained.items() if name != "samples"}
    for name, points in evaluated.items():
        family = name.rpartition("@")[0] or name
        panel = panels.setdefault(family, Panel(family))
        panel.marks["evaluation" if panel.lines else name[len(family) :] or name] = points
    if "samples_per_second" in speed:
        panels["samples per second"] = Panel("samples per second", lines={"samples per second": speed["samples_per_second"]})
    found = [p for p in panels.values() if p.lines or any(len(steps) > 1 for steps, _ in p.marks.values())]
    return sorted(found, key=lambda panel: (panel.name != "loss", not panel.name.startswith("loss"), not panel.lines))


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Smooth a curve: the mean of up to `width` finite values around each one.

    Example:
        >>> smoothed([1, 2, 6, float("nan"), 3], 3)
        [1.5, 3.0, 4.0, 4.5, 3.0]
    """
    sums, counts = [0.0], [0]
    for value in values:
        good = math.isfinite(value)
        sums.append(sums[-1] + (value if good else 0.0))
        counts.append(counts[-1] + good)
    means = []
    half = width // 2
    for i in range(len(values)):
        low, high = max(i - half, 0), min(i + half + 1, len(values))
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / count if count else math.nan)
    return means


def _series(lines: Sequence[dict[str, Json]], kind: str) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for line in lines:
        if line["kind"] == kind:
            for name, value in line.items():
                if name not in ("kind", "step") and isinstance(value, int | float):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(float(value))
    return found


def _draw(panel: Panel, theme: Theme) -> bytes:
    return draw_figure(lambda figure: _fill(figure, panel, theme), theme=theme)


def draw_figure(fill: Callable[[Figure], None], *, theme: Theme = "light", size: tuple[float, float] = (6.4, 3.4)) -> bytes:
    """Draw a PNG in the style of all plots of this package. `fill` draws into the empty figure, of `size` inches."""
    import matplotlib  # slow to import: only when something is drawn
    from matplotlib.figure import Figure  # not pyplot, which has a state and picks a window system

    paper, ink, faint, grid = INKS[theme]
    style: Any = {
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.formatter.limits": (-4, 7),
        "text.color": ink,
        "text.parse_math": False,
        "axes.labelcolor": faint,
        "axes.edgecolor": grid,
        "axes.facecolor": paper,
        "figure.facecolor": paper,
        "xtick.color": faint,
        "ytick.color": faint,
        "grid.color": grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        fill(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})  # the same curves are the same file
    return buffer.getvalue()


def _fill(figure: Figure, panel: Panel, theme: Theme) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    colours = iter(COLOURS[theme] * 10)
    shown: list[float] = []
    for steps, values in panel.lines.values():
        colour = next(colours)
        width = _width(values)
        curve = smoothed(values, width)
        stride = max(len(values) // 4000, 1)  # more points than the image has columns only cost time
        if width > 1:
            axes.plot(steps[::stride], values[::stride], color=colour, alpha=0.33, linewidth=0.9)
        label = "training" + (f", mean of {width}" if width > 1 else "")
        dot = "o" if len(values) == 1 else None
        axes.plot(
            steps[::stride], curve[::stride], color=colour, linewidth=1.9, label=label, marker=dot, solid_capstyle="round"
        )
        shown += curve
    for name, (steps, values) in panel.marks.items():
        edge = INKS[theme][0]
        axes.plot(
            steps, values, color=next(colours), linewidth=1.4, marker="o", markersize=5.5, markeredgecolor=edge, label=name
        )
    axes.set_title(readable_name(panel.name), loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel("step")
    axes.set_ylabel(readable_name(panel.name.rpartition("/")[2]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.margins(x=0.015)
    if len(panel.lines) + len(panel.marks) > 1:
        axes.legend(frameon=False, fontsize=9, loc="best")
    _limit(axes, shown, [value for _, values in panel.marks.values() for value in values])


def _width(values: Sequence[float]) -> int:
    """Return the number of steps to average over: a thirtieth of the run, or 1 if the curve is smooth without it."""
    width = max(len(values) // 30, 1)
    ways = [sum(abs(b - a) for a, b in pairwise(curve) if math.isfinite(b - a)) for curve in (values, smoothed(values, width))]
    return width if ways[0] > 1.5 * ways[1] else 1


def _limit(axes: Any, curves: Sequence[float], marks: Sequence[float]) -> None:
    """Limit the y axis to most of the values, since a few outliers would flatten the rest. Fractions start at 0."""
    curves = sorted(value for value in curves if math.isfinite(value))
    marks = [value for value in marks if math.isfinite(value)]
    if len(curves) > 50:
        low, high = min([curves[0], *marks]), max([curves[int(0.995 * (len(curves) - 1))], *marks])
        room = 0.06 * (high - low)
        if room > 0:
            axes.set_ylim(low - room, high + room)
    elif marks and not curves and min(marks) >= 0 and max(marks) <= 1:
        axes.set_ylim(bottom=0)


def readable_name(name: str) -> str:
    """
    Example:
        >>> readable_name("text_to_image/recall@1")
        'text to image: recall@1'
    """
    return name.replace("_", " ").replace("/", ": ")


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


@cache
def dejavu_sans(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the font DejaVu Sans, which comes with matplotlib: the same on every machine."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)
