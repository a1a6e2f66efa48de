"""SIGTERM and Ctrl-C: all ranks finish the same step, save, and end in order."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from unisono.collectives import all_reduce

_SAME_PRESS = 0.5  # seconds: one Ctrl-C may reach a rank twice, from the terminal and from its launcher


class StopSignal:
    """Turns SIGTERM, and the first Ctrl-C, into a question that the training loop asks after each step. A context manager.

    A second Ctrl-C interrupts at once. Signals reach the ranks at different times or only some of them: so the ranks have
    to agree, which takes one all_reduce of a number (0.2 to 0.4 ms with gloo on one host) at every call, or every `every`-th.

    A run that was told to stop saves and ends with exit status 0: an error status would make torchrun with --max-restarts
    start it again. Whether it is finished is written in its run directory. torchrun itself, when it gets SIGTERM, passes it
    on, waits --shutdown-timeout seconds (30 by default) before it kills, and then ends with status 1: the step and the
    checkpoint have to fit into that time.

    Example:
        with StopSignal() as stopping:
            for step in range(first, steps):
                ...
                if stopping.agreed():
                    checkpoints.save(step + 1, ...)
                    break
    """

    def __init__(self, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"StopSignal: every={every}: must be at least 1")
        self._every = every
        self._asked = 0
        self._agreed = False
        self._before: dict[int, Any] = {}
        self._signalled = 0.0
        self.told: str | None = None
        """The name of the signal that this rank got, if it got one."""

    def agreed(self) -> bool:
        """Whether any rank was told to stop: the same answer on every rank. All ranks must call it equally often."""
        self._asked += 1
        if not self._agreed and self._asked % self._every == 0:
            self._agreed = bool(all_reduce(torch.tensor([int(self.told is not None)])).item())
        return self._agreed

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # After an error torchrun sends SIGTERM to the ranks that are left. They are about to end, and yet to say why.
            if number == signal.SIGINT or error is None:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.told == "SIGINT" and now - self._signalled > _SAME_PRESS:
            raise KeyboardInterrupt
        if self.told is None:
            self.told, self._signalled = signal.Signals(number).name, now
