"""Compare runs: whether two runs of one config have the same numbers, and a table of the metrics of several runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import tyro

from unisono_models.training.config.serialization import read_json
from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.errors import UserError
from unisono_models.training.run.log import read_metrics
from unisono_models.training.run.run_directory import config_differences, read_config, read_provenance

Line = dict[str, Json]
# If rounding may differ (other ranks, other machine): how many of the first losses must agree, and how closely (relative).
TOLERANCES = {"float32": (10, 1e-6), "float64": (50, 1e-9), "bfloat16": (10, 1e-2)}
_FIELDS = 4  # of the config that name a column at most
SAME = ("world_size", "threads", "environment", "versions", "machine.cpu", "machine.device", "git.commit")


@dataclass(frozen=True)
class Verdict:
    """Whether a run was reproduced, and a text that explains it."""

    good: bool
    text: str


def compare_runs(old: Path, new: Path, *, steps: int | None = None) -> Verdict:
    """Compare the metrics of two runs of one config, in the first `steps` steps if given.

    If both have the same number of ranks, machine and versions, every value of every step and evaluation has to be the same
    bits. Otherwise rounding may differ: the first losses have to agree within TOLERANCES, or within `rounding` of the config.
    """
    before, after = _steady(old, steps), _steady(new, steps)
    if not any(kind == "train" for _, kind, _ in before):
        return Verdict(False, f"Nothing to compare: {old} has no steps in its metrics.jsonl")
    unlike = environment_differences(old, new)
    missing = [key for key in before if key not in after and not _beyond(key, steps)]
    different = _first_difference(before, after)
    text = [f"Compared {sum(kind == 'train' for _, kind, _ in before)} steps of {old} with {new}."]
    if unlike:
        text.append("The environments differ: " + "; ".join(unlike) + ".")
    if different is None and not missing:
        return Verdict(True, "\n".join([*text, "Reproduced: bitwise equal."]))
    if missing:
        step, kind, _ = missing[0]
        text.append(f"Not reproduced: the {kind} line of step {step} is missing in {new}, and {len(missing) - 1} more.")
        return Verdict(False, "\n".join(text))
    assert different is not None
    text.append(different)
    if not unlike:
        return Verdict(False, "\n".join([*text, "Not reproduced: bitwise equal numbers were expected." + _hint(old, new)]))
    good, words = _within_rounding(before, after, *_tolerance(old))
    return Verdict(good, "\n".join([*text, words]))


def environment_differences(old: Path, new: Path) -> list[str]:
    """List the differences between the starts of two runs that may make their numbers round differently."""
    starts = [read_provenance(path)["starts"] for path in (old, new)]
    if not all(starts):
        return ["a run has no provenance.json"]
    found = []
    for name in SAME:
        values = [[_circumstance(start, name) for start in some] for some in starts]
        if any(value != values[0][0] for some in values for value in some):
            shown = [", then ".join(dict.fromkeys(_short(value) for value in some)) for some in values]
            found.append(
                f"{name} {shown[0]} and {shown[1]}" if name != "versions" else _versions(*(some[-1] for some in values))
            )
    return found


def _steady(path: Path, steps: int | None) -> dict[tuple[int, str, str], Line]:
    """Read the lines that do not depend on the clock, by step, kind and names: a step may have several evaluations."""
    lines = [line for line in read_metrics(path) if line["kind"] != "speed" and (steps is None or line["step"] < steps)]
    order = sorted(lines, key=lambda line: (line["step"], line["kind"] != "train"))
    return {(line["step"], line["kind"], ",".join(sorted(line))): line for line in order}


def _beyond(key: tuple[int, str, str], steps: int | None) -> bool:
    """Return whether a line may be missing: a run that stops after `steps` steps need not evaluate after the last one."""
    return steps is not None and key[0] == steps - 1 and key[1] == "evaluation"


def _first_difference(before: dict[tuple[int, str, str], Line], after: dict[tuple[int, str, str], Line]) -> str | None:
    for key, line in before.items():
        other = after.get(key)
        for name, value in line.items():
            if other is not None and repr(value) != repr(other[name]):  # repr tells -0 from 0, and lets NaN equal NaN
                return f"The first difference is at step {key[0]} ({key[1]}): {name} was {value!r}, is {other[name]!r}."
    return None


def _within_rounding(
    before: dict[tuple[int, str, str], Line], after: dict[tuple[int, str, str], Line], count: int, limit: float
) -> tuple[bool, str]:
    trained = [(line, after[key]) for key, line in before.items() if key[1] == "train"]
    gaps = [
        max([relative_difference(line[name], other[name]) for name in _losses(line)], default=0.0) for line, other in trained
    ]
    early, overall = max(gaps[:count]), max(gaps)
    good = early <= limit
    return good, (
        f"The largest relative difference of the loss is {early:.1e} in the first {min(count, len(gaps))} steps "
        f"and {overall:.1e} in all {len(gaps)}.\n"
        + (f"Reproduced: within {limit:g}, which rounding explains." if good else f"Not reproduced: {limit:g} was expected.")
    )


def relative_difference(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the larger one.

    Example:
        >>> relative_difference(1.0, 1.5), relative_difference(1.0, float("nan"))
        (0.3333333333333333, inf)
    """
    if repr(a) == repr(b) or a == b:
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def _losses(line: Line) -> list[str]:
    names = [name for name, value in line.items() if isinstance(value, int | float) and name not in ("step", "samples")]
    return [name for name in names if name.startswith("loss")] or names


