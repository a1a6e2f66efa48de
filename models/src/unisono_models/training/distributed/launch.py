"""One process of many: its rank, its device, and an orderly end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from unisono_models.training.distributed.rendezvous import wait_for_ranks

_START = 300.0  # seconds at least for all ranks to come: a cold file system keeps some of them
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WAY_OUT = 10  # seconds for a rank that has failed to end by itself


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `size`, `local_rank` on its host, and the device that it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on rank 0, which writes the files and speaks to the user."""
        return self.rank == 0


@contextmanager
def start_ranks(*, timeout: float = 600.0) -> Iterator[Ranks]:
    """Join the other ranks that torchrun started; without torchrun, one rank and no process group.

    The device is this rank's accelerator, or else the CPU. The group has gloo for CPU tensors and the accelerator's own
    backend for its tensors. A collective that waits longer than `timeout` seconds fails; to come, the ranks have five
    minutes at least. A process group that exists already is used as it is, and left alone.

    At the end of the block the group is destroyed. An exception goes through as it is, is left for torchrun to show in its
    summary, and ends the process with an error soon, even if a thread or a collective still waits for a rank that is gone.

    Example:
        with start_ranks(timeout=60) as ranks:
            model.to(ranks.device)
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        yield Ranks(rank, size, local_rank, torch.device("cpu") if dist.get_backend() == "gloo" else _device(local_rank, size))
        return
    if not dist.is_torchelastic_launched():
        yield Ranks(0, 1, 0, _device(0, 1))
        return
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        device = _device(local_rank, size)
        _start_group(rank, size, device, timeout)
        yield Ranks(rank, size, local_rank, device)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _hurry(error)
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _start_group(rank: int, size: int, device: torch.device, timeout: float) -> None:
    patience, limit = max(timeout, _START), timedelta(seconds=timeout)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
    store.set_timeout(limit)
    backends = {"cpu": "gloo"} | ({} if device.type == "cpu" else {device.type: dist.get_default_backend_for_device(device)})
    dist.init_process_group(
        ",".join(f"{kind}:{backend}" for kind, backend in backends.items()),
        store=wait_for_ranks(store, rank=rank, size=size, timeout=patience),
        rank=rank,
        world_size=size,
        timeout=limit,
    )


def _device(local_rank: int, size: int) -> torch.device:
    """The accelerator of this rank, made the current one; the CPU if there is none, or none that ranks can share."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        _keep_freed_memory()
        return torch.device("cpu")
    if size > 1 and dist.get_default_backend_for_device(accelerator.type) == "gloo":
        return torch.device("cpu")  # no backend of its own (mps): gloo moves CPU tensors only
    if local_rank >= torch.accelerator.device_count():
        raise RuntimeError(
            f"start_ranks: local rank {local_rank} has no device: there are {torch.accelerator.device_count()} of type "
            f"{accelerator.type}; start torchrun with --nproc-per-node of at most that, or hide the devices to use CPUs"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _keep_freed_memory() -> None:
    """Make glibc reuse the memory of large tensors instead of giving it back: clearing new pages took half of a step's time."""
    with suppress(OSError, AttributeError):  # other systems have other allocators
        libc = ctypes.CDLL(None)
        for option, size in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1)):
            libc.mallopt(option, size)


def _hurry(error: BaseException) -> None:
    """Make sure that a rank that has failed ends, with its error told."""
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)  # the file that torchrun's summary quotes
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "alarm"):
        # torchrun ends the ranks that remain by SIGTERM: this one is on its way, and has yet to print why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Threads and destructors may wait for a dead rank at the exit of the interpreter. The kernel does not.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_WAY_OUT)
