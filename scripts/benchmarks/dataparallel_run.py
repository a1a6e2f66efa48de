"""The benchmark as a whole: first one process, then two ranks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from dataparallel_process import count_copies, time_process
from dataparallel_report import Figure, judge, write_report
from dataparallel_sync import MODELS, time_sync
from rich.console import Console
from rich.table import Table
from shared_ranks import FreshRanks
from shared_report import aim_table, describe_machine

RESULTS = Path(__file__).parent / "results"


def main(quick: bool = False, out: Path = RESULTS) -> None:
    """Time unisono.dataparallel against torch.nn.parallel in one process, and against DDP on two ranks.

    One process: scatter, gather and the making of replicas on CPUs, in turns with torch's own code, whose CUDA-only calls are
    replaced by tensor_split and cat; and the copies to four devices, counted on the devices of tests/dataparallel (needs a C++
    compiler). Two ranks with gloo: the time that syncing adds to a backward pass which itself computes next to nothing.
    Prints the figures and the aims, and writes <date>-dataparallel.md and .png. Takes two minutes: leave the machine alone.

    Args:
        quick: A tenth of the rounds: to see that it works, not to quote.
        out: The folder for the markdown file and the plot. A file of the same day is replaced.
    """
    console = Console()
    machine = describe_machine()
    figures: list[Figure] = []
    with FreshRanks(console, 1 + len(MODELS)) as ranks:
        # in a process of its own, too: a device is to be there before the first backward
        figures += ranks.run("one process", 1, time_process, quick)[0]
        for name, sizes in MODELS.items():
            found = ranks.run(f"gradient sync, {name}", 2, time_sync, name, sizes, quick)
            figures += found[0]
        counts = ranks.run("copies", 1, count_copies)[0]
    aims = judge(figures)
    shown = Table("", "contender", "ratio", "µs", title="Time, as a ratio to torch's own")
    for figure in figures:
        shown.add_row(figure.case, figure.contender, f"{figure.ratio:.2f}", f"{figure.microseconds:,.1f}")
    console.print(shown, aim_table(aims))
    warning = " (quick: too few rounds to quote)" if quick else ""
    command = f"`{shlex.join(['./scripts/bench', 'dataparallel', *sys.argv[1:]])}`{warning}"
    path = write_report(figures, counts, aims, out, command=command, machine=machine)
    console.print(f"written: {path}, {path.with_suffix('.png').name}", soft_wrap=True)
