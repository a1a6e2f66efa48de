"""Tensors on disk for torch.distributed.checkpoint: plain bytes and a JSON index, so that reading them executes nothing.

Each rank writes one file, `rank-00003.bin`, with its tensors one after another, each at a multiple of 64 bytes. Rank 0 writes
`tensors.json`: for every tensor its dtype, its shape and its blocks, as [file, first byte, offsets in the tensor, sizes].
"""

import dataclasses
import errno
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from unisono_models.training.checkpoint.atomic_file import check_free_space, explain_os_errors, write_new_file

INDEX = "tensors.json"


class TensorBlock(NamedTuple):
    """A block of a tensor: where it is on disk, and which part of the tensor it is."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[TensorBlock, ...]


def encode_index(entries: Mapping[str, TensorEntry]) -> bytes:
    """Encode an index as JSON."""
    table = {
        name: {"dtype": str(entry.dtype).removeprefix("torch."), "shape": entry.shape, "parts": entry.parts}
        for name, entry in entries.items()
    }
    return json.dumps(table).encode()


def read_index(directory: Path, sizes: Mapping[str, int]) -> dict[str, TensorEntry]:
    """Read the index in `directory`, and check that every block lies within one of the files of `sizes` (bytes, by name).

    Raises: ValueError that names the tensor and what is wrong with it.
    """
    table = json.loads((directory / INDEX).read_bytes())
    if not isinstance(table, dict):
        raise ValueError(f"{INDEX}: expected an object, got {type(table).__name__}")
    index = {}
    for name, value in table.items():
        try:
            index[name] = _read_entry(value, sizes)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{INDEX}: {name!r}: {type(error).__name__}: {error}") from error
    return index


def _read_entry(value: Mapping[str, object], sizes: Mapping[str, int]) -> TensorEntry:
    dtype = getattr(torch, str(value["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['dtype']!r} is not a dtype")
    shape = _whole(value["shape"])
    parts = []
    for file, begin, offsets, extent in value["parts"]:  # type: ignore[attr-defined]  # the caller reports errors
        part = TensorBlock(file, _whole([begin])[0], _whole(offsets), _whole(extent))
        end = part.begin + math.prod(part.sizes) * dtype.itemsize
        if file not in sizes or end > sizes[file]:
            raise ValueError(f"bytes {part.begin} to {end} of {file!r}, which has {sizes.get(file, 0)}")
        if not len(shape) == len(part.offsets) == len(part.sizes) or any(
            offset + size > length for offset, size, length in zip(part.offsets, part.sizes, shape, strict=True)
        ):
            raise ValueError(f"block {part.offsets} of {part.sizes} does not lie in {shape}")
        parts.append(part)
    covered = sum(math.prod(part.sizes) for part in parts)
    if covered != math.prod(shape):
        raise ValueError(f"blocks hold {covered} of {math.prod(shape)} elements")
    return TensorEntry(dtype, shape, tuple(parts))


def _whole(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"expected whole numbers, got {values!r}")
    return tuple(values)


_ALIGNMENT = 64
_PIECE = 1 << 24  # bytes written and hashed at a time


class StagedPlanner(DefaultSavePlanner):
    """Plans with the shapes of the live tensors, but writes their staged copies. So no DTensor is made of the copies."""

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._staged[write_item.index.fqn]


class ShardWriter(StorageWriter):
    """Writes into an existing `directory`. `written` has [size, sha256] of each file that this rank wrote, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.written: dict[str, list[Any]] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the free space, on rank 0: each block belongs to one rank now, so the number of bytes is known."""
        check_free_space(self._directory, sum(_size_of(item) + _ALIGNMENT for plan in plans for item in plan.items))
        return [dataclasses.replace(plan, storage_data=f"rank-{rank:05}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        path = self._directory / plan.storage_data
        with explain_os_errors(path), open(path, "xb") as file:
            digest = hashlib.sha256()
            end = 0
            for item in plan.items:
                data = _bytes_of(planner.resolve_data(item))
                padding = bytes(-end % _ALIGNMENT)
                begin = end + len(padding)
                pieces: list[bytes | memoryview] = [padding, *(data[i : i + _PIECE] for i in range(0, len(data), _PIECE))]
                for piece in pieces:
                    file.write(piece)
                    digest.update(piece)
                end = begin + len(data)
                results.append(WriteResult(item.index, len(data), (path.name, begin)))
            file.flush()
            os.fsync(file.fileno())
        self.written[path.name] = [end, digest.hexdigest()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        index = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)  # `collect_state` gives tensors only
            parts = []
            for chunk in stored.chunks:
                file, begin = places[MetadataIndex(name, chunk.offsets)]
                parts.append(TensorBlock(file, begin, tuple(chunk.offsets), tuple(chunk.sizes)))
            index[name] = TensorEntry(stored.properties.dtype, tuple(stored.size), tuple(parts))
        self.written[INDEX] = write_new_file(self._directory / INDEX, encode_index(index))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(StorageReader):
    """Reads the tensors of `index` from `directory`: only the rows of each block that this rank needs."""

    def __init__(self, directory: Path, index: Mapping[str, TensorEntry]) -> None:
        self._directory = directory
        self._index = index
        self._places = {MetadataIndex(name, part.offsets): part for name, entry in index.items() for part in entry.parts}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in entry.parts],
            )
            for name, entry in self._index.items()
        }
        return Metadata(dict(tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part = self._places[item.storage_index]
            dtype = self._index[item.storage_index.fqn].dtype
            first, rows = (item.storage_offsets[0], item.lengths[0]) if part.sizes else (0, 1)
            block = _read_rows(self._directory / part.file, part, dtype, first, rows)
            for dim in range(1, len(part.sizes)):
                block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target = planner.resolve_tensor(item).detach()
            target.copy_(block)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def find_nan(directory: Path, index: Mapping[str, TensorEntry], files: Collection[str]) -> list[str]:
    """List the tensors of `index` that have a NaN in one of `files`. Infinities are not looked for: a mask may have them."""
    found = []
    for name, entry in index.items():
        parts = [part for part in entry.parts if part.file in files]
        if any(has_nan(rows) for part in parts for rows in _iterate_rows(directory, part, entry.dtype)):
            found.append(name)
    return found


def has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1 and bool(tensor.isnan().any())  # not of 8 bits


def _iterate_rows(directory: Path, part: TensorBlock, dtype: torch.dtype) -> Iterator[Tensor]:
    """Read a block of a floating dtype, some rows at a time. Other dtypes have nothing to find."""
    if not dtype.is_floating_point:
        return
    rows = part.sizes[0] if part.sizes else 1
    step = max(1, _PIECE // max(1, math.prod(part.sizes[1:]) * dtype.itemsize))
    for first in range(0, rows, step):
        yield _read_rows(directory / part.file, part, dtype, first, min(step, rows - first))


def _read_rows(path: Path, part: TensorBlock, dtype: torch.dtype, first: int, rows: int) -> Tensor:
    """Read rows [first, first + rows) of a block. Not by mmap, where an error of the disk would be a SIGBUS."""
    row = math.prod(part.sizes[1:]) * dtype.itemsize
    data = torch.empty(rows * row, dtype=torch.uint8, device="cpu")
    with explain_os_errors(path), open(path, "rb") as file:
        file.seek(part.begin + first * row)
        if file.readinto(_bytes_of(data)) != len(data):
            raise OSError(errno.EIO, f"the file ends within {part}: it changed while it was read")
    return data.view(dtype).view(rows, *part.sizes[1:]) if part.sizes else data.view(dtype).view(())


def _bytes_of(tensor: Any) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _size_of(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
