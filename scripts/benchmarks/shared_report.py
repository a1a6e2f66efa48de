"""What the reports of all benchmarks have in common: the aims, the machine, tables in markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class Aim:
    """A limit, and what was measured: the worst of all cases that it is about."""

    text: str
    measured: float
    met: bool
    where: str  # the worst case
    form: str = "{:.3f}x"

    @property
    def figure(self) -> str:
        return self.form.format(self.measured)


def aim_table(aims: Iterable[Aim]) -> Table:
    table = Table("aim", "measured", "met", "worst case", title="Aims")
    for aim in aims:
        table.add_row(aim.text, aim.figure, "[green]yes[/]" if aim.met else "[red]no[/]", aim.where)
    return table


def aims_in_markdown(aims: Iterable[Aim]) -> str:
    head = ("aim", "measured", "met", "worst case")
    return table(head, ((aim.text, aim.figure, "yes" if aim.met else "**no**", aim.where) for aim in aims))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_machine() -> str:
    """Call it before the run: the load should be that of others."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = models[0] if models else model
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {system}, load {os.getloadavg()[0]:.1f} before the run"
