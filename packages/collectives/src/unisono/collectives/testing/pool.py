"""A pool of real ranks that stays alive between calls, cannot hang and cannot lose an error.

A rank is a process in a gloo group. It runs the functions that it is sent until it is sent an empty message.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

_SEVERITY = ("died", "raised", "hung", "returned")  # the most likely cause of a failure comes first
_GRACE = 2.0  # seconds that the other ranks have to report, once one has failed
_HASH_SEEDS = ("1", "2")  # PYTHONHASHSEED of even and odd ranks
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}

_fork_servers: list[Any] = []  # one for each hash seed
_starting = threading.Lock()


@dataclass(frozen=True)
class RankReport:
    """How a call ended on one rank: `detail` is its traceback, its signal, or where it hangs."""

    rank: int
    state: Literal["returned", "raised", "died", "hung"]
    detail: str = ""


class RanksFailed(AssertionError):  # noqa: N818  (it reads as what it says)
    """At least one rank did not return. `reports` has one entry for each rank."""

    def __init__(self, name: str, reports: list[RankReport]) -> None:
        self.reports = reports
        by_text: dict[tuple[str, str], list[int]] = {}  # the same traceback on several ranks is shown once
        for report in sorted(reports, key=lambda report: _SEVERITY.index(report.state)):
            by_text.setdefault((report.state, report.detail), []).append(report.rank)
        sections = [
            f"--- rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {state}{': ' * bool(detail)}{detail.rstrip()}"
            for (state, detail), ranks in by_text.items()
        ]
        first = next(iter(by_text))
        cause = first[1].rstrip().rpartition("\n")[2] if first[0] != "hung" else "no answer"
        super().__init__("\n".join([f"{name}: rank {by_text[first][0]} of {len(reports)} {first[0]}: {cause}", *sections]))


class RankPool:
    """`world_size` processes that form a gloo group. A context manager; most tests use `run_ranks` instead.

    Even and odd ranks have different hash seeds and different memory layouts, as ranks of a real run have. So a program
    whose ranks differ by the order of a set fails in the test.
    """

    def __init__(self, world_size: int, *, group_timeout: float = 30.0) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self.usable = True
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self._callers: list[threading.Thread] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, self.folder, group_timeout), name=f"rank-{rank}"
            )
            _start(process, rank)
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return what `fn(*args)` returned on each rank, in rank order, or raise RanksFailed. `fn` is a top-level function."""
        __tracebackhide__ = True  # pytest: show the ranks' tracebacks, not ours
        results = self._call(fn, args, timeout)
        self._call(dist.barrier, (), timeout)  # a test that leaves the ranks out of step fails itself, not the next one
        return results

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        try:
            request = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"run_ranks: fn must be a top-level function, and its arguments must pickle: {error}") from error
        self.usable = False  # until every rank has returned
        try:
            reports, results = self._collect(self._start_callers(request), time.monotonic() + timeout)
        except BaseException:  # an interrupt, or a result that does not unpickle: leave no rank behind
            self.close()
            raise
        if any(report.state != "returned" for report in reports):
            self.close()
            raise RanksFailed(getattr(fn, "__qualname__", repr(fn)), reports)
        self.usable = True
        return results

    def _start_callers(self, request: bytes) -> SimpleQueue[tuple[int, bytes]]:
        """Send `request` to all ranks. Return the queue that gets each rank and its answer, empty if the rank has died.

        Each rank has a thread: one that is stopped takes or gives a part of a large message, and then nothing more.
        """
        answers: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._callers = [
            threading.Thread(target=_call_rank, args=(rank, connection, process.sentinel, request, answers), daemon=True)
            for rank, (connection, process) in enumerate(zip(self.connections, self.processes, strict=True))
        ]
        for caller in self._callers:
            caller.start()
        return answers

    def _collect(self, answers: SimpleQueue[tuple[int, bytes]], deadline: float) -> tuple[list[RankReport], list[Any]]:
        reports: dict[int, RankReport] = {}
        results: list[Any] = [None] * len(self.processes)
        while len(reports) < len(self.processes):
            try:
                rank, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            reports[rank], results[rank] = self._read_report(rank, answer)
            if reports[rank].state != "returned":
                deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in range(len(self.processes)):
            if rank not in reports:
                reports[rank] = RankReport(rank, "hung", self._stacks(rank))
        return [reports[rank] for rank in sorted(reports)], results

    def _read_report(self, rank: int, answer: bytes) -> tuple[RankReport, Any]:
        if answer:
            state, value = pickle.loads(answer)
            return RankReport(rank, state, value if state == "raised" else ""), value
        self.processes[rank].join(5)
        code = self.processes[rank].exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RankReport(rank, "died", reason), None

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a silent rank's threads. A signal prints them, even inside a blocked C++ call."""
        process = self.processes[rank]
        path = _stacks_file(self.folder, rank)
        if not hasattr(signal, "SIGUSR1") or process.pid is None or not path.exists():
            return ""
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return "\n" + path.read_text()

    def close(self) -> None:
        """End the processes."""
        patience = 1.0 if self.usable else 0.0  # after a failure, ranks may wait for each other for ever
        if self.usable:
            for connection in self.connections:
                with suppress(OSError):  # a dead rank
                    connection.send_bytes(b"")
        self.usable = False
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for caller in self._callers:
            caller.join()  # nobody is left to read or write: it has ended
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_pools: dict[int, RankPool] = {}


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Run `fn(*args)` on `world_size` real ranks and return what each returned, in rank order.

    `fn` is a top-level function (it is pickled by name). torch.distributed is initialised with gloo when it runs. The
    processes stay alive for the next call with the same world size, unless one of them failed. So what a function changes
    globally (default dtype, environment) stays changed for the next one; only the random seed is set again.

    Raises RanksFailed, with every rank's traceback, signal or stack, if any rank raises, exits, crashes, or has not returned
    after `timeout` seconds.

    Example (in a file of its own, since ranks import it):
        def adds_up():
            x = torch.tensor([float(dist.get_rank())])
            assert all_reduce(x).item() == 6

        def test_adds_up():
            run_ranks(adds_up, world_size=4)
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size={world_size} must be at least 1")
    pool = _pools.get(world_size)
    if pool is None or not pool.usable:
        if pool is not None:
            pool.close()
        pool = _pools[world_size] = RankPool(world_size)
    return pool.run(fn, *args, timeout=timeout)


