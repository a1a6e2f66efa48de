"""What one sees of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")

SECONDS = 10.0  # between plain lines at first; later ones are a fiftieth of the time so far apart
PART = 0.05  # or this part of the run, if that is sooner


class Progress:
    """Steps `first_step` to `steps`, with the loss, the rate and the time left. A bar if `stream` is a terminal."""

    def __init__(self, *, steps: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        self.steps, self.first_step = steps, first_step
        self.stream = sys.stderr if stream is None else stream
        self.done = first_step
        self._start = self._last = time.monotonic()
        self._last_done = first_step
        self._bar: Any = None
        if _has_room(self.stream):
            from tqdm import tqdm  # type: ignore[import-untyped]

            bar_format = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
            self._bar = tqdm(
                total=steps, initial=first_step, file=self.stream, bar_format=bar_format, dynamic_ncols=True, smoothing=0.05
            )

    def advance(self) -> None:
        """One step more."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, values: dict[str, float], rate: float | None) -> None:
        """The newest `values` and the samples per second."""
        parts = [f"{name} {value:.4g}" for name, value in values.items()]
        if rate is not None:
            parts.append(f"{rate:,.0f} samples/s")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            return
        now = time.monotonic()
        part = (self.done - self._last_done) / max(self.steps, 1)
        if now - self._last >= max(SECONDS, (now - self._start) / 50) or part >= PART or self.done == self.steps:
            self._last, self._last_done = now, self.done
            each = (now - self._start) / max(self.done - self.first_step, 1)
            left = as_time(each * (self.steps - self.done))
            self.say(f"step {self.done}/{self.steps}, {', '.join(parts)}, {left} left")

    def say(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def watched(items: Sequence[Item], what: str, *, aloud: bool = True, stream: TextIO | None = None) -> Iterator[Item]:
    """`items`, one after the other, while a bar or plain lines show how far it is. Nothing is shown unless `aloud`.

    Example:
        pixels = [render(drawing) for drawing in watched(drawings, "drawings")]
    """
    stream = sys.stderr if stream is None else stream
    if not aloud or _has_room(stream):
        from tqdm import tqdm

        yield from tqdm(items, desc=what, file=stream, disable=not aloud, dynamic_ncols=True)
        return
    start = last = time.monotonic()
    print(f"{what}: {len(items):,} to do", file=stream, flush=True)
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= SECONDS and done < len(items):
            last, left = now, as_time((now - start) / done * (len(items) - done))
            print(f"{what}: {done:,}/{len(items):,}, {left} left", file=stream, flush=True)


def _has_room(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with lines to draw in. Some, of containers and CI, say that they have none."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # it stands for a terminal, but is none of the system's
        return True


def as_time(seconds: float) -> str:
    """
    Example:
        >>> as_time(75), as_time(3 * 3600 + 62)
        ('01:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
