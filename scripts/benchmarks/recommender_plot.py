"""The plot of the benchmark of the recommender: bars for each contender, a row of them for each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from embedding_workload import DIM, TABLES, Setting
from recommender_contenders import (
    ADAGRAD,
    AUTO,
    DENSE,
    ONE_PROCESS,
    PREFETCH,
    TORCHREC_ROW,
    TORCHREC_TABLE,
    TWO_THREADS,
    WORLD_SIZE,
)
from recommender_results import Result, Results
from recommender_workload import Case
from shared_plot import draw_bar, dress, room_for

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Of Okabe and Ito, for all kinds of sight: ours are blue and green, TorchRec's warm, torch's own grey.
COLOURS = {
    AUTO: "#0072b2",
    PREFETCH: "#56b4e9",
    ADAGRAD: "#009e73",
    TORCHREC_TABLE: "#e69f00",
    TORCHREC_ROW: "#d55e00",
    ONE_PROCESS: "#999999",
    TWO_THREADS: "#777777",
    DENSE: "#dddddd",
}


def plot(cases: Mapping[Case, Results], setting: Setting, path: Path) -> None:
    """Speed, CPU time, traffic and memory of each contender."""
    figure, rows = plt.subplots(
        len(cases), 4, figsize=(17, 0.8 + 3.6 * len(cases)), layout="constrained", sharey="row", squeeze=False
    )
    for (case, results), (rates, cpu, traffic, memory) in zip(cases.items(), rows, strict=True):
        draw_bars(rates, results, lambda r: r.rate.median, "{:,.0f}")
        for place, r in enumerate(results):
            rate = r.rate
            rates.plot([rate.least, rate.most], [place + 0.25] * 2, color="black", linewidth=1.2)
        rates.set_title(f"{case}: samples/s (longer is better;\nline: range over rounds)", fontsize=11)
        draw_bars(cpu, results, lambda r: r.cpu_milliseconds, "{:.0f}")
        cpu.set_title("CPU ms of each rank in a step", fontsize=11)
        draw_bars(traffic, results, lambda r: r.sent, "{:.1f}")
        traffic.set_title("MB sent by each rank in a step", fontsize=11)
        draw_bars(memory, results, lambda r: r.peak, "{:,.0f}")
        memory.set_title("peak memory of each rank, MiB", fontsize=11)
        rates.set_yticks(range(len(results)), [r.contender for r in results])
        rates.invert_yaxis()
        for label, result in zip(rates.get_yticklabels(), results, strict=True):
            label.set_fontweight("bold" if result.kind.is_ours else "normal")
    figure.suptitle(
        f"A whole training step of DLRM on {TABLES} sharded tables ({setting.gigabytes:.2f} GB, width {DIM}): {WORLD_SIZE} "
        f"ranks on gloo, batch {setting.batch} on each. Ours are blue and green"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_bars(axes: Axes, results: Results, value: Callable[[Result], float], form: str) -> None:
    limit = room_for([value(r) for r in results])
    for place, r in enumerate(results):
        draw_bar(axes, place, value(r), COLOURS[r.contender], limit, form, height=0.7, alpha=1.0)
    axes.set_xlim(0, limit)
    dress(axes, "x")
