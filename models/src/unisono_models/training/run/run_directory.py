"""The directory of a run: choosing it, continuing it, locking it, and finding what a finished run has left."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, TypeVar

from unisono_models.training.checkpoint.atomic_file import PART, atomic_write
from unisono_models.training.checkpoint.manifest import is_committed, is_step_directory, list_steps, read_manifest
from unisono_models.training.config import RunConfig
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json
from unisono_models.training.config.validate import option_name
from unisono_models.training.distributed.object_collectives import (
    Json,
    all_gather_object,
    broadcast_object,
    format_by_rank,
    raise_together,
)
from unisono_models.training.errors import LOG, UserError
from unisono_models.training.run.provenance import describe_start

WAIT = 10.0  # seconds: a run that was stopped may be about to end


def lock_run(path: Path) -> IO[str] | None:
    """Lock the run directory `path` until the returned file is closed or this process ends: two runs would mix their files.

    Returns None where locks are not available: on some network file systems, and on systems without POSIX.

    Raises: UserError that names the process that holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = (path / ".lock").open("a+")
    deadline = time.monotonic() + WAIT
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked workers do not inherit it
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise UserError(f"{path} is in use by {holder}: wait for it, stop it, or choose another --run.dir") from error
            time.sleep(0.2)
        except OSError:
            file.close()
            return None
    with suppress(OSError):  # the content is only for the message above
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
    return file


if TYPE_CHECKING:
    from unisono_models.training.distributed.launch import Ranks

# These fields do not change what is computed: each start of a run may have its own values. The first two are not saved in
# config.json, so that a run can be moved and repeated elsewhere.
NOT_SAVED = ("dir", "stop_after")
_BELONGS_TO_WEIGHTS = ("tokenizer.json",)  # files of a run that one which starts from its weights needs
_SKELETON = ("config.json", "provenance.json", LOG, ".lock")  # files of a start that was refused before it did anything
NOT_COMPARED = ("run.dir", "run.stop_after", "run.timeout", "data.max_broken")


class Config(Protocol):
    """A config that open_run accepts: a frozen dataclass with a section `run`."""

    @property
    def run(self) -> RunConfig: ...


