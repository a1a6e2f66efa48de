"""Checkpoints: written in the background, verified before they are loaded, complete or absent."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from unisono.collectives.groups import resolve_group
from unisono_models.training.checkpoint import manifest
from unisono_models.training.checkpoint.atomic_file import write_new_file
from unisono_models.training.checkpoint.manifest import Manifest
from unisono_models.training.checkpoint.state_dict import Extra, LoadTargets, Optimizers, collect_state, validate_values
from unisono_models.training.checkpoint.storage import (
    ShardReader,
    ShardWriter,
    StagedPlanner,
    TensorEntry,
    find_nan,
    has_nan,
    read_index,
)
from unisono_models.training.distributed.object_collectives import (
    Json,
    RanksError,
    all_gather_object,
    broadcast_object,
    format_by_rank,
    raise_together,
)
from unisono_models.training.errors import UserError

_STATE = "state.json"
_EXIT_SECONDS = 10.0  # that a run which has failed waits for a save in progress


@dataclass(frozen=True)
class _Chosen:
    """A checkpoint that is not damaged, before its tensors are read."""

    path: Path
    commit: Manifest
    index: dict[str, TensorEntry]
    values: Json
    state: Json


class Checkpoints:
    """The checkpoints of a run: directory/step-00000120 and so on, on a file system that all hosts share.

    Each step has its own directory. A file COMMIT, with the size and sha256 of every other file, is written last. So a
    directory that a crash left incomplete does not count, and damage is found before anything is loaded. The number of ranks
    may change between save and load, and so may the way the model is distributed (not at all, DDP, FSDP2).

    Nothing in a checkpoint is ever executed: tensors are plain bytes, all else is JSON, and no pickle is read. sha256 finds
    damage, not malice: someone who can write the directory can change weights, but cannot run code.

    All ranks construct it and call its methods in the same order. It has its own process group (gloo), so that the work in the
    background does not interfere with the collectives of training. A save that fails does not end training.

    Example:
        with Checkpoints(run.checkpoints, keep=2) as checkpoints:
            step, state = checkpoints.load(model, optimizer) or (0, {"best": None})
            ...
            checkpoints.save(step, model, optimizer, {"best": 0.4}, score=recall)
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        best: Literal["max", "min"] = "max",
        report: Callable[[str], None] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Args:
        directory: Where the checkpoints are.
        keep: The number of newest checkpoints that are kept. The one with the best score is kept in addition.
        best: Whether the best score is the highest or the lowest.
        report: Called on rank 0 with a line for each checkpoint that could not be saved or was skipped by `load`. None
            prints it to stderr.
        timeout: The seconds that a rank waits for another one in the background, which includes the time to write.
        """
        if keep < 1 or best not in ("max", "min"):
            raise ValueError(f"Checkpoints: keep={keep}, best={best!r}: keep at least 1, and best is 'max' or 'min'")
        self.directory = directory
        self.failures: list[str] = []
        """Why saves failed, the same on every rank."""
        self._keep, self._best = keep, best
        self._report = report or _print
        self._group: Any = None  # a ProcessGroup
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc="unisono: checkpoints")
        else:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
        group = resolve_group(self._group)
        self._rank, self._size = group.rank, group.size
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, futures.Future[str]] | None = None
        self._staged: dict[str, Tensor] = {}
        self._broken: list[str] = []
        self._notes: list[str] = []  # for `report`, which only the main thread calls

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers,
        state: Json,
        *,
        score: float | None = None,
        extra: Extra | None = None,
    ) -> None:
        """Copy everything to host memory and return. A thread writes it to disk.

        Waits for the previous save first, and reports if it failed.

        Args:
            step: The number of steps taken so far.
            optimizers: One, or several by name.
            state: What else the run needs to continue, as JSON, the same on every rank.
            score: Decides which checkpoint is the best.
            extra: Further tensors and modules, such as averaged weights. `load` needs the same ones.
        """
        self.wait()
        tensors, values = collect_state(model, optimizers, extra or {})
        text = json.dumps({"values": values, "state": state}).encode()
        self._stage(tensors)
        self._pending = (step, self._thread.submit(self._write, step, tensors, text, None if score is None else float(score)))

    def wait(self) -> bool:
        """Wait for the save in progress. Return False if it failed, after reporting it and adding it to `failures`.

        Raises: RuntimeError if another rank did not answer. Then training cannot continue either.
        """
        if self._pending is None:
            return True
        (step, result), self._pending = self._pending, None
        if failure := result.result():
            self.failures.append(f"step {step}: {failure}")
            if self._rank == 0:
                self._report(f"CHECKPOINT NOT SAVED, step {step}: {failure}; the newest checkpoint: {self._newest()}")
        while self._notes:
            self._report(self._notes.pop(0))
        return not failure

    def load(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        extra: Extra | None = None,
        state_type: type = object,
        which: Literal["newest", "best"] = "newest",
    ) -> tuple[int, Json] | None:
        """Load the newest checkpoint that is not damaged. Return its step and `state`, or None if there is none.

        `which`: "best" loads the one with the best score instead.

        Reports each newer one that it skipped, and why. Changes nothing on disk. A tensor that has a NaN counts as damage, and
        so does a `state` that is not a `state_type`.

        Raises: UserError on all ranks if the checkpoint does not fit these objects. It names each tensor that is missing, or
        that has another shape or dtype.
        """
        self.wait()
        chosen = self._choose(self.directory, state_type, which=which)
        if chosen is None:
            return None
        with raise_together("load", group=self._group), _name_source(str(chosen.path)):
            targets = LoadTargets(model, optimizers, extra or {}, chosen.index, chosen.values)
        self._fill(targets, chosen)
        return chosen.commit.step, chosen.state

    def load_weights(self, source: Path, model: nn.Module, *, extra: Extra | None = None) -> Json:
        """Load the weights of `model` and `extra` from another run: not its optimizers, step and state.

        Returns a record of where they come from: {"checkpoint": path, "step": …, "sha256": that of its COMMIT}.

        Args:
            source: A run directory, whose newest checkpoint is taken that is not damaged, or the directory of a checkpoint.

        Raises: UserError on all ranks if there is no such checkpoint, or if it does not fit: it names the first tensors.
        """
        self.wait()
        is_step = manifest.is_step_directory(source)
        chosen = self._choose(source.parent if is_step else source / "checkpoints", object, only=source.name if is_step else "")
        if chosen is None:
            what = "no checkpoint that can be loaded" if is_step else "not the directory of a run that has a checkpoint"
            raise UserError(f"--run.init-from {source}: it is {what}")
        with raise_together("load_weights", group=self._group), _name_source(f"--run.init-from {source}"):
            targets = LoadTargets(model, {}, extra or {}, chosen.index, chosen.values, weights_only=True)
        self._fill(targets, chosen)
        seal = hashlib.sha256((chosen.path / manifest.COMMIT).read_bytes()).hexdigest()
        return {"checkpoint": str(chosen.path.absolute()), "step": chosen.commit.step, "sha256": seal}

    def _fill(self, targets: LoadTargets, chosen: _Chosen) -> None:
        """Read the tensors and put everything into the model and the optimizers."""
        path, index = chosen.path, chosen.index
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            load(targets.tensors, storage_reader=ShardReader(path, index), planner=planner, process_group=self._group)
        except CheckpointException as error:  # raised on all ranks; it is a BaseException, which callers do not expect
            raise RanksError(f"load {path}: {_explain(error)}") from error
        targets.install()

    def close(self) -> None:
        """Wait for the save in progress, then end the thread and the process group."""
        self.wait()
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            futures.wait([self._pending[1]] if self._pending else [], timeout=_EXIT_SECONDS)  # the other ranks may be gone
            self._thread.shutdown(wait=False)

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of each tensor into buffers that are kept from save to save."""
        for name, tensor in tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            held = self._staged.get(name)
            if held is None or held.shape != local.shape or held.dtype != local.dtype:
                self._staged[name] = held = torch.empty(
                    local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda and local.numel() > 0
                )
            held.copy_(local, non_blocking=local.is_cuda)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _write(self, step: int, tensors: dict[str, Tensor], text: bytes, score: float | None) -> str:
        """Write a checkpoint, in the background. Return the error, or an empty text: the same on every rank."""
        path = manifest.step_directory(self.directory, step)
        committed = False
        try:
            with raise_together("begin", group=self._group):
                if names := [name for name in tensors if has_nan(self._staged[name])]:
                    raise ValueError(_describe_nan(names))
                if self._rank == 0:
                    manifest.begin(path)
            writer = ShardWriter(path)
            save(tensors, storage_writer=writer, planner=StagedPlanner(self._staged), process_group=self._group)
            files = {name: held for rank in all_gather_object(writer.written, group=self._group) for name, held in rank.items()}
            with raise_together("commit", group=self._group):
                if self._rank == 0:
                    files[_STATE] = write_new_file(path / _STATE, text)
                    manifest.write_manifest(path, Manifest(step, self._size, score, files))
                    committed = True  # from now on it counts, even if a rank dies
        except (Exception, CheckpointException) as error:
            if self._rank == 0 and not committed:
                with suppress(OSError):
                    manifest.abandon(path)
            if self._size > 1 and not isinstance(error, RanksError | CheckpointException):  # all ranks raise these
                raise RuntimeError(
                    f"checkpoint of step {step}: rank {self._rank} lost the other ranks: {_explain(error)}"
                ) from error
            return _explain(error)
        if self._rank == 0:
            self._broken = [name for name in self._broken if name != path.name]  # it was written again
            try:
                manifest.prune(self.directory, newest=path, keep=self._keep, best=self._best, broken=self._broken)
            except OSError as error:
                self._notes.append(f"old checkpoints could not be removed: {error}")
        return ""

    def _newest(self) -> str:
        """Name the newest committed checkpoint, for a message. On a disk that fails, this may fail, too."""
        try:
            return next((path.name for path in manifest.list_steps(self.directory) if manifest.is_committed(path)), "none")
        except OSError as error:
            return f"unknown ({error.strerror})"

    def _choose(
        self, directory: Path, state_type: type, *, which: Literal["newest", "best"] = "newest", only: str = ""
    ) -> _Chosen | None:
        """Find the first checkpoint in `directory` that is not damaged. Rank 0 lists them, all ranks together hash the files.

        `only`: consider this one alone.
        """
        listed = [only] if only else []
        if self._rank == 0 and not only:
            newest = which == "newest"
            paths = manifest.list_steps(directory) if newest else manifest.list_best(directory, best=self._best)
            listed = [path.name for path in paths]
        for name in broadcast_object(listed, group=self._group):
            path = directory / name
            index = {}
            values = state = None
            damage = []
            try:
                commit = manifest.read_manifest(path)
                files = sorted(commit.files, key=lambda file: (-commit.files[file][0], file))
                mine = files[self._rank :: self._size]
                damage = manifest.find_damage(path, commit.files, mine)
                if not damage:
                    index = read_index(path, {file: size for file, (size, _) in commit.files.items()})
                    values, state = _read_state(path / _STATE, state_type)
                    names = find_nan(path, index, mine)
                    damage = [_describe_nan(names)] if names else []
            except Exception as error:  # a damaged file may cause any
                damage = [str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"]
            found = sorted({line for rank in all_gather_object(damage, group=self._group) for line in rank})
            if not found:
                return _Chosen(path, commit, index, values, state)
            if directory == self.directory:
                self._broken.append(name)
            if self._rank == 0:
                self._report(f"checkpoint {path} skipped: {'; '.join(found)}")
        return None


@contextmanager
def _name_source(source: str) -> Iterator[None]:
    """Put the name of the checkpoint, or the option that gave it, before the text of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _read_state(path: Path, state_type: type) -> tuple[Json, Json]:
    """Read what collect_state returned beside the tensors, and the `state` of `save`. Raises: ValueError if it is neither."""
    held = json.loads(path.read_bytes())
    try:
        if not isinstance(held, dict) or "state" not in held or not isinstance(held["state"], state_type):
            raise ValueError("its state is missing or of the wrong type")
        validate_values(held.get("values"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return held["values"], held["state"]


def _describe_nan(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"NaN in {names[0]}{more}: the training had diverged"


def _explain(error: BaseException) -> str:
    """Describe an error in one line that names the ranks, without the tracebacks that DCP adds."""
    if isinstance(error, CheckpointException):
        return format_by_rank({rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()})
    return f"{type(error).__name__}: {error}"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
