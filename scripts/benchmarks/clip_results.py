"""The figures of the benchmark of the training step, and the aims they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from clip_contenders import CONTENDERS, OPEN_CLIP_CUT, OURS, OURS_CONCEPTS, OURS_CUT, OURS_SIGMOID, PEERS, WORLD_SIZE, Family
from clip_measures import Check, Seconds, Weight
from numpy.typing import NDArray
from shared_report import Aim

Rounds = NDArray[np.float64]
MB = 2**20
FLAT = 1.5  # times the memory of the smallest batch, at most


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio that was taken in every round, and its range."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most == 1:  # of the peer itself
            return "1x"
        return f"{self.median:.2f}x ({self.least:.2f}-{self.most:.2f})"

    @classmethod
    def of(cls, rounds: Rounds) -> Ratio:
        return cls(float(np.median(rounds)), float(rounds.min()), float(rounds.max()))


@dataclass(frozen=True)
class Result:
    """One contender with `rows` on each rank. No rounds: only its memory was measured."""

    contender: str
    rows: int
    wall: Rounds  # seconds of the slowest rank, in each round
    cpu: Rounds  # seconds, the mean over ranks, in each round
    extra: float  # MB of the rank that held most
    check: Check

    @property
    def batch(self) -> int:
        return self.rows * WORLD_SIZE

    @property
    def is_timed(self) -> bool:
        return len(self.wall) > 0

    @property
    def rate(self) -> float:
        """Samples per second, over all ranks."""
        return self.batch / float(np.median(self.wall))

    @property
    def is_ours(self) -> bool:
        return CONTENDERS[self.contender].is_ours

    @property
    def family(self) -> Family:
        return CONTENDERS[self.contender].family


class Results(list[Result]):
    def find(self, contender: str, rows: int) -> Result | None:
        return next((r for r in self if (r.contender, r.rows) == (contender, rows)), None)

    def speed(self, result: Result) -> Ratio | None:
        """How many times as many samples per second as open_clip's of the same family, in the same round."""
        peer = self.find(PEERS[result.family], result.rows)
        return Ratio.of(peer.wall / result.wall) if peer and peer.is_timed and result.is_timed else None

    def cpu(self, result: Result) -> Ratio | None:
        """CPU time, as a part of open_clip's in the same round."""
        peer = self.find(PEERS[result.family], result.rows)
        return Ratio.of(result.cpu / peer.cpu) if peer and peer.is_timed and result.is_timed else None

    def memory(self, result: Result) -> float | None:
        peer = self.find(PEERS[result.family], result.rows)
        return result.extra / peer.extra if peer else None

    @property
    def sizes(self) -> list[int]:
        return sorted({r.rows for r in self})


def combine(
    name: str,
    rows: int,
    weights: Sequence[Weight],
    rounds: Sequence[Sequence[Mapping[str, Seconds]]],
) -> Result:
    """`weights` by rank; `rounds` by rank."""
    wall = np.array([max(rank[name].wall for rank in by_rank) for by_rank in rounds])
    cpu = np.array([np.mean([rank[name].cpu for rank in by_rank]) for by_rank in rounds])
    return Result(name, rows, wall, cpu, max(w.extra[rows] for w in weights) / MB, weights[0].check)


def judge(results: Results) -> list[Aim]:
    """Never slower, and memory that stays where it is."""
    aims = []
    for name in (OURS, OURS_CONCEPTS, OURS_SIGMOID):
        found = [(speed, r) for r in results if r.contender == name and (speed := results.speed(r))]
        if found:
            speed, r = min(found, key=lambda each: each[0].median)
            where = f"batch {r.batch}, rounds {speed.least:.2f}x to {speed.most:.2f}x"
            text = f"{name}: samples/s, as many as {PEERS[r.family]}: ≥ 1x"
            aims.append(Aim(text, speed.median, speed.median >= 1, where))
    cut = sorted((r for r in results if r.contender == OURS_CUT), key=lambda r: r.rows)
    if len(cut) > 1:
        most = max(cut, key=lambda r: r.extra)
        growth = most.extra / cut[0].extra
        where = f"{cut[0].extra:.0f} MB at batch {cut[0].batch}, {most.extra:.0f} MB at {most.batch}"
        text = f"{OURS_CUT}: peak memory stays flat: ≤ {FLAT}x over all batches"
        aims.append(Aim(text, growth, growth <= FLAT, where, "{:.2f}x"))
    pairs = [(a, b) for a in cut if (b := results.find(OPEN_CLIP_CUT, a.rows))]
    if pairs:
        a, b = pairs[-1]
        part = b.extra / a.extra
        text = f"{OURS_CUT}: peak memory, less than {OPEN_CLIP_CUT}"
        aims.append(Aim(text, part, part > 1, f"batch {a.batch}, {a.extra:.0f} of {b.extra:.0f} MB", "1/{:.1f}"))
    return aims
