"""Measure on one rank: wall and CPU time, peak memory, bytes sent. Every rank imports this file, so it imports little."""

import ctypes
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives import count_bytes

M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
BYTES_SENT, BYTES_RETRANSMITTED = 200, 208  # offsets in the kernel's struct tcp_info


class Seconds(NamedTuple):
    wall: float
    cpu: float


class Prepared(NamedTuple):
    """A call with a preparation that is not timed. `call` receives what `prepare` returns."""

    prepare: Callable[[], Any]
    call: Callable[[Any], Any]


def order_of_turns(names: Sequence[str], turn: int) -> list[str]:
    """Rotate the names in each turn and reverse them in every other turn, so that none always follows the same one."""
    first = turn % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def time_call(call: Callable[[], Any]) -> Seconds:
    """Time one call on all ranks at once. Its result is freed after the clocks are read."""
    if dist.get_world_size() > 1:
        dist.barrier()
    cpu = time.process_time()
    wall = time.perf_counter()
    result = call()
    seconds = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
    del result
    return seconds


def take_turns(
    calls: Mapping[str, Callable[[], Any] | Prepared], turns: range, *, warm_up: int = 0
) -> dict[str, list[Seconds]]:
    """Time every call once in each turn. The `warm_up` turns before them are not recorded."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in calls}
    for turn in range(turns.start - warm_up, turns.stop):
        for name in order_of_turns(list(calls), turn):
            call = calls[name]
            if isinstance(call, Prepared):
                prepared = call.prepare()
                taken = time_call(lambda call=call, prepared=prepared: call.call(prepared))
            else:
                taken = time_call(call)
            if turn >= turns.start:
                seconds[name].append(taken)
    return seconds


def relative_deviation(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference as a fraction of the norm of `b`."""
    return float((a - b).norm(dtype=torch.float64) / b.norm(dtype=torch.float64))


def deviations_from_peer(results: Mapping[str, Tensor], path: Path, *, is_peer: bool) -> dict[str, float]:
    """Compare results with those of the peer, which the peer itself saves at `path`."""
    if is_peer:
        torch.save(results, path)
    expected = torch.load(path)
    return {key: relative_deviation(results[key], expected[key]) for key in expected}


def return_freed_memory() -> None:
    """Make malloc return every freed tensor to the system at once.

    By default glibc keeps up to 32 MB of freed memory, depending on what was freed before, and rarely fits the next tensor
    into it: the peak would differ by half from rank to rank.
    """
    if not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16):
        raise RuntimeError("mallopt rejected the threshold; --plain-malloc, where a benchmark has it, does not need it")


def reset_peak() -> int:
    """Start a new measurement of peak memory. Returns the bytes that are resident now."""
    ctypes.CDLL(None).malloc_trim(0)  # or a call would reuse, for free, what the allocator has not returned
    Path("/proc/self/clear_refs").write_text("5")
    return peak_resident()


def peak_resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: peak memory can only be measured on Linux")


def peak_of_call(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of `call`, and by how many bytes it raised the resident memory of this process at most."""
    dist.barrier()
    before = reset_peak()
    result = call()
    return result, peak_resident() - before


def bytes_sent() -> int:
    """Return the bytes that this process has sent on its open TCP connections, as the kernel counts them."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not a TCP connection, or closed in the meantime
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("=Q", info, BYTES_SENT)[0] - struct.unpack_from("=Q", info, BYTES_RETRANSMITTED)[0]
    return total


class Stepper(Protocol):
    """A contender whose training steps are measured, on this rank."""

    def prepare(self, step: int) -> Any:
        """Return a batch in the contender's own form, as its data loader would. Not timed."""
        ...

    def step(self, batch: Any) -> Any: ...


class StepCosts(NamedTuple):
    """What the steps of one contender cost on one rank, apart from time."""

    sent: float  # bytes that the sockets sent in a step
    payload: float  # bytes that the collectives have to send in a step, as unisono.collectives counts them
    code: int  # bytes resident after all code was loaded, before the model was built
    peak: int  # most bytes resident during the steps
    numbers: dict[str, Any]  # from the check of the results


class StepTimes(NamedTuple):
    steps: list[Seconds]
    peak: int  # most bytes resident, with malloc as it is
    sent: float | None


def measure_costs(
    make: Callable[[Any], Stepper], check: Callable[[Any], dict[str, Any]], *, setting: Any, tiny: Any, batches: int
) -> StepCosts:
    """Check a contender's results and measure its traffic and peak memory. Call it in a fresh process."""
    return_freed_memory()
    run_steps(make(tiny), 2)  # loads all code
    code = reset_peak()
    stepper = make(setting)
    numbers = check(stepper)
    sent, payload = count_traffic(stepper, batches)
    reset_peak()
    run_steps(stepper, batches)
    return StepCosts(sent, payload, code, peak_resident(), numbers)


def time_steps(stepper: Stepper, *, batches: int, warm_up: int, steps: int, count_bytes_sent: bool = False) -> StepTimes:
    """Time steps. Each takes another batch than the step before it."""
    reset_peak()
    seconds = []
    for number in range(warm_up + steps):
        batch = stepper.prepare(number % batches)
        seconds.append(time_call(lambda batch=batch: stepper.step(batch)))
    peak = peak_resident()
    return StepTimes(seconds[warm_up:], peak, count_traffic(stepper, batches)[0] if count_bytes_sent else None)


def run_steps(stepper: Stepper, steps: int) -> None:
    for step in range(steps):
        stepper.step(stepper.prepare(step))


def count_traffic(stepper: Stepper, batches: int) -> tuple[float, float]:
    """Return the bytes of a step on average: those that the sockets sent, and those that the collectives have to send."""
    prepared = [stepper.prepare(step) for step in range(batches)]
    dist.barrier()
    before = bytes_sent()
    for batch in prepared:
        stepper.step(batch)
    dist.barrier()  # adds a few bytes
    sent = bytes_sent() - before
    with count_bytes() as traffic:
        for batch in prepared:
            stepper.step(batch)
    return sent / batches, traffic.sent / batches
