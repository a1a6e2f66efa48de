"""What one rank's process does: join the group, then run what it is sent until it is sent nothing."""

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
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def serve(connection: Connection, rank: int, world_size: int, folder: Path, group_timeout: float) -> None:
    """Answer each pickled (fn, args) with ("returned", value) or ("raised", traceback)."""
    with open(stacks_file(folder, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # so that the parent can ask where we hang
        torch.set_num_threads(1)
        if sys.platform in LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
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
    torch.manual_seed(0)  # a test must not depend on those before it
    try:
        try:
            fn, args = pickle.loads(request)
        except ImportError as error:  # pytest's importlib mode, for one, gives modules names that nobody can import
            raise ImportError(f"a rank cannot import the function to run ({error}): it must be importable by name") from error
        value = fn(*args)
        pickle.dumps(value)
        return "returned", value
    except BaseException:  # SystemExit and KeyboardInterrupt must reach the parent too
        return "raised", traceback.format_exc()


_SEVERITY = ("died", "raised", "hung", "returned")  # what is most likely the cause comes first
_GRACE = 2.0  # seconds the other ranks have to report, once one has failed


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
        told = [
            f"--- rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {state}{': ' * bool(detail)}{detail.rstrip()}"
            for (state, detail), ranks in by_text.items()
        ]
        first = next(iter(by_text))
        cause = first[1].rstrip().rpartition("\n")[2] if first[0] != "hung" else "no answer"
        super().__init__("\n".join([f"{name}: rank {by_text[first][0]} of {len(reports)} {first[0]}: {cause}", *told]))


class RankPool:
    """`world_size` processes with a gloo group among them. A context manager; most tests use `run_ranks` instead."""

    def __init__(self, world_size: int, *, group_timeout: float = 30.0) -> None:
        # Ranks are forked from a server that has imported torch already: milliseconds instead of seconds each.
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(["unisono.collectives.testing.pool"])
        self.usable = True
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, world_size, self.folder, group_timeout), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`fn(*args)` on every rank; the results in rank order, or RanksFailed. `fn` is a top-level function."""
        __tracebackhide__ = True  # pytest: show the ranks' tracebacks, not ours
        results = self._call(fn, args, timeout)
        self._call(dist.barrier, (), timeout)  # a test that leaves the ranks out of step fails here, not the next one
        return results

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        try:
            request = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"run_ranks: fn must be a top-level function, and its arguments must pickle: {error}") from error
        self.usable = False  # until every rank has returned
        for connection in self.connections:
            with suppress(OSError):  # a dead rank: _collect will report it
                connection.send_bytes(request)
        try:
            reports, results = self._collect(time.monotonic() + timeout)
        except BaseException:  # an interrupt, or a result that does not unpickle: leave no rank behind
            self.close()
            raise
        if any(report.state != "returned" for report in reports):
            self.close()
            raise RanksFailed(getattr(fn, "__qualname__", repr(fn)), reports)
        self.usable = True
        return results

    def _collect(self, deadline: float) -> tuple[list[RankReport], list[Any]]:
        reports: dict[int, RankReport] = {}
        results: list[Any] = [None] * len(self.processes)
        while len(reports) < len(self.processes) and (remaining := deadline - time.monotonic()) > 0:
            open_ranks = [rank for rank in range(len(self.processes)) if rank not in reports]
            events = [self.connections[rank] for rank in open_ranks] + [self.processes[rank].sentinel for rank in open_ranks]
            ready = wait(events, remaining)
            for rank in open_ranks:
                if self.connections[rank] in ready or self.processes[rank].sentinel in ready:
                    reports[rank], results[rank] = self._hear(rank)
                    if reports[rank].state != "returned":
                        deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in range(len(self.processes)):
            if rank not in reports:
                reports[rank] = RankReport(rank, "hung", self._stacks(rank))
        return [reports[rank] for rank in sorted(reports)], results

    def _hear(self, rank: int) -> tuple[RankReport, Any]:
        with suppress(EOFError, OSError):
            if self.connections[rank].poll():
                state, value = pickle.loads(self.connections[rank].recv_bytes())
                return RankReport(rank, state, value if state == "raised" else ""), value
        self.processes[rank].join(5)
        code = self.processes[rank].exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RankReport(rank, "died", reason), None

    def _stacks(self, rank: int) -> str:
        """Where a silent rank is: its threads' stacks, by signal, which works even inside a blocked C++ call."""
        process, path = self.processes[rank], stacks_file(self.folder, rank)
        if not hasattr(signal, "SIGUSR1") or process.pid is None or not path.exists():
            return ""
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return "\n" + path.read_text()

    def close(self) -> None:
        patience = 1.0 if self.usable else 0.0  # after a failure, ranks may wait for each other for ever
        self.usable = False
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
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

    `fn` is a top-level function (it is pickled by name) in which torch.distributed is initialised with gloo. Raises
    RanksFailed with every rank's traceback, signal or stack if any rank raises, exits, crashes, or is not done after
    `timeout` seconds. The processes are kept for the next call with the same world size, unless they failed; so what a
    function changes globally (default dtype, environment) stays for the next one. The seed is set anew for each.

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
    """End all processes that run_ranks keeps. Happens by itself at exit."""
    while _pools:
        _pools.popitem()[1].close()
