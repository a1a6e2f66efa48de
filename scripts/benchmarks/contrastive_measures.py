"""What each rank measures: the peak memory of a step and whether its results are right, and the time of every step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from contrastive_contenders import CONTENDERS, LIMIT, PEERS, Family, Inputs, limit
from shared_measuring import order_of_turns, time_call
from shared_process import M_MMAP_THRESHOLD, begin_peak, resident_peak
from torch import Tensor

WARM_UP_ROWS = 128


class Weight(NamedTuple):
    """One contender on one rank."""

    extra: int  # bytes: the most that one step held beyond what was there before it
    loss: float  # of the global batch
    deviation: float  # of loss and gradients from the peer's, as a part of these


class Seconds(NamedTuple):
    wall: float
    cpu: float


def weigh(name: str, rows: int, folder: Path, plain_malloc: bool) -> Weight:
    """One forward and backward of a contender in a process that has done no other but a tiny one, which loads the code.

    The first of a family leaves its results in `folder`; those of the others are compared with them.
    """
    # glibc keeps freed memory of up to 32 MB, depending on what was freed before, and rarely fits the next tensor in: the peak
    # would differ by half from rank to rank. With a fixed threshold every freed tensor goes back at once.
    if not plain_malloc and not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16):
        raise RuntimeError("mallopt refuses a threshold: --plain-malloc does without")
    family = CONTENDERS[name].family
    loss_of = CONTENDERS[name].make()
    warm_up([name])
    inputs = Inputs.make(rows, family)
    dist.barrier()
    loss, extra = peak_of(lambda: step(loss_of, inputs))
    results = global_results(loss, inputs, family)
    path = folder / f"{family}-{rows}-{dist.get_rank()}.pt"
    if name == PEERS[family]:
        torch.save(results, path)
    expected = torch.load(path)
    deviation = max(relative(results[key], expected[key]) for key in expected)
    return Weight(extra, float(results["loss"]), deviation)


def warm_up(names: Sequence[str]) -> None:
    """Load all code: torch's checkpoint, for one, imports for seconds when it is called first."""
    for name in names:
        CONTENDERS[name].make()(Inputs.make(WARM_UP_ROWS, CONTENDERS[name].family)).backward()


def time_round(names: Sequence[str], rows: int, turn: int) -> dict[str, Seconds]:
    """One step of every contender and the limit's matmuls, in turn."""
    matmuls, factor = limit(rows)
    inputs = {family: Inputs.make(rows, family) for family in PEERS}
    times = {}
    for name in order_of_turns([*names, LIMIT], turn):
        if name == LIMIT:
            times[name] = Seconds(*(factor * seconds for seconds in time_call(matmuls)))
            continue
        contender = CONTENDERS[name]
        loss_of, own = contender.make(), inputs[contender.family]
        times[name] = Seconds(*time_call(lambda loss_of=loss_of, own=own: step(loss_of, own)))
        own.forget_gradients()
    return times


def step(loss_of: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    loss = loss_of(inputs)
    loss.backward()
    return loss.detach()


def global_results(loss: Tensor, inputs: Inputs, family: Family) -> dict[str, Tensor]:
    """What must be the same for all: the loss and the shared gradients averaged over the ranks, as DDP does, and own rows'.

    open_clip local and SigLIP return the loss of this rank's rows; their mean is the global one.
    """
    shared = [loss, inputs.scale.grad, *([inputs.bias.grad] if family == "sigmoid" else [])]
    values = torch.stack([torch.as_tensor(v).double().reshape(()) for v in shared])
    dist.all_reduce(values)
    names = ("loss", "scale", "bias")
    means = dict(zip(names, values / dist.get_world_size(), strict=False))
    assert inputs.x.grad is not None and inputs.y.grad is not None
    return {**means, "x": inputs.x.grad, "y": inputs.y.grad}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dtype=torch.float64) / b.norm(dtype=torch.float64))


def peak_of(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What `call` returns, and the bytes by which the process's resident memory rose at most during it. Linux only."""
    before = begin_peak()  # trimmed, or the call would reuse, for free, what the allocator has not given back
    result = call()
    return result, resident_peak() - before
