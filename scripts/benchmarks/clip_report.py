"""What is kept of a run of the benchmark of the training step: a markdown file and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np
import torch
from clip_contenders import (
    CHECK_ROWS,
    CLIP_NORM,
    CONTENDERS,
    MICRO_BATCH,
    OPEN_CLIP,
    OPEN_CLIP_CUT,
    OPEN_CLIP_DEFAULT,
    OURS,
    OURS_CONCEPTS,
    OURS_CUT,
    OURS_SIGMOID,
    PEERS,
    SIGLIP,
    WORLD_SIZE,
)
from clip_results import Result, Results
from contrastive_report import MALLOC
from shared_report import Aim, aims_in_markdown, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

HEAD = ("batch", "contender", "samples/s", "/ open_clip", "CPU s a step", "CPU / open_clip", "MB", "MB / open_clip")
# Of Okabe and Ito, for all kinds of sight: ours are blue and green, those of others warm. Dashed: cut into parts.
STYLES = {
    OURS: ("#0072b2", "-", "o"),
    OURS_CONCEPTS: ("#56b4e9", "-", "s"),
    OURS_CUT: ("#009e73", "--", "D"),
    OURS_SIGMOID: ("#0072b2", "-", "o"),
    OPEN_CLIP: ("#d55e00", "-", "o"),
    OPEN_CLIP_DEFAULT: ("#e69f00", "-", "s"),
    OPEN_CLIP_CUT: ("#cc79a7", "--", "D"),
    SIGLIP: ("#d55e00", "-", "o"),
}
CONTENDERS_EXPLAINED = (
    f"open_clip's model is its CustomTextCLIP, its step one of its own `train_one_epoch` under DDP, with AdamW and gradients "
    f"clipped to a norm of {CLIP_NORM:g}. `local loss`: --local-loss --gather-with-grad; `its default`: neither, which makes "
    f"the gradient of the towers 1/{WORLD_SIZE} of the true one (each rank has that of its own features only, and DDP takes "
    f"the mean). `{MICRO_BATCH} rows at a time`, on each rank, is its --accum-freq with the local loss: for each part the "
    "loss of the whole batch is taken once more, and the gradient of the scale is added as often. Ours is the body of the "
    f"loop of `unisono_models.clip.train`, `{MICRO_BATCH} rows at a time` with objective.micro_batch. `positives by concept` "
    "is what its recipes use, here with no two pairs of one concept, so that the loss is the same. Our tower normalises the "
    "pictures within the step, open_clip's loader before it. No dropout."
)


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
    """Write `<date>-clip.md` and the plot beside it; return the path of the former."""
    from clip_towers import BERT, CONVNEXT, PIXELS, TOKENS, WIDTH

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-clip.md"
    plot(results, path.with_suffix(".png"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("open_clip_torch", "timm", "transformers"))
    rounds = ", ".join(
        f"{rounds} at batch {rows * WORLD_SIZE}"
        for rows in results.sizes
        if (rounds := max(len(r.wall) for r in results if r.rows == rows))
    )
    sections = [
        "# Benchmark of the training step",
        f"- Command: {command}\n- Date: {now:%Y-%m-%d %H:%M %Z}\n- Machine: {machine}\n"
        f"- torch {torch.__version__}, {versions}, {WORLD_SIZE} ranks on gloo, one thread each, float32\n"
        f"- Towers: timm {CONVNEXT.model} {CONVNEXT.kwargs} at {PIXELS} pixels; BERT of {BERT['num_hidden_layers']} layers, "
        f"width {BERT['hidden_size']}, up to {TOKENS} tokens; both into {WIDTH} dimensions\n- Rounds: {rounds}",
        "A step: both towers forward, the loss over the global batch, backward, the exchange of gradients, and the optimizer. "
        "All contenders take turns in every round. Samples/s: of the global batch, by the slowest rank, the median of all "
        "rounds. CPU s: process time, the mean over ranks, the median of all rounds. Ratios of time are taken within each "
        "round: their median, and in brackets their range. MB (2^20 bytes): how much one step raised the resident memory of a "
        "process at most, activations and gradients included, weights, optimizer and batch not; the rank that took most. "
        f"Ratios are to `{PEERS['CLIP']}` for CLIP, `{PEERS['sigmoid']}` for the sigmoid losses.",
        CONTENDERS_EXPLAINED,
        f"Memory is weighed with {MALLOC[plain_malloc]}. Time always is with glibc's malloc as it is.",
        f"All start from the same weights and do the same work: with {CHECK_ROWS} rows on each rank the first loss deviates "
        f"from open_clip's by at most {max(r.check.loss for r in results):.1e} of it, the gradients (but for the factors said "
        f"above) by {max(r.check.gradients for r in results):.1e} of their norm.",
        "## Aims",
        aims_in_markdown(aims),
        f"![samples per second and peak memory]({path.with_suffix('.png').name})",
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
    memory = results.memory(result)
    return [
        str(result.batch),
        result.contender,
        f"{result.rate:.0f}" if result.is_timed else "-",
        str(results.speed(result) or "-"),
        f"{np.median(result.cpu):.3f}" if result.is_timed else "-",
        str(results.cpu(result) or "-"),
        f"{result.extra:.0f}",
        f"{memory:.2f}x" if memory else "-",
    ]


def plot(results: Results, path: Path) -> None:
    """A row for each family; the speed as a ratio to open_clip's on the left, peak memory on the right."""
    figure, grid = plt.subplots(len(PEERS), 2, figsize=(14, 8.5), layout="constrained", squeeze=False)
    titles = {"CLIP": "Softmax (CLIP) loss", "sigmoid": "Sigmoid (SigLIP) loss"}
    for (speeds, memory), family in zip(grid, PEERS, strict=True):
        for name in (name for name in STYLES if CONTENDERS[name].family == family):
            mine = sorted((r for r in results if r.contender == name), key=lambda r: r.rows)
            colour, line, marker = STYLES[name]
            look = {"color": colour, "linestyle": line, "marker": marker, "linewidth": 1.8, "markersize": 5, "label": name}
            timed = [(r.batch, speed) for r in mine if (speed := results.speed(r))]
            if timed:
                middle = [speed.median for _, speed in timed]
                below = [speed.median - speed.least for _, speed in timed]
                above = [speed.most - speed.median for _, speed in timed]
                speeds.errorbar([batch for batch, _ in timed], middle, [below, above], capsize=3, elinewidth=0.8, **look)
            memory.plot([r.batch for r in mine], [r.extra for r in mine], **look)
        speeds.set_ylim(bottom=0)
        speeds.set_ylabel(f"{titles[family]}\nsamples per second / open_clip")
        speeds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        memory.set_yscale("log")
        memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        memory.yaxis.set_minor_formatter(NullFormatter())
        memory.set_ylabel("peak memory of a step, MB (log scale)")
        memory.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        for axes in (speeds, memory):
            dress(axes, results)
    grid[0][0].set_title("Speed, as a ratio to open_clip in the same round; bars: the range (higher is faster)", fontsize=11)
    grid[0][1].set_title("Peak memory of a step on each rank (lower is smaller)", fontsize=11)
    figure.suptitle(f"A whole training step with the same towers: {WORLD_SIZE} ranks on gloo, float32")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def dress(axes: Axes, results: Results) -> None:
    batches = [rows * WORLD_SIZE for rows in results.sizes]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("global batch")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
