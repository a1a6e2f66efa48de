"""Captions of pictures in a folder, as Hugging Face's ImageFolder has them: metadata.csv or metadata.jsonl beside them."""

from __future__ import annotations

import csv
import io
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
    """Rows by the names of their columns, each with the line that it begins in."""
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"read_captions: {path}, line {data.count(10, 0, error.start) + 1}: {error}") from error
    return _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader, line = csv.reader(io.StringIO(text, newline="")), 1
    try:
        header: list[str] = next(reader, [])
        if _FILE not in header or not set(_TEXTS) & set(header):
            yield 1, dict.fromkeys(header)  # which is refused, also if no row follows
        line = reader.line_num + 1
        for values in reader:
            if values:
                yield line, dict(zip(header, values, strict=False))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"read_captions: {path}, line {line}: {error}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, part in enumerate(text.split("\n"), 1):
        if part.strip():
            try:
                row = json.loads(part)
            except (json.JSONDecodeError, RecursionError) as error:
                why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ValueError(f"read_captions: {path}, line {line}: not JSON: {why}") from error
            if not isinstance(row, dict):
                raise ValueError(f"read_captions: {path}, line {line}: not an object in braces")
            yield line, row
