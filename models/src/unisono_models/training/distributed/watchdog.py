"""A watchdog on every rank: it says which rank is missing or hangs, and where, and ends ranks that make no progress."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import RanksError
from unisono_models.training.distributed.rendezvous import call_within, store_address

T = TypeVar("T")
_MOST_LINES = 8  # of ranks that a message lists one by one
_MOST_READERS = 16  # ranks that read all statuses: if thousands fail together, the store would not keep up


@dataclass(frozen=True)
class RankStatus:
    """What a rank writes about itself once a second or so. `count` grows each time, so others see that the rank is alive."""

    host: str
    pid: int
    step: int
    idle: float  # seconds since the rank reached that step
    time: float  # when it was written, by the rank's own clock
    count: int
    state: Literal["runs", "ended", "failed"] = "runs"
    error: str = ""


class StatusBoard:
    """The statuses of all ranks, in torchrun's store, which outlives the ranks.

    No method waits for a rank. If the network is cut, a call may wait for the store for ever: use `within`.
    """

    def __init__(self, rank: int, size: int, *, patience: float = 5.0) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        # A connection of its own: the main thread may wait on the group's connection for minutes.
        self._store: Store = _get_default_store().clone()
        self._store.set_timeout(timedelta(seconds=patience))

    def write(self, status: RankStatus) -> None:
        """Replace this rank's status."""
        self._store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def read(self) -> list[RankStatus | None]:
        """Return the newest status of every rank, None for a rank that has written none."""
        keys = [f"status/{rank}" for rank in range(self.size)]
        if self._store.check(keys):
            return [_decode(text) for text in self._store.multi_get(keys)]
        return [_decode(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def count_reader(self) -> int:
        """Return 1 for the first rank that calls this, 2 for the second, and so on."""
        return int(self._store.add("status/readers", 1))

    def request_stacks(self, by: str) -> None:
        """Make every rank print its stacks. `by` says who wants them; it must be a unique string."""
        self._store.set("status/stacks", by)

    def stacks_requested_by(self) -> str | None:
        """Return who requested stacks last, if anyone."""
        return bytes(self._store.get("status/stacks")).decode() if self._store.check(["status/stacks"]) else None

    def within(self, call: Callable[[], T]) -> T:
        """Return what `call` returns.

        Raises: TimeoutError if the store does not answer within `patience` seconds.
        """
        try:
            return call_within(self.patience, call)
        except TimeoutError:
            raise TimeoutError(
                f"the store at {store_address()} does not answer: its host or its torchrun is down, or the network to it is "
                "cut. So the state of the other ranks is unknown"
            ) from None


def describe_missing_ranks(
    before: Sequence[RankStatus | None], after: Sequence[RankStatus | None], *, rank: int, now: float
) -> str:
    """List the ranks that do not work, as seen from `rank`, the likeliest cause first.

    `before`, `after`: the statuses of all ranks at two times, far enough apart for a living rank to write a new one.

    Example:
        missing: rank 1 on node7 (pid 47): last seen at step 17, 10.2 s ago; silent for 9.8 s: killed, stopped or cut off
    """
    silent, stuck, left, failed = [], [], [], []
    for other, (old, new) in enumerate(zip(before, after, strict=True)):
        if other == rank:
            continue
        if new is None:
            silent.append(f"rank {other}: never started")
            continue
        idle = new.idle + max(0.0, now - new.time)
        who = f"rank {other} on {new.host} (pid {new.pid})"
        if new.state == "failed":
            failed.append((new.time, f"{who}: failed at step {new.step}: {new.error}"))
        elif new.state == "ended":
            left.append(f"{who}: ended without an error after step {new.step}")
        elif old is not None and old.count == new.count and old.pid == new.pid:
            since = f"silent for {max(0.0, now - new.time):.1f} s: killed, stopped or cut off"
            silent.append(f"{who}: last seen at step {new.step}, {idle:.1f} s ago; {since}")
        elif old is None or old.step == new.step:
            stuck.append((-idle, f"{who}: alive, but at step {new.step} for {idle:.1f} s"))
    lines = [f"missing: {line}" for line in silent]
    lines += [f"no progress: {line}" for _, line in sorted(stuck)]
    lines += [f"ended: {line}" for line in left]
    lines += [f"failed too: {line}" for _, line in sorted(failed)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more ranks"]
    return "\n".join(lines) or "every other rank is alive and makes progress"


def find_missing_ranks(board: StatusBoard, *, pause: float) -> str:
    """Describe the missing ranks, or say that the store does not answer. Takes `pause` seconds, in which living ranks write."""
    try:
        if board.within(board.count_reader) > _MOST_READERS:
            return "the ranks that failed first say which rank is missing: see their output"
        before = board.within(board.read)
        time.sleep(pause)
        return describe_missing_ranks(before, board.within(board.read), rank=board.rank, now=time.time())
    except TimeoutError as error:
        return str(error)


def _decode(text: bytes) -> RankStatus:
    return RankStatus(**json.loads(text))


class Watchdog:
    """Watches that this rank makes progress, and says which rank is to blame if it does not. A context manager.

    `beat(step)` costs next to nothing: threads of the watchdog communicate. After `timeout` seconds without a beat every rank
    prints the stacks of its threads. If there is no beat in the next few seconds either, the process prints which ranks are
    missing and exits with status 1, so that torchrun restarts or ends the ranks. (A collective's own timeout, that of
    start_ranks, often comes first. NCCL's kills the process without an exception: then there are only the stacks.)

    An exception in the block that another rank may have caused gets a note that says which rank is missing, and since when.

    The time in which the process itself is stopped (Ctrl-Z) does not count. When torchrun is gone, the rank gets a SIGTERM.

    Example:
        with start_ranks(timeout=60) as ranks, Watchdog(ranks, timeout=60) as watchdog:
            for step in range(steps):
                ...
                watchdog.beat(step)
    """

    def __init__(self, ranks: Ranks, *, timeout: float = 300.0) -> None:
        if timeout <= 0:
            raise ValueError(f"Watchdog: timeout={timeout}: must be above 0 seconds")
        self.timeout = timeout
        self.interval = min(max(timeout / 20, 0.2), 2.0)
        self._ranks = ranks
        self._board = StatusBoard(ranks.rank, ranks.world_size) if ranks.world_size > 1 else None
        self._step = 0
        self._last_beat = time.monotonic()
        self._written = 0
        self._write_lock = threading.Lock()
        self._over = threading.Event()
        self._stalled = threading.Event()
        self._stacks_shown = float("-inf")
        self._watcher = threading.Thread(target=self._watch, name="watchdog-watch", daemon=True)
        self._parent = os.getppid() if dist.is_torchelastic_launched() else None

    def beat(self, step: int | None = None) -> None:
        """Report that this rank has reached `step`. None reports progress in long work that is no step."""
        self._step = self._step if step is None else step
        self._last_beat = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        if self._board is not None:
            self._write(self._board, "runs")  # now, so that a rank that dies in the first second is known
            arguments = (self._board, self._board.stacks_requested_by())
            threading.Thread(target=self._communicate, args=arguments, name="watchdog-status", daemon=True).start()
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._watcher.join(1)  # or it might set the next alarm
        faulthandler.cancel_dump_traceback_later()
        if self._board is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._write_last(self._board, "ended")
            return
        summary = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._write_last(self._board, "failed", summary)
        if isinstance(error, RuntimeError) and not isinstance(error, RanksError):  # collectives raise only RuntimeErrors
            error.add_note(f"{self._who()}:\n{find_missing_ranks(self._board, pause=2.5 * self.interval)}")

    def _who(self) -> str:
        idle = time.monotonic() - self._last_beat
        return f"rank {self._ranks.rank} on {socket.gethostname()} (pid {os.getpid()}), at step {self._step} for {idle:.1f} s"

    def _write(self, board: StatusBoard, state: Literal["runs", "ended", "failed"], error: str = "") -> None:
        with self._write_lock:
            if state == "runs" and self._over.is_set():
                return  # the last status must not be overwritten
            self._written += 1
            idle = time.monotonic() - self._last_beat
            host, pid = socket.gethostname(), os.getpid()
            board.write(RankStatus(host, pid, self._step, idle, time.time(), self._written, state, error))

    def _write_last(self, board: StatusBoard, state: Literal["ended", "failed"], error: str = "") -> None:
        with suppress(TimeoutError):  # whoever needs the store reports that it is lost
            board.within(lambda: self._write(board, state, error))

    def _communicate(self, board: StatusBoard, answered: str | None) -> None:
        """Keep this rank's status fresh, and pass requests for stacks on. May hang for ever if the network is cut."""
        requested = False
        while not self._over.wait(self.interval):
            try:
                self._write(board, "runs")
                if self._stalled.is_set() and not requested:
                    board.request_stacks(f"rank {self._ranks.rank} at step {self._step}")
                requested = self._stalled.is_set()
                request = board.stacks_requested_by()
                if request is not None and request != answered:
                    self._show_stacks(f"requested by {request}, which makes no progress")
                    answered = request
            except dist.DistNetworkError:  # the connection is lost, and does not come back
                return
            except dist.DistError:  # the store is slow for the moment
                continue

    def _watch(self) -> None:
        """Report when this rank makes no progress, and end it. Never waits for another rank or the store."""
        last = time.monotonic()
        grace = min(max(self.timeout / 4, 3.0), 60.0)
        while not self._over.wait(self.interval):
            now = time.monotonic()
            if now - last > self.interval + 5:
                self._last_beat += now - last  # the process itself was stopped: it could not make progress
            last = now
            if self._parent not in (None, os.getppid()):
                self._parent = None
                os.kill(os.getpid(), signal.SIGTERM)
            with suppress(Exception):  # fails if stderr is no file. It works even if the main thread never releases the GIL
                faulthandler.dump_traceback_later(self.timeout + grace)
            idle = now - self._last_beat
            if idle > self.timeout and not self._stalled.is_set():
                self._stalled.set()
                self._show_stacks(f"no progress for {self.timeout:g} s")
            elif idle <= self.timeout and self._stalled.is_set():
                self._stalled.clear()
                _print(f"{self._who()}: makes progress again")
            if idle > self.timeout + grace:
                self._give_up()

    def _show_stacks(self, reason: str) -> None:
        if time.monotonic() - self._stacks_shown > self.timeout:  # once, although there may be two reasons
            self._stacks_shown = time.monotonic()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stacks = [
                f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
                for ident, frame in sys._current_frames().items()
                if not names.get(ident, "").startswith("watchdog-")
            ]
            _print(f"{self._who()}: {reason}. Its stacks:", *stacks)

    def _give_up(self) -> None:
        found = find_missing_ranks(self._board, pause=2.5 * self.interval) if self._board else "it is the only rank"
        if self._over.is_set():  # an exception was raised in the meantime, and says more
            return
        try:
            raise TimeoutError(f"{self._who()}: no progress, gives up.\n{found}")
        except TimeoutError as error:
            _print(str(error))
            get_error_handler().record_exception(error)
        os._exit(1)


def _print(*lines: str) -> None:
    """Print at once, so that the lines of several ranks do not mix."""
    sys.stderr.write("\n".join(lines).rstrip() + "\n")
    sys.stderr.flush()
