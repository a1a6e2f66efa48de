"""The log of a run: metrics.jsonl, TensorBoard, and the progress on the screen."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.distributed.object_collectives import Json, raise_together
from unisono_models.training.run.run_directory import RunDirectory


def read_metrics(path: Path) -> list[dict[str, Json]]:
    """Read the lines of metrics.jsonl. `path`: the file, or the run directory. Incomplete lines are left out.

    Example:
        losses = [line["loss"] for line in read_metrics(run.path) if line["kind"] == "train"]
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = []
    for text in file.read_bytes().split(b"\n"):
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("kind"), str) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


class MetricsFile:
    """metrics.jsonl: a line of JSON for each step and evaluation, which neither a kill nor a full disk leaves broken.

    Opening it drops the lines of `first_step` and later steps. add() holds lines until flush() writes them. If a flush fails,
    the file stays as it was, and the next flush writes the lines.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < first_step] if path.exists() else []
        self.kept: Sequence[Mapping[str, Json]] = kept
        content = b"".join(_encoded(line) for line in kept)
        atomic_write(path, content)
        self._file = path.open("r+b", buffering=0)
        self._size = len(content)
        self._waiting: list[bytes] = []

    def missing(self, first_step: int) -> int:
        """Return the number of steps before `first_step` that have no line."""
        return first_step - len({line["step"] for line in self.kept if line["kind"] == "train"})

    def add(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        self._waiting.append(_encoded({"kind": kind, "step": step, **values}))

    def flush(self, *, to_disk: bool = False) -> None:
        """Write the lines that are held. `to_disk` also makes them survive a loss of power."""
        content = b"".join(self._waiting)
        try:
            self._file.seek(self._size)
            rest = memoryview(content)
            while rest:
                rest = rest[self._file.write(rest) :]
            if to_disk:
                os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)  # no incomplete line is left
            raise
        self._size += len(content)
        self._waiting.clear()

    def close(self) -> None:
        self._file.close()


def _encoded(line: Mapping[str, Json]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"  # floats keep all their bits


Item = TypeVar("Item")

SECONDS = 10.0  # between plain lines at first; later they are a fiftieth of the elapsed time apart
FRACTION = 0.05  # of the run between plain lines, if that is sooner


class Progress:
    """The progress of a run, with the loss, the speed and the time left: a bar on a terminal, plain lines elsewhere."""

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
        """Count one more step."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()

    def show(self, values: dict[str, float], rate: float | None) -> None:
        """Show the newest `values` and `rate`, the samples per second."""
        parts = [f"{name} {value:.4g}" for name, value in values.items()]
        if rate is not None:
            parts.append(f"{rate:,.0f} samples/s")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            return
        now = time.monotonic()
        fraction = (self.done - self._last_done) / max(self.steps, 1)
        if now - self._last >= max(SECONDS, (now - self._start) / 50) or fraction >= FRACTION or self.done == self.steps:
            self._last = now
            self._last_done = self.done
            each = (now - self._start) / max(self.done - self.first_step, 1)
            left = format_duration(each * (self.steps - self.done))
            self.say(f"step {self.done}/{self.steps}, {', '.join(parts)}, {left} left")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def show_progress(items: Sequence[Item], what: str, *, aloud: bool = True, stream: TextIO | None = None) -> Iterator[Item]:
    """Iterate over `items` while a bar or plain lines show the progress. Nothing is shown unless `aloud`.

    Example:
        pixels = [render_emoji(image, 32) for image in show_progress(images, "emoji")]
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
            last = now
            left = format_duration((now - start) / done * (len(items) - done))
            print(f"{what}: {done:,}/{len(items):,}, {left} left", file=stream, flush=True)


def _has_room(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that has lines. Those of containers and CI may have none."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # it imitates a terminal and has no file descriptor
        return True


def format_duration(seconds: float) -> str:
    """Format a duration as minutes and seconds.

    Example:
        >>> format_duration(75), format_duration(3 * 3600 + 62)
        ('01:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


if TYPE_CHECKING:
    from unisono_models.training.distributed.launch import Ranks

RESERVED = ("kind", "step", "samples")


class RunLog:
    """The log of a run. Every rank makes one and calls the same methods; rank 0 writes and prints.

    steps: the steps of the whole run. first_step: the step at which this start begins. Lines of that step and later ones, from
    an earlier start, are dropped: so the file is that of a run that never stopped. log_every: the number of steps between
    reads of the values from the device.

    metrics.jsonl has lines such as {"kind": "train", "step": 0, "loss": 5.5, "samples": 512}, {"kind": "evaluation", …} and
    {"kind": "speed", …}. Only the last kind depends on the clock.

    A full disk does not end the run: rank 0 prints a warning, holds the lines, and tries again. Only at the end is it an error.

    Example:
        with RunLog(run, ranks, steps=config.run.steps, first_step=first_step, log_every=config.run.log_every) as log:
            for step in range(first_step, config.run.steps):
                ...
                log.step(step, {"loss": loss}, samples=len(all_samples))
    """

    def __init__(self, run: RunDirectory, ranks: Ranks, *, steps: int, first_step: int = 0, log_every: int = 10) -> None:
        if log_every < 1:
            raise ValueError(f"RunLog: log_every={log_every} must be at least 1")
        self.log_every = log_every
        self._pending: list[tuple[int, float, int, dict[str, Tensor | float]]] = []
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._failed = False
        self.diverged: str | None = None
        """What the first loss that is not finite was, and at which step: on rank 0, as soon as the values are read back."""
        with raise_together("RunLog"):
            if ranks.first:
                self._file = MetricsFile(run.path / "metrics.jsonl", first_step=first_step)
                self._progress = Progress(steps=steps, first_step=first_step)
                from torch.utils.tensorboard import SummaryWriter  # slow to import: only where it is used

                purge = first_step if run.resumes else None
                self._board = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge, flush_secs=30)
                evaluations = [line for line in self._file.kept if line["kind"] == "evaluation"]
                self._evaluated = {(line["step"], frozenset(line) - {"kind", "step"}) for line in evaluations}
                if missing := self._file.missing(first_step):
                    self.say(f"metrics.jsonl lacks {missing} of the {first_step} steps before this start")
        self._window = (time.monotonic(), 0)

    def step(self, step: int, values: Mapping[str, Tensor | float], *, samples: int, read: bool = False) -> None:
        """Log the `values` of `step`: numbers, or tensors of one element, which are copied now and read back later.

        The values should be those of the global batch, and `samples` its size: only rank 0's are logged. `read` reads them
        back now.
        """
        _check("RunLog.step", values)
        values = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in values.items()}  # a collective
        if self._file is None:
            return
        # a copy: what is given may be a parameter, or memory that the next step writes to
        copies = {name: v.detach().clone().view(()) if isinstance(v, Tensor) else v for name, v in values.items()}
        self._pending.append((step, time.time(), samples, copies))
        self._window = (self._window[0], self._window[1] + samples)
        self._progress.advance()
        if read or len(self._pending) >= self.log_every:
            self._read_pending()
            self._write()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log the `values` of an evaluation after `step`. What an earlier start has logged is not logged twice."""
        _check("RunLog.evaluation", values)
        if self._file is None:
            return
        self._read_pending()
        values = {name: float(value) for name, value in values.items()}
        if (step, frozenset(values)) not in self._evaluated:
            self._file.add("evaluation", step, values)
            self._plot("evaluation", step, values, time.time())
        self._write()
        self._window = (time.monotonic(), 0)  # the evaluation does not count as training time

    def flush(self) -> None:
        """Write everything logged so far to disk. Call it before a checkpoint: the next start begins after it."""
        if self._file is not None:
            self._read_pending()
            self._write(to_disk=True)

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self._file is not None:
            self._progress.say(text)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:  # no collective: the other ranks may be gone
            with suppress(Exception):  # the error must not be replaced by one that follows from it
                self.flush()
            self._close()
            return
        with raise_together("RunLog"):
            try:
                self.flush()
                if self._file is not None and self._failed:
                    self._file.flush()  # raises what is still wrong
            finally:
                self._close()

    def _read_pending(self) -> None:
        """Read back the values of the pending steps, all at once, and add their lines."""
        assert self._file is not None
        if not self._pending:
            return
        read = _read_back([values for _, _, _, values in self._pending])
        for (step, when, samples, _), values in zip(self._pending, read, strict=True):
            self._file.add("train", step, {**values, "samples": samples})
            self._plot("train", step, values, when)
            bad = [name for name, value in values.items() if name.startswith("loss") and not math.isfinite(value)]
            if bad and self.diverged is None:
                self.diverged = f"step {step:,}: {bad[0]} is {values[bad[0]]}"
        last = self._pending[-1][0]
        self._pending.clear()
        start, count = self._window
        now = time.monotonic()
        rate = count / (now - start) if now > start else None
        if count and rate is not None:
            self._file.add("speed", last, {"samples_per_second": rate})
            self._plot("speed", last, {"samples_per_second": rate}, time.time())
        self._window = (now, 0)
        losses = {name: value for name, value in read[-1].items() if name.startswith("loss")}
        self._progress.show(losses or dict(list(read[-1].items())[:1]), rate)

    def _write(self, *, to_disk: bool = False) -> None:
        assert self._file is not None
        try:
            self._file.flush(to_disk=to_disk)
        except OSError as error:
            if not self._failed:
                self.say(f"metrics.jsonl cannot be written ({error}). The run continues and tries again")
            self._failed = True
        else:
            self._failed = False
        if to_disk:
            self._on_board(lambda board: board.flush())

    def _plot(self, kind: str, step: int, values: Mapping[str, float], when: float) -> None:
        def add(board: Any) -> None:
            for name, value in values.items():
                board.add_scalar(f"{kind}/{name}", value, step, walltime=when)

        self._on_board(add)

    def _on_board(self, write: Callable[[Any], None]) -> None:
        """Do something with TensorBoard's writer. If that fails, the run goes on without it."""
        if self._board is None:
            return
        try:
            write(self._board)
        except Exception as error:  # TensorBoard writes in a thread, which may raise anything
            self.say(f"TensorBoard's events cannot be written ({error}). The run continues without them")
            self._board = None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._progress.close()
            self._on_board(lambda board: board.close())


def _check(caller: str, values: Mapping[str, Tensor | float]) -> None:
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"{caller}: a value cannot be called {name!r}: every line has a field of that name")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{caller}: {name!r} has shape {tuple(value.shape)}: it must have one element")


def _read_back(rows: list[dict[str, Tensor | float]]) -> list[dict[str, float]]:
    """Return the values of all rows as numbers, by one transfer for each device and dtype."""
    stacks: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for row in rows:
        for value in row.values():
            if isinstance(value, Tensor):
                stacks.setdefault((value.device, value.dtype), []).append(value)
    numbers = {key: iter(torch.stack(tensors).tolist()) for key, tensors in stacks.items()}
    return [
        {name: next(numbers[v.device, v.dtype]) if isinstance(v, Tensor) else float(v) for name, v in row.items()}
        for row in rows
    ]
