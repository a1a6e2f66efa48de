"""What every rank last said of itself, in the store that outlives the ranks; and who is missing, told from it."""

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

T = TypeVar("T")
_SHOWN = 8  # ranks that a message names one by one
_CALLERS = 16  # ranks that call the roll: of thousands that fail together, the store would choke


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself from time to time. `count` grows each time: so another rank sees that it lives."""

    host: str
    pid: int
    step: int
    idle: float  # seconds since it came to that step
    time: float  # when it said so, by its own clock
    count: int
    state: Literal["runs", "ended", "failed"] = "runs"
    error: str = ""


class StatusBoard:
    """The words of all ranks. Nothing here waits for a rank. On a cut link a call may wait for the store for ever: `within`."""

    def __init__(self, rank: int, size: int, *, patience: float = 5.0) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        # A connection of its own: the main thread may wait for something in the group's for minutes.
        self._store: Store = _get_default_store().clone()
        self._store.set_timeout(timedelta(seconds=patience))

    def say(self, word: RankStatus) -> None:
        """Write this rank's word in place of its last."""
        self._store.set(f"roll/{self.rank}", json.dumps(asdict(word)))

    def hear(self) -> list[RankStatus | None]:
        """The last word of every rank, None for one that never spoke."""
        keys = [f"roll/{rank}" for rank in range(self.size)]
        if self._store.check(keys):
            return [_word(text) for text in self._store.multi_get(keys)]
        return [_word(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def turn(self) -> int:
        """1 for the rank that asks first, and so on."""
        return int(self._store.add("roll/turns", 1))

    def ask_for_stacks(self, who: str) -> None:
        """Have every rank print what it is doing. `who` wants to know: a text that no one asked with before."""
        self._store.set("roll/stacks", who)

    def asked_for_stacks(self) -> str | None:
        """Who asked last, if anyone."""
        return bytes(self._store.get("roll/stacks")).decode() if self._store.check(["roll/stacks"]) else None

    def within(self, call: Callable[[], T]) -> T:
        """What `call` returns, if the store answers within `patience` seconds: else TimeoutError, which says what that means.

        In a thread that is left behind if need be, for on a cut link the store's calls wait longer than their own timeout.
        """
        answers: list[T] = []

        def run() -> None:
            with suppress(Exception):  # a closed connection is no answer either
                answers.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience)
        if not answers:
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            raise TimeoutError(
                f"the store at {where} does not answer: its host or its torchrun is down, or the network to it is cut, "
                "so the other ranks cannot be asked"
            )
        return answers[0]


def describe_missing_ranks(
    before: Sequence[RankStatus | None], after: Sequence[RankStatus | None], *, rank: int, now: float
) -> str:
    """Lines that name the ranks that do not work, the likeliest cause first, seen from `rank`.

    `before`, `after`: the words of all ranks at two times, far enough apart for a living rank to speak in between.

    Example:
        missing: rank 1 on node7 (pid 47): last seen at step 17, 10.2 s ago; not heard of for 9.8 s: killed, stopped or cut off
    """
    silent, stuck, left, failed = [], [], [], []
    for other, (old, new) in enumerate(zip(before, after, strict=True)):
        if other == rank:
            continue
        if new is None:
            silent.append(f"rank {other}: never heard of")
            continue
        idle = new.idle + max(0.0, now - new.time)
        who = f"rank {other} on {new.host} (pid {new.pid})"
        if new.state == "failed":
            failed.append((new.time, f"{who}: failed at step {new.step}: {new.error}"))
        elif new.state == "ended":
            left.append(f"{who}: ended in order after step {new.step}")
        elif old is not None and old.count == new.count and old.pid == new.pid:
            since = f"not heard of for {max(0.0, now - new.time):.1f} s: killed, stopped or cut off"
            silent.append(f"{who}: last seen at step {new.step}, {idle:.1f} s ago; {since}")
        elif old is None or old.step == new.step:
            stuck.append((-idle, f"{who}: alive, but at step {new.step} for {idle:.1f} s"))
    lines = [f"missing: {line}" for line in silent]
    lines += [f"no progress: {line}" for _, line in sorted(stuck)]
    lines += [f"gone: {line}" for line in left]
    lines += [f"failed too: {line}" for _, line in sorted(failed)]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} ranks more"]
    return "\n".join(lines) or "every other rank is alive and makes progress"


def find_missing_ranks(roll: StatusBoard, *, pause: float) -> str:
    """Who is missing, as lines; or that the store is out of reach. Takes `pause` seconds, in which a living rank speaks."""
    try:
        if roll.within(roll.turn) > _CALLERS:
            return "who is missing is told by the ranks that failed first: see their output"
        before = roll.within(roll.hear)
        time.sleep(pause)
        return describe_missing_ranks(before, roll.within(roll.hear), rank=roll.rank, now=time.time())
    except TimeoutError as error:
        return str(error)


def _word(text: bytes) -> RankStatus:
    return RankStatus(**json.loads(text))


