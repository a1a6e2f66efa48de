"""How a process joins the other ranks, chooses its device, and ends."""

import ctypes
import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from unisono.collectives.sizes import even_sizes
from unisono_models.training.distributed.rendezvous import call_within, wait_for_ranks
from unisono_models.training.errors import UserError

_MIN_START_TIMEOUT = 300.0  # seconds for all ranks to start: a cold file system delays some of them
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_RANK_0_FIRST = 1.0  # seconds in which rank 0 says that it has the same mistake
_STORE_SECONDS = 3.0  # for an answer of the store after a rank has failed
_EXIT_SECONDS = 10  # after which a rank that has failed is killed if it has not ended


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks: its `rank` of `world_size`, its `local_rank` on its host, and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files and prints to the user."""
        return self.rank == 0

    def shard(self, count: int) -> range:
        """Return the rows of `count` that belong to this rank: see `shard_range`."""
        return shard_range(count, self.rank, self.world_size)


def shard_range(count: int, rank: int, world_size: int) -> range:
    """Return the rows of `count` that belong to `rank`: contiguous, as even as possible, as torch.tensor_split divides them.

    Example:
        >>> [shard_range(10, rank, 4) for rank in range(4)]
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    sizes = even_sizes(count, world_size)
    first = sum(sizes[:rank])
    return range(first, first + sizes[rank])


def shard_chunks(count: int, rank: int, world_size: int, rows: int) -> list[range]:
    """Split the share of `rank` into chunks of at most `rows` rows: as many chunks on every rank, some perhaps empty.

    Example:
        >>> shard_chunks(10, 1, 2, 3), shard_chunks(1, 1, 2, 3)
        ([range(5, 8), range(8, 10)], [range(1, 1)])
    """
    share = shard_range(count, rank, world_size)
    largest_share = -(-count // world_size)
    chunks = max(1, -(-largest_share // rows))
    return [share[place.start : place.stop] for place in (shard_range(len(share), chunk, chunks) for chunk in range(chunks))]


@contextmanager
def start_ranks(*, timeout: float = 600.0) -> Iterator[Ranks]:
    """Join the other ranks that torchrun started. Without torchrun there is one rank and no process group. A context manager.

    The device is this rank's accelerator, or the CPU if there is none. The group uses gloo for CPU tensors and the
    accelerator's own backend for its tensors. A collective fails after `timeout` seconds. Ranks get at least five minutes to
    start. A process group that exists already is used, and not destroyed at the end.

    An exception is recorded for torchrun's summary and raised again. The process then ends within seconds, even if a thread or
    a collective still waits for a rank that is gone.

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
            _end_soon(error)
            if isinstance(error, UserError):
                error.printed_by = _choose_printer(str(error), rank)
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _start_group(rank: int, size: int, device: torch.device, timeout: float) -> None:
    start_timeout = max(timeout, _MIN_START_TIMEOUT)
    limit = timedelta(seconds=timeout)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=start_timeout)))
    store.set_timeout(limit)
    backends = {"cpu": "gloo"} | ({} if device.type == "cpu" else {device.type: dist.get_default_backend_for_device(device)})
    dist.init_process_group(
        ",".join(f"{kind}:{backend}" for kind, backend in backends.items()),
        store=wait_for_ranks(store, rank=rank, size=size, timeout=start_timeout),
        rank=rank,
        world_size=size,
        timeout=limit,
    )


def _device(local_rank: int, size: int) -> torch.device:
    """Choose the accelerator of this rank and make it the current one. Without one that ranks can share, choose the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        _keep_freed_memory()
        return torch.device("cpu")
    if size > 1 and dist.get_default_backend_for_device(accelerator.type) == "gloo":
        return torch.device("cpu")  # it has no backend of its own (mps), and gloo takes only CPU tensors
    if local_rank >= torch.accelerator.device_count():
        raise UserError(
            f"local rank {local_rank} has no device: this host has {torch.accelerator.device_count()} of type "
            f"{accelerator.type}. Start at most that many ranks on it (--nproc-per-node), or hide the devices to use CPUs"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _choose_printer(text: str, rank: int) -> int:
    """Return the rank that prints a mistake: rank 0 if it has made the same one, otherwise the first that comes."""
    if not dist.is_initialized():
        return rank
    store, key = _get_default_store(), f"user-error/{hashlib.sha256(text.encode()).hexdigest()}"

    def choose() -> int:
        if rank:
            with suppress(dist.DistStoreError):
                store.wait([key], timedelta(seconds=_RANK_0_FIRST))
        return int(store.compare_set(key, "", str(rank)))

    try:
        return call_within(_STORE_SECONDS, choose)
    except TimeoutError:
        return rank


def _keep_freed_memory() -> None:
    """Make glibc reuse the memory of large tensors. It would return it, and clearing new pages took half of a step's time."""
    with suppress(OSError, AttributeError):  # other systems have other allocators
        libc = ctypes.CDLL(None)
        for option, size in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1)):
            libc.mallopt(option, size)


def _end_soon(error: BaseException) -> None:
    """Record the error of a rank that has failed, and make sure that its process ends."""
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)  # the file that torchrun's summary quotes
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "alarm"):
        # torchrun sends SIGTERM to the ranks that remain. This one ends by itself, and has yet to print its error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Threads and destructors may wait for a dead rank at the exit of the interpreter. The kernel does not.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_EXIT_SECONDS)
