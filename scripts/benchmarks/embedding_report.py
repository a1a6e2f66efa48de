"""What is kept of a run of the benchmark of the tables: a markdown file, and a plot beside it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from embedding_contenders import CONTENDERS, DTENSOR, ONE_PROCESS, TORCHREC_COLUMN, TORCHREC_TABLE, WORLD_SIZE
from embedding_plot import plot
from embedding_results import Result, Results, Scales
from embedding_workload import BATCHES, DIM, EXPONENT, LR, POOLINGS, TABLES, Setting
from shared_report import Aim, aims_in_markdown, table

HEAD = ("contender", "wall ms", "best", "x TorchRec", "CPU ms", "MB sent", "payload", "peak MiB", "no code", "plain malloc")
SCALE_HEAD = ("contender", "ranks", "CPU ms", "ns an id", "MB sent")


def write_report(
    results: Results, scales: Scales, aims: Sequence[Aim], setting: Setting, folder: Path, *, command: str, machine: str
) -> Path:
    """Write `<date>-embedding.md` and the plot beside it; return the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-embedding.md"
    plot(results, scales, setting, path.with_suffix(".png"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torchrec", "fbgemm-gpu-cpu"))
    ids = setting.batch * sum(POOLINGS)
    sections = [
        "# Benchmark of the sharded tables",
        f"- Command: {command}\n- Date: {now:%Y-%m-%d %H:%M %Z}\n- Machine: {machine}\n"
        f"- torch {torch.__version__} for all contenders, {versions}; {WORLD_SIZE} ranks on gloo, one thread each, float32\n"
        f"- {TABLES} tables of {min(setting.rows):,} to {max(setting.rows):,} rows, {sum(setting.rows):,} in all, of width "
        f"{DIM}: {setting.gigabytes:.2f} GB\n"
        f"- Batch {setting.batch} on each rank; bags of {min(POOLINGS)} to {max(POOLINGS)} ids, the same in all bags of a "
        f"table: {ids:,} ids on each rank, {unique_ids(results):,} of them unique; Zipf {EXPONENT}, popular ids scattered\n"
        f"- {len(results[0].wall)} rounds",
        measured(),
        contenders_explained(results),
        agreement(results),
        "## Aims",
        "All are about `unisono, auto`, the plan that the planner chooses.\n\n" + aims_in_markdown(aims)
        if aims
        else "None: they are about `unisono, auto` and TorchRec.",
        f"![time, bytes sent and peak memory of a step]({path.with_suffix('.png').name})",
        "## All figures",
        table(HEAD, (in_bold(figure_cells(r, results), r.kind.is_ours) for r in results)),
        *scale_section(scales),
    ]
    path.write_text("\n\n".join(sections) + "\n")
    return path


def measured() -> str:
    return (
        "A step: the forward of a batch, the backward from a fixed gradient of the pooled rows, and the update, which all but "
        f"torch's own apply in the backward. {BATCHES} batches, made before the clock runs, are taken in turn, in the form "
        "that each contender's loader would give. All take turns in every round, with fresh processes each time, 3 steps to "
        "warm up, and filled tables.\n\n"
        "Wall ms: the slowest rank, the median of a round's steps, then of all rounds; best: the least of all steps. x "
        "TorchRec: how many times as fast as its fastest plan with float32 on the wire, in the same round; the median and the "
        "range over all rounds. CPU ms: process time with that of all threads, the mean over ranks, medians likewise. MB sent "
        "(10^6 bytes): what a rank's TCP connections took in a step by the kernel's own count (tcp_info), the mean over ranks. "
        "Payload: what the collectives have to send if ranks exchange directly, by `unisono.collectives.count_bytes`; gloo's "
        "reduce_scatter sends more than that. Peak MiB (2^20 bytes): the most that was resident in a fresh process during 4 "
        "steps, tables and code included, the rank that held most, with malloc set to give back every freed tensor at once "
        "(mallopt, 64 KB); no code: without what was resident once all code was loaded, before there were tables; plain "
        "malloc: the whole peak in the timed rounds, with glibc's malloc as it is."
    )


def contenders_explained(results: Results) -> str:
    choices = [f"`{r.contender}` chose {r.weights[0].chosen}" for r in results if r.weights[0].chosen]
    text = (
        "TorchRec's are an EmbeddingBagCollection under DistributedModelParallel, with fbgemm's fused kernels and their exact "
        "row-wise Adagrad; it gets its batches as KeyedJaggedTensors whose lengths are known, and its result is taken as one "
        f"tensor. `{TORCHREC_TABLE}`: whole tables, placed such that ids and rows are even, more so than by its own planner, "
        "which for these tables chooses table-wise (on CPUs it leaves out row-wise). unisono's result is a tensor for each "
        "feature. On gloo TorchRec has no bf16, hence fp16. "
        f"`{ONE_PROCESS}` takes the batches of all ranks, on one thread, with SGD: torch has no row-wise Adagrad. "
        f"`{DTENSOR}` is what RowwiseParallel makes of nn.Embedding, with the sum over each bag after it and SGD as soon as a "
        "gradient is there; DTensor has no EmbeddingBag."
    )
    return f"{text} Plans: {'; '.join(choices)}." if choices else text


def agreement(results: Results) -> str:
    exact = [r for r in results if not r.kind.half_wire]
    half = [r for r in results if r.kind.half_wire]

    def worst(chosen: Sequence[Result]) -> str:
        outputs, updates = (max(getattr(w, key) for r in chosen for w in r.weights) for key in ("outputs", "updates"))
        return f"{outputs:.1e} in the first outputs and {updates:.1e} after two steps"

    text = (
        f"All start from the same rows and do the same work, gradients averaged over ranks, a rate of {LR:g}: the outputs of "
        "the first forward, and those of two batches after two steps, are compared with a plain computation in float64. "
    )
    text += f"Largest deviations, as a part of the norm: {worst(exact)}" if exact else ""
    text += f"; with half the bytes on the wire (bf16, fp16), {worst(half)}" if half else ""
    if any(r.contender == TORCHREC_COLUMN for r in results):
        text += (
            f". `{TORCHREC_COLUMN}` keeps a state of Adagrad for each rank's columns of a row, so its updates depend on the "
            "number of ranks; it is compared with a computation that does so, too"
        )
    return text + "."


def unique_ids(results: Results) -> int:
    """Of one rank of two, unless only the contender of one process was run."""
    shared = [r for r in results if not r.kind.one_process] or results
    return round(float(np.mean([w.unique_ids for w in shared[0].weights])))


def figure_cells(result: Result, results: Results) -> list[str]:
    speed = results.speed(result)
    return [
        result.contender,
        f"{result.milliseconds:.1f}",
        f"{result.best:.1f}",
        str(speed) if speed else "-",
        f"{result.cpu_milliseconds:.1f}",
        f"{result.sent:.2f}",
        f"{result.payload:.2f}",
        f"{result.peak:.0f}",
        f"{result.beyond_code:.0f}",
        f"{result.plain_peak:.0f}",
    ]


def scale_cells(scales: Scales, contender: str) -> list[str]:
    """One row: the figures on each number of ranks, with arrows between."""
    mine = scales.of(contender)

    def arrows(texts: Sequence[str]) -> str:
        return " → ".join(texts)

    return [
        contender,
        arrows([str(s.ranks) for s in mine]),
        arrows([f"{s.cpu:.1f}" for s in mine]),
        arrows([f"{s.nanoseconds_an_id:.0f}" for s in mine]),
        arrows([f"{s.sent:.2f}" for s in mine]),
    ]


def scale_section(scales: Scales) -> list[str]:
    if not scales:
        return []
    return [
        "## More ranks",
        f"The same tables, a batch of {scales[0].batch} on each rank. CPU ms and MB sent of one rank in a step; CPU: the "
        "median of a round's steps, the lesser of the rounds. More ranks than cores share them: wall times would say nothing.",
        table(SCALE_HEAD, (in_bold(scale_cells(scales, name), CONTENDERS[name].is_ours) for name in scales.contenders)),
    ]


def in_bold(cells: Sequence[str], yes: bool) -> list[str]:
    return [f"**{cell}**" for cell in cells] if yes else list(cells)
