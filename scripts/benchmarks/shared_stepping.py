"""Training steps, measured on a rank: their time and what they send; and the figures of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from shared_measuring import time_call
from shared_process import begin_peak, bytes_sent, resident_peak

from unisono.collectives import count_bytes

Rounds = NDArray[np.float64]
MB, MIB = 1e6, 2**20  # of traffic, of memory


class Stepper(Protocol):
    def prepare(self, step: int) -> Any:
        """A batch in the contender's own form, as a loader would give it. Not timed."""
        ...

    def step(self, batch: Any) -> Any: ...


class Seconds(NamedTuple):
    wall: float
    cpu: float


class Sent(NamedTuple):
    """By this rank in a step, on average."""

    bytes: float  # that its sockets took
    payload: float  # of the collectives, as unisono.collectives counts it


class Timing(NamedTuple):
    steps: list[Seconds]
    peak: int  # bytes resident at most, with malloc as it is
    sent: Sent | None


def time_stepper(stepper: Stepper, *, batches: int, warm_up: int, steps: int, count: bool) -> Timing:
    """Each step has another batch than the one before. `count`: the traffic, too."""
    begin_peak()
    seconds = []
    for number in range(warm_up + steps):
        batch = stepper.prepare(number % batches)
        seconds.append(Seconds(*time_call(lambda batch=batch: stepper.step(batch))))
    peak = resident_peak()
    return Timing(seconds[warm_up:], peak, count_sent(stepper, batches=batches) if count else None)


def count_sent(stepper: Stepper, *, batches: int) -> Sent:
    prepared = [stepper.prepare(step) for step in range(batches)]
    dist.barrier()
    before = bytes_sent()
    for batch in prepared:
        stepper.step(batch)
    dist.barrier()  # a few bytes
    sent = bytes_sent() - before
    with count_bytes() as traffic:
        for batch in prepared:
            stepper.step(batch)
    return Sent(sent / batches, traffic.sent / batches)


def wall_of_steps(ranks: Sequence[Timing]) -> Rounds:
    """ms of the slowest rank in each step."""
    return 1e3 * np.array([[step.wall for step in rank.steps] for rank in ranks]).max(axis=0)


def cpu_of_steps(ranks: Sequence[Timing]) -> Rounds:
    """ms of a rank in each step: the mean."""
    return 1e3 * np.array([[step.cpu for step in rank.steps] for rank in ranks]).mean(axis=0)


def median_peak(rounds: Sequence[Sequence[Timing]]) -> float:
    """MiB of the rank that held most."""
    return float(np.median([max(rank.peak for rank in ranks) for ranks in rounds])) / MIB


def mean_sent(sent: Sequence[Sent | None]) -> float:
    """MB, of a rank."""
    return float(np.mean([s.bytes for s in sent if s is not None])) / MB


class Measured:
    """The figures of a contender, from what a results file keeps of it: `wall`, `cpu` and the `weights` of its ranks."""

    wall: Rounds
    cpu: Rounds
    weights: Sequence[Any]

    @property
    def milliseconds(self) -> float:
        return float(np.median(self.wall))

    @property
    def cpu_milliseconds(self) -> float:
        return float(np.median(self.cpu))

    @property
    def sent(self) -> float:
        return mean_sent([w.sent for w in self.weights])

    @property
    def payload(self) -> float:
        return float(np.mean([w.sent.payload for w in self.weights])) / MB

    @property
    def peak(self) -> float:
        return max(w.peak for w in self.weights) / MIB

    @property
    def beyond_code(self) -> float:
        return max(w.peak - w.code for w in self.weights) / MIB
