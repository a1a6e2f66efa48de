"""RecBole's atomic files: a table as tab-separated text, under a header of names with types."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono_models.datasets.skip_report import SkippedSample

TYPES = ("token", "token_seq", "float", "float_seq")


@dataclass(frozen=True)
class Column:
    """A column of text. `type`: as the header says."""

    type: str
    values: list[str]


@dataclass(frozen=True)
class Table:
    """The columns of a file by name, and the rows that were left out."""

    path: Path
    columns: dict[str, Column]
    lines: list[int]
    """Of each row, for messages: the header is line 1."""
    names: tuple[str, ...]
    """Of all columns of the file, read or not."""
    skipped: list[SkippedSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """The values of a column. Raises: ValueError with the columns that there are."""
        if name not in self.columns:
            raise ValueError(f"{self.path} has no column {name!r}; it has {', '.join(self.names)}")
        return self.columns[name].values

    def without(self, bad: Collection[int], reason: str, errors: list[str]) -> Table:
        """Without some rows, which are noted as skipped, with an error each."""
        if not bad:
            return self
        gone = dict(zip(bad, errors, strict=True))
        kept = [row for row in range(len(self)) if row not in gone]
        skips = [SkippedSample(self.lines[row], self.path.name, reason, error) for row, error in gone.items()]
        columns = {name: Column(x.type, [x.values[row] for row in kept]) for name, x in self.columns.items()}
        return replace(self, columns=columns, lines=[self.lines[row] for row in kept], skipped=self.skipped + skips)


def read_atomic(path: Path, columns: Collection[str] | None = None) -> Table:
    """Read an atomic file (.inter, .user, .item): `columns` of it, or all. Lines of another number of fields are skipped.

    A file without types in its header is read, too: all its columns are tokens then.

    Raises: ValueError that names the file if its header is none.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        names = _read_header(path, next(lines, ""))
        wanted = [place for place, name in enumerate(names) if columns is None or name in columns]
        fields: list[list[str]] = [[] for _ in wanted]
        numbers, skipped = [], []
        for number, line in enumerate(lines, 2):
            parts = line.rstrip("\r\n").split("\t")
            if len(parts) != len(names):
                if parts != [""]:  # an empty line is no row
                    error = f"{len(parts)} fields instead of {len(names)}"
                    skipped.append(SkippedSample(number, path.name, "another number of fields", error))
                continue
            for values, place in zip(fields, wanted, strict=True):
                values.append(parts[place])
            numbers.append(number)
    kinds = list(names.items())
    found = {kinds[place][0]: Column(kinds[place][1], values) for place, values in zip(wanted, fields, strict=True)}
    return Table(path, found, numbers, tuple(names), skipped)


def _read_header(path: Path, line: str) -> dict[str, str]:
    """The type of each column by name, in order."""
    parts = [part.partition(":") for part in line.lstrip("\ufeff").rstrip("\r\n").split("\t")]
    names = {name.strip(): kind.strip() or "token" for name, _, kind in parts}
    wrong = [f"{name}:{kind}" for name, kind in names.items() if not name or kind not in TYPES]
    if wrong or len(names) < len(parts):
        raise ValueError(
            f"{path}: line 1 is no header of an atomic file ({line.strip()[:80]!r}): it needs NAME:TYPE, different "
            f"names with tabs between, with a TYPE of {', '.join(TYPES)}"
        )
    return names
