"""How a process joins the other ranks, chooses its device, and ends."""

import ctypes
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from unisono.collectives import LaunchEnv, init_distributed, read_launch_env
from unisono.collectives.launch import choose_backend, choose_device
from unisono.collectives.sizes import even_sizes
from unisono_models.training.distributed.rendezvous import call_within, count_lower_ranks_here, open_store, wait_for_ranks
from unisono_models.training.errors import UserError, process_rank

T = TypeVar("T")
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
    """Join the other ranks that a launcher started. Without one there is one rank and no process group. A context manager.

    The launcher is torchrun, srun, mpirun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: see
    unisono.collectives.read_launch_env. The device is this rank's accelerator, or the CPU if there is none. The group uses gloo
    for CPU tensors and the accelerator's own backend for its tensors. A collective fails after `timeout` seconds. Ranks get at
    least five minutes to start; after some seconds a line says which ones are missing. A process group that exists already is
    used, and not destroyed at the end.

    An exception is recorded for torchrun's summary and raised again. The process then ends within seconds, even if a thread or
    a collective still waits for a rank that is gone.

    Raises: UserError if the launcher's variables are incomplete, or if ranks do not start.

    Example:
        with start_ranks(timeout=60) as ranks:
            model.to(ranks.device)
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu") if dist.get_backend() == "gloo" else init_distributed()
        yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank)), device)
        return
    env = _as_mistake(read_launch_env)
    if env is None:
        yield Ranks(0, 1, 0, _choose_device(None))
        return
    try:
        device = _choose_device(env)
        local_rank = _start_group(env, device, timeout)
        yield Ranks(env.rank, env.world_size, local_rank, device)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _end_soon(error)
            if isinstance(error, UserError):
                error.printed_by = _choose_printer(str(error), env.rank)
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _as_mistake(call: Callable[[], T]) -> T:
    """Return what `call` returns. A wrong environment variable is the user's mistake, perhaps on this rank only."""
    try:
        return call()
    except ValueError as error:
        mistake = UserError(str(error))
        mistake.printed_by = process_rank()
        raise mistake from None


def _choose_device(env: LaunchEnv | None) -> torch.device:
    device = _as_mistake(lambda: choose_device(env))
    if device.type == "cpu":
        _keep_freed_memory()
    return device


def _start_group(env: LaunchEnv, device: torch.device, timeout: float) -> int:
    """Initialise the process group and return the local rank."""
    start_timeout = max(timeout, _MIN_START_TIMEOUT)
    limit = timedelta(seconds=timeout)
    store = open_store(env, timeout=start_timeout)
    store.set_timeout(limit)
    prints = not env.local_rank  # one rank of each host
    own_store = wait_for_ranks(store, rank=env.rank, size=env.world_size, timeout=start_timeout, prints=prints)
    dist.init_process_group(choose_backend(device), store=own_store, rank=env.rank, world_size=env.world_size, timeout=limit)
    return count_lower_ranks_here(own_store, rank=env.rank) if env.local_rank is None else env.local_rank


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