@atexit.register
def close_pools() -> None:
    """End all processes that run_ranks has started. This happens by itself at exit."""
    while _pools:
        _pools.popitem()[1].close()


def _start(process: Any, rank: int) -> None:
    """Start the process of a rank, with the hash seed of that rank.

    Ranks are forked from servers that have imported torch: that takes milliseconds, not seconds. The hash seed is fixed when
    an interpreter starts, so there is one server for each seed. Modules that multiprocessing.set_forkserver_preload names
    are imported there, too.
    """
    place = rank % len(_HASH_SEEDS)
    if process._start_method != "forkserver":
        with mock.patch.dict(os.environ, PYTHONHASHSEED=_HASH_SEEDS[place]):
            process.start()
        return
    from multiprocessing import forkserver  # not on every platform

    with _starting:
        if not _fork_servers:
            preload = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
            for _ in _HASH_SEEDS:
                server = forkserver.ForkServer()
                server.set_forkserver_preload([__name__, *(name for name in preload if name not in ("__main__", __name__))])
                _fork_servers.append(server)
        for seed, server in zip(_HASH_SEEDS, _fork_servers, strict=True):  # together, so that they import at the same time
            with mock.patch.dict(os.environ, PYTHONHASHSEED=seed):
                server.ensure_running()
        with mock.patch.object(forkserver, "connect_to_new_process", _fork_servers[place].connect_to_new_process):
            process.start()


def _call_rank(
    rank: int, connection: Connection, sentinel: int, request: bytes, answers: SimpleQueue[tuple[int, bytes]]
) -> None:
    answer = b""
    with suppress(EOFError, OSError):  # the rank has died
        connection.send_bytes(request)
        wait([connection, sentinel])  # a process that the rank has started may keep the connection open
        if connection.poll():
            answer = connection.recv_bytes()
    answers.put((rank, answer))


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _serve(connection: Connection, rank: int, world_size: int, folder: Path, group_timeout: float) -> None:
    """Be one rank: join the group, and answer each pickled (fn, args) with ("returned", value) or ("raised", traceback)."""
    with open(_stacks_file(folder, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # so that the parent can see where this rank hangs
        torch.set_num_threads(1)
        if sys.platform in _LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        while (request := _receive(connection)) is not None:
            connection.send_bytes(pickle.dumps(_answer(request)))
        dist.destroy_process_group()


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except EOFError:  # the parent is gone
        return None


def _answer(request: bytes) -> tuple[str, Any]:
    torch.manual_seed(0)  # a test must not depend on the tests before it
    try:
        try:
            fn, args = pickle.loads(request)
        except ImportError as error:  # for example, pytest's importlib mode gives modules names that cannot be imported
            raise ImportError(f"a rank cannot import the function to run ({error}): it must be importable by name") from error
        value = fn(*args)
        pickle.dumps(value)
        return "returned", value
    except BaseException:  # SystemExit and KeyboardInterrupt must reach the parent too
        return "raised", traceback.format_exc()
