"""What each rank measures: the losses of the first steps, the bytes that leave, the peak memory, the time of steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from embedding_workload import BATCHES, Setting
from recommender_contenders import CONTENDERS, Learner
from recommender_workload import TINY, Workload
from shared_process import begin_peak, free_at_once, resident_peak
from shared_stepping import Sent, Timing, count_sent, time_stepper

CHECKED_STEPS = BATCHES + 2  # the last have batches that came before, whose rows have changed by then


class Weight(NamedTuple):
    """One contender on one rank."""

    losses: list[float]  # of the global batch, in the first steps
    sent: Sent
    code: int  # bytes resident once all code is loaded, before there are tables
    peak: int  # bytes resident at most during the steps
    unique_ids: int
    chosen: str  # by a planner


def weigh(name: str, setting: Setting) -> Weight:
    """In a fresh process: the losses, the traffic and the peak memory of a contender."""
    free_at_once()
    _, learner = make(name, TINY._replace(poolings=setting.poolings))  # loads all code
    for step in range(2):
        learner.step(learner.prepare(step))
    del learner
    code = begin_peak()
    work, learner = make(name, setting)
    losses = torch.stack([learner.step(learner.prepare(step % BATCHES)) for step in range(CHECKED_STEPS)]).double()
    dist.all_reduce(losses)  # ours is that of all rows already
    sent = count_sent(learner, batches=BATCHES)
    begin_peak()
    for step in range(BATCHES):
        learner.step(learner.prepare(step))
    found = (losses / dist.get_world_size()).tolist()
    return Weight(found, sent, code, resident_peak(), work.unique_ids(), learner.chosen)


def time_steps(name: str, setting: Setting, warm_up: int, steps: int) -> Timing:
    return time_stepper(make(name, setting)[1], batches=BATCHES, warm_up=warm_up, steps=steps, count=False)


def make(name: str, setting: Setting) -> tuple[Workload, Learner]:
    contender = CONTENDERS[name]
    work = contender.given(setting)
    return work, contender.make(work)
