"""The figures of the benchmark of the collectives, and the aims they are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from collectives_contenders import ASKED, BACKWARD, EXCHANGE, KNOWN, PADDED, UNITS, Case, Samples
from numpy.typing import NDArray
from shared_report import Aim

Rounds = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """One contender in one case: an entry for each round, taken over all ranks."""

    world_size: int
    case: Case
    contender: str
    wall: Rounds  # seconds of the slowest rank
    cpu: Rounds  # seconds of all ranks together
    sent: list[int]  # payload bytes, of each rank
    ratios: Rounds  # wall time over the unit's in the same round

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.ratios, (0.25, 0.75))
        return float(low), float(high)

    @property
    def is_ours(self) -> bool:
        return self.contender in (KNOWN, ASKED, BACKWARD, EXCHANGE)


def combine(world_size: int, case: Case, by_rank: Sequence[dict[str, Samples]]) -> list[Result]:
    """What the ranks measured, as one result for each contender."""
    walls = {name: np.max([rank[name].wall for rank in by_rank], axis=0) for name in by_rank[0]}
    cpus = {name: np.sum([rank[name].cpu for rank in by_rank], axis=0) for name in by_rank[0]}
    unit = walls[UNITS[case.direction]]
    return [
        Result(world_size, case, name, wall, cpus[name], [rank[name].sent for rank in by_rank], wall / unit)
        for name, wall in walls.items()
    ]


def judge(results: Sequence[Result]) -> list[Aim]:
    def at_most(limit: float, text: str, wanted: Callable[[Result], bool]) -> Aim:
        worst = max((r for r in results if wanted(r)), key=lambda r: r.ratio)
        return Aim(f"{text} ≤ {limit}x", worst.ratio, worst.ratio <= limit, name_case(worst))

    def known_at(payload: str) -> Callable[[Result], bool]:
        return lambda r: r.contender == KNOWN and r.case.payload.name == payload

    def backward_at(payload: str) -> Callable[[Result], bool]:
        return lambda r: r.contender == BACKWARD and r.case.payload.name == payload

    payloads = dict.fromkeys(r.case.payload.name for r in results if r.case.direction != "sizes")
    aims = [at_most(1.3 if p == "1 KB" else 1.0, f"all_gather, sizes known, {p}:", known_at(p)) for p in payloads]
    aims += [at_most(1.0, f"backward of all_gather, {p}:", backward_at(p)) for p in payloads]
    aims.append(at_most(1.3, "exchange of sizes:", lambda r: r.contender == EXCHANGE))

    speedups = [
        (float(np.median(seeds.wall / ours.wall)), name_case(ours))
        for seeds in results
        for ours in results
        if seeds.contender == PADDED and ours.contender == ASKED  # both have to find out the sizes
        if (seeds.world_size, seeds.case) == (ours.world_size, ours.case)
        if ours.case.lengths == "skewed" and ours.case.payload.name == "64 MB"
    ]
    slowest, where = min(speedups)
    aims.append(Aim("all_gather against the seeds' algorithm, 64 MB skewed: ≥ 4x faster", slowest, slowest >= 4, where))
    return aims


def name_case(result: Result) -> str:
    lengths = "" if result.case.direction == "sizes" else f", {result.case.lengths}"
    return f"{result.world_size} ranks{lengths}"
