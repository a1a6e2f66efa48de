"""Repeat a run from its directory and compare the numbers: python -m unisono_models.training reproduce RUN_DIR"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.errors import UserError
from unisono_models.training.run.compare import Verdict, compare_runs
from unisono_models.training.run.log import read_metrics
from unisono_models.training.run.provenance import VARIABLES
from unisono_models.training.run.run_directory import read_config, read_provenance

PACKAGE = "unisono_models"


def reproduce(
    run_dir: Path, *, nproc: int | None = None, steps: int | None = None, dir: Path | None = None, _package: str = PACKAGE
) -> Verdict:
    """Repeat the run in `run_dir`, in a new directory, and compare the metrics of both.

    The training runs in the working directory of the first start, if that still exists: paths of data may be relative to it.
    A run that was extended is repeated in the same stages, each with its own number of steps.

    Args:
        nproc: The number of ranks on this host. None takes as many as the run had.
        steps: Repeat only this many steps, with the learning rate schedule of the whole run. The new run stays unfinished.
            None repeats all steps that the run has taken.
        dir: The new directory. None makes one beside `run_dir`.

    Raises: UserError if `run_dir` has no run that can be repeated, or if `dir` is not empty; CalledProcessError if the training
    fails.
    """
    if not (run_dir / "config.json").is_file():
        raise UserError(f"{run_dir} is not a run directory: it has no config.json")
    saved = read_config(run_dir)
    starts = read_provenance(run_dir)["starts"]
    taken = _steps_taken(run_dir)
    if not taken:
        raise UserError(f"{run_dir} has taken no step: there is nothing to compare")
    if steps is not None and not 1 <= steps <= taken:
        raise UserError(f"--steps {steps}: must be at least 1 and at most {taken}, the steps that {run_dir} has taken")
    finished = steps is None and (run_dir / "summary.json").exists()
    first: Json = starts[0] if starts else {}
    out = _fresh(run_dir) if dir is None else dir.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--dir {dir} is not empty: choose another")
    module = _model_package(saved["model"], _package)
    ranks = nproc or int(first.get("world_size") or 1)
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(runner if ranks > 1 or first.get("torchrun") else []), "-m", module, "train"]
    command += ["--config", str((run_dir / "config.json").absolute()), "--run.dir", str(out)]
    limit = taken if steps is None else steps
    for options in _stages(starts, None if finished else limit):
        print(shlex.join([*command, *options]), flush=True)
        subprocess.run([*command, *options], check=True, env=_environment(first), cwd=_working_directory(first))
    verdict = compare_runs(run_dir, out, steps=None if finished else limit)
    if finished:
        return verdict
    note = f"{out} is left as it is: unfinished, after {limit:,} steps."
    return Verdict(verdict.good, "\n".join([note, verdict.text]))


def _stages(starts: Sequence[Json], limit: int | None) -> list[list[str]]:
    """List the options of the trainings that repeat a run: one, and one more for each time that its steps changed.

    `limit`: after how many steps the repetition ends. None: when the run is finished.
    """
    changes = [(start["changed_steps"]["from"], start["first_step"]) for start in starts if start.get("changed_steps")]
    stages: list[list[str]] = []
    for steps, end in changes:
        if limit is not None and limit <= end:
            return [*stages, ["--run.steps", str(steps), "--run.stop-after", str(limit)]]
        stages.append(["--run.steps", str(steps), "--run.stop-after", str(end)])
    return [*stages, [] if limit is None else ["--run.stop-after", str(limit)]]


def _working_directory(start: Json) -> str | None:
    """Return where that start was made, or None for the current directory if that is not there any more."""
    directory: str | None = start.get("directory")
    if directory is None or os.path.isdir(directory):
        return directory
    print(f"{directory}, where the run was started, does not exist here. Relative paths of data start at {os.getcwd()}")
    return None


def _model_package(model: str, package: str) -> str:
    """Find the package to run. What a file names is run only if it is one of ours."""
    if not isinstance(model, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", model):
        raise UserError(f"config.json names the model {model!r}, which is not a model of {package}")
    name = f"{package}.{model}"
    try:
        found = importlib.util.find_spec(f"{name}.train")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UserError(f"config.json names the model {model!r}, but there is no {name}.train")
    return name


def _fresh(run_dir: Path) -> Path:
    base = run_dir.absolute()
    number = 1
    while True:
        path = base.with_name(f"{base.name}-reproduced" + (f"-{number}" if number > 1 else ""))
        if not path.exists():
            return path
        number += 1


def _environment(start: Json) -> dict[str, str]:
    """Return this process's environment, with the variables that change rounding as that start had them."""
    if not start:
        return dict(os.environ)
    kept = {"OMP_NUM_THREADS": start.get("threads")} | (start.get("environment") or {})
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return others | {name: str(kept[name]) for name in VARIABLES if kept.get(name) is not None}


def _steps_taken(run_dir: Path) -> int:
    try:
        lines = read_metrics(run_dir)
    except FileNotFoundError:
        return 0
    return max((line["step"] + 1 for line in lines if line["kind"] == "train"), default=0)


@dataclass(frozen=True)
class Options:
    """Repeat a run and compare the numbers. The exit code is 0 if it was reproduced."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The directory of the run. The data has to be where it was: relative paths start where the run was started."""
    nproc: int | None = None
    """The number of ranks. None takes as many as the run had."""
    steps: int | None = None
    """Repeat and compare only this many of the first steps. The new run stays unfinished. None takes all steps."""
    dir: Path | None = None
    """An empty directory for the new run. None takes a new one beside the old one: RUN-reproduced."""


def main(args: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m unisono_models.training reproduce", args=args)
    try:
        verdict = reproduce(options.run_dir, nproc=options.nproc, steps=options.steps, dir=options.dir)
    except subprocess.CalledProcessError as error:
        raise UserError(f"the training ended with exit code {error.returncode}") from None
    print(verdict.text)
    return 0 if verdict.good else 1
