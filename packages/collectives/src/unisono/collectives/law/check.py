"""check: run a training step on real ranks, and compare it with one process that has the whole batch."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from unisono.collectives.law.comparison import FLOAT32, FLOAT64, Case, Comparison, Precision
from unisono.collectives.law.diagnoses import diagnose
from unisono.collectives.law.record import Plan, RankRecord, record_steps
from unisono.collectives.law.report import CaseResult, Report
from unisono.collectives.law.splits import NAMES, count_rows, split_sizes
from unisono.collectives.testing.pool import RanksFailed, run_ranks

Splits = Sequence[str | Sequence[int]]
Progress = Callable[[int, int, str], None]


_SCRIPT = "unisono-check "  # begins the names of modules that check_file imports
_PATIENCE = 600.0  # seconds for ranks to start, and for one process


class CheckError(ValueError):
    """The step cannot be checked: it does not run in one process, or does not give the same twice."""


def check(
    build: Callable[[], Any],
    step: Callable[..., Any] | None = None,
    batch: Any = None,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    splits: Splits = NAMES,
    steps: int = 2,
    tolerance: float | None = None,
    dtype: Literal["float64", "float32"] | None = None,
    dropout: Literal["on", "off"] = "on",
    resume: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Train some steps on 1, 2, 3 and 4 real ranks, and say whether the number of ranks makes a difference, and why.

    build: returns (model, optimizer), or a model; both may be dicts or tuples of several. It runs on every rank, inside a gloo
        group, so it may wrap the model in DDP or FSDP2.
    step: `step(model, batch)` returns the loss; backward and optimizer.step follow. Or `step(model, optimizer, batch)` does
        them itself and returns the loss. Either may return (loss, {"metric": value}).
    batch: the whole batch, a tensor or a tree of tensors with the samples along dim 0; each rank gets its rows. 12 rows can
        be divided evenly by 1, 2, 3 and 4. Or a function: called on each rank, it returns that rank's batches (a DataLoader).
        Or nothing, and build returns (model, optimizer, loader), as accelerator.prepare does.
    A Hugging Face Trainer has its own step and loader: `check(build)`, where build returns the Trainer. Its
        per_device_train_batch_size is that of one process, and is divided by the number of ranks.
    splits: "even", "uneven", "empty" (the last rank has no rows), or the number of rows of each rank.
    steps: how many steps are taken, on the same batch. With a loader, all of its batches.
    tolerance: the largest relative deviation; 1e-8 in float64, 1e-3 in float32.
    dtype: float64, where rounding cannot hide anything; if the step does not run in it, float32.
    dropout: "off" sets the probabilities of the model's dropout modules to 0, since ranks draw other numbers than one process.
    resume: also save the state_dicts of model and optimizer after half of the steps, load them on another number of ranks (1 on
        1, 1 on 2, 2 on 3, …, the last on 1), go on, and compare with the run that was not interrupted.
    timeout: seconds for a case; unless given, 30 times the time of one process and at least 60. What takes longer hangs.

    Compared with one process, after the same seed: the data, losses, all gradients when the optimizer gets them, parameters
    after the last step, buffers and metrics. The model needs no annotation: hooks see what it does.

    Raises CheckError if the step does not run in one process, or gives something else the second time.

    Example (in a file of its own, since ranks import it):
        def build():
            model = DistributedDataParallel(nn.Linear(8, 1))
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model, batch):
            return (model(batch["x"]) - batch["y"]).square().mean()  # wrong on uneven ranks: use global_mean

        print(check(build, step, {"x": torch.randn(12, 8), "y": torch.randn(12, 1)}))
    """
    _validate(world_sizes, splits, steps, tolerance, dtype, dropout)
    if resume and step is None:
        raise ValueError("check: resume: a Trainer saves and loads its own checkpoints, and they are not checked")
    source = _source(build, step, batch)
    rows = None if batch is None or callable(batch) else count_rows(batch)
    plan = Plan(steps if rows is not None or step is None else sys.maxsize, dropout)
    cases = list(_cases(world_sizes, splits, rows))
    report_progress = progress or (lambda done, total, text: None)
    report_progress(0, len(cases), "one process")
    whole = None if rows is None else (rows,)
    _load(source, 1)
    started = time.monotonic()
    reference, precision, float64 = _reference(source, whole, plan, dtype, max(timeout or 0.0, _PATIENCE))
    if tolerance is not None:
        precision = precision._replace(tolerance=tolerance)
    limit = timeout or max(60.0, 30 * (time.monotonic() - started))
    report = Report("float64" if float64 else "float32", precision.tolerance, len(reference.steps))
    for number, case in enumerate(cases):
        report_progress(number, len(cases), str(case))
        _load(source, case.world_size)  # after a failure, ranks are new
        comparison = _run_case(source, case, reference, precision, plan, float64, limit)
        report.add(CaseResult(case, comparison.deviations, None if comparison.ok else diagnose(comparison)))
        report.not_compared = comparison.not_compared() if comparison.ranks else report.not_compared
        if comparison.failure is not None and any(r.state == "hung" for r in comparison.failure.reports):
            report.skipped = len(cases) - number - 1  # each of them would wait as long again
            break
    if resume and report.ok:
        _check_resume(report, source, reference, precision, plan, limit, [*world_sizes], splits, rows)
    report_progress(len(cases), len(cases), "done")
    return report


