"""Figures, aims and the two files that the benchmark leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from shared_report import Aim, aims_in_markdown, table

THEIRS = "torch.nn.parallel"
OURS = ("unisono", "GradientSync", "GradientSync.overlap", "sync_gradients")


@dataclass(frozen=True)
class Figure:
    """`ratio`: the time of `contender`, in medians, to that of the unit of its `case`; `best` is of the quickest fifths."""

    case: str
    contender: str
    ratio: float
    best: float
    microseconds: float


def ratios(case: str, unit: str, seconds: dict[str, list[float]]) -> list[Figure]:
    middle = {name: float(np.median(taken)) for name, taken in seconds.items()}
    quick = {name: float(np.quantile(taken, 0.2)) for name, taken in seconds.items()}
    return [Figure(case, name, middle[name] / middle[unit], quick[name] / quick[unit], 1e6 * middle[name]) for name in seconds]


def judge(figures: Sequence[Figure]) -> list[Aim]:
    def worst(text: str, limit: float, word: str, contenders: Sequence[str]) -> Aim:
        found = max((f for f in figures if word in f.case and f.contender in contenders), key=lambda f: f.ratio)
        return Aim(text, found.ratio, found.ratio <= limit, f"{found.case}, {found.contender}")

    def of_a_leaf(call: str) -> Aim:
        """The cost of each leaf beyond the first."""
        cost = {
            name: [f.microseconds for f in figures if f.case.startswith(call) and f.contender == name]
            for name in ("unisono", THEIRS)
        }
        ratio = (cost["unisono"][-1] - cost["unisono"][0]) / (cost[THEIRS][-1] - cost[THEIRS][0])
        return Aim(f"{call}, a leaf, against torch.nn.parallel: ≤ 1.0x", ratio, ratio <= 1, "from 1 leaf to 64")

    return [
        of_a_leaf("scatter"),
        of_a_leaf("gather"),
        worst("replicas against torch.nn.parallel: ≤ 1.0x", 1.0, "replicas", ["unisono"]),
        worst("GradientSync against DDP's communication: ≤ 1.05x", 1.05, "gradient sync", ["GradientSync"]),
        worst("overlap() against DDP's communication: ≤ 1.05x", 1.05, "gradient sync", ["GradientSync.overlap"]),
    ]


def write_report(
    figures: Sequence[Figure],
    counts: Sequence[Sequence[str]],
    aims: Sequence[Aim],
    folder: Path,
    *,
    command: str,
    machine: str,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-dataparallel.md"
    plot(figures, path.with_suffix(".png"))
    rows = [
        tuple(
            f"**{cell}**" if f.contender in OURS else cell
            for cell in (f.case, f.contender, f"{f.ratio:.2f}", f"{f.best:.2f}", f"{f.microseconds:,.1f}")
        )
        for f in figures
    ]
    sections = [
        "# Benchmark of dataparallel",
        f"- Command: {command}\n- Date: {now:%Y-%m-%d %H:%M %Z}\n- Machine: {machine}\n"
        f"- torch {torch.__version__}, one thread for each process; gloo, two ranks, for the gradient sync",
        "Ratios are of medians over rounds in which all contenders take turns (beside: of the quickest fifths), to "
        "torch.nn.parallel, whose CUDA-only calls are replaced by tensor_split and cat, or to what DDP adds to a backward pass "
        "(its backward less its backward under no_sync). GradientSync and one all_reduce each come after the backward pass; "
        "overlap() is the whole block less a plain backward.",
        "## Aims",
        aims_in_markdown(aims),
        f"![ratios]({path.with_suffix('.png').name})",
        "## Time",
        table(("case", "contender", "ratio", "ratio of the quickest fifths", "median µs"), rows),
        "## Copies, as four asynchronous devices count them",
        table(("call", "tensors", "copies"), counts),
    ]
    path.write_text("\n\n".join(sections) + "\n")
    return path


def plot(figures: Sequence[Figure], path: Path) -> None:
    import matplotlib.pyplot as plt
    from shared_plot import draw_bar, dress, room_for

    halves = [[f for f in figures if ("sync" in f.case) == synced] for synced in (False, True)]
    fig, grid = plt.subplots(1, 2, figsize=(14, 6.4), layout="constrained")
    titles = ("One process: trees and replicas on CPUs", "Two ranks: gradient sync")
    for axes, half, title in zip(grid, halves, titles, strict=True):
        limit = room_for([f.ratio for f in half])
        for place, figure in enumerate(half):
            colour = "#0b6e4f" if figure.contender in OURS else "#9aa5b1"
            draw_bar(axes, -place, figure.ratio, colour, limit, "{:.2f}", height=0.8, alpha=1)
        axes.set_yticks([-k for k in range(len(half))], [f"{f.case}: {f.contender}" for f in half], fontsize=8)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlim(0, limit * 1.05)
        axes.set_title(title, fontsize=10)
        dress(axes, "x")
    fig.suptitle("Time as a ratio to torch.nn.parallel and to DDP (shorter is faster)")
    fig.savefig(path, dpi=120)
    plt.close(fig)
