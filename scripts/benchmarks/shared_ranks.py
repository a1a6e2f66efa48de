"""Fresh ranks for every call, and a bar that shows how far a benchmark is."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unisono.collectives.testing import RankPool

PATIENCE = 900.0  # seconds


class FreshRanks:
    """`total`: how many calls there will be."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def run(self, text: str, ranks: int, *call: Any) -> list[Any]:
        """What a function of the top level returns on each rank."""
        self.progress.update(self.task, description=text)
        with RankPool(ranks, group_timeout=300) as pool:
            found = pool.run(*call, timeout=PATIENCE)
        self.progress.advance(self.task)
        return found