@dataclass(frozen=True)
class RunDirectory:
    """A run's directory, the same on every rank.

    It has config.json, provenance.json, metrics.jsonl, tensorboard/, plots/, samples/, checkpoints/, export/ and report.html.
    summary.json is written last: a run that has it is finished. As a context manager it releases the lock at the end of
    the block, whoever still holds a reference to it.
    """

    path: Path
    resumes: bool
    """Whether an earlier start of this run is continued. It may have left no checkpoint."""
    first: bool
    """Whether this is rank 0, which writes the files."""
    lock: IO[str] | None = field(default=None, repr=False, compare=False)
    remarks: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """What `finish` adds to the metrics in summary.json, such as why the run ended early."""
    changed_steps: tuple[int, int] | None = None
    """run.steps of the earlier start and of this one, if they differ: the run is extended, or shortened."""
    hint: str = ""
    """What the user may have wanted instead, for the terminal."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def finish(self, summary: Mapping[str, float]) -> None:
        """Write summary.json: the run is finished, and will not be continued. Call it last, on every rank."""
        with raise_together("RunDirectory.finish"):
            if self.first:
                self.raise_if_vanished()
                atomic_write(self.path / "summary.json", _pretty({**summary, **self.remarks}))
            self.close()

    def check_fingerprint(self, name: str, fingerprint: str) -> None:
        """Refuse to continue the run if `fingerprint`, a hash of what its weights depend on, is not that of its first start.

        The first start records it in provenance.json under `name`, such as "tokenizer" or "data". A run that has no checkpoint
        yet begins anew, and records what it finds. All ranks call this, at any time in the session, with the same fingerprint.

        Raises: UserError on all ranks if the fingerprint has changed, or if the ranks have different ones.

        Example:
            session.directory.check_fingerprint("tokenizer", hashlib.sha256(tokenizer.to_json().encode()).hexdigest())
        """
        given = all_gather_object(fingerprint)
        if len(set(given)) > 1:
            raise UserError(f"The ranks have different versions of the {name}: {format_by_rank(dict(enumerate(given)))}")
        recorded = None
        with raise_together("check_fingerprint"):
            if self.first:
                provenance = read_provenance(self.path)
                recorded = provenance["fingerprints"].get(name) if list_steps(self.checkpoints) else None
                if recorded is None:
                    provenance["fingerprints"][name] = fingerprint
                    atomic_write(self.path / "provenance.json", _pretty(provenance))
        recorded = broadcast_object(recorded)
        if recorded not in (None, fingerprint):
            raise UserError(
                f"--run.dir {self.path}: the {name} has changed since the run began (its fingerprint was {recorded[:16]}, now "
                f"it is {fingerprint[:16]}): the trained weights would mean something else. Restore the {name}, or choose "
                "another --run.dir"
            )

    def record_start(self, **facts: Json) -> None:
        """Add `facts` about this start to provenance.json, and give the run its new number of steps if that changes.

        TrainingLoop calls it, on every rank, when it has loaded what it continues: a start that is refused before that leaves
        the run as it is, finished if it was. Extending a finished run removes summary.json; `finish` writes a new one.
        """
        with raise_together("record_start"):
            if not self.first:
                return
            if self.changed_steps is not None:
                old, new = self.changed_steps
                facts["changed_steps"] = {"from": old, "to": new}
                (self.path / "summary.json").unlink(missing_ok=True)  # first: a kill must not leave a run that looks finished
                saved = read_config(self.path)
                saved["config"]["run"]["steps"] = new
                atomic_write(self.path / "config.json", _pretty(saved))
            provenance = read_provenance(self.path)
            provenance["starts"][-1] |= facts
            atomic_write(self.path / "provenance.json", _pretty(provenance))

    def raise_if_vanished(self) -> None:
        """Raise UserError if the directory has vanished: what the run still writes would be lost. One rank calls it."""
        try:
            os.stat(self.path / "config.json")
        except FileNotFoundError:
            text = f"--run.dir {self.path}: the run's files have vanished while it ran, and it cannot be saved. Start it again"
            raise UserError(text) from None
        except OSError:  # a file system that does not answer may do so later
            pass

    def close(self) -> None:
        """Release the lock: another process may continue the run."""
        if self.lock is not None:
            self.lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(config: Config, *, model: str, recipe: str, ranks: Ranks) -> RunDirectory:
    """Open the directory of the run that `config` describes: a new one, or that of the same run if it was interrupted.

    This is config.run.dir if it is given. Otherwise it is runs/{model}-{recipe}, or the first of runs/{model}-{recipe}-2, -3, …
    that is free or has an unfinished run of the same config. The number of ranks may differ from that of the earlier start.
    Every rank calls this; rank 0 decides.

    A run in config.run.dir, finished or not, may get another number of steps, if it has not taken more already: a larger one
    extends it. Samples and random numbers are functions of (seed, step), so an extended run takes the steps of a run that had
    this number from the beginning. Only the schedules (learning rate, warm-up) of its earlier steps are those of the old
    number: with a constant learning rate the extended run is equal bit for bit.

    Raises: UserError, on all ranks, if config.run.dir has a finished run, a run of another config (it names the fields), or
    something else; or if another process uses it.

    Example:
        run = open_run(config, model="clip", recipe="emoji", ranks=ranks)
        checkpoints = Checkpoints(run.checkpoints)
    """
    hosts = all_gather_object(platform.node())
    path, resumes, changed_steps, hint = Path(), False, None, ""
    lock = None
    with raise_together("open_run"):
        if ranks.first:
            saved = {"model": model, "recipe": recipe, "config": config_to_json(config)}
            if config.run.init_from is not None:
                saved["config"]["run"]["init_from"] = str(Path(config.run.init_from).absolute())
            saved["config"]["run"] |= {name: None for name in NOT_SAVED if name in saved["config"]["run"]}
            path, resumes, lock, hint = _take(config.run.dir, saved, type(config))
            if not resumes:
                _copy_with_weights(config.run.init_from, path)
                atomic_write(path / "config.json", _pretty(saved))
            elif (old := read_config(path)["config"]["run"]["steps"]) != config.run.steps:
                changed_steps = old, config.run.steps
            for name in ("plots", "samples", "checkpoints", "export", "tensorboard"):
                if (path / name).exists() and not (path / name).is_dir():
                    raise UserError(f"--run.dir {path}: {path / name} is a file, and the run needs a folder there: remove it")
                (path / name).mkdir(exist_ok=True)
            provenance = (read_provenance(path) if resumes else {"starts": [], "fingerprints": {}}) | {"seed": config.run.seed}
            provenance["starts"].append(describe_start(world_size=ranks.world_size, hosts=hosts))
            atomic_write(path / "provenance.json", _pretty(provenance))
    path, resumes, changed_steps = broadcast_object([str(path), resumes, changed_steps])
    changed_steps = None if changed_steps is None else tuple(changed_steps)
    return RunDirectory(Path(path), resumes, ranks.first, lock, changed_steps=changed_steps, hint=hint)


def config_differences(old: Json, new: Json) -> list[str]:
    """List the dotted names of the fields in which two configs, as JSON, differ. NOT_COMPARED fields do not count.

    Example:
        >>> config_differences({"run": {"seed": 0, "dir": "a"}}, {"run": {"seed": 1, "dir": "b"}})
        ['run.seed']
    """
    return [name for name in _differences(old, new, "") if name not in NOT_COMPARED]


def read_config(path: Path) -> Json:
    """Read config.json of the run directory `path`, or the file `path`: {"model": …, "recipe": …, "config": {…}}."""
    file = path / "config.json" if path.is_dir() else path
    saved = read_json(file)
    if not isinstance(saved, dict) or set(saved) != {"model", "recipe", "config"} or not isinstance(saved["config"], dict):
        raise ValueError(f'{file} is not the config of a run: it needs "model", "recipe" and "config"')
    return saved


def read_provenance(path: Path) -> Json:
    """Read provenance.json of the run directory `path`: {"seed": …, "starts": […], "fingerprints": {…}}.

    If it cannot be read, it has no starts and no fingerprints.
    """
    try:
        found = json.loads((path / "provenance.json").read_text())
    except (OSError, ValueError):
        found = None
    found = found if isinstance(found, dict) and isinstance(found.get("starts"), list) else {"seed": None, "starts": []}
    return found | {"fingerprints": fingerprints if isinstance(fingerprints := found.get("fingerprints"), dict) else {}}


def _copy_with_weights(source: Path | None, path: Path) -> None:
    """Copy what the weights of --run.init-from mean nothing without, such as the tokenizer of a text tower."""
    for name in _BELONGS_TO_WEIGHTS if source is not None else ():
        assert source is not None
        file = (source.parent.parent if is_step_directory(source) else source) / name
        if file.is_file():
            atomic_write(path / name, file.read_bytes())


def _take(given: Path | None, saved: Json, kind: type) -> tuple[Path, bool, IO[str] | None, str]:
    """Return the directory, whether the run in it is continued, the lock, and a hint for the user."""
    while True:
        path, _ = _choose(given, saved, kind)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_run(path)
        again, hint = _choose(given, saved, kind)  # another run may have taken or finished it while we waited
        if again == path:
            return path, (path / "config.json").exists() and not _may_begin_anew(path, saved, kind), lock, hint
        if lock is not None:
            lock.close()


def _choose(given: Path | None, saved: Json, kind: type) -> tuple[Path, str]:
    """Return the directory, and a hint for the user. `kind`: the class of the config."""
    if given is not None:
        path = Path(given).absolute()
        if obstacle := _obstacle(path, saved, kind, named=True):
            raise UserError(f"--run.dir {given} {obstacle}")
        return path, ""
    number = 1
    hint = ""
    while True:
        name = f"{saved['model']}-{saved['recipe']}" + (f"-{number}" if number > 1 else "")
        path = Path("runs", name).absolute()
        if not _obstacle(path, saved, kind, named=False):
            return path, hint
        if not hint and not _obstacle(path, saved, kind, named=True):
            hint = f"runs/{name} has the same run with another number of steps: to extend it, add --run.dir runs/{name}"
        number += 1


def _obstacle(path: Path, saved: Json, kind: type, *, named: bool) -> str:
    """Return why the run `saved` can neither begin nor continue in `path`, or an empty text if it can.

    `named`: whether the user gave this path. Only then the number of steps of the run in it may change.
    """
    if not path.exists():
        return ""
    if not path.is_dir():
        return "is a file: choose another"
    if not (path / "config.json").exists():
        others = sorted(name for name in os.listdir(path) if name != ".lock" and not name.endswith(PART))
        return f"is not empty and not a run (it has {', '.join(others[:3])}): choose another" if others else ""
    try:
        old = read_config(path)
    except ValueError as error:
        return f"holds a run whose config cannot be read ({error}): choose another"
    if (old["model"], old["recipe"]) != (saved["model"], saved["recipe"]):
        return f"holds a run of {old['model']} {old['recipe']}, this is {saved['model']} {saved['recipe']}: choose another"
    finished = (path / "summary.json").exists()
    if not finished and _may_begin_anew(path, saved, kind):
        return ""
    before = _with_defaults(old["config"], kind)
    different = config_differences(before, saved["config"])
    if different == ["run.steps"] and named:
        return _obstacle_to_steps(path, before["run"]["steps"], saved["config"]["run"]["steps"], finished)
    shown = ", ".join(
        f"{option_name(name)} ({_get(before, name)} there, {_get(saved['config'], name)} here)" for name in different
    )
    if finished:
        advice = "A larger --run.steps extends it" if not different else f"It has other values of {shown}"
        return f"holds a finished run: choose another, or remove it to run again. {advice}"
    if different:
        return (
            f"holds an unfinished run of another config, with other values of {shown}. Choose another, or the same config to "
            "continue it"
        )
    return ""


def _may_begin_anew(path: Path, saved: Json, kind: type) -> bool:
    """Return whether `path` has a start with another config that left nothing, such as one that a mistake ended at once."""
    left = (entry for entry in path.iterdir() if entry.name not in _SKELETON and not entry.name.endswith(PART))
    if any(not entry.is_dir() or any(entry.iterdir()) for entry in left):
        return False
    try:
        old = read_config(path)
    except (OSError, ValueError):
        return False
    same_recipe = (old["model"], old["recipe"]) == (saved["model"], saved["recipe"])
    return same_recipe and bool(config_differences(_with_defaults(old["config"], kind), saved["config"]))


def _obstacle_to_steps(path: Path, old: int, new: int, finished: bool) -> str:
    """Return why the run in `path` cannot get `new` steps instead of `old`, or an empty text if it can."""
    done = max((read_manifest(step).step for step in list_steps(path / "checkpoints") if is_committed(step)), default=0)
    if finished and (early := _read_summary(path).get("ended_early")):
        return (
            f"holds a run that ended early {early}. More steps do not change that. To train on, start another run from its "
            f"weights: --run.init-from {path}"
        )
    if new < done or (finished and new < old):
        return f"holds a run that has taken {max(done, old if finished else 0):,} steps: --run.steps {new} is less than that"
    if finished and not done:
        return "holds a finished run without a checkpoint, which cannot be extended: choose another"
    return ""


def _read_summary(path: Path) -> Json:
    try:
        summary = json.loads((path / "summary.json").read_text())
    except (OSError, ValueError):
        summary = None
    return summary if isinstance(summary, dict) else {}


def _with_defaults(config: Json, kind: type) -> Json:
    """Give fields that a config of an older version does not have their defaults. What cannot be read stays as it is."""
    try:
        return config_to_json(config_from_json(kind, config))
    except ValueError:
        return config


def _differences(old: Json, new: Json, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        nothing = object()
        pairs = [(f"{where}{name}", old.get(name, nothing), new.get(name, nothing)) for name in names]
        return [found for name, a, b in pairs for found in (_differences(a, b, f"{name}.") if a is not b else [])]
    numbers = type(old) in (int, float) and type(new) in (int, float)
    same = old == new if numbers else repr(old) == repr(new)
    return [] if same else [where.rstrip(".")]


def _get(config: Json, name: str) -> str:
    for part in name.split("."):
        if not isinstance(config, dict) or part not in config:
            return "absent"
        config = config[part]
    return json.dumps(config)


def _pretty(value: Json) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


T = TypeVar("T")


class RunError(UserError):
    """There is no finished run, or its model cannot do what a command wants. The message says what to do."""


def find_run(path: Path, *, model: str, kind: type[T], files: Sequence[str]) -> T:
    """Return the config, of class `kind`, of the run of `model` in the directory `path`, which has exported `files`.

    Raises: RunError if there is no such run, or if it has not finished.

    Example:
        find_run(Path("runs/gan-digits"), model="gan", kind=Config, files=FILES).data.source  ->  "mnist-5k"
    """
    return config_from_json(kind, read_finished_run(path, model=model, files=files)["config"])


def read_finished_run(path: Path, *, model: str, files: Sequence[str]) -> Json:
    """Do what find_run does, but return what config.json says, as it is."""
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs(model, files)}")
    try:
        saved = read_config(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is not a run: {error}.{_list_runs(model, files)}") from None
    if saved["model"] != model:
        raise RunError(f"{path} holds a run of {saved['model']}, not of {model}.{_list_runs(model, files)}")
    if missing := [name for name in files if not (path / "export" / name).is_file()]:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or continue it: start the "
            "training again with the same options"
        )
    return saved


def _list_runs(model: str, files: Sequence[str]) -> str:
    """List the runs that the user may have meant."""
    paths = [file.parents[1] for file in sorted(Path("runs").glob(f"*/export/{files[0]}"))]
    found = [str(path) for path in paths if _is_of(model, path)]
    return f" Here are {', '.join(found[:5])}" if found else f" Train one: ./scripts/train {model}"


def _is_of(model: str, path: Path) -> bool:
    try:
        return bool(read_config(path)["model"] == model)
    except (OSError, ValueError):
        return False
