"""What every rank last said of itself, in the store that outlives the ranks; and who is missing, told from it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")
_SHOWN = 8  # ranks that a message names one by one
_CALLERS = 16  # ranks that call the roll: of thousands that fail together, the store would choke


@dataclass(frozen=True)
class Word:
    """What a rank says of itself from time to time. `count` grows each time: so another rank sees that it lives."""

    host: str
    pid: int
    step: int
    idle: float  # seconds since it came to that step
    time: float  # when it said so, by its own clock
    count: int
    state: Literal["runs", "ended", "failed"] = "runs"
    error: str = ""


class RollCall:
    """The words of all ranks. Nothing here waits for a rank. On a cut link a call may wait for the store for ever: `within`."""

    def __init__(self, rank: int, size: int, *, patience: float = 5.0) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        # A connection of its own: the main thread may wait for something in the group's for minutes.
        self._store: Store = _get_default_store().clone()
        self._store.set_timeout(timedelta(seconds=patience))

    def say(self, word: Word) -> None:
        """Write this rank's word in place of its last."""
        self._store.set(f"roll/{self.rank}", json.dumps(asdict(word)))

    def hear(self) -> list[Word | None]:
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


def who_is_missing(before: Sequence[Word | None], after: Sequence[Word | None], *, rank: int, now: float) -> str:
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


def call_the_roll(roll: RollCall, *, pause: float) -> str:
    """Who is missing, as lines; or that the store is out of reach. Takes `pause` seconds, in which a living rank speaks."""
    try:
        if roll.within(roll.turn) > _CALLERS:
            return "who is missing is told by the ranks that failed first: see their output"
        before = roll.within(roll.hear)
        time.sleep(pause)
        return who_is_missing(before, roll.within(roll.hear), rank=roll.rank, now=time.time())
    except TimeoutError as error:
        return str(error)


def _word(text: bytes) -> Word:
    return Word(**json.loads(text))
