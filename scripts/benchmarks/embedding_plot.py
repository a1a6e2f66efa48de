"""The plot of the benchmark of the tables: bars for each contender, and lines over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
from embedding_contenders import (
    AUTO,
    AUTO_HALF,
    COLUMN,
    CONTENDERS,
    DTENSOR,
    ONE_PROCESS,
    ROW,
    TABLE,
    TORCHREC_COLUMN,
    TORCHREC_HALF,
    TORCHREC_ROW,
    TORCHREC_TABLE,
    WORLD_SIZE,
)
from embedding_results import Result, Results, Scale, Scales
from embedding_workload import DIM, TABLES, Setting
from shared_plot import draw_bar, dress, room_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Of Okabe and Ito, for all kinds of sight: ours are blue and green, TorchRec's warm, torch's own grey.
COLOURS = {
    AUTO: "#0072b2",
    ROW: "#56b4e9",
    TABLE: "#56b4e9",
    COLUMN: "#56b4e9",
    AUTO_HALF: "#009e73",
    TORCHREC_ROW: "#d55e00",
    TORCHREC_TABLE: "#e69f00",
    TORCHREC_COLUMN: "#cc79a7",
    TORCHREC_HALF: "#f0e442",
    ONE_PROCESS: "#999999",
    DTENSOR: "#666666",
}
LINES = {
    AUTO: ("-", "o"),
    ROW: ("-", "s"),
    TORCHREC_ROW: ("--", "s"),
    TORCHREC_TABLE: ("--", "D"),
    TORCHREC_COLUMN: ("--", "^"),
}


def plot(results: Results, scales: Scales, setting: Setting, path: Path) -> None:
    """Time, traffic and memory of each contender above; below, what they become with more ranks."""
    figure = plt.figure(figsize=(15, 6 if not scales else 10), layout="constrained")
    above, *below = figure.subfigures(2, 1, height_ratios=(1.5, 1)) if scales else [figure.subfigures(1, 1)]
    times, traffic, memory = above.subplots(1, 3, sharey=True)
    draw_times(times, results)
    draw_bars(traffic, results, lambda r: r.sent, "{:.1f}")
    traffic.set_title("bytes sent by each rank in a step, MB", fontsize=11)
    draw_bars(memory, results, lambda r: r.peak, "{:,.0f}")
    memory.axvline(setting.gigabytes * 1e9 / 2**20 / WORLD_SIZE, color="black", linewidth=1, linestyle=(0, (4, 3)))
    memory.set_title("peak memory of each rank, MiB\n(dashed: its share of the tables)", fontsize=11)
    times.set_yticks(range(len(results)), [r.contender for r in results])
    times.invert_yaxis()
    for label, result in zip(times.get_yticklabels(), results, strict=True):
        label.set_fontweight("bold" if result.kind.is_ours else "normal")
    if below:
        cpu, sent = below[0].subplots(1, 2)
        draw_lines(cpu, scales, lambda s: s.nanoseconds_an_id)
        cpu.set_title(f"CPU ns per id, batch {scales[0].batch} on each rank (flat is ideal)", fontsize=11)
        draw_lines(sent, scales, lambda s: s.sent)
        sent.set_title(f"MB sent by each rank in a step, batch {scales[0].batch} on each rank", fontsize=11)
        sent.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.suptitle(
        f"A training step of {TABLES} sharded tables ({setting.gigabytes:.2f} GB, width {DIM}), row-wise Adagrad: "
        f"{WORLD_SIZE} ranks on gloo, batch {setting.batch} on each. Shorter is better; ours are blue and green"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_times(axes: Axes, results: Results) -> None:
    """Two bars for each: wall time, and CPU time paler below it."""
    limit = room_for([r.milliseconds for r in results])
    for place, r in enumerate(results):
        for value, shift, opacity in ((r.milliseconds, -0.2, 1.0), (r.cpu_milliseconds, 0.2, 0.45)):
            draw_bar(axes, place + shift, value, COLOURS[r.contender], limit, "{:.0f}", height=0.38, alpha=opacity)
    axes.set_xlim(0, limit)
    axes.set_title("ms of a step: wall time\n(pale: CPU time of each rank)", fontsize=11)
    dress(axes, "x")


def draw_bars(axes: Axes, results: Results, value: Callable[[Result], float], form: str) -> None:
    limit = room_for([value(r) for r in results])
    for place, r in enumerate(results):
        draw_bar(axes, place, value(r), COLOURS[r.contender], limit, form, height=0.7, alpha=1.0)
    axes.set_xlim(0, limit)
    dress(axes, "x")


def draw_lines(axes: Axes, scales: Scales, value: Callable[[Scale], float]) -> None:
    for name in scales.contenders:
        mine = scales.of(name)
        line, marker = LINES[name]
        width = 2.4 if CONTENDERS[name].is_ours else 1.6
        look = {"color": COLOURS[name], "linestyle": line, "marker": marker, "linewidth": width, "label": name}
        axes.plot([s.ranks for s in mine], [value(s) for s in mine], **look)
    worlds = sorted({s.ranks for s in scales})
    axes.set_xticks(worlds, [str(ranks) for ranks in worlds])
    axes.set_xlabel("ranks")
    axes.set_ylim(bottom=0)
    dress(axes, "y")
