"""The values of fake tensors, which have no data: guesses where an op needs a value, and integers that are followed.

A value that is not known is 1 or True, and a shape that depends on data is the largest possible one: all elements are nonzero,
unique and selected. That is too much for a look-up in embedding tables: which ids are equal decides how many rows travel. So
`known_values` gives the integers of a simulation, and small tensors on its CPU, real copies on the CPU, on which each op runs
once more.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from unisono.collectives.ledger.cost_rules import registered_cost, tensors_in
from unisono.collectives.ledger.host_syncs import INDEXED

if TYPE_CHECKING:
    from unisono.collectives.ledger.ledger import Ledger

aten, c10d = torch.ops.aten, torch.ops.c10d


def run_on_fake_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_data: bool) -> Any:
    """Return `func(*args, **kwargs)`, or a plausible result if it would need the data.

    `keep_data` computes with real tensors on the CPU where the data is known: a schedule by `torch.linspace(...).tolist()` is
    then that of a real run. It is for simulations of another device.
    """
    if (device := kwargs.get("device")) is not None and device.type == "cuda":  # a rank has one device, the current one
        kwargs = {**kwargs, "device": torch.device("cuda", torch.cuda.current_device())}
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


@contextmanager
def known_values(ledger: "Ledger") -> Iterator[None]:
    """Follow the values of integers and of small tensors. Enter it inside `simulate_rank`, which yields the `ledger`.

    The other ranks of the simulation count as copies of this one: what is gathered from them are its own values.

    Example:
        >>> import torch
        >>> from unisono.collectives import simulate_rank
        >>> with simulate_rank(2, device="cpu") as ledger, known_values(ledger):
        ...     torch.tensor([3, 1, 3]).unique().shape
        torch.Size([2])
    """
    mode = _KnownValues()
    simulated_tolist = FakeTensor.tolist

    def tolist(x: FakeTensor) -> Any:
        guess = simulated_tolist(x)  # counts the wait of the host
        return mode.tolist(x, guess)

    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(ledger, "keeps_data", False),
        mode,
    ):
        yield


class _KnownValues(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the ledger's mode

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakIdKeyDictionary()

    def tolist(self, x: Tensor, guess: Any) -> Any:
        with _disable_current_modes():
            return self._values[x].tolist() if x in self._values else guess

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # as in the ledger's mode
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") != "aten" and registered_cost(func) is None:
            if func is c10d._allgather_base_.default:
                self._gather_copies(*args[:2])
            return func(*args, **kwargs)
        if func.overloadpacket is aten.index:
            args = (args[0], [self._as_positions(index) for index in args[1]], *args[2:])
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = all(self._knows(x) for x in tensors)
        result = func(*args, **kwargs)  # counts the op
        if func.overloadpacket in _DATA_DEPENDENT:
            if not known:
                return result
            real = self._compute(func, args, kwargs)
            if not isinstance(real, Tensor | tuple):
                return real
            device = tensors[0].device
            result = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), real)
            self._remember(result, real)
        elif known and _is_worth_it(result, tensors):
            self._remember(result, self._compute(func, args, kwargs))
        elif not known:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for x in tensors_in(value):
                        self._values.pop(x, None)  # changed by what is not known
        return result

    def _gather_copies(self, output: Tensor, given: Tensor) -> None:
        """The fake group moves nothing. The other ranks count as copies of this one."""
        if output in self._values and given in self._values:
            with _disable_current_modes():
                own = self._values[given].flatten()
                self._values[output].view(-1, max(own.numel(), 1)).copy_(own)

    def _knows(self, x: Tensor) -> bool:
        return type(x) is Tensor or x in self._values  # a constant of Python is a real tensor

    def _as_positions(self, index: Tensor | None) -> Tensor | None:
        """A boolean index of one dimension whose values are known, as positions."""
        if index is None or index.dtype != torch.bool or index.ndim != 1 or index not in self._values:
            return index
        return index.nonzero()[:, 0]

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def real(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self._values.get(x, x)
            if isinstance(x, torch.device):
                return torch.device("cpu")
            return None if isinstance(x, torch.Generator) else x

        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map(real, (args, kwargs))
            kwargs.pop("pin_memory", None)
            out = func(*args, **kwargs)
            if func.overloadpacket in _UNINITIALIZED:
                out.zero_()
            return out

    def _remember(self, result: Any, real: Any) -> None:
        for fake, value in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(fake, Tensor) and isinstance(value, Tensor):
                self._values[fake] = value


def _is_worth_it(result: Any, given: list[Tensor]) -> bool:
    """Whether a copy of the result is small, or that of the inputs if the op changes them in place and returns nothing."""
    found = [x for x in tree_leaves(result) if isinstance(x, Tensor)] or given
    return bool(found) and all(_may_have_copy(x) for x in found)


def _may_have_copy(x: Tensor) -> bool:
    if x.is_floating_point() or x.is_complex():
        return x.numel() <= _SMALL_FLOATS and x.device.type == "cpu"
    return x.numel() <= _MANY_INTEGERS


_SMALL_FLOATS = 4096  # elements up to which a tensor of floats on the CPU has a copy
_MANY_INTEGERS = 1 << 26  # elements up to which a tensor of integers has one
_READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
_SELECTS = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount}
_DATA_DEPENDENT = _READS | _SELECTS | {aten.repeat_interleave}
_UNINITIALIZED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
