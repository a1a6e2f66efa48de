"""What is kept of a run of the benchmark of the contrastive losses: a markdown file and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path

import matplotlib
import torch
from contrastive_contenders import (
    CLIP_AUTO,
    CLIP_GATHER,
    CLIP_RING,
    CONTENDERS,
    LIMIT_ROWS,
    OPEN_CLIP_GLOBAL,
    OPEN_CLIP_LOCAL,
    PEERS,
    SIGLIP,
    SIGLIP_CHUNKS,
    SIGLIP_RECOMPUTED,
    SIGMOID,
    WIDTH,
    WORLD_SIZE,
    limit_flops,
)
from contrastive_results import Result, Results
from shared_report import Aim, aims_in_markdown, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullFormatter

HEAD = (
    "b",
    "contender",
    "CPU s",
    "CPU, most",
    "CPU / limit",
    "CPU / open_clip",
    "wall s",
    "wall / limit",
    "wall / open_clip",
    "MB",
    "MB / open_clip",
)
MALLOC = {
    False: "malloc set to give back every freed tensor at once (mallopt, 64 KB), so that it is that of the tensors; "
    "`--plain-malloc` also counts the gaps that glibc leaves, which differ from rank to rank",
    True: "glibc's malloc as it is: the gaps that it leaves between tensors count, and differ from rank to rank",
}
# Of Okabe and Ito, for all kinds of sight: ours are blue and green, those of others warm.
COLOURS = {
    CLIP_AUTO: "#0072b2",
    CLIP_GATHER: "#56b4e9",
    CLIP_RING: "#009e73",
    SIGMOID: "#0072b2",
    OPEN_CLIP_LOCAL: "#d55e00",
    OPEN_CLIP_GLOBAL: "#e69f00",
    SIGLIP: "#d55e00",
    SIGLIP_CHUNKS: "#e69f00",
    SIGLIP_RECOMPUTED: "#f0e442",
}


def write_report(
    results: Results,
    aims: Sequence[Aim],
    skipped: Sequence[str],
    folder: Path,
    *,
    command: str,
    machine: str,
    plain_malloc: bool,
) -> Path:
    """Write `<date>-contrastive.md` and the plot beside it; return the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-contrastive.md"
    plot(results, path.with_suffix(".png"))
    rates = ", ".join(
        f"{limit_flops(rows) / results.limit(rows).cpu_seconds / 1e9:.0f} at b = {rows}"
        for rows in results.sizes
        if rows <= LIMIT_ROWS
    )
    worst = max((r for r in results if not r.is_limit), key=lambda r: r.deviation)
    sections = [
        "# Benchmark of the contrastive losses",
        f"- Command: {command}\n- Date: {now:%Y-%m-%d %H:%M %Z}\n- Machine: {machine}\n"
        f"- torch {torch.__version__}, open_clip {version('open_clip_torch')}, {WORLD_SIZE} ranks on gloo, one thread each\n"
        f"- float32, width {WIDTH}, b rows on each rank, N = {WORLD_SIZE}b; forward and backward to x, y, scale (and bias)\n"
        f"- GFLOP/s of the limit's matmuls: {rates or '-'}",
        "The limit: the three matmuls of the logits (b x width by width x N) and of the two gradients, in the same rounds, "
        f"into outputs allocated once. Beyond {LIMIT_ROWS} rows it is that of {LIMIT_ROWS}, times the ratio of their work, "
        "to spare the memory of the logits. All contenders take turns in every round. CPU s: process time, the mean over "
        "ranks, the least of all rounds (and the most). Wall s: the slowest rank, the median of all rounds. MB (2^20 bytes): "
        "how much one step raised the resident memory of a fresh process at most, gradients of the inputs included; the rank "
        f"that took most. Ratios to open_clip are to `{PEERS['CLIP']}` for CLIP, `{PEERS['sigmoid']}` for the sigmoid losses.",
        f"Memory is weighed with {MALLOC[plain_malloc]}. Time always is with glibc's malloc as it is.",
        "`open_clip local` is ClipLoss(local_loss=True, gather_with_grad=True), `global` with local_loss=False; SigLIP is "
        "SigLipLoss as it comes. The release takes no chunks: those contenders are written here, after the descriptions of "
        "the pull requests and on its SigLipLoss. In 1145 autograd keeps the logits of all chunks, in 1214 they are formed "
        "again.",
        f"All losses and gradients agree with open_clip's: the largest deviation is {worst.deviation:.1e} of their norm "
        f"({worst.contender}, b = {worst.rows}).",
        "## Aims",
        aims_in_markdown(aims) if aims else "None: they are about 4096 and 8192 rows.",
        f"![CPU time and peak memory]({path.with_suffix('.png').name})",
        "## All figures",
        table(HEAD, (markdown_row(r, results) for r in results)),
        *(["\n".join(f"- {line}" for line in skipped)] if skipped else []),
    ]
    path.write_text("\n\n".join(sections) + "\n")
    return path


