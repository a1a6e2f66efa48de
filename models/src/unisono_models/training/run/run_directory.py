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
from unisono_models.training.checkpoint.manifest import list_steps
from unisono_models.training.config import RunConfig
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json
from unisono_models.training.distributed.object_collectives import (
    Json,
    all_gather_object,
    broadcast_object,
    format_by_rank,
    raise_together,
)
from unisono_models.training.errors import UserError
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

    Raises: UserError, on all ranks, if config.run.dir has a finished run, a run of another config (it names the fields), or
    something else; or if another process uses it.

    Example:
        run = open_run(config, model="clip", recipe="emoji", ranks=ranks)
        checkpoints = Checkpoints(run.checkpoints)
    """
    hosts = all_gather_object(platform.node())
    path, resumes = Path(), False
    lock = None
    with raise_together("open_run"):
        if ranks.first:
            saved = {"model": model, "recipe": recipe, "config": config_to_json(config)}
            path, resumes, lock = _take(config.run.dir, saved)
            if not resumes:
                saved["config"]["run"] |= {name: None for name in NOT_SAVED if name in saved["config"]["run"]}
                atomic_write(path / "config.json", _pretty(saved))
            for name in ("plots", "samples", "checkpoints", "export"):
                (path / name).mkdir(exist_ok=True)
            provenance = read_provenance(path) | {"seed": config.run.seed}
            provenance["starts"].append(describe_start(world_size=ranks.world_size, hosts=hosts))
            atomic_write(path / "provenance.json", _pretty(provenance))
    path, resumes = broadcast_object([str(path), resumes])
    return RunDirectory(Path(path), resumes, ranks.first, lock)


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


def _take(given: Path | None, saved: Json) -> tuple[Path, bool, IO[str] | None]:
    """Return the directory, whether the run in it is continued, and the lock."""
    while True:
        path, _ = _choose(given, saved)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_run(path)
        again, resumes = _choose(given, saved)  # another run may have taken or finished it while we waited
        if again == path:
            return path, resumes, lock
        if lock is not None:
            lock.close()


def _choose(given: Path | None, saved: Json) -> tuple[Path, bool]:
    """Return the directory, and whether the run in it is continued."""
    if given is not None:
        path = Path(given).absolute()
        obstacle = _obstacle(path, saved)
        if obstacle:
            raise UserError(f"--run.dir {given} {obstacle}")
        return path, (path / "config.json").exists()
    number = 1
    while True:
        name = f"{saved['model']}-{saved['recipe']}" + (f"-{number}" if number > 1 else "")
        path = Path("runs", name).absolute()
        if not _obstacle(path, saved):
            return path, (path / "config.json").exists()
        number += 1


def _obstacle(path: Path, saved: Json) -> str:
    """Return why the run `saved` can neither begin nor continue in `path`, or an empty text if it can."""
    if not path.exists():
        return ""
    if not path.is_dir():
        return "is a file: choose another"
    if not (path / "config.json").exists():
        others = sorted(name for name in os.listdir(path) if name != ".lock" and not name.endswith(PART))
        return f"is not empty and not a run (it has {', '.join(others[:3])}): choose another" if others else ""
    if (path / "summary.json").exists():
        return "holds a finished run: choose another, or remove it to run again"
    try:
        old = read_config(path)
    except ValueError as error:
        return f"holds a run whose config cannot be read ({error}): choose another"
    if (old["model"], old["recipe"]) != (saved["model"], saved["recipe"]):
        return f"holds a run of {old['model']} {old['recipe']}, this is {saved['model']} {saved['recipe']}: choose another"
    different = config_differences(old["config"], saved["config"])
    if different:
        shown = ", ".join(
            f"{name} ({_get(old['config'], name)} there, {_get(saved['config'], name)} here)" for name in different
        )
        return (
            f"holds an unfinished run of another config, with other values of {shown}. Choose another, or the same config to "
            "continue it"
        )
    return ""


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
