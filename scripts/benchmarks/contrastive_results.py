"""The figures of the benchmark of the contrastive losses, and the aims they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from contrastive_contenders import (
    CLIP_AUTO,
    CONTENDERS,
    LIMIT,
    OPEN_CLIP_LOCAL,
    PEERS,
    SIGLIP_CHUNKS,
    SIGLIP_RECOMPUTED,
    SIGMOID,
    Family,
)
from contrastive_measures import Seconds, Weight
from numpy.typing import NDArray
from shared_report import Aim

Rounds = NDArray[np.float64]
MB = 2**20


@dataclass(frozen=True)
class Result:
    """One contender, or the limit, with `rows` on each rank."""

    contender: str
    rows: int
    wall: Rounds  # seconds of the slowest rank, in each round
    cpu: Rounds  # seconds, the mean over ranks, in each round
    extra: float  # MB of the rank that held most; not a number for the limit
    deviation: float

    @property
    def seconds(self) -> float:
        return float(np.median(self.wall))

    @property
    def cpu_seconds(self) -> float:
        return float(self.cpu.min())

    @property
    def is_limit(self) -> bool:
        return self.contender == LIMIT

    @property
    def is_ours(self) -> bool:
        return not self.is_limit and CONTENDERS[self.contender].is_ours

    @property
    def family(self) -> Family | None:
        return None if self.is_limit else CONTENDERS[self.contender].family


class Results(list[Result]):
    def find(self, contender: str, rows: int) -> Result | None:
        return next((r for r in self if (r.contender, r.rows) == (contender, rows)), None)

    def limit(self, rows: int) -> Result:
        found = self.find(LIMIT, rows)
        assert found is not None
        return found

    def peer(self, result: Result) -> Result | None:
        """open_clip's loss of the same family."""
        return None if result.family is None else self.find(PEERS[result.family], result.rows)

    @property
    def sizes(self) -> list[int]:
        return list(dict.fromkeys(r.rows for r in self))


def combine(
    rows: int, weights: Mapping[str, Sequence[Weight]], rounds: Sequence[Sequence[Mapping[str, Seconds]]]
) -> list[Result]:
    """`weights` of each contender by rank; `rounds` by rank."""

    def result(name: str) -> Result:
        wall = np.array([max(rank[name].wall for rank in by_rank) for by_rank in rounds])
        cpu = np.array([np.mean([rank[name].cpu for rank in by_rank]) for by_rank in rounds])
        if name == LIMIT:
            return Result(name, rows, wall, cpu, np.nan, np.nan)
        extra, deviation = max(w.extra for w in weights[name]) / MB, max(w.deviation for w in weights[name])
        return Result(name, rows, wall, cpu, extra, deviation)

    return [result(name) for name in (LIMIT, *weights)]


def judge(results: Results) -> list[Aim]:
    """The aims that the measured sizes tell about."""
    aims = []
    clip, local, sigmoid = (results.find(name, 4096) for name in (CLIP_AUTO, OPEN_CLIP_LOCAL, SIGMOID))
    chunked = [r for name in (SIGLIP_CHUNKS, SIGLIP_RECOMPUTED) if (r := results.find(name, 4096))]
    at = "b = 4096"
    for loss in (clip, sigmoid):
        if loss:
            ratio = loss.cpu_seconds / results.limit(4096).cpu_seconds
            aims.append(Aim(f"{loss.contender}, CPU time to the limit: ≤ 1.4x", ratio, ratio <= 1.4, at))
    if clip and local:
        faster = local.cpu_seconds / clip.cpu_seconds
        aims.append(Aim("clip_loss against open_clip local, CPU time: ≥ 2.2x faster", faster, faster >= 2.2, at))
    if sigmoid and chunked:
        best = min(chunked, key=lambda r: r.cpu_seconds)
        faster = best.cpu_seconds / sigmoid.cpu_seconds
        which = f"{at}, {best.contender}"
        aims.append(Aim("sigmoid_loss against SigLIP in chunks, CPU time: faster", faster, faster > 1, which))
    for rows in (4096, 8192):
        clip, local = results.find(CLIP_AUTO, rows), results.find(OPEN_CLIP_LOCAL, rows)
        if clip and local:
            part = local.extra / clip.extra
            text = f"clip_loss, peak memory, b = {rows}: ≤ 1/12 of open_clip local"
            aims.append(Aim(text, part, part >= 12, f"{clip.extra:.0f} of {local.extra:.0f} MB", "1/{:.1f}"))
    for name in (CLIP_AUTO, SIGMOID):
        if loss := results.find(name, 8192):
            text = f"{name}, peak memory, b = 8192: ≤ 100 MB"
            aims.append(Aim(text, loss.extra, loss.extra <= 100, "b = 8192", "{:.0f} MB"))
    return aims