def _check_resume(
    report: Report,
    source: Pickled | Script,
    reference: RankRecord,
    precision: Precision,
    plan: Plan,
    limit: float,
    world_sizes: list[int],
    splits: Splits,
    rows: int | None,
) -> None:
    """Add the cases that save after half of the steps on one number of ranks, and go on on another."""
    half = len(reference.steps) // 2
    if not half:
        raise CheckError("check: resume needs at least two steps: one before the state is saved, and one after")
    rest = replace(reference, steps=reference.steps[half:])
    cases = {case.world_size: case for case in [*_cases(world_sizes, splits, rows)][::-1]}
    cases[1] = Case(1, "whole batch", None if rows is None else (rows,))
    sizes = sorted(cases)
    for before, after in [(1, 1), *pairwise([*sizes, 1])]:
        float64 = report.dtype == "float64"
        saving = replace(plan, steps=half, saves=True)
        state = _run(source, before, cases[before].sizes, saving, float64, limit)[0].state
        going_on = replace(plan, first=half, state=state)
        case = replace(cases[after], resumed_from=before)
        comparison = _run_case(source, case, rest, precision, going_on, float64, limit)
        report.add(CaseResult(case, comparison.deviations, None if comparison.ok else diagnose(comparison)))
        if not report.ok:
            return  # the others would say the same


def check_file(path: str | Path, **options: Any) -> Report:
    """check the `build`, `step` and `batch` of a Python file. A file may also set options: `splits = ("even",)`."""
    module = _import_file(str(Path(path).resolve()))
    missing = [name for name in ("build", "step", "batch") if not hasattr(module, name)]
    if "build" in missing:  # without the others, it returns a Trainer
        raise CheckError(f"{path} has no {' and no '.join(missing)}: it needs functions build() and step(), and a batch")
    names = ("world_sizes", "splits", "steps", "tolerance", "dropout", "resume")
    own = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return check(*_read_module(module), **(own | options))


def _run_case(
    source: Pickled | Script, case: Case, reference: RankRecord, precision: Precision, plan: Plan, float64: bool, limit: float
) -> Comparison:
    try:
        ranks = _run(source, case.world_size, case.sizes, plan, float64, limit)
    except RanksFailed as failure:
        return Comparison(case, reference, [], precision, failure)
    return Comparison(case, reference, ranks, precision)


def _reference(
    source: Pickled | Script, sizes: tuple[int, ...] | None, plan: Plan, dtype: str | None, limit: float
) -> tuple[RankRecord, Precision, bool]:
    """Return the record of one process with the whole batch, in float64 if the step runs in it."""
    for float64 in [dtype != "float32"] if dtype else [True, False]:
        try:
            first, second = (_run(source, 1, sizes, plan, float64, limit)[0] for _ in range(2))
        except RanksFailed as failure:
            if float64 and not dtype:
                continue
            raise CheckError(_first_failure(failure)) from failure
        if float64 and not dtype and not first.is_float64:
            continue
        precision = FLOAT64 if float64 else FLOAT32
        again = Comparison(Case(1, "again", sizes), first, [second], precision)
        if not first.steps:
            raise CheckError("check: the loader has no batch")
        if not again.ok:
            aspects = [name for name, value in again.deviations.items() if value > precision.tolerance]
            raise CheckError(
                "check: the step is not deterministic by itself: two runs in one process, after the same seeds, differ in "
                f"their {', '.join(aspects)}. Seed what it draws from (torch, random and numpy.random are seeded before "
                "build), and let nothing remain from one run to the next"
            )
        return first, precision, float64
    raise AssertionError("unreachable")


def _first_failure(failure: RanksFailed) -> str:
    """Return a sentence for a step that does not run in one process."""
    text = failure.reports[0].detail.rstrip().rpartition("\n")[2]
    if "check: " in text:  # our own sentence, with the name of its class
        return "check: " + text.partition("check: ")[2]
    case = Case(1, "whole batch", None)
    finding = diagnose(Comparison(case, RankRecord(0, 1), [], FLOAT64, failure))
    hint = ""
    if "initialize the default process group twice" in text:
        hint = ". The ranks are in a group already: leave init_process_group to your script, outside of build and step"
    where = f" ({finding.where})" if finding.where else ""
    return f"check: with one process and the whole batch, {finding.what}{where}{hint}"


