"""The figures of the benchmark of the tables, and the aims they are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from clip_results import Ratio
from embedding_contenders import AUTO, CONTENDERS, Contender
from embedding_measures import Weight
from embedding_workload import POOLINGS
from shared_report import Aim
from shared_stepping import Measured, Rounds, Timing, cpu_of_steps, mean_sent, median_peak, wall_of_steps

FASTER, FLAT = 1.8, 1.25


@dataclass(frozen=True)
class Result(Measured):
    """One contender. No rounds: it was not timed."""

    contender: str
    wall: Rounds  # ms of the slowest rank, the median of a round's steps
    best: float  # ms of the slowest rank, the least of all steps
    cpu: Rounds  # ms, the mean over ranks, the median of a round's steps
    plain_peak: float  # MiB, with malloc as it is: the median of all rounds, of the rank that held most
    weights: Sequence[Weight]  # of each rank

    @property
    def kind(self) -> Contender:
        return CONTENDERS[self.contender]


@dataclass(frozen=True)
class Scale:
    """One contender on so many ranks, with the same batch on each."""

    contender: str
    ranks: int
    batch: int
    cpu: float  # ms of a rank: the least of all rounds
    sent: float  # MB of a rank

    @property
    def nanoseconds_an_id(self) -> float:
        return 1e6 * self.cpu / (self.batch * sum(POOLINGS))


class Results(list[Result]):
    def find(self, contender: str) -> Result | None:
        return next((r for r in self if r.contender == contender), None)

    def least(self, value: Callable[[Result], float]) -> Result | None:
        """The best of TorchRec's plans, with float32 on the wire."""
        theirs = [r for r in self if r.kind.family == "TorchRec" and not r.kind.half_wire]
        return min(theirs, key=value, default=None)

    def speed(self, result: Result) -> Ratio | None:
        """How many times as fast as the fastest plan of TorchRec, in the same round."""
        peer = self.least(lambda r: r.milliseconds)
        return Ratio.of(peer.wall / result.wall) if peer else None


class Scales(list[Scale]):
    def of(self, contender: str) -> list[Scale]:
        return sorted((s for s in self if s.contender == contender), key=lambda s: s.ranks)

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(s.contender for s in self))


def combine(contender: str, weights: Sequence[Weight], rounds: Sequence[Sequence[Timing]]) -> Result:
    """`weights` by rank; `rounds` by rank."""
    steps = [wall_of_steps(ranks) for ranks in rounds]
    return Result(
        contender,
        wall=np.array([np.median(wall) for wall in steps]),
        best=float(min(wall.min() for wall in steps)),
        cpu=np.array([np.median(cpu_of_steps(ranks)) for ranks in rounds]),
        plain_peak=median_peak(rounds),
        weights=weights,
    )


def combine_scale(contender: str, ranks: int, batch: int, rounds: Sequence[Sequence[Timing]]) -> Scale:
    cpu = min(float(np.median(cpu_of_steps(timings))) for timings in rounds)
    return Scale(contender, ranks, batch, cpu, mean_sent([timing.sent for timing in rounds[0]]))


def judge(results: Results, scales: Scales) -> list[Aim]:
    """Of the plan that our planner chooses, against the best that TorchRec has in each respect."""
    aims = []
    auto = results.find(AUTO)
    if auto and (speed := results.speed(auto)) and (fastest := results.least(lambda r: r.milliseconds)):
        where = f"{fastest.contender}; rounds {speed.least:.2f}x to {speed.most:.2f}x"
        text = f"wall time of a step, against TorchRec's fastest plan: ≥ {FASTER}x faster"
        aims.append(Aim(text, speed.median, speed.median >= FASTER, where, "{:.2f}x"))
    respects: dict[str, tuple[Callable[[Result], float], str]] = {
        "bytes sent, to TorchRec's leanest plan: ≤ 1x": (lambda r: r.sent, "{:.2f} of {:.2f} MB"),
        "peak memory, to TorchRec's lowest: ≤ 1x": (lambda r: r.peak, "{:.0f} of {:.0f} MiB"),
        "peak memory without the code, to TorchRec's lowest: ≤ 1x": (lambda r: r.beyond_code, "{:.0f} of {:.0f} MiB"),
    }
    for text, (value, form) in respects.items():
        if auto and (least := results.least(value)):
            ratio = value(auto) / value(least)
            aims.append(Aim(text, ratio, ratio <= 1, f"{form.format(value(auto), value(least))}, {least.contender}"))
    ours = scales.of(AUTO)
    if len(ours) > 1:
        first, worst = ours[0], max(ours[1:], key=lambda s: s.cpu)
        where = f"{first.nanoseconds_an_id:.0f} ns on {first.ranks}, {worst.nanoseconds_an_id:.0f} ns on {worst.ranks} ranks"
        text = f"CPU time per id, from {first.ranks} to {ours[-1].ranks} ranks: flat, ≤ {FLAT}x"
        aims.append(Aim(text, worst.cpu / first.cpu, worst.cpu <= FLAT * first.cpu, where))
        theirs = [s for s in scales if CONTENDERS[s.contender].family == "TorchRec" and s.ranks == ours[-1].ranks]
        if theirs:
            last, least_sent = ours[-1], min(theirs, key=lambda s: s.sent)
            where = f"{last.sent:.2f} of {least_sent.sent:.2f} MB, {least_sent.contender}"
            text = f"bytes sent on {last.ranks} ranks, to TorchRec's leanest plan: ≤ 1x"
            aims.append(Aim(text, last.sent / least_sent.sent, last.sent <= least_sent.sent, where))
    return aims