def markdown_row(result: Result, results: Results) -> list[str]:
    cells = figure_cells(result, results)
    return [f"**{cell}**" for cell in cells] if result.is_ours else cells


def figure_cells(result: Result, results: Results) -> list[str]:
    limit, peer = results.limit(result.rows), results.peer(result)

    def to(other: Result | None, value: Callable[[Result], float]) -> str:
        return f"{value(result) / value(other):.2f}x" if other else "-"

    def cpu(r: Result) -> float:
        return r.cpu_seconds

    def wall(r: Result) -> float:
        return r.seconds

    return [
        str(result.rows),
        result.contender,
        f"{result.cpu_seconds:.3f}",
        f"{result.cpu.max():.3f}",
        to(limit, cpu),
        to(peer, cpu),
        f"{result.seconds:.3f}",
        to(limit, wall),
        to(peer, wall),
        "-" if math.isnan(result.extra) else f"{result.extra:.0f}",
        f"1/{peer.extra / result.extra:.1f}" if peer and peer.extra > result.extra else to(peer, lambda r: r.extra),
    ]


def plot(results: Results, path: Path) -> None:
    """A row for each family; CPU time to the limit on the left, peak memory on the right."""
    figure, grid = plt.subplots(len(PEERS), 2, figsize=(14, 8.5), layout="constrained", squeeze=False)
    titles = {"CLIP": "Softmax (CLIP) losses", "sigmoid": "Sigmoid (SigLIP) losses"}
    for (times, memory), family in zip(grid, PEERS, strict=True):
        names = [name for name in COLOURS if CONTENDERS[name].family == family and any(r.contender == name for r in results)]

        def ratio(r: Result) -> float:
            return r.cpu_seconds / results.limit(r.rows).cpu_seconds

        draw_bars(times, results, names, ratio, "{:.2f}")
        times.axhline(1, color="black", linewidth=1.2)
        times.axhline(1.4, color="black", linewidth=1, linestyle=(0, (4, 3)))
        for height, label in ((1, "limit"), (1.4, "aim")):
            times.annotate(
                label, (1, height), (3, 0), xycoords=times.get_yaxis_transform(), textcoords="offset points", va="center"
            )
        times.set_ylim(0, 1.12 * max(ratio(r) for r in results if r.contender in names))
        times.yaxis.set_major_locator(MultipleLocator(1))
        times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        times.set_ylabel(f"{titles[family]}\nCPU time / limit")
        draw_bars(memory, results, names, lambda r: r.extra, "{:.0f}")
        memory.set_yscale("log")
        memory.set_ylim(1, 2.2 * max(r.extra for r in results if not r.is_limit))  # the same for both families
        memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        memory.yaxis.set_minor_formatter(NullFormatter())
        memory.set_ylabel("peak memory of a step, MB (log scale)")
        patches = [Patch(facecolor=COLOURS[name], edgecolor="black", linewidth=0.4, label=in_lines(name)) for name in names]
        memory.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    grid[0][0].set_title("CPU time, as a ratio to the three matmuls (lower is faster)", fontsize=11)
    grid[0][1].set_title("Peak extra memory on each rank (lower is smaller)", fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel("b, rows on each rank")
    figure.suptitle(f"Exact contrastive losses, forward and backward: {WORLD_SIZE} ranks on gloo, float32, width {WIDTH}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def in_lines(name: str) -> str:
    return name.replace(" (as", "\n(as")


def draw_bars(axes: Axes, results: Results, names: Sequence[str], value: Callable[[Result], float], form: str) -> None:
    width = 0.86 / len(names)
    for (i, rows), (j, name) in product(enumerate(results.sizes), enumerate(names)):
        place = i + (j - (len(names) - 1) / 2) * width
        r = results.find(name, rows)
        if r is None:
            axes.text(place, 0.02, "not run", transform=axes.get_xaxis_transform(), ha="center", rotation=90, fontsize=8)
            continue
        axes.bar(place, value(r), width * 0.92, color=COLOURS[name], edgecolor="black", linewidth=0.4)
        above = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
        axes.annotate(form.format(value(r)), (place, value(r)), (0, 2), **above)
    axes.set_xticks(range(len(results.sizes)), [f"{rows:,}" for rows in results.sizes])
    axes.set_xlim(-0.5, len(results.sizes) - 0.5)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