def _run(
    source: Pickled | Script, world_size: int, sizes: tuple[int, ...] | None, plan: Plan, float64: bool, limit: float
) -> list[RankRecord]:
    return run_ranks(_record_on_rank, source, sizes, plan, float64, world_size=world_size, timeout=limit)


def _load(source: Pickled | Script, world_size: int) -> None:
    """Start the ranks and let them import what the step needs, so that this does not count as time of the step."""
    try:
        run_ranks(_load_on_rank, source, sys.path, world_size=world_size, timeout=_PATIENCE)
    except RanksFailed as failure:
        text = failure.reports[0].detail.rstrip().rpartition("\n")[2]
        raise CheckError(f"check: ranks cannot import build, step or batch: {text}") from failure


def _load_on_rank(source: Pickled | Script, path: list[str]) -> None:
    sys.path += [folder for folder in path if folder not in sys.path]
    source.load()


def _record_on_rank(source: Pickled | Script, sizes: tuple[int, ...] | None, plan: Plan, float64: bool) -> RankRecord:
    build, step, batch = source.load()
    return record_steps(build, step, batch, sizes=sizes, plan=plan, float64=float64)


@dataclass(frozen=True)
class Pickled:
    """build, step and batch, pickled: functions by their names, or by cloudpickle."""

    content: bytes

    def load(self) -> tuple[Any, Any, Any]:
        loaded: tuple[Any, Any, Any] = pickle.loads(self.content)
        return loaded


def _source(build: Any, step: Any, batch: Any) -> Pickled | Script:
    """Return how ranks get the functions: from the file of check_file, by their names, or by cloudpickle.

    Functions of a notebook, and functions inside functions, cannot be imported: cloudpickle sends their code.
    """
    for function in (build, step):
        if (name := getattr(function, "__module__", "")).startswith(_SCRIPT):
            return Script(name.removeprefix(_SCRIPT))
    main = sys.modules["__main__"]
    in_notebook = any(getattr(fn, "__module__", "") == "__main__" for fn in (build, step)) and not hasattr(main, "__file__")
    if not in_notebook:
        try:
            return Pickled(pickle.dumps((build, step, batch)))
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        raise TypeError(
            "check: ranks cannot import build, step or batch. Define the functions at the top level of a module (in a "
            "notebook: %%writefile train_step.py), or pip install cloudpickle"
        ) from None
    return Pickled(cloudpickle.dumps((build, step, batch)))


@dataclass(frozen=True)
class Script:
    """A Python file with build, step and batch. Each rank imports it once."""

    path: str

    def load(self) -> tuple[Any, Any, Any]:
        module = _import_file(self.path)
        return _read_module(module)


def _read_module(module: ModuleType) -> tuple[Any, Any, Any]:
    return module.build, getattr(module, "step", None), getattr(module, "batch", None)


@cache
def _import_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise CheckError(f"there is no file {path}: unisono-check --example {Path(path).name} writes one to start from")
    name = _SCRIPT + path  # no other module has it
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _cases(world_sizes: Iterable[int], splits: Splits, rows: int | None) -> Iterable[Case]:
    for world_size in world_sizes:
        if world_size == 1:  # the reference
            continue
        if rows is None:
            yield Case(world_size, "own loader", None)
            continue
        seen = set()
        for split in splits:
            if not isinstance(split, str) and len(split) != world_size:
                continue
            sizes = split_sizes(split, rows, world_size)
            if sum(sizes) != rows or min(sizes) < 0:
                raise ValueError(f"check: splits: {sizes} does not divide the {rows} rows of the batch")
            if sizes not in seen:
                seen.add(sizes)
                yield Case(world_size, split if isinstance(split, str) else "given", sizes)


def _validate(
    world_sizes: Sequence[int], splits: Splits, steps: int, tolerance: float | None, dtype: str | None, dropout: str
) -> None:
    for split in splits:
        if isinstance(split, str) and split not in NAMES:
            raise ValueError(f"check: splits: {split!r} must be one of {', '.join(NAMES)}, or the numbers of rows of the ranks")
    if not any(size > 1 for size in world_sizes) or any(size < 1 for size in world_sizes):
        raise ValueError(f"check: world_sizes={tuple(world_sizes)} must be positive, and one of them above 1")
    if steps < 1:
        raise ValueError(f"check: steps={steps} must be at least 1")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"check: tolerance={tolerance} must be above 0")
    if dtype not in (None, "float64", "float32"):
        raise ValueError(f'check: dtype={dtype!r} must be "float64", "float32" or None')
    if dropout not in ("on", "off"):
        raise ValueError(f'check: dropout={dropout!r} must be "on" or "off"')
