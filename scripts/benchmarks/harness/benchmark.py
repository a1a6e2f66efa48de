"""What a benchmark provides to the harness: options, measurements, tables and targets."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Results


class Column(NamedTuple):
    """A column of a table. A value of None is shown as "-"."""

    head: str
    value: Callable[[Measurement], Any]
    form: str = "{}"
    key: str | None = None  # under which the JSON file keeps the value, unrounded
    plot: str = ""  # the title of its panel in the plot, if it has one
    in_terminal: bool = True

    def cell(self, measurement: Measurement) -> str:
        value = self.value(measurement)
        return "-" if value is None else self.form.format(value)


class Section(NamedTuple):
    """A heading, a table and the texts around it. `label` names a row in the plot."""

    heading: str
    columns: Sequence[Column]
    rows: Sequence[Measurement]
    before: str = ""
    after: str = ""
    label: Callable[[Measurement], str] = lambda m: m.contender


class Target(NamedTuple):
    """A limit, and the worst value that was measured."""

    text: str
    measured: float
    met: bool
    worst_case: str
    form: str = "{:.3f}x"

    @classmethod
    def at_most(cls, limit: float, text: str, measured: float, worst_case: str, form: str = "{:.3f}x") -> Target:
        return cls(f"{text}: ≤ {limit}x", measured, measured <= limit, worst_case, form)

    @classmethod
    def at_least(cls, limit: float, text: str, measured: float, worst_case: str, form: str = "{:.3f}x") -> Target:
        return cls(f"{text}: ≥ {limit}x", measured, measured >= limit, worst_case, form)


@dataclass(frozen=True)
class Benchmark(ABC):
    """The options of a benchmark are the fields of its class, and --help shows its docstring.

    The text of its report is a Markdown file beside it with the same name, in which {names} stand for `values`.
    """

    quick: bool = False
    """Run a small and short version, to see that it works. Writes nothing unless --out is given."""
    out: Path | None = None
    """Folder for the JSON, Markdown and PNG files. Files of the same day are replaced. [default: scripts/benchmarks/results]"""

    title: ClassVar[str]
    plot_title: ClassVar[str]
    peers: ClassVar[tuple[str, ...]] = ()  # Python packages whose versions the report names
    needs_torchrec: ClassVar[bool] = False
    needs_linux: ClassVar[bool] = True  # memory and traffic are read from /proc

    def validate(self) -> None:  # noqa: B027  (most options need no check)
        """Raise SystemExit for options that make no sense."""

    @abstractmethod
    def run(self, ranks: Ranks) -> Sequence[Measurement]: ...

    def skipped(self) -> Sequence[str]:
        """Say what these options leave out, and why."""
        return ()

    def is_ours(self, contender: str) -> bool:
        return contender.startswith("unisono")

    def values(self, results: Results) -> dict[str, Any]:
        """Return what the {names} in the text of the report stand for."""
        return {}

    @abstractmethod
    def sections(self, results: Results) -> Sequence[Section]: ...

    @abstractmethod
    def targets(self, results: Results) -> Sequence[Target]: ...

    def text(self, results: Results) -> str:
        template = Path(inspect.getfile(type(self))).with_suffix(".md").read_text()
        return template.format_map(self.values(results))

    def options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("quick", "out")}

    def derived(self, results: Results) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the values of all columns that have a key, by case and contender."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for section in self.sections(results):
            for m in section.rows:
                values = {column.key: column.value(m) for column in section.columns if column.key}
                found.setdefault((m.case, m.contender), {}).update(values)
        return found


def require_at_least(least: int, **options: Any) -> None:
    """Raise SystemExit if an option, or an entry of it, is below `least`."""
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        if any(each is not None and each < least for each in values):
            raise SystemExit(f"--{name.replace('_', '-')} {value}: must be {least} or more")


def choose_contenders(contenders: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the contenders whose names contain one of the parts in `only`, or all of them."""
    names = [name for name in contenders if not only or any(part in name for part in only)]
    if not names:
        raise SystemExit(f"--only {' '.join(only)}: no contender has this in its name: {'; '.join(contenders)}")
    return names
