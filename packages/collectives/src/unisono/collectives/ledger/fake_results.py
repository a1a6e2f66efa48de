"""Results for ops whose value or shape depends on data, which fake tensors do not have.

A value becomes 1 or True, and a shape the largest possible one: all elements are nonzero, unique and selected.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)

from unisono.collectives.ledger.cost_rules import tensors_in
from unisono.collectives.ledger.host_syncs import INDEXED

aten = torch.ops.aten


def run_on_fake_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_data: bool) -> Any:
    """Return `func(*args, **kwargs)`, or a plausible result if it would need the data.

    `keep_data` computes with real tensors on the CPU where the data is known: a schedule by `torch.linspace(...).tolist()` is
    then that of a real run. It is for simulations of another device.
    """
    if keep_data and _has_data(func, args, kwargs):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    if func._overloadpacket in INDEXED and any(_is_mask(index) for index in args[1] if index is not None):
        args = (args[0], _without_masks(args[0], args[1]), *args[2:])
    if func._overloadpacket in _WITHOUT_FAKE:
        return _WITHOUT_FAKE[func._overloadpacket](*args)
    if func._overloadpacket not in _RESULTS:
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)  # a constant on the CPU has its data
    except (DataDependentOutputException, DynamicOutputShapeException):
        return _RESULTS[func._overloadpacket](*args, **kwargs)


def plausible_number(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return True
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


def plausible_list(x: Tensor) -> Any:
    """What `x.tolist()` returns if all elements are plausible numbers."""

    def nested(shape: tuple[int, ...]) -> Any:
        return [nested(shape[1:]) for _ in range(shape[0])] if shape else plausible_number(x.dtype)

    return nested(tuple(x.shape))


def _has_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.device(kwargs.get("device") or "cpu").type != "cpu" or func.namespace != "aten":
        return False
    tensors = tensors_in(args, kwargs)
    if tensors:
        return all(not isinstance(x, FakeTensor) and x.device.type == "cpu" for x in tensors)
    packet = func._overloadpacket
    if packet not in _CONSTANTS:
        return False
    shape = args[0] if isinstance(args[0], (list, tuple)) else ()
    return math.prod(shape) <= _SMALL


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _without_masks(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace each boolean index by the integer indices of all its elements."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and _is_mask(index):
            found += [index.new_empty((index.numel(),), dtype=torch.int64, device=x.device) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


def _int64(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.int64)


def _unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> tuple[Tensor, ...]:
    inverse = _int64(x, *x.shape) if return_inverse else _int64(x, 0)
    return x.new_empty(x.numel()), inverse, _int64(x, x.numel() if return_counts else 0)


def _unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, ...]:
    count = x.numel() if dim is None else x.shape[dim]
    inverse = _int64(x, *(x.shape if dim is None else [count])) if return_inverse else _int64(x, 0)
    return x.new_empty(x.numel() if dim is None else x.shape), inverse, _int64(x, count if return_counts else 0)


def _unique_dim(
    x: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, ...]:
    return torch.empty_like(x), _int64(x, x.shape[dim]), _int64(x, x.shape[dim])


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return x.new_empty(max(minlength, 1), dtype=torch.int64 if weights is None else weights.dtype)


_SMALL = 1 << 16  # elements; larger constants stay fake, so that a large model can be built without its memory
_CONSTANTS = {aten.linspace, aten.logspace, aten.arange, aten.zeros, aten.ones, aten.full, aten.eye, aten.scalar_tensor}
_RESULTS: dict[Any, Any] = {
    aten._local_scalar_dense: lambda x: plausible_number(x.dtype),
    aten.is_nonzero: lambda x: True,
    aten.equal: lambda *_: True,
    aten.allclose: lambda *_, **__: True,
    aten.nonzero: lambda x: _int64(x, x.numel(), x.ndim),
    aten.masked_select: lambda x, mask: x.new_empty(torch.broadcast_shapes(x.shape, mask.shape)).view(-1),
    aten._unique2: _unique,
    aten.unique_dim: _unique_dim,
    aten.unique_consecutive: _unique_consecutive,
    aten.bincount: _bincount,
    aten.repeat_interleave: lambda repeats, **_: _int64(repeats, repeats.numel()),
}


def _by_channel(x: Tensor, count: int) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(count))


# Ops of SyncBatchNorm for which torch has no fake kernel.
_WITHOUT_FAKE: dict[Any, Any] = {
    aten.batch_norm_stats: lambda x, *_: _by_channel(x, 2),
    aten.batch_norm_update_stats: lambda x, *_: _by_channel(x, 2),
    aten.batch_norm_gather_stats_with_counts: lambda x, *_: _by_channel(x, 2),
    aten.batch_norm_elemt: lambda x, *_: torch.empty_like(x),
    aten.batch_norm_backward_reduce: lambda grad, *_: _by_channel(grad, 4),
    aten.batch_norm_backward_elemt: lambda grad, *_: torch.empty_like(grad),
}
