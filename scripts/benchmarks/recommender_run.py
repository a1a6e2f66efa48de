"""The benchmark of the recommender: fresh ranks weigh each contender; then all are timed in turn, on fresh ranks each time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import embedding_environment
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
WARM_UP = 3


def main(
    batch: int = 2048,
    rounds: int = 5,
    steps: int = 12,
    cases: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Samples per second of a whole training step of the recommender, against the same model on TorchRec's tables.

    DLRM on rows as Criteo has them: 13 numbers, 26 tables of 100,000 to 500,000 rows of 64 (1.95 GB); look-up, forward,
    backward and all updates of a batch that is in memory, on two gloo ranks of this machine, one thread each. Against
    TorchRec's sharded EmbeddingBagCollection below the same dense part, and torch's own tables in one process. First fresh
    processes for each contender give the losses of 6 steps, which must agree, its traffic and its peak memory; then all
    take turns in every round, each time in fresh processes. All run on the torch that TorchRec loads on, in .venv-torchrec,
    which is made the first time. Prints all figures and the aim, and writes <date>-recommender.md, .json and .png. About 25
    minutes on two cores and 8 GB: leave the machine alone.

    Args:
        batch: Samples on each rank.
        rounds: How often each contender is timed.
        steps: How many steps are timed each time, after 3 to warm up.
        cases: "one id" for each feature, as Criteo has; "bags" of 1 to 10 ids. None: both, with --quick the first.
        only: Parts of the names of contenders, to leave out all others.
        quick: One round of 3 steps with a hundredth of the rows, in processes that stay, to see that it works; writes
            nothing, unless --out says where.
        out: The folder for the markdown file, the figures and the plot. A file of the same day is replaced.
    """
    if min(batch, rounds, steps) < 1:
        raise SystemExit(f"--batch {batch}, --rounds {rounds}, --steps {steps}: 1 or more")
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("recommender: memory and traffic are read from /proc, which only Linux has")
    console = Console()
    if not console.is_terminal:
        console.width = 190
    embedding_environment.enter(console)
    from embedding_workload import Setting
    from recommender_contenders import CONTENDERS, WORLD_SIZE
    from recommender_report import HEAD, figure_cells, write_report
    from recommender_results import judge
    from recommender_turns import run_case
    from recommender_workload import CASES, Case
    from shared_ranks import FreshRanks
    from shared_report import aim_table, describe_machine

    names = [name for name in CONTENDERS if not only or any(part in name for part in only)]
    if not names:
        raise SystemExit(f"--only {' '.join(only)}: no contender is named so: {'; '.join(CONTENDERS)}")
    if unknown := set(cases) - set(CASES):
        raise SystemExit(f"--cases {' '.join(map(repr, unknown))}: the cases are {', '.join(map(repr, CASES))}")
    chosen: list[Case] = [case for case in CASES if case in cases or not cases]
    setting = Setting(batch)
    if quick:
        setting, rounds, steps = Setting(128, 100), 1, 3
        chosen = chosen if cases else chosen[:1]
    machine = describe_machine()
    given = {case: setting._replace(poolings=CASES[case]) for case in chosen}
    with FreshRanks(console, len(chosen) * len(names) * (1 + rounds), keep=quick) as ranks:
        found = {
            case: run_case(ranks, case, names, given[case], rounds=rounds, warm_up=WARM_UP, steps=steps) for case in chosen
        }
    aims = judge(found)
    for case, results in found.items():
        title = f"{case}: a training step, {WORLD_SIZE} ranks, batch {setting.batch} on each"
        console.print(figure_table(title, HEAD, [figure_cells(r, results) for r in results]))
    console.print(aim_table(aims) if aims else "no aims: they are about unisono and TorchRec")
    if quick and out is None:
        return
    warning = " (quick: too small to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'recommender', *sys.argv[1:]])}`{warning}"
    path = write_report(found, aims, setting, out or RESULTS, command=command, machine=machine)
    console.print(f"written: {path}, .json and .png", soft_wrap=True)


def figure_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in head:
        left = column == "contender"
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    for cells in rows:
        table.add_row(*cells, style="green" if cells[0].startswith("unisono") else None)
    return table
