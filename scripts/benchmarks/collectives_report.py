"""What is kept of a run of the benchmark of the collectives: a markdown file and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import matplotlib
import numpy as np
import torch
from collectives_contenders import ASKED, BACKWARD, KNOWN, NEW_OUTPUT, PADDED, TORCH_NN, TORCH_NN_BACKWARD, UNITS, Direction
from collectives_results import Result
from shared_report import Aim, aims_in_markdown, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

TITLES: dict[Direction, str] = {
    "forward": "Forward: all_gather",
    "backward": "Backward of all_gather",
    "sizes": "Exchange of sizes",
}
COLOURS = {
    KNOWN: "#0b6e4f",
    ASKED: "#6bbf92",
    BACKWARD: "#0b6e4f",
    NEW_OUTPUT: "#9aa5b1",
    TORCH_NN: "#e09f3e",
    TORCH_NN_BACKWARD: "#e09f3e",
    PADDED: "#9e2a2b",
}


def write_report(results: Sequence[Result], aims: Sequence[Aim], folder: Path, *, command: str, machine: str) -> Path:
    """Write `<date>-collectives.md` and the plot beside it; return the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-collectives.md"
    plot(results, path.with_suffix(".png"))
    sections = [
        "# Benchmark of the collectives",
        f"- Command: {command}\n- Date: {now:%Y-%m-%d %H:%M %Z}\n- Machine: {machine}\n"
        f"- torch {torch.__version__}, gloo, one thread for each rank",
        "Ratios are to torch's own call on the same total bytes, split equally, into an output that is allocated once: "
        f"`{UNITS['forward']}`, `{UNITS['backward']}`, or `all_gather_into_tensor` of one int64 for each rank. They are the "
        "median over rounds (in brackets: quartiles) of the ratio within a round, in which all contenders take turns. Time "
        "is that of the slowest rank, CPU time that of all ranks together. Skewed: 70 % of the rows on rank 0. Sent: payload "
        "bytes that leave a rank if ranks exchange directly, mean and largest over the ranks.",
        "## Aims",
        aims_in_markdown(aims),
        f"![ratios]({path.with_suffix('.png').name})",
    ]
    for direction, title in TITLES.items():
        sections += [f"## {title}", figures([r for r in results if r.case.direction == direction])]
    path.write_text("\n\n".join(sections) + "\n")
    return path


def figures(results: Iterable[Result]) -> str:
    head = ("ranks", "payload", "lengths", "contender", "ratio", "median ms", "CPU ms", "sent, mean", "sent, largest")
    return table(head, map(figure_row, results))


def figure_row(r: Result) -> tuple[str, ...]:
    low, high = r.quartiles
    asks_sizes = r.case.direction == "sizes"
    cells = (
        str(r.world_size),
        "-" if asks_sizes else r.case.payload.name,
        "-" if asks_sizes else r.case.lengths,
        r.contender,
        f"{r.ratio:.2f} ({low:.2f}-{high:.2f})",
        f"{np.median(r.wall) * 1e3:.3f}",
        f"{np.median(r.cpu) * 1e3:.3f}",
        f"{np.mean(r.sent):,.0f}",
        f"{max(r.sent):,}",
    )
    return tuple(f"**{cell}**" for cell in cells) if r.is_ours else cells


def plot(results: Sequence[Result], path: Path) -> None:
    """Bars that start at the unit: below it is faster than torch's own call, above it slower."""
    columns = list(dict.fromkeys((r.world_size, r.case.lengths) for r in results if r.case.direction != "sizes"))
    directions: tuple[Direction, ...] = ("forward", "backward")
    size = (3.2 + 3.4 * len(columns), 8.0)
    figure, grid = plt.subplots(2, len(columns), figsize=size, sharey="row", squeeze=False, layout="constrained")
    for row, direction in zip(grid, directions, strict=True):
        bars = [r for r in results if r.case.direction == direction and r.contender != UNITS[direction]]
        contenders = list(dict.fromkeys(r.contender for r in bars))
        for axes, (world_size, lengths) in zip(row, columns, strict=True):
            draw_bars(
                axes, [r for r in bars if (r.world_size, r.case.lengths) == (world_size, lengths)], 0.86 / len(contenders)
            )
            axes.set_title(f"{world_size} ranks, {lengths} lengths", fontsize=10)
        row[0].set_ylim(0.75 * min(0.6, *(r.ratio for r in bars)), 1.6 * max(1.6, *(r.ratio for r in bars)))
        row[0].set_ylabel(f"{TITLES[direction]}\ntime / {UNITS[direction]}")
        patches = [Patch(color=COLOURS[contender], label=contender) for contender in contenders]
        row[-1].legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.suptitle("Collectives on gloo: time as a ratio to torch's own call (lower is faster, 1 is equal)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_bars(axes: Axes, results: Sequence[Result], width: float) -> None:
    payloads = list(dict.fromkeys(r.case.payload.name for r in results))
    contenders = list(dict.fromkeys(r.contender for r in results))
    for r in results:
        place = payloads.index(r.case.payload.name) + (contenders.index(r.contender) - (len(contenders) - 1) / 2) * width
        axes.bar(place, r.ratio - 1, width * 0.9, bottom=1, color=COLOURS[r.contender])
        slower = r.ratio >= 1
        label = f"{r.ratio:.2f}" if r.ratio < 9.95 else f"{r.ratio:.1f}"
        axes.annotate(
            label,
            (place, r.ratio),
            (0, 3 if slower else -3),
            textcoords="offset points",
            ha="center",
            va="bottom" if slower else "top",
            rotation=90,
            fontsize=8,
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xticks(range(len(payloads)), payloads)
    axes.set_xlim(-0.5, len(payloads) - 0.5)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
