"""What is kept of a run of the benchmark of the recommender: a markdown file, all figures as JSON, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from clip_results import Ratio
from embedding_report import in_bold
from embedding_workload import BATCHES, DIM, EXPONENT, LR, TABLES, Setting
from recommender_contenders import ADAGRAD, AUTO, DENSE, ONE_PROCESS, PREFETCH, TORCHREC_TABLE, TWO_THREADS, WORLD_SIZE
from recommender_measures import CHECKED_STEPS
from recommender_plot import plot
from recommender_results import TOLERANCE, Result, Results, as_json, deviations
from recommender_workload import CASES, DENSE_LR, MODEL, NUMBERS, WIDTH, Case
from shared_report import Aim, aims_in_markdown, table

HEAD = (
    "contender",
    "samples/s",
    "x TorchRec",
    "wall ms",
    "dense share",
    "table ms",
    "CPU ms",
    "MB sent",
    "payload",
    "peak MiB",
    "no code",
    "plain malloc",
)


def write_report(
    cases: Mapping[Case, Results], aims: Sequence[Aim], setting: Setting, folder: Path, *, command: str, machine: str
) -> Path:
    """Write `<date>-recommender.md`, .json and .png; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    path = folder / f"{now:%Y-%m-%d}-recommender.md"
    plot(cases, setting, path.with_suffix(".png"))
    about = {
        "command": command.replace("`", ""),
        "date": f"{now:%Y-%m-%d %H:%M %Z}",
        "machine": machine,
        "torch": torch.__version__,
    }
    path.with_suffix(".json").write_text(json.dumps({**about, "cases": as_json(cases)}, indent=1) + "\n")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torchrec", "fbgemm-gpu-cpu"))
    rounds = len(next(iter(cases.values()))[0].wall)
    layers = f"bottom {' '.join(map(str, (NUMBERS, *MODEL.bottom, WIDTH)))}, top {' '.join(map(str, (*MODEL.hidden, 1)))}"
    layers += ", linear terms in the tables" if WIDTH < DIM else ""
    sections = [
        "# Benchmark of the recommender",
        f"- Command: {command}\n- Date: {about['date']}\n- Machine: {machine}\n"
        f"- torch {torch.__version__} for all contenders, {versions}; {WORLD_SIZE} ranks on gloo, one thread each, float32\n"
        f"- DLRM: {layers}; {TABLES} tables of {min(setting.rows):,} to {max(setting.rows):,} rows, {sum(setting.rows):,} in "
        f"all, of width {DIM}: {setting.gigabytes:.2f} GB\n"
        f"- Batch {setting.batch} on each rank; ids by Zipf {EXPONENT}, popular ones scattered; row-wise Adagrad at {LR:g} "
        f"for tables, AdamW at {DENSE_LR:g} for the rest\n- {rounds} rounds",
        measured(),
        contenders_explained(cases),
        "## Aims",
        f"About `{AUTO}`, with the plan that the planner chooses.\n\n" + aims_in_markdown(aims)
        if aims
        else f"None: they are about `{AUTO}` and TorchRec.",
        f"![samples per second, CPU time, bytes sent and peak memory]({path.with_suffix('.png').name})",
    ]
    for case, results in cases.items():
        rows = (in_bold(figure_cells(r, results), r.kind.is_ours) for r in results)
        sections += [f"## {case.capitalize()}", describe(case, results, setting), table(HEAD, rows), agreement(results)]
    path.write_text("\n\n".join(sections) + "\n")
    return path


def measured() -> str:
    return (
        "A step: look-up, forward of the dense part, loss, backward, update of the tables and of the rest, of a batch that is "
        f"in memory. {BATCHES} batches are taken in turn, in the form that each contender's loader would give. All take turns "
        "in every round, with fresh processes each time, 3 steps to warm up, and filled tables.\n\n"
        "Samples/s: of all ranks, by the slowest one's median of a round's steps; the median and the range over rounds. x "
        "TorchRec: how many times as many as with its fastest plan, in the same round. Wall ms: of a step, the median over "
        f"rounds. Dense share: the wall time of `{DENSE}` in the same round, as a part of this; table ms: the wall time "
        "beyond it. CPU ms: process time of a rank with all threads, the mean over ranks. MB sent (10^6 bytes): what a rank's "
        "TCP connections took in a step by the kernel's count (tcp_info), the mean over ranks, gradients of the dense part "
        "included. Payload: what the collectives have to send if ranks exchange directly, by "
        "`unisono.collectives.count_bytes`. Peak MiB (2^20 bytes): the most that was resident in a fresh process during 4 "
        "steps, the rank that held most, with malloc set to give back every freed tensor at once; no code: without what was "
        "resident once all code was loaded; plain malloc: the whole peak in the timed rounds, with malloc as it is."
    )


