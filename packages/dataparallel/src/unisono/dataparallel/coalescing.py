"""Many tensors to many devices and back, in few copies.

Small tensors travel as one flat buffer: to an accelerator a copy costs more than what a small one moves. Not between CPUs,
where a copy costs nothing but its bytes, and a buffer would be one copy more. It is all torch's own differentiable
operations, so the backward of a buffer is a buffer, too, and derivatives of any order are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.dataparallel.copying import Copies
from unisono.dataparallel.devices import Device, full_device, full_devices

BUCKET_BYTES = 10 * 2**20


def broadcast(tensors: Sequence[Tensor], devices: Sequence[Device], *, bucket_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Copies of `tensors` on each of `devices`: one list for each device, always of new tensors.

    Tensors of one dtype and device travel together, up to `bucket_bytes` at a time.

    Backward: the gradients of all copies are added, on the tensor's own device, in buckets as well (reduce_add).

    Example:
        >>> import torch
        >>> broadcast([torch.ones(2), torch.tensor(3)], ["cpu", "cpu"])
        [[tensor([1., 1.]), tensor(3)], [tensor([1., 1.]), tensor(3)]]
    """
    targets = full_devices("broadcast", devices)
    _check_tensors("broadcast", "tensors", tensors)
    _check_bytes("broadcast", bucket_bytes)
    results: list[list[Any]] = [[None] * len(tensors) for _ in targets]
    copies = Copies()
    arriving = []
    for bucket in _fill([(x.device, x.dtype, _wants_gradient(x)) for x in tensors], tensors, bucket_bytes):
        source = tensors[bucket[0]].device
        flat = None
        for result, target in zip(results, targets, strict=True):
            if len(bucket) == 1 or target == source or (source.type == target.type == "cpu"):
                for place in bucket:
                    result[place] = copies.start(tensors[place], target) if target != source else tensors[place].clone()
                continue
            flat = _flatten([tensors[place] for place in bucket]) if flat is None else flat
            arriving.append((result, bucket, copies.start(flat, target)))
    copies.join()
    for result, bucket, buffer in arriving:
        for place, part in zip(bucket, _unflatten(buffer, [tensors[place] for place in bucket]), strict=True):
            result[place] = part
    return results


def reduce_add(rows: Sequence[Sequence[Tensor]], device: Device, *, bucket_bytes: int = BUCKET_BYTES) -> list[Tensor]:
    """Add `rows`, one list of tensors for each device, tensor by tensor on `device`, in the order of the rows.

    Tensors of one dtype travel together, up to `bucket_bytes` at a time. The results are new tensors, also of one row.

    Backward: every row gets the gradient, each tensor on its own device, in buckets as well (broadcast).

    Example:
        >>> import torch
        >>> reduce_add([[torch.ones(2)], [torch.full((2,), 3.0)]], "cpu")
        [tensor([4., 4.])]
    """
    target = full_device("reduce_add", "device", device)
    _check_rows(rows)
    _check_bytes("reduce_add", bucket_bytes)
    results: list[Any] = [None] * len(rows[0])
    keys = [
        (tuple(row[k].device for row in rows), x.dtype, _wants_gradient(*(row[k] for row in rows)))
        for k, x in enumerate(rows[0])
    ]
    for bucket in _fill(keys, rows[0], bucket_bytes):
        copies = Copies()
        columns = [[row[place] for place in bucket] for row in rows]
        whole = len(bucket) > 1 and not all(_near(row[0].device, target) for row in columns)
        if whole:
            columns = [[_flatten(row)] for row in columns]
        columns = [[copies.start(x, target) for x in row] for row in columns]
        copies.join()
        totals = [_add(column) for column in zip(*columns, strict=True)]
        if whole:
            totals = _unflatten(totals[0], [rows[0][place] for place in bucket])
        for place, total in zip(bucket, totals, strict=True):
            results[place] = total
    return results


def _fill(keys: Sequence[object], tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Places of tensors that travel together: of one key, dense, and up to `bucket_bytes`; what is larger goes alone."""
    open_buckets: dict[object, tuple[list[int], int]] = {}
    for place, (key, x) in enumerate(zip(keys, tensors, strict=True)):
        size = x.numel() * x.element_size() if x.layout == torch.strided else bucket_bytes
        if size >= bucket_bytes:
            yield [place]
            continue
        places, filled = open_buckets.get(key, ([], 0))
        if filled + size > bucket_bytes:
            yield places
            places, filled = [], 0
        places.append(place)
        open_buckets[key] = places, filled + size
    yield from (places for places, _ in open_buckets.values())


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unflatten(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = [part.view(x.shape) for part, x in zip(buffer.split([x.numel() for x in like]), like, strict=True)]
    # without a graph, each with a version of its own: a change of one is none of the others
    return parts if buffer.requires_grad else [part.data for part in parts]


def _add(column: Sequence[Tensor]) -> Tensor:
    if len(column) == 1:
        return column[0].clone()
    total = column[0] + column[1]
    for x in column[2:]:
        total = total + x if torch.is_grad_enabled() else total.add_(x)
    return total


def _near(device: torch.device, target: torch.device) -> bool:
    return device == target or device.type == target.type == "cpu"


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _check_tensors(function: str, argument: str, tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor) or not all(isinstance(x, Tensor) for x in tensors):
        kinds = "a Tensor" if isinstance(tensors, Tensor) else ", ".join(type(x).__name__ for x in tensors)
        raise TypeError(f"{function}: {argument}: expected a sequence of tensors, got {kinds}")


def _check_bytes(function: str, bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"{function}: bucket_bytes={bucket_bytes} must be at least 1")


def _check_rows(rows: Sequence[Sequence[Tensor]]) -> None:
    if not len(rows):
        raise ValueError("reduce_add: rows=[]: expected at least one row")
    for number, row in enumerate(rows):
        _check_tensors("reduce_add", f"rows[{number}]", row)
        if len(row) != len(rows[0]):
            raise ValueError(f"reduce_add: rows[{number}] has {len(row)} tensors, but rows[0] has {len(rows[0])}")
        for place, (x, first) in enumerate(zip(row, rows[0], strict=True)):
            if x.shape != first.shape or x.dtype != first.dtype:
                raise ValueError(
                    f"reduce_add: rows[{number}][{place}] is {x.dtype} of shape {tuple(x.shape)}, "
                    f"but rows[0][{place}] is {first.dtype} of shape {tuple(first.shape)}"
                )
