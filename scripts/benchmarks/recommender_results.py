"""The figures of the benchmark of the recommender, and the aim they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clip_results import Ratio
from recommender_contenders import AUTO, CONTENDERS, DENSE, WORLD_SIZE, Contender
from recommender_measures import Weight
from recommender_workload import Case
from shared_report import Aim
from shared_stepping import Measured, Rounds, Timing, cpu_of_steps, median_peak, wall_of_steps

FASTER = 1.5
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Result(Measured):
    """One contender in one case."""

    contender: str
    samples: int  # of all ranks, in a step
    wall: Rounds  # ms of the slowest rank, the median of a round's steps
    best: float  # ms of the slowest rank, the least of all steps
    cpu: Rounds  # ms, the mean over ranks, the median of a round's steps
    plain_peak: float  # MiB, with malloc as it is: the median of all rounds, of the rank that held most
    weights: Sequence[Weight]  # of each rank

    @property
    def kind(self) -> Contender:
        return CONTENDERS[self.contender]

    @property
    def rate(self) -> Ratio:
        """Samples per second: the median over rounds, and the range."""
        return Ratio.of(1e3 * self.samples / self.wall)

    @property
    def losses(self) -> list[float]:
        return self.weights[0].losses


class Results(list[Result]):
    """Of one case."""

    def find(self, contender: str) -> Result | None:
        return next((r for r in self if r.contender == contender), None)

    @property
    def fastest(self) -> Result | None:
        """Of TorchRec's plans."""
        return min((r for r in self if r.kind.family == "TorchRec"), key=lambda r: r.milliseconds, default=None)

    def speed(self, result: Result) -> Ratio | None:
        """How many times as many samples per second as TorchRec's fastest plan, in the same round."""
        return Ratio.of(self.fastest.wall / result.wall) if self.fastest else None

    def share_of_dense(self, result: Result) -> Ratio | None:
        """Of the wall time of a step: what the dense part alone takes in the same round. Only of those on as many ranks."""
        dense = self.find(DENSE)
        return Ratio.of(dense.wall / result.wall) if dense and not result.kind.one_process else None

    def table_milliseconds(self, result: Result) -> float | None:
        """What a step takes beyond the dense part alone."""
        dense = self.find(DENSE)
        is_apart = dense is None or dense is result or result.kind.one_process
        return None if is_apart or dense is None else float(np.median(result.wall - dense.wall))


def combine(contender: str, samples: int, weights: Sequence[Weight], rounds: Sequence[Sequence[Timing]]) -> Result:
    """`weights` by rank; `rounds` by rank."""
    steps = [wall_of_steps(ranks) for ranks in rounds]
    return Result(
        contender,
        samples,
        wall=np.array([np.median(wall) for wall in steps]),
        best=float(min(wall.min() for wall in steps)),
        cpu=np.array([np.median(cpu_of_steps(ranks)) for ranks in rounds]),
        plain_peak=median_peak(rounds),
        weights=weights,
    )


def deviations(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each contender's losses, as a part of them: from the first one's of the same optimizer; the first loss, which no
    update precedes, from that of all."""
    known = {name: np.array(losses[name]) for name in losses if CONTENDERS[name].optimizer}
    first_of: dict[str | None, str] = {}
    found = {}
    for name, mine in known.items():
        peer = known[first_of.setdefault(CONTENDERS[name].optimizer, name)]
        start = next(iter(known.values()))[0]
        found[name] = float(max(np.abs(mine / peer - 1).max(), abs(mine[0] / start - 1)))
    return found


def judge(cases: Mapping[Case, Results]) -> list[Aim]:
    aims = []
    for case, results in cases.items():
        ours, fastest = results.find(AUTO), results.fastest
        if ours and fastest and (speed := results.speed(ours)):
            where = f"{fastest.contender}; rounds {speed.least:.2f}x to {speed.most:.2f}x"
            text = f"{case}: samples/s at world {WORLD_SIZE}, against TorchRec's fastest plan: ≥ {FASTER}x"
            aims.append(Aim(text, speed.median, speed.median >= FASTER, where, "{:.2f}x"))
    return aims


def as_json(cases: Mapping[Case, Results]) -> dict[str, Any]:
    """Every figure, unrounded."""
    return {case: {r.contender: _figures(r, results) for r in results} for case, results in cases.items()}


def _figures(result: Result, results: Results) -> dict[str, Any]:
    ratios = {"samples_per_second": result.rate, "times_torchrec": results.speed(result)}
    ratios["dense_share"] = results.share_of_dense(result)
    return {
        **{name: vars(ratio) if ratio else None for name, ratio in ratios.items()},
        "wall_ms_by_round": result.wall.tolist(),
        "best_wall_ms": result.best,
        "cpu_ms_by_round": result.cpu.tolist(),
        "table_ms": results.table_milliseconds(result),
        "mb_sent": result.sent,
        "mb_payload": result.payload,
        "peak_mib": result.peak,
        "peak_without_code_mib": result.beyond_code,
        "peak_plain_malloc_mib": result.plain_peak,
        "losses": result.losses,
        "plan": result.weights[0].chosen,
    }
