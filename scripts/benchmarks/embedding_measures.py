"""What each rank measures: whether the tables do the work, the bytes that leave, the peak memory, the time of steps."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from contrastive_measures import M_MMAP_THRESHOLD, resident_peak
from embedding_contenders import CONTENDERS, Tables
from embedding_workload import BATCHES, CHECKED_STEPS, TINY, Setting, Workload, deviation, expected_outputs
from shared_measuring import time_call

from unisono.collectives import count_bytes

BYTES_SENT, BYTES_RETRANSMITTED = 200, 208  # where they are in the kernel's struct tcp_info


class Seconds(NamedTuple):
    wall: float
    cpu: float


class Sent(NamedTuple):
    """By this rank in a step, on average."""

    bytes: float  # that its sockets took
    payload: float  # of the collectives, as unisono.collectives counts it


class Weight(NamedTuple):
    """One contender on one rank."""

    outputs: float  # deviation of the first outputs from those formed plainly
    updates: float  # the same, of the outputs after two steps
    sent: Sent
    code: int  # bytes resident once all code is loaded, before there are tables
    peak: int  # bytes resident at most during the steps
    unique_ids: int
    chosen: str  # by a planner


class Timing(NamedTuple):
    steps: list[Seconds]
    peak: int  # bytes resident at most, with malloc as it is
    sent: Sent | None


def weigh(name: str, setting: Setting) -> Weight:
    """Check a contender in a fresh process, and find its traffic and its peak memory."""
    # Why: see contrastive_measures.weigh
    if not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16):
        raise RuntimeError("mallopt refuses a threshold")
    load_code(name)
    code = begin_peak()
    work, tables = make(name, setting)
    outputs, updates = check(name, work, tables)
    sent = count_sent(tables)
    begin_peak()
    for step in range(BATCHES):
        tables.step(tables.prepare(step))
    return Weight(outputs, updates, sent, code, resident_peak(), work.unique_ids(), tables.chosen)


def time_steps(name: str, setting: Setting, warm_up: int, steps: int, count: bool) -> Timing:
    """Each step has another batch than the one before. `count`: the traffic, too."""
    _, tables = make(name, setting)
    begin_peak()
    seconds = []
    for number in range(warm_up + steps):
        batch = tables.prepare(number % BATCHES)
        seconds.append(Seconds(*time_call(lambda batch=batch: tables.step(batch))))
    peak = resident_peak()
    return Timing(seconds[warm_up:], peak, count_sent(tables) if count else None)


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


def count_sent(tables: Tables) -> Sent:
    batches = [tables.prepare(step) for step in range(BATCHES)]
    dist.barrier()
    before = bytes_sent()
    for batch in batches:
        tables.step(batch)
    dist.barrier()  # a few bytes
    sent = bytes_sent() - before
    with count_bytes() as traffic:
        for batch in batches:
            tables.step(batch)
    return Sent(sent / BATCHES, traffic.sent / BATCHES)


def bytes_sent() -> int:
    """All that this process has written to its open TCP connections, by the kernel's count. Linux only."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # what is no TCP connection, or is closed by now
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = (struct.unpack_from("=Q", info, place)[0] for place in (BYTES_SENT, BYTES_RETRANSMITTED))
            total += sent - again
    return total


def begin_peak() -> int:
    """The peak begins anew. The bytes that are resident now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()
