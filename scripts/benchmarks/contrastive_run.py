"""The benchmark of the contrastive losses: fresh ranks weigh each contender, then one set of ranks times all in turn."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contrastive_contenders import CONTENDERS, WIDTH, WORLD_SIZE
from contrastive_measures import Weight, time_round, warm_up, weigh
from contrastive_report import HEAD, figure_cells, write_report
from contrastive_results import Results, combine, judge
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from shared_report import aim_table, describe_machine

from unisono.collectives.testing import RankPool

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1e-4
MOST_GIGABYTES = 3.0  # on each rank
TERMINAL_HEAD = [head for head in HEAD if head not in ("CPU, most", "wall / limit", "wall / open_clip")]


def main(
    sizes: tuple[int, ...] = (1024, 4096, 8192),
    repeats: int | None = None,
    quick: bool = False,
    full: bool = False,
    plain_malloc: bool = False,
    out: Path | None = None,
) -> None:
    """Weigh and time clip_loss and sigmoid_loss against open_clip's, and against the matmuls that none can do without.

    Forward and backward, two gloo ranks on this machine, one thread each, float32, width 512. First a fresh pair of
    processes for each contender finds its peak memory and checks its loss and gradients; then all take turns in every
    round. Prints all figures and the aims, and writes <date>-contrastive.md and .png. About 10 minutes on two cores: leave
    the machine alone.

    Args:
        sizes: Rows on each rank. Aims are told about 4096 and 8192.
        repeats: Rounds of each size; 15 up to 1024 rows, 5 up to 4096, 3 beyond, unless given.
        quick: Two rounds of 128 and 768 rows, to see that it works; writes nothing, unless --out says where.
        full: Also what is estimated to take more than 3 GB on each rank: open_clip global with 8192 rows.
        plain_malloc: Memory as glibc's allocator leaves it, unused gaps included, and not of the tensors alone.
        out: The folder for the markdown file and the plot. A file of the same day is replaced.
    """
    if min(sizes) < 2 or (repeats is not None and repeats < 1):
        raise SystemExit(f"--sizes: {sizes} must be 2 or more, and --repeats: {repeats} 1 or more")
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("contrastive: the peak memory is read from /proc, which only Linux has")
    if quick:
        sizes, repeats = (128, 768), repeats or 2
    console = Console()
    if not console.is_terminal:
        console.width = 120
    machine = describe_machine()
    results, skipped = run_all(sizes, repeats, full, plain_malloc, console)
    aims = judge(results)
    console.print(figure_table(results))
    for line in skipped:
        console.print(line, soft_wrap=True)
    worst = max((r for r in results if not r.is_limit), key=lambda r: r.deviation)
    console.print(
        f"largest deviation from open_clip's loss and gradients: {worst.deviation:.1e} ({worst.contender}, b = {worst.rows})"
    )
    console.print(aim_table(aims) if aims else "no aims: they are about 4096 and 8192 rows")
    if quick and out is None:
        return
    warning = " (quick: too small to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'contrastive', *sys.argv[1:]])}`{warning}"
    path = write_report(results, aims, skipped, out or RESULTS, command=command, machine=machine, plain_malloc=plain_malloc)
    console.print(f"written: {path}, {path.with_suffix('.png').name}", soft_wrap=True)


def run_all(
    sizes: Sequence[int], repeats: int | None, full: bool, plain_malloc: bool, console: Console
) -> tuple[Results, list[str]]:
    """The results, and a line for each contender that was left out."""
    results, skipped, plans = Results(), [], []
    weights: dict[tuple[str, int], list[Weight]] = {}
    for rows in sizes:
        too_large = [name for name, c in CONTENDERS.items() if c.gigabytes(rows) > MOST_GIGABYTES and not full]
        skipped += [
            f"skipped: {name}, b = {rows}, for about {CONTENDERS[name].gigabytes(rows):.1f} GB on each rank (--full runs it)"
            for name in too_large
        ]
        plans.append((rows, [name for name in CONTENDERS if name not in too_large], repeats or usual_repeats(rows)))

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        total = sum(len(names) * (2 + work(rows) * (1 + rounds + rounds // 5)) for rows, names, rounds in plans)
        task = progress.add_task("", total=total)
        for rows, names, _ in plans:
            for name in names:
                progress.update(task, description=f"b = {rows}: memory and results of {name}")
                with RankPool(WORLD_SIZE, group_timeout=300) as pool:
                    found = weights[name, rows] = pool.run(weigh, name, rows, Path(folder), plain_malloc, timeout=600)
                deviation = max(w.deviation for w in found)
                if not deviation <= TOLERANCE:
                    raise SystemExit(f"{name}, b = {rows}: loss or gradients deviate by {deviation:.1e}, so it is other work")
                progress.advance(task, 2 + work(rows))
        with RankPool(WORLD_SIZE, group_timeout=300) as pool:
            pool.run(warm_up, list(CONTENDERS), timeout=600)
            for rows, names, rounds in plans:
                seconds = []
                for turn in range(-(rounds // 5), rounds):  # those below 0 warm up
                    progress.update(task, description=f"b = {rows}: time, round {turn + 1} of {rounds}")
                    found = pool.run(time_round, names, rows, turn, timeout=900)
                    seconds += [found] if turn >= 0 else []
                    progress.advance(task, work(rows) * len(names))
                results += combine(rows, {name: weights[name, rows] for name in names}, seconds)
    return results, skipped


def usual_repeats(rows: int) -> int:
    return 15 if rows <= 1024 else 5 if rows <= 4096 else 3


def work(rows: int) -> float:
    """About the seconds of one contender, for the bar of progress."""
    return 0.05 + 1e-7 * rows**2


def figure_table(results: Results) -> Table:
    table = Table(title=f"Forward and backward, {WORLD_SIZE} ranks, width {WIDTH}: ratios to the limit and to open_clip")
    for head in TERMINAL_HEAD:
        left = head == "contender"
        table.add_column(head, justify="left" if left else "right", no_wrap=left)
    for rows in results.sizes:
        table.add_section()
        for result in (r for r in results if r.rows == rows):
            cells = [cell for head, cell in zip(HEAD, figure_cells(result, results), strict=True) if head in TERMINAL_HEAD]
            table.add_row(*cells, style="green" if result.is_ours else None)
    return table