def contenders_explained(cases: Mapping[Case, Results]) -> str:
    choices = [
        f"`{r.contender}` chose {r.weights[0].chosen} ({case})"
        for case, results in cases.items()
        for r in results
        if r.weights[0].chosen
    ]
    return (
        f"`{AUTO}` is the learner of `unisono_models.recommender`, made and wrapped as its trainer does, and the body of its "
        f"loop, the loss over all ranks included; `{PREFETCH}`: with `--tables.prefetch`, row numbers of the next batch "
        f"travel in the backward; `{ADAGRAD}`: with the optimizer that torch's own tables have. TorchRec's are an "
        "EmbeddingBagCollection under DistributedModelParallel with fbgemm's fused kernels, exact row-wise Adagrad in the "
        "backward, below the same head in a DDP of the options that DistributedModelParallel gives one. The head takes "
        "TorchRec's result as the one tensor it is, without a copy; ours is a tensor for each feature, which the model "
        f"stacks. `{TORCHREC_TABLE}`: whole tables, placed such that ids and rows are even. Its pipeline for the next batch's "
        "ids (TrainPipelineSparseDist), which overlaps by streams of GPUs, is left out. "
        f"`{ONE_PROCESS}`: nn.EmbeddingBag(sparse=True) for each table and torch.optim.Adagrad, which has a state for each "
        "element: torch has no row-wise one for sparse gradients; it takes the batches of all ranks on one thread, "
        f"`{TWO_THREADS}` on both cores. `{DENSE}`: the head in the same DDP on two ranks, on fixed rows whose gradients "
        f"are formed and dropped. Plans: {'; '.join(choices) or 'none'}."
    )


def describe(case: Case, results: Results, setting: Setting) -> str:
    shared = [r for r in results if not r.kind.one_process] or results
    unique = round(float(np.mean([w.unique_ids for w in shared[0].weights])))
    ids = setting.batch * sum(CASES[case])
    text = "One id for each feature, as Criteo has" if case == "one id" else "Bags of 1 to 10 ids, their mean"
    text = f"{text}: {ids:,} ids on each rank, {unique:,} of them unique."
    ours, fastest = results.find(AUTO), results.fastest
    if ours and fastest and (share := results.share_of_dense(ours)) and (theirs := results.share_of_dense(fastest)):
        apart = (results.table_milliseconds(r) for r in (ours, fastest))
        mine, other = (f"{value:.1f}" for value in apart if value is not None)
        text += (
            f" The dense part alone, which is the same for both, takes {share.median:.0%} of our step and {theirs.median:.0%} "
            f"of that of `{fastest.contender}`: what is left for tables is {mine} ms and {other} ms."
        )
        if theirs.median < 1:
            text += f" Even with tables that cost nothing the ratio of whole steps would be {1 / theirs.median:.2f}x."
    return text


def agreement(results: Results) -> str:
    known = [r for r in results if r.kind.optimizer]
    if not known:
        return ""
    away = deviations({r.contender: r.losses for r in known})
    curves = {r.kind.optimizer: r for r in reversed(known)}
    texts = [f"{' '.join(f'{loss:.5f}' for loss in r.losses)} with {optimizer}" for optimizer, r in curves.items()]
    return (
        f"All start from the same weights and have the same rows. Losses of the first {CHECKED_STEPS} steps, the last two with "
        f"batches that came before: {'; '.join(texts)}. Contenders with the same optimizer agree to {max(away.values()):.1e} "
        f"of the loss (at most {TOLERANCE:g}, or nothing is timed); the first loss is the same for all."
    )


def figure_cells(result: Result, results: Results) -> list[str]:
    rate, speed, share = result.rate, results.speed(result), results.share_of_dense(result)
    apart = results.table_milliseconds(result)
    return [
        result.contender,
        span(rate),
        str(speed) if speed else "-",
        f"{result.milliseconds:.1f}",
        f"{share.median:.0%}" if share else "-",
        f"{apart:.1f}" if apart is not None else "-",
        f"{result.cpu_milliseconds:.1f}",
        f"{result.sent:.2f}",
        f"{result.payload:.2f}",
        f"{result.peak:.0f}",
        f"{result.beyond_code:.0f}",
        f"{result.plain_peak:.0f}",
    ]


def span(rate: Ratio) -> str:
    range_ = f" ({rate.least:,.0f}-{rate.most:,.0f})" if rate.most > rate.least else ""  # of one round there is none
    return f"{rate.median:,.0f}{range_}"