def _tolerance(path: Path) -> tuple[int, float]:
    config = read_config(path)["config"]
    parallel = config.get("parallel")
    precision = parallel.get("precision") if isinstance(parallel, dict) else config.get("precision")
    count, limit = TOLERANCES[precision if precision in TOLERANCES else "float32"]
    return count, config.get("rounding", limit) if precision in (None, "float32") else limit


def _hint(old: Path, new: Path) -> str:
    dirty = [path for path in (old, new) if any(_dotted(start, "git.dirty") for start in read_provenance(path)["starts"])]
    return f" The code had uncommitted changes in {' and '.join(map(str, dirty))}." if dirty else ""


def _circumstance(start: Json, name: str) -> Json:
    value = _dotted(start, name)
    if name == "environment" and isinstance(value, dict):
        return {key: item for key, item in value.items() if key != "OMP_NUM_THREADS"}  # `threads` has its effect
    return value


def _dotted(value: Json, name: str) -> Json:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _versions(old: dict[str, str], new: dict[str, str]) -> str:
    names: Sequence[str] = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {old.get(name)} and {new.get(name)}" for name in names) or "versions of restarts"


def _short(value: Json) -> str:
    return str(value)[:60]


@dataclass(frozen=True)
class Options:
    """Print the metrics of runs, of any models, as a Markdown table.

    Finished runs of one config that differ only in their seed share a column: the mean, and the distance of the furthest run
    from it. A run that repeats another one, with the same seed, is not counted. An unfinished run has a column of its own, with
    the metrics of its last evaluation. Columns are named by the fields of the config in which they differ.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories, such as runs/*. One that cannot be read is listed below the table."""
    metrics: tuple[str, ...] = ("*",)
    """The metrics to print, as patterns of their names in summary.json, such as '*recall@1'."""
    digits: int = 3
    """The number of digits after the decimal point."""


@dataclass(frozen=True)
class _Column:
    """Runs that share a column of the table, by their seeds."""

    saved: Json
    runs: dict[Json, Path]
    values: dict[Json, Mapping[str, float]]
    unfinished: str = ""

    @property
    def recipe(self) -> str:
        return f"{self.saved['model']} {self.saved['recipe']}"


