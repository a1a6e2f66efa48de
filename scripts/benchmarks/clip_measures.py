"""What each rank measures: whether a step's loss and gradients are right, its peak memory, and the time of every step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from clip_contenders import CHECK_ROWS, CONTENDERS, PEERS, Step
from contrastive_measures import peak_of, relative
from shared_measuring import order_of_turns, time_call
from shared_process import M_MMAP_THRESHOLD
from torch import Tensor


class Check(NamedTuple):
    """How far a contender is from open_clip's, of the same family, in its first step."""

    loss: float  # as a part of the loss
    gradients: float  # as a part of their norm: of the image tower, the text tower, or scale and bias, the worst


class Seconds(NamedTuple):
    wall: float
    cpu: float


class Weight(NamedTuple):
    """One contender on one rank."""

    check: Check
    extra: dict[int, int]  # by rows: the bytes that a step held at most beyond those before it


def weigh(name: str, sizes: Sequence[int], folder: Path, plain_malloc: bool) -> Weight:
    """Check a contender, then weigh it with each of `sizes`, the smallest first. The optimizer has its state by then."""
    # Why: see contrastive_measures.weigh
    if not plain_malloc and not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16):
        raise RuntimeError("mallopt refuses a threshold: --plain-malloc does without")
    from clip_towers import Batch

    step = step_of(name)
    check = check_first_step(name, step, folder)
    extra = {}
    for rows in sorted(sizes):
        batch = Batch.make(rows)
        step.optimizer.zero_grad()  # open_clip keeps the gradients until the next step, ours does not: for both they count
        dist.barrier()
        extra[rows] = peak_of(lambda batch=batch: step(batch))[1]
    return Weight(check, extra)


def check_first_step(name: str, step: Step, folder: Path) -> Check:
    """The peer leaves its results in `folder`; those of the others are compared with them."""
    from clip_towers import Batch

    found: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for key, parameter in step.parameters().items():
            assert parameter.grad is not None, key
            found[key] = parameter.grad.double().clone()

    hook = step.optimizer.register_step_pre_hook(keep_gradients)
    clip_norm, step.clip_norm = step.clip_norm, math.inf
    loss = step(Batch.make(CHECK_ROWS)).double().reshape(())
    step.clip_norm = clip_norm
    hook.remove()
    dist.all_reduce(loss)
    results = gradient_parts(found, name) | {"loss": loss / dist.get_world_size()}
    family = CONTENDERS[name].family
    path = folder / f"{family}-{dist.get_rank()}.pt"
    if name == PEERS[family]:
        torch.save(results, path)
    expected = torch.load(path)
    away = {key: relative(results[key], expected[key]) for key in expected}
    return Check(away.pop("loss"), max(away.values()))


def gradient_parts(gradients: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The gradients of each tower and of the loss as one vector each, the known multiples of a contender taken out."""
    contender = CONTENDERS[name]
    factors = {"visual.": contender.towers, "text.": contender.towers, "logit_": contender.scale}
    return {
        part: torch.cat([gradients[key].flatten() for key in sorted(gradients) if key.startswith(part)]) / factor
        for part, factor in factors.items()
    }


def time_round(names: Sequence[str], rows: int, turn: int) -> dict[str, Seconds]:
    """One step of every contender, in turn."""
    from clip_towers import Batch

    batch = Batch.make(rows)
    times = {}
    for name in order_of_turns(names, turn):
        step = step_of(name)
        times[name] = Seconds(*time_call(lambda step=step: step(batch)))
    return times


def warm_up(names: Sequence[str]) -> None:
    """Make every contender, in the same order on all ranks, and load its code."""
    from clip_towers import Batch

    for name in names:
        step_of(name)(Batch.make(CHECK_ROWS))


@cache
def step_of(name: str) -> Step:
    return CONTENDERS[name].make()
