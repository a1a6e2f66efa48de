"""Captions of pictures in a folder, as Hugging Face's ImageFolder has them: metadata.csv or metadata.jsonl beside them."""

from __future__ import annotations

import csv
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_FILE, _TEXTS = "file_name", ("text", "caption")


def read_captions(root: Path, folders: Sequence[str] = ("",)) -> dict[str, str] | None:
    """The caption of each picture by its path below `root`, with forward slashes. None: there is no metadata file.

    folders: where below `root` to look, "" for itself. Names in a file are relative to the file's own folder. A picture that is
    named twice keeps its first caption; one with an empty caption has none.

    Raises: ValueError that names the file and line if one cannot be read, or has no column file_name or text.

    Example:
        metadata.jsonl with {"file_name": "cats/1.png", "text": "a sleepy cat"}  ->  {"cats/1.png": "a sleepy cat"}
    """
    found: dict[str, str] = {}
    files = [path for name in folders for path in (root / name / "metadata.csv", root / name / "metadata.jsonl")]
    there = [path for path in files if path.is_file()]
    for path in there:
        for line, row in _rows(path):
            column = next((name for name in _TEXTS if row.get(name) is not None), None)
            if column is None or not isinstance(row.get(_FILE), str):
                names = ", ".join(str(name) for name in row)[:200]
                raise ValueError(
                    f"read_captions: {path}, line {line}: columns file_name and text are needed; there are {names}"
                )
            name = posixpath.normpath(posixpath.join(path.parent.relative_to(root).as_posix(), row[_FILE].strip()))
            if text := " ".join(str(row[column]).split()):
                found.setdefault(name, text)
    return found if there else None


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                rows = csv.DictReader(file)
                yield from ((rows.line_num, row) for row in rows)
                return
            for line, text in enumerate(file, 1):
                if text.strip():
                    row = json.loads(text)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {line}: not an object in braces")
                    yield line, row
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise ValueError(f"read_captions: {path}: {error}") from error
