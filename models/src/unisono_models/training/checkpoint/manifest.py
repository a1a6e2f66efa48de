"""The manifest of a checkpoint: a file COMMIT that is written last and lists the other files.

    checkpoints/step-00000120/COMMIT
    {"format": 1, "step": 120, "world_size": 2, "score": 0.41, "files": {"rank-00000.bin": [8192, "9f86d0…"], …}, "sha256": "…"}

A directory without a valid COMMIT does not count: its writer died. `step-00000120.old` is a step as it was before it was saved
again. It is removed when the new one is committed. Nothing here communicates: rank 0 calls the functions that write.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unisono_models.training.checkpoint.atomic_file import atomic_write, explain_os_errors, hash_file, sync_directory

COMMIT = "COMMIT"
FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})(\.old)?")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # no folder, no "..", no hidden file


@dataclass(frozen=True)
class Manifest:
    """The content of a COMMIT. `files` has [size, sha256] of every other file, by name."""

    step: int
    world_size: int
    score: float | None
    files: Mapping[str, list[Any]]


def step_directory(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08}"


def is_step_directory(path: Path) -> bool:
    """Return whether `path` has the name of the directory of a step."""
    return _STEP.fullmatch(path.name) is not None


def list_steps(directory: Path) -> list[Path]:
    """List the directories of steps, committed or not, the newest first."""
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: (-int(pair[0][1]), pair[0][2] or ""))]


def write_manifest(path: Path, commit: Manifest) -> None:
    """Commit the checkpoint in `path`. Raises: OSError if its files are not those that `commit` lists."""
    for name, (size, _) in commit.files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise OSError(f"{path / name} is not what its rank wrote: is {path.parent} one directory, shared by all hosts?")
    with explain_os_errors(path):
        sync_directory(path)
    body = {"format": FORMAT, **asdict(commit)}
    atomic_write(path / COMMIT, json.dumps({**body, "sha256": _seal(body)}, indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """Read the COMMIT of directory `path`.

    Raises: ValueError that says why it does not count: unfinished, damaged, of another format, or unsafe.
    """
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    try:
        hash_file(path / COMMIT)  # raises if it is a link
        body = json.loads((path / COMMIT).read_bytes())
        seal = body.pop("sha256")
    except FileNotFoundError:
        raise ValueError("unfinished: it has no COMMIT") from None
    except Exception as error:  # the file may contain anything
        raise ValueError(f"COMMIT cannot be read: {type(error).__name__}: {error}") from error
    if seal != _seal(body):
        raise ValueError(f"COMMIT is damaged: sha256 {seal!r} expected, {_seal(body)!r} found")
    if body.pop("format", None) != FORMAT:
        raise ValueError(f"COMMIT is not of format {FORMAT}, the one this version reads")
    try:
        commit = Manifest(**body)
        unsafe = [name for name, (size, digest) in commit.files.items() if not _FILE.fullmatch(name) or name == COMMIT]
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"COMMIT has unexpected fields: {error}") from error
    if unsafe:
        raise ValueError(f"COMMIT names {unsafe[0]!r}, which is not a plain file name")
    named = _STEP.fullmatch(path.name)
    if named is None or commit.step != int(named[1]):
        raise ValueError(f"COMMIT is that of step {commit.step}")
    return commit


def find_damage(path: Path, files: Mapping[str, list[Any]], names: Iterable[str]) -> list[str]:
    """Compare the files `names` of directory `path` with their sizes and hashes. Return a line for each that differs."""
    damage = []
    for name in names:
        try:
            found = list(hash_file(path / name))
        except OSError as error:
            damage.append(f"{name}: {error.strerror or error}")
            continue
        for what, expected, actual in zip(("size", "sha256"), files[name], found, strict=True):
            if expected != actual:
                damage.append(f"{name}: {what} {expected} expected, {actual} found")
                break
    return damage


def begin(path: Path) -> None:
    """Make an empty directory `path`. Remove what a crash left there; move a committed checkpoint to `.old`."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if _claims(path) and (is_committed(path) or not _aside(path).exists()):
            _remove(_aside(path))
            path.rename(_aside(path))
        _remove(path)
        path.mkdir()
        sync_directory(path.parent)


def abandon(path: Path) -> None:
    """Undo `begin`, as far as the disk allows."""
    shutil.rmtree(path, ignore_errors=True)
    if _aside(path).is_dir() and not path.exists():
        _aside(path).rename(path)


def prune(directory: Path, *, newest: Path, keep: int, best: Literal["max", "min"], broken: Iterable[str] = ()) -> None:
    """Remove all checkpoints but the `keep` newest, `newest` among them, and the one with the best score.

    Also remove what crashes left. `broken`: names of directories that are committed but damaged. They do not count as kept,
    and are removed when they are older than the checkpoints that are kept.
    """
    _remove(_aside(newest))
    commits: dict[Path, Manifest] = {}
    for path in list_steps(directory):
        try:
            commits[path] = read_manifest(path)
        except ValueError:  # a directory whose COMMIT cannot be read at the moment stays
            if not path.is_symlink() and not _claims(path):
                _remove(path)
    if newest not in commits:
        return
    sound = [path for path in commits if path.name not in broken or path == newest]
    kept = {newest, *sound[:keep], *_by_score({path: commits[path] for path in sound}, best)[:1]}
    oldest = min(commits[path].step for path in kept)
    for path, commit in commits.items():
        if path not in kept and (path in sound or commit.step < oldest):
            _remove(path)


def list_best(directory: Path, *, best: Literal["max", "min"]) -> list[Path]:
    """List the committed checkpoints that have a score, the best one first, and the newer of two equal ones."""
    return _by_score({path: read_manifest(path) for path in list_steps(directory) if is_committed(path)}, best)


def _by_score(commits: Mapping[Path, Manifest], best: Literal["max", "min"]) -> list[Path]:
    """Sort the checkpoints that have a score, the best one first. Equal ones keep their order."""
    scores = {path: score for path, commit in commits.items() if (score := commit.score) is not None and not math.isnan(score)}
    return sorted(scores, key=lambda path: -scores[path] if best == "max" else scores[path])


def is_committed(path: Path) -> bool:
    try:
        read_manifest(path)
    except ValueError:
        return False
    return True


def _claims(path: Path) -> bool:
    """Return whether there is a COMMIT, valid or not. A directory that has one is not removed as a leftover."""
    return os.path.lexists(path / COMMIT)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _remove(path: Path) -> None:
    """Remove COMMIT first: so a kill in between leaves an unfinished directory, not a damaged one that is committed."""
    if path.is_symlink():
        path.unlink()  # the link only, not what it points to
    elif path.is_dir():
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path)


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
