"""SIGTERM and Ctrl-C: all ranks finish the same step, save, and end without an error."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from unisono.collectives import all_reduce

_SAME_PRESS = 0.5  # seconds: one Ctrl-C may reach a rank twice, from the terminal and from its launcher


class StopSignal:
    """Catches SIGTERM and the first Ctrl-C, for the training loop to ask about after each step. A context manager.

    A second Ctrl-C interrupts at once. A signal reaches the ranks at different times, or only some of them. So the ranks have
    to agree, by one all_reduce of a number at each call (0.2 to 0.4 ms with gloo on one host), or at every `every`-th call.

    A run that was stopped saves and ends with exit status 0: an error status would make torchrun with --max-restarts start it
    again. The run directory shows whether the run is finished. When torchrun itself gets SIGTERM, it passes it on, waits
    --shutdown-timeout seconds (30 by default) before it kills the ranks, and ends with status 1: the step and the checkpoint
    have to fit into that time.

    Example:
        with StopSignal() as stop_signal:
            for step in range(first, steps):
                ...
                if stop_signal.received_by_any_rank():
                    checkpoints.save(step + 1, ...)
                    break
    """

    def __init__(self, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"StopSignal: every={every}: must be at least 1")
        self._every = every
        self._calls = 0
        self._agreed = False
        self._handlers: dict[int, Any] = {}
        self._received_at = 0.0
        self.received: str | None = None
        """The name of the signal that this rank got, if it got one."""

    def received_by_any_rank(self) -> bool:
        """Return whether any rank got a signal: the same answer on every rank. All ranks have to call it equally often."""
        return self.agree()[0]

    def agree(self, *, failed: bool = False) -> tuple[bool, bool]:
        """Return whether any rank got a signal, and whether any rank called this with `failed`, by one message."""
        self._calls += 1
        any_failed = False  # until the ranks have agreed: this one must not act alone on what it knows
        if not self._agreed and self._calls % self._every == 0:
            signals, failures = all_reduce(torch.tensor([int(self.received is not None), int(failed)])).tolist()
            self._agreed, any_failed = bool(signals), bool(failures)
        return self._agreed, any_failed

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            # After an error torchrun sends SIGTERM to the ranks that are left. They end by themselves, and have yet to print
            # their errors.
            if number == signal.SIGINT or error is None:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.received == "SIGINT" and now - self._received_at > _SAME_PRESS:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            self._received_at = now
