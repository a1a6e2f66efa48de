"""Figures of several runs side by side: python -m unisono_models.training.table RUN_DIR … [--figures PATTERN …]

Runs of one recipe that differ in their seed are one line, with the mean and the distance of the furthest from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import tyro

from unisono_models.training.run_directory import config_differences, read_config


@dataclass(frozen=True)
class Options:
    """Print the figures of finished runs as a table in Markdown."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories."""
    figures: tuple[str, ...] = ("*",)
    """Which figures, as patterns of their names in summary.json, such as '*recall@1'."""
    digits: int = 3
    """Behind the point."""


def make_table(runs: Sequence[Path], figures: Sequence[str] = ("*",), *, digits: int = 3) -> str:
    """The table. Raises: ValueError that names a run which is not finished."""
    groups: list[tuple[dict[str, object], list[dict[str, float]]]] = []
    for path in runs:
        if not (path / "summary.json").exists():
            raise ValueError(f"table: {path}: not a finished run: there is no summary.json")
        config, summary = read_config(path), json.loads((path / "summary.json").read_text())
        alike = (group for other, group in groups if _same_but_for_the_seed(other, config))
        group = next(alike, None)
        if group is None:
            groups.append((config, [summary]))
        else:
            group.append(summary)
    names = [name for name in groups[0][1][0] if any(fnmatch(name, pattern) for pattern in figures)] if groups else []
    lines = ["| figure | " + " | ".join(_title(config, len(group)) for config, group in groups) + " |"]
    lines.append("|---|" + "---|" * len(groups))
    for name in names:
        cells = [_cell([summary.get(name) for summary in group], digits) for _, group in groups]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.training.table", args=args)
    try:
        print(make_table(options.runs, options.figures, digits=options.digits))
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _same_but_for_the_seed(one: dict[str, object], other: dict[str, object]) -> bool:
    return one["recipe"] == other["recipe"] and config_differences(one["config"], other["config"]) in ([], ["run.seed"])


def _title(config: dict[str, object], seeds: int) -> str:
    return f"{config['model']} {config['recipe']}" + (f", {seeds} seeds" if seeds > 1 else "")


def _cell(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = sum(known) / len(known)
    furthest = max(abs(value - mean) for value in known)
    return f"{mean:.{digits}f}" + (f" ± {furthest:.{digits}f}" if len(known) > 1 else "")


if __name__ == "__main__":
    main()
