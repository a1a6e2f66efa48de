"""Checkpoints that are written in the background, verified before they are loaded, and never half there."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
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
from unisono_models.training.checkpoint.state_dict import Extra, LoadTargets, Optimizers, collect_state
from unisono_models.training.checkpoint.storage import ShardReader, ShardWriter, StagedPlanner
from unisono_models.training.checkpoint.tensor_index import TensorEntry, read_index
from unisono_models.training.distributed.object_collectives import (
    Json,
    RanksError,
    all_gather_object,
    broadcast_object,
    format_by_rank,
    raise_together,
)

_STATE = "state.json"
_WAY_OUT = 10.0  # seconds that a run which has failed leaves the save that is under way


class Checkpoints:
    """The checkpoints of a run: directory/step-00000120 and so on, on a file system that all hosts share.

    Each step has a directory of its own, in which a COMMIT with the size and sha256 of every file comes last: what was cut
    short by a crash does not count, and damage is found before anything is loaded. The number of ranks may change between
    save and load, and so may the way the model is spread (none, DDP, FSDP2).

    Nothing in a checkpoint is ever executed: tensors are plain bytes, all else is JSON, and no pickle is read. sha256
    finds damage, not malice: whoever can write the directory can give you other weights, but not run code.

    All ranks construct it, and call its methods in the same order. It has a process group of its own (gloo), so that the
    background work does not meet the collectives of training. `report` gets, on rank 0, a line for each checkpoint that
    could not be saved or had to be passed over (default: stderr). A save that fails does not end training.

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
        """`keep`: how many of the newest stay; the one with the best score (the highest if `best` is "max") stays besides.

        `timeout`: seconds that one rank waits for another in the background, which includes the other's writing.
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
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        else:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
        self._rank, self._size = resolve_group(self._group).rank, resolve_group(self._group).size
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, futures.Future[str]] | None = None
        self._staged: dict[str, Tensor] = {}
        self._broken: list[str] = []
        self._notes: list[str] = []  # for `report`, which is the main thread's

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
        """Copy everything to host memory and return; the rest goes on in the background.

        Waits for the previous save first, and reports if it failed. `optimizers`: one, or several by name. `state`: what
        else the run needs to go on, as JSON, the same on every rank. `extra`: further tensors and modules, such as averaged
        weights; `load` needs the same ones.
        """
        self.wait()
        tensors, values = collect_state(model, optimizers, extra or {})
        text = json.dumps({"values": values, "state": state}).encode()
        self._stage(tensors)
        self._pending = (step, self._thread.submit(self._write, step, tensors, text, None if score is None else float(score)))

    def wait(self) -> bool:
        """Until the save that is under way has ended. False if it failed, which is reported and added to `failures`, too.

        Raises: RuntimeError if another rank did not answer. That is no fault of the disk, and training cannot go on either.
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

    def load(self, model: nn.Module, optimizers: Optimizers, *, extra: Extra | None = None) -> tuple[int, Json] | None:
        """Load the newest good checkpoint; returns its step and `state`, or None if there is none.

        Reports each newer one that it passed over, and why. Changes nothing on disk.

        Raises, on all ranks: RanksError (ValueError on one rank) if the checkpoint is good but does not fit these objects,
        naming each tensor that is missing, or has another shape or dtype.
        """
        self.wait()
        chosen = self._choose()
        if chosen is None:
            return None
        step, path, index, values, state = chosen
        with raise_together(f"load {path}", group=self._group):
            targets = LoadTargets(model, optimizers, extra or {}, index, values)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            load(targets.tensors, storage_reader=ShardReader(path, index), planner=planner, process_group=self._group)
        except CheckpointException as error:  # raised on all ranks; a BaseException, which no one expects
            raise RanksError(f"load {path}: {_explain(error)}") from error
        targets.install()
        return step, state

    def close(self) -> None:
        """Wait, and give up the thread and the process group."""
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
            futures.wait([self._pending[1]] if self._pending else [], timeout=_WAY_OUT)  # the other ranks may be gone
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
        """In the background: what went wrong, or nothing, the same on every rank."""
        path, committed = manifest.step_directory(self.directory, step), False
        try:
            with raise_together("begin", group=self._group):
                if self._rank == 0:
                    manifest.begin(path)
            writer = ShardWriter(path)
            save(tensors, storage_writer=writer, planner=StagedPlanner(self._staged), process_group=self._group)
            files = {name: held for rank in all_gather_object(writer.written, group=self._group) for name, held in rank.items()}
            with raise_together("commit", group=self._group):
                if self._rank == 0:
                    files[_STATE] = write_new_file(path / _STATE, text)
                    manifest.write_manifest(path, Manifest(step, self._size, score, files))
                    committed = True  # whoever dies from now on
        except (Exception, CheckpointException) as error:
            if self._rank == 0 and not committed:
                with suppress(OSError):
                    manifest.abandon(path)
            if self._size > 1 and not isinstance(error, RanksError | CheckpointException):  # not one that all agreed on
                raise RuntimeError(
                    f"checkpoint of step {step}: rank {self._rank} has lost the others: {_explain(error)}"
                ) from error
            return _explain(error)
        if self._rank == 0:
            self._broken = [name for name in self._broken if name != path.name]  # it was written anew
            try:
                manifest.prune(self.directory, newest=path, keep=self._keep, best=self._best, broken=self._broken)
            except OSError as error:
                self._notes.append(f"old checkpoints could not be removed: {error}")
        return ""

    def _newest(self) -> str:
        """Of those that are committed, for a message: on a disk that fails, this may fail, too."""
        try:
            return next((path.name for path in manifest.list_steps(self.directory) if manifest.is_committed(path)), "none")
        except OSError as error:
            return f"unknown ({error.strerror})"

    def _choose(self) -> tuple[int, Path, dict[str, TensorEntry], Json, Json] | None:
        """The newest good one, as rank 0 lists them; its files are hashed by all ranks together."""
        names = broadcast_object(
            [path.name for path in manifest.list_steps(self.directory)] if self._rank == 0 else None, group=self._group
        )
        for name in names:
            path, index, values, state, damage = self.directory / name, {}, None, None, []
            try:
                commit = manifest.read_manifest(path)
                files = sorted(commit.files, key=lambda file: (-commit.files[file][0], file))
                damage = manifest.find_damage(path, commit.files, files[self._rank :: self._size])
                if not damage:
                    index = read_index(path, {file: size for file, (size, _) in commit.files.items()})
                    held = json.loads((path / _STATE).read_bytes())
                    values, state = held["values"], held["state"]
            except Exception as error:  # whatever a damaged file may cause
                damage = [str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"]
            found = sorted({line for rank in all_gather_object(damage, group=self._group) for line in rank})
            if not found:
                return commit.step, path, index, values, state
            self._broken.append(name)
            if self._rank == 0:
                self._report(f"checkpoint {path} passed over: {'; '.join(found)}")
        return None


def _explain(error: BaseException) -> str:
    """One line: which ranks, and what went wrong there, without the tracebacks that DCP sends along."""
    if isinstance(error, CheckpointException):
        return format_by_rank({rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()})
    return f"{type(error).__name__}: {error}"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
