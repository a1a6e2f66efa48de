"""What would one GPU of many do? Kernels, FLOPs, bytes, collectives, host syncs and memory, beside open_clip's and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_ledger.contenders import HAS_TRITON, JOBS, RANK, count
from benchmarks.gpu_ledger.torchrec import torchrec_is_missing
from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, require_at_least
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import MB, Measurement, Results
from unisono.collectives.ledger.hardware import H100_SXM

SMALL, LARGE = "64 rows of 512", "4,096 rows of 1,024"


@dataclass(frozen=True)
class GpuLedger(Benchmark):
    """Count what one GPU of W does in a step: our losses, gathers, gradient sync, batch norm and tables, and their peers.

    Nothing is timed and no GPU is needed: the counts come from simulate_rank, and two runs give the same. The milliseconds
    are a model of an H100. Takes about two minutes, most of it for the ring of SigLIP. --quick runs W = 8 alone.
    """

    worlds: tuple[int, ...] = (8, 64, 256, 1024)
    """Numbers of ranks."""

    title = "one GPU of many: counts of the ledger"
    plot_title = "One GPU of W, counted without a GPU (shorter is better; the milliseconds are a model)"
    peers = ("open_clip_torch",)
    needs_linux = False

    def validate(self) -> None:
        require_at_least(RANK + 1, worlds=self.worlds)

    def run(self, ranks: Ranks) -> list[Measurement]:
        plan = [
            (job, f"{job}, {size}, W = {world}", name, contender, JOBS[job].sizes[size], world)
            for job in JOBS
            for size in JOBS[job].sizes
            for world in ((8,) if self.quick else self.worlds)
            if world <= JOBS[job].sizes[size].most_ranks
            for name, contender in JOBS[job].contenders.items()
        ]
        ranks.expect(len(plan))
        found = []
        for job, case, name, contender, size, world in plan:
            ranks.progress.update(ranks.task, description=f"{case}: {name}")
            found.append(Measurement(case, name, numbers={"job": job, **count(contender, size, world)}))
            ranks.progress.advance(ranks.task)
        return found

    def skipped(self) -> list[str]:
        lines = [] if HAS_TRITON else ["skipped: the Triton kernels of the losses: this environment has no Triton"]
        missing = torchrec_is_missing()
        lines.append(
            f"skipped: losses of {LARGE} with more than 64 ranks: a million rows in all, and a ring that is counted hop by hop"
        )
        return [*lines, f"skipped: TorchRec: {missing}"] if missing else lines

    def values(self, results: Results) -> dict[str, Any]:
        return {"rank": RANK, "hardware": H100_SXM}

    def sections(self, results: Results) -> list[Section]:
        columns = [
            Column("W", lambda m: m["world_size"]),
            Column("contender", lambda m: m.contender),
            Column("kernels", lambda m: m["kernels"], "{:,}", plot="kernels"),
            Column("forward + backward", lambda m: f"{m['kernels_forward']:,} + {m['kernels_backward']:,}", in_terminal=False),
            Column("GFLOP", gflops),
            Column("MB touched", in_mb("bytes_touched"), "{:,.1f}"),
            Column("collectives", collectives),
            Column("MB sent", in_mb("bytes_sent"), "{:,.2f}"),
            Column("syncs", lambda m: m["host_syncs"]),
            Column("peak MB", in_mb("peak_bytes"), "{:,.1f}", plot="peak memory, MB"),
            Column("ms, model: lower", lambda m: m["model_lower_bound_ms"], "{:.3f}", in_terminal=False),
            Column("ms, model: estimate", lambda m: m["model_estimate_ms"], "{:.3f}", plot="model of an H100, ms"),
        ]
        sections = []
        for name, job in JOBS.items():
            for size in job.sizes:
                rows = [m for m in results.measurements if m.case.startswith(f"{name}, {size}, W")]
                label = lambda m: f"W = {m['world_size']}: {m.contender}"  # noqa: E731
                sections.append(Section(f"{name}, {size}", columns, rows, before=job.about, label=label))
        return [section for section in sections if section.rows]

    def targets(self, results: Results) -> list[Target]:
        """The aims of issues 20 and 21."""
        targets: list[Target] = []

        def at_most(limit: float, text: str, case: str, contender: str, value: Callable[[Measurement], float]) -> None:
            if (m := results.find(case, contender)) is not None:
                found = value(m)
                targets.append(Target(f"{text}: ≤ {limit:g}", found, found <= limit, f"{case}: {contender}", "{:,.3g}"))

        large = f"CLIP loss, {LARGE}, W = 8"
        small = f"CLIP loss, {SMALL}, W = 256"
        tree = f"Gather of a tree, {next(iter(JOBS['Gather of a tree'].sizes))}, W = 64"
        torch_tiles, triton = "unisono clip_loss, torch tiles", "unisono clip_loss, Triton"
        peer = results.find(large, "open_clip ClipLoss, local")
        at_most(80, "clip_loss, kernels with torch tiles", large, torch_tiles, kernels)
        if peer:
            at_most(peer["kernels"], "clip_loss, kernels with Triton (open_clip's)", large, triton, kernels)
        best = triton if results.find(large, triton) else torch_tiles
        at_most(5, "clip_loss, modelled ms", large, best, lambda m: float(m["model_estimate_ms"]))
        at_most(0.3, "clip_loss, peak memory, GB", large, best, lambda m: float(m["peak_bytes"]) / 1e9)
        at_most(100, "clip_loss, kernels of a step", small, torch_tiles, kernels)
        at_most(6, "clip_loss, collectives of a step", small, torch_tiles, lambda m: float(m["collective_calls"]))
        at_most(
            4, "gather of a tree, kernels of the backward", tree, "unisono all_gather", lambda m: float(m["kernels_backward"])
        )
        tables = f"Embedding tables, {next(iter(JOBS['Embedding tables'].sizes))}, W = 8"
        for plan in ("rows", "tables"):
            contender = f"unisono EmbeddingCollection, {plan}"
            at_most(60, f"26 tables, {plan}: kernels of a step", tables, contender, kernels)
            at_most(1, f"26 tables, {plan}: host syncs", tables, contender, lambda m: float(m["host_syncs"]))
        waiting = [m for m in results.measurements if self.is_ours(m.contender) and m["job"] != "Embedding tables"]
        if waiting:
            worst = max(waiting, key=lambda m: m["host_syncs"])
            text = "host syncs of our losses, gathers, gradients and batch norm: 0"
            targets.append(
                Target(text, worst["host_syncs"], worst["host_syncs"] == 0, f"{worst.case}: {worst.contender}", "{}")
            )
        return targets


def kernels(m: Measurement) -> float:
    return float(m["kernels"])


def in_mb(key: str) -> Callable[[Measurement], float]:
    return lambda m: float(m[key]) / MB


def gflops(m: Measurement) -> str | None:
    return ", ".join(f"{flops / 1e9:,.2f} {dtype}" for dtype, flops in m["flops"].items()) or None


def collectives(m: Measurement) -> str:
    return ", ".join(f"{calls:,} {name}" for name, calls in m["collectives"].items()) or "0"