def tabulate_runs(runs: Sequence[Path], metrics: Sequence[str] = ("*",), *, digits: int = 3) -> str:
    """Return the table as Markdown, and below it a line for each run that is not in it: see Options.

    Raises: UserError if none of `runs` can be read, or if no metric has one of the names.
    """
    columns: list[_Column] = []
    notes: list[str] = []
    for path in runs:
        try:
            _add_run(path, columns, notes)
        except (OSError, ValueError) as error:
            notes.append(f"{path}: cannot be read as a run: {error}")
    if not columns:
        raise UserError("there is no run to compare. " + ("; ".join(notes) or "Give the directories of runs: runs/*"))
    names = list(dict.fromkeys(name for column in columns for values in column.values.values() for name in values))
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in metrics)]
    if names and not chosen:
        raise UserError(f"--metrics {' '.join(metrics)}: no metric has such a name. There are {', '.join(names)}")
    lines = ["| metric | " + " | ".join(_titles(columns)) + " |", "|---|" + "---|" * len(columns)]
    for name in chosen:
        cells = [_cell([values.get(name) for values in column.values.values()], digits) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)])


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.training compare", args=args)
    print(tabulate_runs(options.runs, options.metrics, digits=options.digits))


def _add_run(path: Path, columns: list[_Column], notes: list[str]) -> None:
    """Add a run to the column of its config, or a new column."""
    saved = read_config(path)
    seed = _dotted(saved, "config.run.seed")
    if not (path / "summary.json").exists():
        lines = read_metrics(path) if (path / "metrics.jsonl").exists() else []
        steps = max((line["step"] + 1 for line in lines if line["kind"] == "train"), default=0)
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        last = [line for line in evaluations if line["step"] == evaluations[-1]["step"]]
        values = _numbers({name: value for line in last for name, value in line.items() if name not in ("kind", "step")})
        unfinished = f"unfinished: {steps:,} of {_dotted(saved, 'config.run.steps')} steps"
        columns.append(_Column(saved, {seed: path}, {seed: values}, unfinished))
        return
    summary = read_json(path / "summary.json")
    if early := summary.get("ended_early"):
        notes.append(f"{path}: ended early {early}")
    alike = (column for column in columns if not column.unfinished and _same_but_for_the_seed(column.saved, saved))
    column = next(alike, None)
    if column is None:
        columns.append(_Column(saved, {seed: path}, {seed: _numbers(summary)}))
    elif seed in column.runs:
        same = "the same" if column.values[seed] == _numbers(summary) else "other"
        notes.append(f"{path}: repeats {column.runs[seed]}, with {same} metrics; it is not counted again")
    else:
        column.runs[seed] = path
        column.values[seed] = _numbers(summary)


def _numbers(values: Json) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _same_but_for_the_seed(one: Json, other: Json) -> bool:
    if (one["model"], one["recipe"]) != (other["model"], other["recipe"]):
        return False
    return set(config_differences(one["config"], other["config"])) <= {"run.seed"}


def _titles(columns: Sequence[_Column]) -> list[str]:
    """Name each column by its recipe, and by the fields in which it differs from others of that recipe."""
    titles = []
    for column in columns:
        others = [other for other in columns if other is not column and other.recipe == column.recipe]
        fields = dict.fromkeys(
            name for other in others for name in config_differences(column.saved["config"], other.saved["config"])
        )
        several = len(column.runs) > 1
        shown = [
            f"{name}={_short(_dotted(column.saved['config'], name))}" for name in fields if not (several and name == "run.seed")
        ]
        parts = [column.recipe, *shown[:_FIELDS], *(["…"] if len(shown) > _FIELDS else [])]
        parts += [f"{len(column.runs)} seeds"] if several else []
        titles.append(", ".join([*parts, column.unfinished] if column.unfinished else parts))
    paths = [str(next(iter(column.runs.values()))) for column in columns]
    return [f"{title}, {path}" if titles.count(title) > 1 else title for title, path in zip(titles, paths, strict=True)]


def _cell(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(set(known)) == 1 and abs(known[0]) > 1 and float(known[0]).is_integer():  # a count; 0 and 1 may be fractions
        return f"{known[0]:,.0f}"
    mean = sum(known) / len(known)
    furthest = max(abs(value - mean) for value in known)
    return f"{mean:.{digits}f}" + (f" ± {furthest:.{digits}f}" if len(known) > 1 else "")
