"""Fresh ranks for every call, and a bar that shows how far a benchmark is."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unisono.collectives.testing import RankPool

PATIENCE = 900.0  # seconds


class FreshRanks:
    """`total`: how many calls there will be. `keep`: the same ranks for all, not fresh: quicker, to see that it works."""

    def __init__(self, console: Console, total: int, *, keep: bool = False) -> None:
        self.keep, self.kept = keep, dict[int, RankPool]()
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
        for pool in self.kept.values():
            pool.close()

    def run(self, text: str, ranks: int, *call: Any) -> list[Any]:
        """What a function of the top level returns on each rank."""
        self.progress.update(self.task, description=text)
        pool = self.kept.pop(ranks, None) or RankPool(ranks, group_timeout=300)
        try:
            found = pool.run(*call, timeout=PATIENCE)
            if self.keep:
                self.kept[ranks] = pool
        finally:
            if ranks not in self.kept:
                pool.close()
        self.progress.advance(self.task)
        return found
