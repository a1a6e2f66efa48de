"""metrics.jsonl: a line of JSON for each step and evaluation, which neither a kill nor a full disk leaves broken."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unisono_models.training.disk import replace_file
from unisono_models.training.talk import Json


def read_metrics(path: Path) -> list[dict[str, Json]]:
    """The lines of the metrics file, or of the run directory, `path`. Broken ones, such as a kill leaves, are left out.

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
    """The metrics file `path`, opened to go on at `first_step`: lines of that step and later ones are dropped.

    add() keeps lines until flush() writes them. After a flush that failed, the file is as it was before, and the lines are
    tried again at the next.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < first_step] if path.exists() else []
        self.kept: Sequence[Mapping[str, Json]] = kept
        content = b"".join(_encoded(line) for line in kept)
        replace_file(path, content)
        self._file = path.open("r+b", buffering=0)
        self._size = len(content)
        self._waiting: list[bytes] = []

    def missing(self, first_step: int) -> int:
        """How many of the steps before `first_step` have no line."""
        return first_step - len({line["step"] for line in self.kept if line["kind"] == "train"})

    def add(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        self._waiting.append(_encoded({"kind": kind, "step": step, **values}))

    def flush(self, *, to_disk: bool = False) -> None:
        """Write what is waiting. to_disk: wait until it is safe from the machine's failing, too."""
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
                self._file.truncate(self._size)  # no line is left cut in the middle
            raise
        self._size += len(content)
        self._waiting.clear()

    def close(self) -> None:
        self._file.close()


def _encoded(line: Mapping[str, Json]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"  # floats as repr: read back, they are the same bits
