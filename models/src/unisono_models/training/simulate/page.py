"""The page of a simulation: what a step costs on one rank, how that grows with the ranks, and what the model assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.collectives import Hardware
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.run.plots import COLOURS, INKS, Theme, draw_figure
from unisono_models.training.run.report import Row, html_notes, html_numbers, html_page, html_plot, html_section, html_table
from unisono_models.training.simulate.rank import PARTS, StepCosts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = ("compute", "memory", "launches", "links", "host_syncs")
_COLOURS = {
    "light": (*COLOURS["light"], "#8c8c8c", "#7b5ea7", "#444444"),
    "dark": (*COLOURS["dark"], "#b0b0b0", "#b49ad9", "#dddddd"),
}


def choose_unit(values: Iterable[float], unit: str) -> tuple[str, float]:
    """Return a unit in which the largest of `values` is at least 1, and what to divide them by.

    Example:
        >>> choose_unit([2e6, 3e3], "B")
        ('MB', 1000000.0)
    """
    largest = max(values, default=0.0)
    prefix, scale = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if largest >= s), ("", 1.0))
    return f"{prefix}{unit}", scale


def readable(value: float, unit: str) -> str:
    """Format a quantity with three digits and a prefix.

    Example:
        >>> readable(97_920, "B"), readable(1.5e12, "FLOP"), readable(0.0158, "s"), readable(0, "B")
        ('97.9 kB', '1.5 TFLOP', '15.8 ms', '0')
    """
    if not value:
        return "0"
    prefixes = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6}
    if unit == "s":
        prefixes = {"": 1.0, "m": 1e-3, "µ": 1e-6}
    prefix, scale = next(((p, s) for p, s in prefixes.items() if value >= 0.9995 * s), ("µ", 1e-6))
    scaled = value / scale
    return f"{scaled:,.0f} {prefix}{unit}" if scaled >= 99.95 else f"{scaled:.3g} {prefix}{unit}"


def draw_growth(growth: Sequence[StepCosts], hardware: Hardware, *, theme: Theme) -> dict[str, bytes]:
    """Draw how memory, time and bytes grow with the number of ranks, as PNGs by name."""
    times = [costs.time(hardware).total for costs in growth]
    links = [costs.link_bytes(hardware) for costs in growth]
    memory_unit, per_memory = choose_unit([costs.peak for costs in growth], "B")
    link_unit, per_link = choose_unit([size for pair in links for size in pair], "B")
    memory_parts = {part: [costs.memory[part] / per_memory for costs in growth] for part in PARTS}
    time_parts = {name.replace("_", " "): [getattr(parts, name) * 1e3 for parts in times] for name in TIMES}
    bounds = {
        "estimate, nothing overlaps": [parts.estimate * 1e3 for parts in times],
        "lower bound, all overlaps": [parts.lower_bound * 1e3 for parts in times],
    }
    link_lines = {
        "links, inside the host": [inside / per_link for inside, _ in links],
        "NIC, between hosts": [network / per_link for _, network in links],
    }
    ranks = [costs.topology.world_size for costs in growth]

    def draw(fill: Callable[[Figure], None]) -> bytes:
        return draw_figure(fill, theme=theme, size=(7.2, 3.6))

    def bars(figure: Figure) -> None:
        _bars(figure, ranks, memory_parts, f"Memory of a rank, {memory_unit}", theme, limit=hardware.memory / per_memory)

    def times_of_parts(figure: Figure) -> None:
        _lines(figure, ranks, bounds | time_parts, "Modelled milliseconds of a step", theme)

    def bytes_on_links(figure: Figure) -> None:
        _lines(figure, ranks, link_lines, f"{link_unit} that a GPU sends in a step", theme)

    return {"memory": draw(bars), "time": draw(times_of_parts), "bytes": draw(bytes_on_links)}


def _bars(
    figure: Figure, ranks: Sequence[int], parts: Mapping[str, Sequence[float]], title: str, theme: Theme, *, limit: float
) -> None:
    axes = figure.subplots()
    bottom = [0.0] * len(ranks)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    shown = {
        part: values
        for part, values in parts.items()
        if any(value > 0.01 * total for value, total in zip(values, totals, strict=True))
    }
    for (part, values), colour in zip(shown.items(), _COLOURS[theme], strict=False):
        axes.bar(range(len(ranks)), values, bottom=bottom, color=colour, width=0.72, label=part)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    if limit < 2 * max(bottom):  # otherwise the line would flatten everything
        axes.axhline(limit, color=INKS[theme][1], linewidth=1.2, linestyle="--", label="the device has")
    top = 1.5 * limit
    if max(bottom) > top:  # otherwise what does not fit by far would flatten what fits
        axes.set_ylim(0, top)
        for place, total in enumerate(totals):
            if total > top:
                axes.text(place, 0.98 * top, f"↑ {total:,.3g}", ha="center", va="top", fontsize=8, color="black")
    _finish(axes, ranks, title)


def _lines(figure: Figure, ranks: Sequence[int], lines: Mapping[str, Sequence[float]], title: str, theme: Theme) -> None:
    axes = figure.subplots()
    shown = {name: values for name, values in lines.items() if max(values) > 0}
    for (name, values), colour in zip(shown.items(), _COLOURS[theme], strict=False):
        width, style = (2.2, "-") if "," in name else (1.4, "--")
        values = [value or float("nan") for value in values]  # 0 has no place on the axis
        axes.plot(
            range(len(ranks)), values, color=colour, linewidth=width, linestyle=style, marker="o", markersize=4, label=name
        )
    if shown:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")  # the default one writes 10^2 in TeX
        smallest = min(value for values in shown.values() for value in values if value > 0)
        axes.set_ylim(bottom=max(max(map(max, shown.values())) / 3000, smallest / 3))
    _finish(axes, ranks, title)


def _finish(axes: Any, ranks: Sequence[int], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel("ranks")
    axes.set_xticks(range(len(ranks)), [f"{count:,}" for count in ranks], fontsize=9)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    handles, labels = axes.get_legend_handles_labels()
    if labels:  # those of stacked bars in the order in which they are stacked
        axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def write_page(
    path: Path,
    *,
    title: str,
    intro: Sequence[str],
    facts: Mapping[str, object],
    numbers: Mapping[str, object],
    plots: Mapping[str, tuple[bytes, bytes]],
    tables: Mapping[str, Sequence[Row]],
    advice: Sequence[str],
    constants: Sequence[Row],
    notes: Sequence[str],
    command: str,
) -> None:
    """Write the page. `plots`: light and dark, by name."""
    chips = "".join(f"<li><span>{escape(name)}</span> <b>{escape(str(value))}</b></li>" for name, value in facts.items())
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in intro)
    curves = "".join(html_plot(*images, f"{name} by the number of ranks") for name, images in plots.items())
    body = [
        f'<header><h1>{escape(title)}</h1>{paragraphs}<ul class="facts">{chips}</ul></header>',
        html_numbers(numbers, list(numbers)),
        html_section("What fits", html_notes(advice)),
        html_section("How it grows", curves, "curves"),
        *(html_section(heading, html_table(rows)) for heading, rows in tables.items() if rows),
        html_section("What the model of the time assumes", html_table(constants) + html_notes(notes)),
        html_section("The command", f"<pre>{escape(command)}</pre>"),
        "<footer>Written by unisono-models. Times are a model, not a measurement.</footer>",
    ]
    atomic_write(path, html_page(title, "\n".join(part for part in body if part)))
