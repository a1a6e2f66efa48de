"""RunLog: every step's values into metrics.jsonl and TensorBoard, and the progress of the run on the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono_models.training.metrics_file import MetricsFile
from unisono_models.training.progress import Progress
from unisono_models.training.run_directory import RunDirectory
from unisono_models.training.talk import together

if TYPE_CHECKING:
    from unisono_models.training.ranks import Ranks

RESERVED = ("kind", "step", "samples")


class RunLog:
    """The log of a run. Every rank makes one and calls it alike; rank 0 writes and shows.

    steps: of the whole run. first_step: where this start begins; lines of that step and later ones, from an earlier start, are
    dropped, so that the file is that of a run which never stopped. log_every: steps between looks at the values.

    Metrics are lines such as {"kind": "train", "step": 0, "loss": 5.5, "samples": 512}, {"kind": "evaluation", …} and {"kind":
    "speed", …}. Only the last depend on the clock.

    A full disk does not end the run: rank 0 says so, keeps the lines, and tries again; only at the end is it an error.

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
        self._kept: list[tuple[int, float, int, dict[str, Tensor | float]]] = []
        self._file: MetricsFile | None = None
        self._board: Any = None
        self._failed = False
        with together("RunLog"):
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

    def step(self, step: int, values: Mapping[str, Tensor | float], *, samples: int) -> None:
        """Keep the `values` of `step`: numbers, or tensors of one element, which are copied now and read back later.

        The values should be those of the global batch, and `samples` its size: only rank 0's are kept.
        """
        _check("RunLog.step", values)
        values = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in values.items()}  # all ranks take part
        if self._file is None:
            return
        # a copy: what is given may be a parameter, or memory that the next step writes to
        copies = {name: v.detach().clone().view(()) if isinstance(v, Tensor) else v for name, v in values.items()}
        self._kept.append((step, time.time(), samples, copies))
        self._window = (self._window[0], self._window[1] + samples)
        self._progress.advance()
        if len(self._kept) >= self.log_every:
            self._settle()
            self._write()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the `values` of an evaluation after `step`, the last one taken. What an earlier start kept is not kept twice."""
        _check("RunLog.evaluation", values)
        if self._file is None:
            return
        self._settle()
        values = {name: float(value) for name, value in values.items()}
        if (step, frozenset(values)) not in self._evaluated:
            self._file.add("evaluation", step, values)
            self._draw("evaluation", step, values, time.time())
        self._write()
        self._window = (time.monotonic(), 0)  # the time that it took is not the training's

    def flush(self) -> None:
        """Write all that is known so far, safely. To be called before a checkpoint: the next start begins after it."""
        if self._file is not None:
            self._settle()
            self._write(to_disk=True)

    def say(self, text: str) -> None:
        """Show a line, on rank 0."""
        if self._file is not None:
            self._progress.say(text)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:  # the other ranks may be gone: nothing is agreed on
            with suppress(Exception):  # nor is the error replaced by one of its consequences
                self.flush()
            self._close()
            return
        with together("RunLog"):
            try:
                self.flush()
                if self._file is not None and self._failed:
                    self._file.flush()  # raises what is still wrong
            finally:
                self._close()

    def _settle(self) -> None:
        """Read back the values of the steps that are waiting, all at once, and add their lines."""
        assert self._file is not None
        if not self._kept:
            return
        read = _read_back([values for _, _, _, values in self._kept])
        for (step, when, samples, _), values in zip(self._kept, read, strict=True):
            self._file.add("train", step, {**values, "samples": samples})
            self._draw("train", step, values, when)
        last = self._kept[-1][0]
        self._kept.clear()
        start, count = self._window
        now = time.monotonic()
        rate = count / (now - start) if now > start else None
        if count and rate is not None:
            self._file.add("speed", last, {"samples_per_second": rate})
            self._draw("speed", last, {"samples_per_second": rate}, time.time())
        self._window = (now, 0)
        losses = {name: value for name, value in read[-1].items() if name.startswith("loss")}
        self._progress.show(losses or dict(list(read[-1].items())[:1]), rate)

    def _write(self, *, to_disk: bool = False) -> None:
        assert self._file is not None
        try:
            self._file.flush(to_disk=to_disk)
            if to_disk and self._board is not None:
                self._board.flush()
        except OSError as error:
            if not self._failed:
                self.say(f"metrics.jsonl cannot be written ({error}). The run goes on and tries again")
            self._failed = True
        else:
            self._failed = False

    def _draw(self, kind: str, step: int, values: Mapping[str, float], when: float) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step, walltime=when)
        except Exception as error:  # its own thread writes, and what it raises is not ours to know
            self.say(f"TensorBoard's events cannot be written ({error}). The run goes on without")
            self._board = None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._progress.close()
        if self._board is not None:
            self._board.close()


def _check(caller: str, values: Mapping[str, Tensor | float]) -> None:
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"{caller}: a value cannot be called {name!r}: the lines have that already")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{caller}: {name!r} has shape {tuple(value.shape)}: it must have one element")


def _read_back(rows: list[dict[str, Tensor | float]]) -> list[dict[str, float]]:
    """The values of all rows as numbers: one transfer for each device and dtype."""
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