class Watchdog:
    """Watches that this rank makes progress, and tells who does not when another lets it down. A context manager.

    `beat(step)` costs next to nothing: threads of their own do the talking. After `timeout` seconds without a beat every
    rank prints the stacks of its threads. If no beat comes in the next few seconds either, the process says who is missing
    and exits with status 1, so that torchrun restarts the ranks or ends them. (A collective's own timeout, that of
    start_ranks, often comes first. NCCL's kills the process without an exception: then the stacks are all there is.)

    An exception in the block that another rank may have caused gets a note that says which rank is missing, and since when.

    The time in which the process itself is stopped (Ctrl-Z) does not count. When torchrun is gone, the rank gets a SIGTERM.

    Example:
        with start_ranks(timeout=60) as ranks, Watchdog(ranks, timeout=60) as heartbeat:
            for step in range(steps):
                ...
                heartbeat.beat(step)
    """

    def __init__(self, ranks: Ranks, *, timeout: float = 300.0) -> None:
        if timeout <= 0:
            raise ValueError(f"Watchdog: timeout={timeout}: must be above 0 seconds")
        self.timeout, self.interval = timeout, min(max(timeout / 20, 0.2), 2.0)
        self._ranks = ranks
        self._roll = StatusBoard(ranks.rank, ranks.size) if ranks.size > 1 else None
        self._step, self._progress, self._words = 0, time.monotonic(), 0
        self._over, self._stalled, self._shown = threading.Event(), threading.Event(), float("-inf")
        self._watcher, self._saying = (
            threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True),
            threading.Lock(),
        )
        self._parent = os.getppid() if dist.is_torchelastic_launched() else None

    def beat(self, step: int | None = None) -> None:
        """Say that this rank has come to `step`; None, in the midst of long work that is no step: that it goes on."""
        self._step, self._progress = self._step if step is None else step, time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        if self._roll is not None:
            self._say(self._roll, "runs")  # now, so that a rank that dies in the first second has a name
            arguments = (self._roll, self._roll.asked_for_stacks())
            threading.Thread(target=self._talk, args=arguments, name="heartbeat-talk", daemon=True).start()
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._watcher.join(1)  # or it might set the next alarm
        faulthandler.cancel_dump_traceback_later()
        if self._roll is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave("ended")
            return
        summary = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._leave("failed", summary)
        if isinstance(error, RuntimeError) and not isinstance(error, RanksError):  # all that collectives raise is one
            error.add_note(f"{self._who()}:\n{find_missing_ranks(self._roll, pause=2.5 * self.interval)}")

    def _who(self) -> str:
        idle = time.monotonic() - self._progress
        return f"rank {self._ranks.rank} on {socket.gethostname()} (pid {os.getpid()}), at step {self._step} for {idle:.1f} s"

    def _say(self, roll: StatusBoard, state: Literal["runs", "ended", "failed"], error: str = "") -> None:
        with self._saying:
            if state != "runs" or not self._over.is_set():  # the last word stays the last
                self._words += 1
                idle = time.monotonic() - self._progress
                roll.say(
                    RankStatus(socket.gethostname(), os.getpid(), self._step, idle, time.time(), self._words, state, error)
                )

    def _leave(self, state: Literal["ended", "failed"], error: str = "") -> None:
        roll = self._roll
        if roll is not None:
            with suppress(TimeoutError):  # a lost store is told by who asks it, and is no reason to fail
                roll.within(lambda: self._say(roll, state, error))

    def _talk(self, roll: StatusBoard, answered: str | None) -> None:
        """Keep this rank's word fresh, and pass on the wish to see stacks. May hang for ever on a cut link."""
        asked = False
        while not self._over.wait(self.interval):
            try:
                self._say(roll, "runs")
                if self._stalled.is_set() and not asked:
                    roll.ask_for_stacks(f"rank {self._ranks.rank} at step {self._step}")
                asked = self._stalled.is_set()
                if (wish := roll.asked_for_stacks()) != answered:
                    self._show_stacks(f"asked by {wish}, which makes no progress")
                    answered = wish
            except dist.DistNetworkError:  # the connection is gone, and does not come back
                return
            except dist.DistError:  # the store is slow today
                continue

    def _watch(self) -> None:
        """Tell when this rank makes no progress, and end it. Never waits for anyone."""
        last = time.monotonic()
        grace = min(max(self.timeout / 4, 3.0), 60.0)
        while not self._over.wait(self.interval):
            now = time.monotonic()
            if now - last > self.interval + 5:
                self._progress += now - last  # the process itself was stopped: nobody could make progress
            last = now
            if self._parent not in (None, os.getppid()):
                self._parent = None
                os.kill(os.getpid(), signal.SIGTERM)
            with suppress(Exception):  # where stderr is no file. For a main thread that never lets go of the interpreter
                faulthandler.dump_traceback_later(self.timeout + grace)
            idle = now - self._progress
            if idle > self.timeout and not self._stalled.is_set():
                self._stalled.set()
                self._show_stacks(f"no progress for {self.timeout:g} s")
            elif idle <= self.timeout and self._stalled.is_set():
                self._stalled.clear()
                _print(f"{self._who()}: goes on")
            if idle > self.timeout + grace:
                self._give_up()

    def _show_stacks(self, reason: str) -> None:
        if time.monotonic() - self._shown > self.timeout:  # once for both reasons
            self._shown = time.monotonic()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stacks = [
                f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
                for ident, frame in sys._current_frames().items()
                if not names.get(ident, "").startswith("heartbeat-")
            ]
            _print(f"{self._who()}: {reason}. Its stacks:", *stacks)

    def _give_up(self) -> None:
        found = find_missing_ranks(self._roll, pause=2.5 * self.interval) if self._roll else "it is the only rank"
        if self._over.is_set():  # an exception has come meanwhile, and says more
            return
        try:
            raise TimeoutError(f"{self._who()}: no progress, gives up.\n{found}")
        except TimeoutError as error:
            _print(str(error))
            get_error_handler().record_exception(error)
        os._exit(1)


def _print(*lines: str) -> None:
    """At once, so that the lines of several ranks do not mix."""
    sys.stderr.write("\n".join(lines).rstrip() + "\n")
    sys.stderr.flush()
