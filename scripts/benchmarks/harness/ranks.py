"""Run functions on fresh ranks, or on ranks that stay, with a progress bar."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.harness.measure import Seconds, StepCosts, StepTimes, order_of_turns
from benchmarks.harness.results import Measurement, combine_rounds, combine_steps
from unisono.collectives.testing import RankPool

TIMEOUT = 1200.0  # seconds, of one call
START = 10.0  # seconds, about, until fresh ranks have imported everything


class Ranks:
    """A context manager. `folder` is a temporary folder that all ranks can read and write."""

    def __init__(self, console: Any) -> None:
        from rich import progress as p  # here: the ranks, which import this file, do not need it

        columns = (p.BarColumn(), p.TaskProgressColumn(), p.TimeElapsedColumn(), p.TimeRemainingColumn())
        self.progress = p.Progress(*columns, p.TextColumn("{task.description}"), console=console, transient=True)
        self.task = self.progress.add_task("", total=None)
        self.pools: dict[int, RankPool] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        for pool in self.pools.values():
            pool.close()
        self._folder.cleanup()

    def expect(self, total: float) -> None:
        """Set the sum of the costs of all calls, for the progress bar."""
        self.progress.update(self.task, total=total)

    def run(
        self, text: str, world_size: int, fn: Callable[..., Any], *args: Any, fresh: bool = True, cost: float = 1.0
    ) -> list[Any]:
        """Return what the top-level function `fn` returns on each rank, in new processes or in those that stay."""
        self.progress.update(self.task, description=text)
        pool = RankPool(world_size, group_timeout=300) if fresh else self.pools.pop(world_size, None)
        pool = pool or RankPool(world_size, group_timeout=300)
        try:
            found = pool.run(fn, *args, timeout=TIMEOUT)
            if not fresh:
                self.pools[world_size] = pool
        finally:
            if self.pools.get(world_size) is not pool:
                pool.close()
        self.progress.advance(self.task, cost)
        return found

    def compare_sizes(
        self,
        rounds: Mapping[int, int],
        plan: Mapping[int, Sequence[str]],
        *,
        world_size: int,
        measure: Callable[..., Mapping[int, Mapping[str, float]]],
        check: Callable[[str, Mapping[str, float]], None],
        warm_up: Callable[[Sequence[str]], None],
        time_round: Callable[[Sequence[str], int, int], Mapping[str, Sequence[Seconds]]],
        seconds: Callable[[str, int], float],
        label: Callable[[int], str],
        plain_malloc: bool,
        fresh: bool,
    ) -> list[Measurement]:
        """Compare contenders at several sizes: measure the memory of each in fresh processes, then time all in turns.

        rounds: How often each size is timed, after a fifth as many rounds to warm up.
        plan: The contenders at each size.
        measure: Returns the numbers of a contender by size, of which the largest over ranks is kept.
        check: Raises if these numbers say that the results are wrong.
        seconds: Guesses the time of a contender's step at a size, for the progress bar.
        """
        names = list(dict.fromkeys(name for found in plan.values() for name in found))
        cost = {size: sum(seconds(name, size) for name in plan[size]) for size in plan}
        self.expect(START * (len(names) + 1) + sum(cost[size] * (1 + n + n // 5) for size, n in rounds.items()))
        numbers: dict[tuple[int, str], dict[str, float]] = {}
        for name in names:
            sizes = [size for size in sorted(plan) if name in plan[size]]
            args = (measure, name, sizes, self.folder, plain_malloc)
            own_cost = START + sum(seconds(name, size) for size in sizes)
            ranks = self.run(f"results and memory of {name}", world_size, *args, fresh=fresh, cost=own_cost)
            for size in sizes:
                numbers[size, name] = {key: max(rank[size][key] for rank in ranks) for key in ranks[0][size]}
                check(name, numbers[size, name])
        self.run("time: all contenders start", world_size, warm_up, names, fresh=False, cost=START)
        measurements = []
        for size, n in rounds.items():
            by_rank: list[dict[str, list[Seconds]]] = [{name: [] for name in plan[size]} for _ in range(world_size)]
            for turn in range(-(n // 5), n):
                text = f"{label(size)}: time, round {turn + 1} of {n}"
                ranks = self.run(text, world_size, time_round, plan[size], size, turn, fresh=False, cost=cost[size])
                for kept, found in zip(by_rank, ranks, strict=True):
                    for name in found if turn >= 0 else ():
                        kept.setdefault(name, []).extend(found[name])
            for name in by_rank[0]:
                measurements.append(combine_rounds(label(size), name, by_rank, size=size, **numbers.get((size, name), {})))
        return measurements

    def compare_steps(
        self,
        case: str,
        worlds: Mapping[str, int],
        setting: Any,
        *,
        measure: Callable[[str, Any], StepCosts],
        time: Callable[[str, Any, int], StepTimes],
        check: Callable[[Mapping[str, Sequence[StepCosts]]], None],
        rounds: int,
        steps: Mapping[str, int],
        fresh: bool,
    ) -> list[Measurement]:
        """Compare training steps: check and measure every contender, then time all of them in turns, in fresh processes.

        worlds: The number of ranks of each contender.
        check: Is called after each contender with the costs so far, and raises if its results are wrong.
        """
        costs: dict[str, list[StepCosts]] = {}
        for name, world_size in worlds.items():
            label = f"{case}: results, traffic and memory of {name}"
            costs[name] = self.run(label, world_size, measure, name, setting, fresh=fresh)
            check(costs)
        times: dict[str, list[list[StepTimes]]] = {name: [] for name in worlds}
        for turn in range(rounds):
            for name in order_of_turns(list(worlds), turn):
                label = f"{case}: time, round {turn + 1} of {rounds}: {name}"
                times[name].append(self.run(label, worlds[name], time, name, setting, steps[name], fresh=fresh))
        return [combine_steps(case, name, times[name], costs[name]) for name in worlds]
