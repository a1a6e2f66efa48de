"""Is a ragged, differentiable all_gather as fast as torch's own equal one? Run this file; `--help` says how."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from collectives_contenders import PAYLOADS, Case, measure
from collectives_report import TITLES, write_report
from collectives_results import Result, combine, judge
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from shared_report import aim_table, describe_machine

from unisono.collectives.testing import RankPool

RESULTS = Path(__file__).parent / "results"


def main(quick: bool = False, out: Path = RESULTS, world_sizes: tuple[int, ...] = (2, 4)) -> None:
    """Time unisono.collectives against torch's own collectives and against padding to the longest.

    Real gloo processes on this machine, one thread each; 1 KB, 1 MB and 64 MB of float32 in all; equal and skewed lengths.
    All contenders of a case take turns in every round, and each is a ratio to torch's own call in the same round. Prints
    the ratios and the aims, and writes <date>-collectives.md and .png. Takes some minutes: leave the machine alone.

    Args:
        quick: A tenth of the rounds: to see that it works, not to quote.
        out: The folder for the markdown file and the plot. A file of the same day is replaced.
        world_sizes: How many ranks; each a divisor of 64, so that the payloads split equally.
    """
    for world_size in world_sizes:
        if world_size < 2 or 64 % world_size:
            raise SystemExit(
                f"--world-sizes: {world_size} is not a divisor of 64 from 2 up, so the payloads would not split equally"
            )
    console = Console()
    machine = describe_machine()
    results = run_all(world_sizes, quick, console)
    aims = judge(results)
    console.print(ratio_table(results), aim_table(aims))
    warning = " (quick: too few rounds to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'collectives', *sys.argv[1:]])}`{warning}"
    path = write_report(results, aims, out, command=command, machine=machine)
    console.print(f"written: {path}, {path.with_suffix('.png').name}", soft_wrap=True)


def run_all(world_sizes: Sequence[int], quick: bool, console: Console) -> list[Result]:
    cases = [
        *(Case("forward", payload, lengths) for payload in PAYLOADS for lengths in ("equal", "skewed")),
        *(Case("backward", payload, lengths) for payload in PAYLOADS for lengths in ("equal", "skewed")),
        Case("sizes", PAYLOADS[0], "skewed"),
    ]
    results = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(world_sizes))
        for world_size in world_sizes:
            with RankPool(world_size, group_timeout=300) as pool:
                for case in cases:
                    progress.update(
                        task, description=f"{world_size} ranks: {case.direction}, {case.payload.name}, {case.lengths}"
                    )
                    rounds = max(2, case.payload.rounds // 10) if quick else case.payload.rounds
                    results += combine(world_size, case, pool.run(measure, case, rounds, timeout=900))
                    progress.advance(task)
    return results


def ratio_table(results: Sequence[Result]) -> Table:
    """A line for each contender, a column for each payload: ratio and median milliseconds."""
    table = Table(title="Ratio to torch's own call, and median milliseconds")
    for head in ("", "ranks", "lengths", "contender"):
        table.add_column(head)
    for payload in PAYLOADS:
        table.add_column(payload.name, justify="right")
    lines: dict[tuple[str, int, str, str], list[Result]] = {}
    for r in sorted(results, key=lambda r: (list(TITLES).index(r.case.direction), r.world_size, r.case.lengths)):
        lines.setdefault((TITLES[r.case.direction], r.world_size, r.case.lengths, r.contender), []).append(r)
    previous: tuple[str, int, str] | None = None
    for (title, world_size, lengths, contender), line in lines.items():
        if previous not in (None, (title, world_size, lengths)):
            table.add_section()
        first = previous != (title, world_size, lengths)
        previous = (title, world_size, lengths)
        cells = [f"{r.ratio:.2f}x [dim]{np.median(r.wall) * 1e3:9.3f}[/dim]" for r in line]
        style = "green" if line[0].is_ours else None
        table.add_row(*((title, str(world_size), lengths) if first else ("", "", "")), contender, *cells, style=style)
    return table


if __name__ == "__main__":
    tyro.cli(main)
