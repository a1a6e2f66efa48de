"""The results of a benchmark: what was measured of each contender in each case, and the JSON file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measure import Seconds, StepCosts, StepTimes

Rounds = NDArray[np.float64]
MB = 10**6  # of traffic
MIB = 2**20  # of memory


@dataclass(frozen=True)
class Ratio:
    """A quantity that was measured in every round: its median and its range.

    Formats as `median (least-most)`, without the range if there is none: "{:,.0f}", or "{:.2fx}" for a ratio like 1.25x.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, rounds: Rounds) -> Ratio:
        return cls(float(np.median(rounds)), float(rounds.min()), float(rounds.max()))

    @classmethod
    def quartiles(cls, rounds: Rounds) -> Ratio:
        return cls(*(float(x) for x in np.quantile(rounds, (0.5, 0.25, 0.75))))

    def __format__(self, spec: str) -> str:
        unit = "x" if spec.endswith("x") else ""
        spec = spec.removesuffix("x")
        if self.least == self.most:
            return "1x" if unit and self.median == 1 else f"{self.median:{spec}}{unit}"
        return f"{self.median:{spec}}{unit} ({self.least:{spec}}-{self.most:{spec}})"


@dataclass(frozen=True)
class Measurement:
    """One contender in one case. No rounds: it was not timed."""

    case: str
    contender: str
    wall: Rounds = field(default_factory=lambda: np.array([]))  # ms of the slowest rank in each round
    cpu: Rounds = field(default_factory=lambda: np.array([]))  # ms in each round, the mean over ranks
    numbers: Mapping[str, Any] = field(default_factory=dict)  # everything else

    def __getitem__(self, key: str) -> Any:
        return self.numbers[key]

    @property
    def is_timed(self) -> bool:
        return len(self.wall) > 0

    @property
    def wall_ms(self) -> float:
        return float(np.median(self.wall))

    @property
    def cpu_ms(self) -> float:
        return float(np.median(self.cpu))


def combine_rounds(
    case: str, contender: str, by_rank: Sequence[Mapping[str, Sequence[Seconds]]], **numbers: Any
) -> Measurement:
    """Combine what each rank measured in each round."""
    seconds = np.array([rank[contender] for rank in by_rank]).reshape(len(by_rank), -1, 2)
    return Measurement(case, contender, 1e3 * seconds[..., 0].max(0), 1e3 * seconds[..., 1].mean(0), numbers)


def combine_steps(
    case: str, contender: str, rounds: Sequence[Sequence[StepTimes]], costs: Sequence[StepCosts] = ()
) -> Measurement:
    """Combine the times of each rank in each round, and the costs on each rank. A round's time is the median of its steps."""
    seconds = [np.array([rank.steps for rank in ranks]) for ranks in rounds]  # in each round: ranks x steps x (wall, CPU)
    wall = [1e3 * each[..., 0].max(0) for each in seconds]
    cpu = [1e3 * each[..., 1].mean(0) for each in seconds]
    numbers = {
        "best_wall_ms": float(min(each.min() for each in wall)),
        "mb_sent": float(np.mean([rank.sent for rank in costs or rounds[0]])) / MB,
        "peak_plain_malloc_mib": float(np.median([max(rank.peak for rank in ranks) for ranks in rounds])) / MIB,
    }
    if costs:
        numbers |= {
            **costs[0].numbers,
            "unique_ids": round(float(np.mean([rank.numbers["unique_ids"] for rank in costs]))),
            "mb_payload": float(np.mean([rank.payload for rank in costs])) / MB,
            "peak_mib": max(rank.peak for rank in costs) / MIB,
            "peak_without_code_mib": max(rank.peak - rank.code for rank in costs) / MIB,
        }
    medians = (np.array([np.median(each) for each in times]) for times in (wall, cpu))
    return Measurement(case, contender, *medians, numbers)


class Results:
    """All measurements of a run, and what is known about the run: command, date, machine, versions, options."""

    def __init__(self, measurements: Sequence[Measurement], about: Mapping[str, Any]) -> None:
        self.measurements = list(measurements)
        self.about = dict(about)

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(m.case for m in self.measurements))

    def of(self, case: str) -> list[Measurement]:
        return [m for m in self.measurements if m.case == case]

    def by(self, contender: str) -> list[Measurement]:
        return [m for m in self.measurements if m.contender == contender]

    def find(self, case: str, contender: str) -> Measurement | None:
        return next((m for m in self.of(case) if m.contender == contender), None)

    def save(self, path: Path, derived: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        """Write everything, unrounded, with the values `derived` by case and contender."""
        cases: dict[str, dict[str, Any]] = {case: {} for case in self.cases}
        for m in self.measurements:
            rounds = {"wall_ms_by_round": m.wall.tolist(), "cpu_ms_by_round": m.cpu.tolist()}
            cases[m.case][m.contender] = {**derived.get((m.case, m.contender), {}), **rounds, **m.numbers}
        path.write_text(json.dumps({**self.about, "cases": cases}, indent=1, default=vars) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        about = json.loads(path.read_text())
        about.setdefault("benchmark", path.stem.rpartition("-")[2])  # files from before 18 November 2026 do not name it
        measurements = [
            Measurement(
                case,
                contender,
                np.array(numbers.pop("wall_ms_by_round")),
                np.array(numbers.pop("cpu_ms_by_round")),
                numbers,
            )
            for case, contenders in about.pop("cases").items()
            for contender, numbers in contenders.items()
        ]
        return cls(measurements, about)
