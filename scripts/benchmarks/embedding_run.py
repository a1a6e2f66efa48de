"""The benchmark of the tables: fresh ranks weigh each contender; then all are timed in turn, on fresh ranks each time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import embedding_environment
from embedding_contenders import AUTO, CONTENDERS, ROW, TORCHREC_COLUMN, TORCHREC_ROW, TORCHREC_TABLE, WORLD_SIZE
from embedding_measures import Weight, time_steps, weigh
from embedding_results import Results, Scales, combine, combine_scale, judge
from embedding_workload import DIM, TABLES, Setting
from rich.console import Console
from rich.table import Table
from shared_measuring import order_of_turns
from shared_ranks import FreshRanks
from shared_report import aim_table, describe_machine
from shared_stepping import Timing

RESULTS = Path(__file__).parent / "results"
SCALED = (AUTO, ROW, TORCHREC_ROW, TORCHREC_TABLE, TORCHREC_COLUMN)
WARM_UP, SLOW_STEPS = 3, 3


def main(
    batch: int = 2048,
    rounds: int = 3,
    steps: int = 8,
    worlds: tuple[int, ...] = (1, 2, 4),
    scale_batch: int = 512,
    only: tuple[str, ...] = (),
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Time and weigh a training step of the sharded tables of unisono.embedding against TorchRec's and torch's own.

    26 tables of 100,000 to 500,000 rows of 64 (1.95 GB), bags of 1 to 10 ids, row-wise Adagrad: forward, backward and
    update on two gloo ranks of this machine, one thread each. First fresh processes for each contender check its outputs
    and its updates and find its traffic and its peak memory; then all take turns in every round, each time in fresh
    processes. Last, the cost of 1, 2 and 4 ranks. All run on the torch that TorchRec loads on, in .venv-torchrec, which is
    made the first time. Prints all figures and the aims, and writes <date>-embedding.md and .png. About 15 minutes on two
    cores and 4 GB: leave the machine alone.

    Args:
        batch: Samples on each rank.
        rounds: How often each contender is timed.
        steps: How many steps are timed each time, after 3 to warm up.
        worlds: Numbers of ranks whose costs are compared; none to leave that out.
        scale_batch: Samples on each rank in that comparison.
        only: Parts of the names of contenders, to leave out all others.
        quick: One round of 3 steps with a hundredth of the rows, to see that it works; writes nothing, unless --out says where.
        out: The folder for the markdown file and the plot. A file of the same day is replaced.
    """
    names = [name for name in CONTENDERS if not only or any(part in name for part in only)]
    if not names:
        raise SystemExit(f"--only {' '.join(only)}: no contender is named so: {'; '.join(CONTENDERS)}")
    if min(batch, rounds, steps, scale_batch, *worlds) < 1:
        raise SystemExit(
            f"--batch {batch}, --rounds {rounds}, --steps {steps}, --worlds {worlds}, --scale-batch {scale_batch}: 1 or more"
        )
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("embedding: memory and traffic are read from /proc, which only Linux has")
    console = Console()
    if not console.is_terminal:
        console.width = 160
    embedding_environment.enter(console)
    from embedding_report import HEAD, SCALE_HEAD, figure_cells, scale_cells, write_report

    setting, divisor = Setting(batch), 1
    if quick:
        setting, divisor, rounds, steps, worlds, scale_batch = Setting(128, 100), 100, 1, 3, worlds[:2], 64
    machine = describe_machine()
    scaled = [name for name in SCALED if name in names]
    with Runner(console, len(names) * (1 + rounds) + len(scaled) * len(worlds) * min(rounds, 2)) as runner:
        weights = {name: runner.weigh(name, setting) for name in names}
        results = time_all(runner, weights, setting, rounds, steps)
        scales = time_scales(runner, scaled, worlds, Setting(scale_batch, divisor), min(rounds, 2), steps)
    aims = judge(results, scales)
    console.print(
        figure_table(
            f"A training step, {WORLD_SIZE} ranks, batch {setting.batch} on each",
            HEAD,
            [figure_cells(r, results) for r in results],
        )
    )
    if scales:
        title = f"From {min(worlds)} to {max(worlds)} ranks, batch {scale_batch} on each"
        console.print(figure_table(title, SCALE_HEAD, [scale_cells(scales, name) for name in scales.contenders]))
    console.print(aim_table(aims) if aims else f"no aims: they are about {AUTO} and TorchRec")
    if quick and out is None:
        return
    warning = " (quick: too small to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'embedding', *sys.argv[1:]])}`{warning}"
    path = write_report(results, scales, aims, setting, out or RESULTS, command=command, machine=machine)
    console.print(f"written: {path}, {path.with_suffix('.png').name}", soft_wrap=True)


class Runner(FreshRanks):
    def weigh(self, name: str, setting: Setting) -> list[Weight]:
        contender = CONTENDERS[name]
        ranks, given = contender.world(setting)
        found: list[Weight] = self.run(f"results, traffic and memory of {name}", ranks, weigh, name, given)
        outputs, updates = max(w.outputs for w in found), max(w.updates for w in found)
        if not max(outputs, updates) <= contender.tolerance:
            raise SystemExit(
                f"{name}: its first outputs deviate by {outputs:.1e} from those formed plainly, those after two steps by "
                f"{updates:.1e}, so it is other work"
            )
        return found

    def time(self, text: str, name: str, ranks: int, setting: Setting, steps: int, *, count: bool = False) -> list[Timing]:
        timings: list[Timing] = self.run(f"{text}: {name}", ranks, time_steps, name, setting, WARM_UP, steps, count)
        return timings


def time_all(runner: Runner, weights: dict[str, list[Weight]], setting: Setting, rounds: int, steps: int) -> Results:
    timings: dict[str, list[list[Timing]]] = {name: [] for name in weights}
    for turn in range(rounds):
        for name in order_of_turns(list(weights), turn):
            contender = CONTENDERS[name]
            ranks, given = contender.world(setting)
            text = f"time, round {turn + 1} of {rounds}"
            timings[name].append(runner.time(text, name, ranks, given, SLOW_STEPS if contender.is_slow else steps))
    return Results(combine(name, weights[name], timings[name]) for name in weights)


def time_scales(
    runner: Runner, names: Sequence[str], worlds: Sequence[int], setting: Setting, rounds: int, steps: int
) -> Scales:
    timings: dict[tuple[str, int], list[list[Timing]]] = {(name, ranks): [] for name in names for ranks in worlds}
    for _ in range(rounds):
        for name, ranks in timings:
            text = f"{ranks} ranks" if ranks > 1 else "1 rank"
            timings[name, ranks].append(runner.time(text, name, ranks, setting, steps, count=True))
    return Scales(combine_scale(name, ranks, setting.batch, found) for (name, ranks), found in timings.items())


def figure_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=f"{title}: {TABLES} tables of width {DIM}")
    for column in head:
        left = column == "contender"
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    for cells in rows:
        table.add_row(*cells, style="green" if cells[0] in CONTENDERS and CONTENDERS[cells[0]].is_ours else None)
    return table
