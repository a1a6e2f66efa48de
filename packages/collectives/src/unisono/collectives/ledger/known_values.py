"""known_values: integers keep their values in a simulation, so that sizes that depend on them are right.

A fake tensor has no data. The ledger then takes the largest possible result of an op whose shape depends on data, such as
`unique`. A look-up in embedding tables is made of such ops: which ids are equal decides how many rows travel. So the integers
of a simulation, and small tensors on its CPU, have real copies on the CPU, on which each op runs once more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from unisono.collectives.ledger.fake_device import _apply_by_swapping
from unisono.collectives.ledger.ledger import Ledger
from unisono.collectives.ledger.patching import patched

aten, c10d = torch.ops.aten, torch.ops.c10d
_SMALL = 4096  # elements up to which a tensor of floats on the CPU has a copy
_LARGE = 1 << 26  # elements up to which a tensor of integers has one
_READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
_SELECTS = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount}
_DATA_DEPENDENT = _READS | _SELECTS | {aten.repeat_interleave}
_UNINITIALIZED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


@contextmanager
def known_values(ledger: Ledger) -> Iterator[None]:
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
        patched(FakeTensor, "tolist", tolist),
        patched(torch.nn.Module, "_apply", _apply_by_swapping),
        patched(ledger, "keeps_data", False),
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
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") != "aten":
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
                    for x in tree_leaves(value):
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
        return x.numel() <= _SMALL and x.device.type == "cpu"
    return x.numel() <= _LARGE
