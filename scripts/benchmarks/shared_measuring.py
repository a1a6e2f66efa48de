"""What all benchmarks share: taking turns, the clocks, the machine, and aims. (The underscore keeps it off ./scripts/bench's list.)"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist


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


def order_of_turns(names: Sequence[str], turn: int) -> list[str]:
    """Rotated from round to round and reversed in every other one, so that none always follows the same."""
    first = turn % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def time_call(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one call; what it returns is freed after the clocks are read."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return seconds


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def aims_in_markdown(aims: Iterable[Aim]) -> str:
    head = ("aim", "measured", "met", "worst case")
    return table(head, ((a.text, a.figure, "yes" if a.met else "**no**", a.where) for a in aims))


def describe_machine() -> str:
    """Call it before the run: the load should be that of others."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = models[0] if models else model
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {system}, load {os.getloadavg()[0]:.1f} before the run"
