"""What each rank measures: whether the tables do the work, the bytes that leave, the peak memory, the time of steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from embedding_contenders import CONTENDERS, Tables
from embedding_workload import BATCHES, CHECKED_STEPS, TINY, Setting, Workload, deviation, expected_outputs
from shared_process import begin_peak, free_at_once, resident_peak
from shared_stepping import Sent, Timing, count_sent, time_stepper


class Weight(NamedTuple):
    """One contender on one rank."""

    outputs: float  # deviation of the first outputs from those formed plainly
    updates: float  # the same, of the outputs after two steps
    sent: Sent
    code: int  # bytes resident once all code is loaded, before there are tables
    peak: int  # bytes resident at most during the steps
    unique_ids: int
    chosen: str  # by a planner


def weigh(name: str, setting: Setting) -> Weight:
    """Check a contender in a fresh process, and find its traffic and its peak memory."""
    free_at_once()
    load_code(name)
    code = begin_peak()
    work, tables = make(name, setting)
    outputs, updates = check(name, work, tables)
    sent = count_sent(tables, batches=BATCHES)
    begin_peak()
    for step in range(BATCHES):
        tables.step(tables.prepare(step))
    return Weight(outputs, updates, sent, code, resident_peak(), work.unique_ids(), tables.chosen)


def time_steps(name: str, setting: Setting, warm_up: int, steps: int, count: bool) -> Timing:
    return time_stepper(make(name, setting)[1], batches=BATCHES, warm_up=warm_up, steps=steps, count=count)


def make(name: str, setting: Setting) -> tuple[Workload, Tables]:
    work = Workload(setting, dist.get_rank(), dist.get_world_size())
    return work, CONTENDERS[name].make(work)


def load_code(name: str) -> None:
    _, tables = make(name, TINY)
    for step in range(2):
        tables.step(tables.prepare(step))


def check(name: str, work: Workload, tables: Tables) -> tuple[float, float]:
    """Two steps; the deviations of the outputs before and after them from what a plain computation gives."""
    contender = CONTENDERS[name]

    def outputs(step: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {key: pooled.clone() for key, pooled in tables.forward(tables.prepare(step)).items()}

    found = [outputs(0)]
    for step in range(CHECKED_STEPS):
        tables.step(tables.prepare(step))
    found += [outputs(step) for step in range(CHECKED_STEPS)]
    expected = expected_outputs(work, contender.optimizer, work.world_size if contender.column_states else 1)
    away = [deviation([each[key] for key in expected], [expected[key][i] for key in expected]) for i, each in enumerate(found)]
    return away[0], max(away[1:])
