"""The index of a checkpoint's tensors: JSON that says which bytes of which file are which block of which tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

INDEX = "tensors.json"


class TensorBlock(NamedTuple):
    """A block of a tensor: where it is on disk, and which block it is."""

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
    """The JSON text of an index."""
    table = {
        name: {"dtype": str(entry.dtype).removeprefix("torch."), "shape": entry.shape, "parts": entry.parts}
        for name, entry in entries.items()
    }
    return json.dumps(table).encode()


def read_index(directory: Path, sizes: Mapping[str, int]) -> dict[str, TensorEntry]:
    """The index in `directory`, checked: every block lies within one of the files of `sizes` (bytes, by name).

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
        raise ValueError(f"{value['dtype']!r} is no dtype")
    shape = _whole(value["shape"])
    parts = []
    for file, begin, offsets, extent in value["parts"]:  # type: ignore[attr-defined]  # what it is not, the caller reports
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
