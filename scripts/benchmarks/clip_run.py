"""The benchmark of the training step: fresh ranks weigh each contender, then one set of ranks times all in turn."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from clip_contenders import CHECK_ROWS, CONTENDERS, MICRO_BATCH, OPEN_CLIP_CUT, WORLD_SIZE
from clip_measures import Check, Seconds, Weight, time_round, warm_up, weigh
from clip_report import HEAD, figure_cells, write_report
from clip_results import Results, combine, judge
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from shared_report import aim_table, describe_machine

from unisono.collectives.testing import RankPool

RESULTS = Path(__file__).parent / "results"
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
MOST_GIGABYTES = 7.0  # on each rank
MOST_SECONDS = 90.0  # of a step
START = 15.0  # seconds until a fresh pair of ranks has imported everything


class Plan(NamedTuple):
    """What is run with so many rows on each rank. No rounds: only memory."""

    rows: int
    names: list[str]
    rounds: int


def main(
    sizes: tuple[int, ...] = (256, 1024, 4096),
    large: tuple[int, ...] = (8192,),
    repeats: int | None = None,
    quick: bool = False,
    plain_malloc: bool = False,
    out: Path | None = None,
) -> None:
    """Time and weigh a whole training step of unisono_models.clip against open_clip's own, with the same towers and weights.

    Both towers, the loss over the global batch, backward, the exchange of gradients, and the optimizer: on two gloo ranks
    of this machine, one thread each, float32. First a fresh pair of processes for each contender checks its first loss and
    gradients and finds its peak memory; then all take turns in every round. Prints all figures and the aims, and writes
    <date>-clip.md and .png. About 8 minutes on two cores and up to 9 GB: leave the machine alone.

    Args:
        sizes: Global batches.
        large: Global batches of which only the memory is found.
        repeats: Rounds of each size; 20 up to a batch of 256, 12 up to 1024, 5 beyond, unless given.
        quick: Two rounds of batches of 256 and 512, memory in the same processes for all, to see that it works; writes
            nothing, unless --out says where.
        plain_malloc: Memory as glibc's allocator leaves it, unused gaps included, and not of the tensors alone.
        out: The folder for the markdown file and the plot. A file of the same day is replaced.
    """
    if any(size < 2 * WORLD_SIZE or size % WORLD_SIZE for size in (*sizes, *large)) or (repeats is not None and repeats < 1):
        raise SystemExit(
            f"--sizes {sizes} and --large {large}: must be multiples of {WORLD_SIZE} from {2 * WORLD_SIZE} up, "
            f"and --repeats: {repeats} 1 or more"
        )
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("clip: the peak memory is read from /proc, which only Linux has")
    if quick:
        sizes, large, repeats = (256, 512), (), repeats or 2
    console = Console()
    if not console.is_terminal:
        console.width = 140
    machine = describe_machine()
    plans, skipped = make_plans(sizes, large, repeats)
    results = run_all(plans, console, plain_malloc=plain_malloc, fresh=not quick)
    aims = judge(results)
    console.print(figure_table(results))
    for line in skipped:
        console.print(line, soft_wrap=True)
    console.print(
        f"largest deviation from open_clip's first loss: {max(r.check.loss for r in results):.1e}, "
        f"from its gradients: {max(r.check.gradients for r in results):.1e}"
    )
    console.print(aim_table(aims))
    if quick and out is None:
        return
    warning = " (quick: too small to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'clip', *sys.argv[1:]])}`{warning}"
    path = write_report(results, aims, skipped, out or RESULTS, command=command, machine=machine, plain_malloc=plain_malloc)
    console.print(f"written: {path}, {path.with_suffix('.png').name}", soft_wrap=True)


def make_plans(sizes: Sequence[int], large: Sequence[int], repeats: int | None) -> tuple[list[Plan], list[str]]:
    """What is run, and a line for each contender that is left out."""
    plans, skipped = [], []
    for batch in sorted({*sizes, *large}):
        rows = batch // WORLD_SIZE
        reasons = {name: reason_to_skip(name, rows) for name in CONTENDERS}
        skipped += [f"left out: {name}, batch {batch}: {reason}" for name, reason in reasons.items() if reason]
        rounds = 0 if batch not in sizes else repeats or usual_repeats(batch)
        plans.append(Plan(rows, [name for name, reason in reasons.items() if not reason], rounds))
    return plans, skipped


def usual_repeats(batch: int) -> int:
    return 20 if batch <= 256 else 12 if batch <= 1024 else 5


def reason_to_skip(name: str, rows: int) -> str:
    contender = CONTENDERS[name]
    if not contender.can_take(rows):
        return f"its {rows} rows on each rank do not make two or more equal parts of {MICRO_BATCH}"
    if (gigabytes := contender.gigabytes(rows)) > MOST_GIGABYTES:
        return f"about {gigabytes:.1f} GB on each rank"
    if (seconds := guess_seconds(name, rows)) > MOST_SECONDS:
        return f"about {seconds:.0f} s a step"
    return ""


def guess_seconds(name: str, rows: int) -> float:
    """About how long a step takes, for the bar of progress and to leave out what takes too long."""
    loss = 1e-7 * rows**2 * (rows / MICRO_BATCH if name == OPEN_CLIP_CUT else 1)
    return 0.05 + 1.4e-3 * rows + loss


def run_all(plans: Sequence[Plan], console: Console, *, plain_malloc: bool, fresh: bool) -> Results:
    """`fresh`: new processes for each contender, for memory that does not depend on what was run before it."""
    weights: dict[str, list[Weight]] = {}
    rounds: dict[int, list[list[Mapping[str, Seconds]]]] = {plan.rows: [] for plan in plans}
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        work = {plan.rows: sum(guess_seconds(name, plan.rows) for name in plan.names) for plan in plans}
        turns = {plan.rows: range(-(plan.rounds // 5), plan.rounds) for plan in plans}  # those below 0 warm up
        total = START * (len(CONTENDERS) + 1) + sum(work[rows] * (1 + len(turns[rows])) for rows in work)
        task = progress.add_task("", total=total)
        for together in [[name] for name in CONTENDERS] if fresh else [list(CONTENDERS)]:
            with RankPool(WORLD_SIZE, group_timeout=300) as pool:
                for name in together:
                    progress.update(task, description=f"first loss, gradients and memory of {name}")
                    sizes = [plan.rows for plan in plans if name in plan.names]
                    weights[name] = pool.run(weigh, name, sizes, Path(folder), plain_malloc, timeout=1200)
                    refuse_other_work(name, weights[name][0].check)
                    progress.advance(task, START + sum(guess_seconds(name, rows) for rows in sizes))
        with RankPool(WORLD_SIZE, group_timeout=300) as pool:
            progress.update(task, description="time: all contenders start")
            pool.run(warm_up, list(CONTENDERS), timeout=600)
            progress.advance(task, START)
            for plan in plans:
                for turn in turns[plan.rows]:
                    progress.update(
                        task, description=f"time, batch {plan.rows * WORLD_SIZE}: round {turn + 1} of {plan.rounds}"
                    )
                    found = pool.run(time_round, plan.names, plan.rows, turn, timeout=900)
                    rounds[plan.rows] += [found] if turn >= 0 else []
                    progress.advance(task, work[plan.rows])
    return Results(combine(name, plan.rows, weights[name], rounds[plan.rows]) for plan in plans for name in plan.names)


def refuse_other_work(name: str, check: Check) -> None:
    if not (check.loss <= LOSS_TOLERANCE and check.gradients <= GRADIENT_TOLERANCE):
        raise SystemExit(
            f"{name}: with {CHECK_ROWS} rows on each rank its first loss deviates from open_clip's by {check.loss:.1e} and its "
            f"gradients by {check.gradients:.1e}, so it is other work"
        )


def figure_table(results: Results) -> Table:
    table = Table(title=f"A training step, {WORLD_SIZE} ranks: ratios to open_clip's own (the range over all rounds)")
    for head in HEAD:
        left = head == "contender"
        table.add_column(head, justify="left" if left else "right", no_wrap=left)
    for rows in results.sizes:
        table.add_section()
        for result in (r for r in results if r.rows == rows):
            table.add_row(*figure_cells(result, results), style="green" if result.is_ours else None)
    return table
