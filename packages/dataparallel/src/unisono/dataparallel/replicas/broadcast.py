"""broadcast and reduce_add: copy many tensors to many devices, and add them up again, in few copies.

Small tensors are copied as one flat buffer, because each copy to an accelerator has a fixed cost. Between CPUs a buffer would
only be one copy more, so there is none. Everything is made of torch's own differentiable operations, so the backward of a
buffer is a buffer, too, and derivatives of any order are right.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.dataparallel.replicas.devices import Device, copy_to_devices, resolve_device, resolve_devices, sum_on_device

BUCKET_BYTES = 10 * 2**20


def broadcast(tensors: Sequence[Tensor], devices: Sequence[Device], *, bucket_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Return copies of `tensors` on each of `devices`: one list for each device, always of new tensors.

    Tensors of one dtype and device are copied together, up to `bucket_bytes` at a time.

    Backward: the gradients of all copies are added on the tensor's own device, in buckets as well (reduce_add).

    Example:
        >>> import torch
        >>> broadcast([torch.ones(2), torch.tensor(3)], ["cpu", "cpu"])
        [[tensor([1., 1.]), tensor(3)], [tensor([1., 1.]), tensor(3)]]
    """
    targets = resolve_devices("broadcast", devices)
    _validate_tensors("broadcast", "tensors", tensors)
    _validate_bucket_bytes("broadcast", bucket_bytes)
    results: list[list[Any]] = [[None] * len(tensors) for _ in targets]
    for bucket in _make_buckets([(x.device, x.dtype, _needs_grad(x)) for x in tensors], tensors, bucket_bytes):
        parts = [tensors[place] for place in bucket]
        source = parts[0].device
        others = [target for target in targets if target != source]
        if len(bucket) == 1:
            arrived = iter([copy] for copy in copy_to_devices(parts[0], others))
        else:
            buffers = copy_to_devices(_flatten(parts), others) if others else []
            arrived = iter(_unflatten(buffer, parts) for buffer in buffers)
        for result, target in zip(results, targets, strict=True):
            copies = [x.clone() for x in parts] if target == source else next(arrived)
            for place, copy in zip(bucket, copies, strict=True):
                result[place] = copy
    return results


def reduce_add(rows: Sequence[Sequence[Tensor]], device: Device, *, bucket_bytes: int = BUCKET_BYTES) -> list[Tensor]:
    """Add `rows`, one list of tensors for each device, tensor by tensor on `device`, in the order of the rows.

    Tensors of one dtype are copied together, up to `bucket_bytes` at a time. The results are new tensors, also for one row.

    Backward: every row gets the gradient, each tensor on its own device, in buckets as well (broadcast).

    Example:
        >>> import torch
        >>> reduce_add([[torch.ones(2)], [torch.full((2,), 3.0)]], "cpu")
        [tensor([4., 4.])]
    """
    target = resolve_device("reduce_add", "device", device)
    _validate_rows(rows)
    _validate_bucket_bytes("reduce_add", bucket_bytes)
    results: list[Any] = [None] * len(rows[0])
    keys = [
        (tuple(row[k].device for row in rows), x.dtype, _needs_grad(*(row[k] for row in rows))) for k, x in enumerate(rows[0])
    ]
    for bucket in _make_buckets(keys, rows[0], bucket_bytes):
        columns = [[row[place] for row in rows] for place in bucket]
        if len(bucket) == 1 or all(x.device == target for x in columns[0]):
            totals = [sum_on_device(column, target) for column in columns]
        else:
            buffers = [_flatten(parts) for parts in zip(*columns, strict=True)]
            totals = _unflatten(sum_on_device(buffers, target), [column[0] for column in columns])
        for place, total in zip(bucket, totals, strict=True):
            results[place] = total
    return results


def _make_buckets(keys: Sequence[object], tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield the places of tensors that are copied together: of one key, dense, up to `bucket_bytes`; larger ones are alone."""
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
    # Without a graph, each gets a version counter of its own: writing to one must not count as a change of the others.
    return parts if buffer.requires_grad else [part.data for part in parts]


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _validate_tensors(function: str, argument: str, tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor) or not all(isinstance(x, Tensor) for x in tensors):
        kinds = "a Tensor" if isinstance(tensors, Tensor) else ", ".join(type(x).__name__ for x in tensors)
        raise TypeError(f"{function}: {argument}: expected a sequence of tensors, got {kinds}")


def _validate_bucket_bytes(function: str, bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"{function}: bucket_bytes={bucket_bytes} must be at least 1")


def _validate_rows(rows: Sequence[Sequence[Tensor]]) -> None:
    if not len(rows):
        raise ValueError("reduce_add: rows=[]: expected at least one row")
    for number, row in enumerate(rows):
        _validate_tensors("reduce_add", f"rows[{number}]", row)
        if len(row) != len(rows[0]):
            raise ValueError(f"reduce_add: rows[{number}] has {len(row)} tensors, but rows[0] has {len(rows[0])}")
        for place, (x, first) in enumerate(zip(row, rows[0], strict=True)):
            if x.shape != first.shape or x.dtype != first.dtype:
                raise ValueError(
                    f"reduce_add: rows[{number}][{place}] is {x.dtype} of shape {tuple(x.shape)}, "
                    f"but rows[0][{place}] is {first.dtype} of shape {tuple(first.shape)}"
                )
