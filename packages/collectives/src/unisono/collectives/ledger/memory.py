"""Which bytes are alive on the device: in total, at the peak, by what they are for."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unisono.collectives.ledger.cost_rules import tensors_in


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage on the device. `born` and `died` count allocations and frees, so that the peak can be looked at later."""

    size: int
    phase: str
    born: int
    died: int | None = None
    part: str = ""  # "parameters", "gathered parameters", "gradients", "optimizer"; otherwise "activations"


class LiveMemory:
    """Follows the storages of all tensors on the device that an op reads or writes, from the first op to the last reference.

    The sizes are those of the tensors. A caching allocator reserves some percent more.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._clock = self._peak_clock = 0
        self._live: dict[int, Allocation] = {}
        self._history: list[Allocation] = []
        self._parameters: dict[int, weakref.ref[Tensor]] = {}

    def see(self, tensors: Iterable[Tensor], phase: str) -> None:
        for tensor in tensors:
            for plain in _plain_tensors(tensor):
                known = self._find(plain.untyped_storage(), phase)
                if not known.part and isinstance(tensor, Parameter):
                    known.part = "parameters"
                    self._parameters[id(tensor)] = weakref.ref(tensor)

    def note(self, tensors: Any, part: str) -> None:
        """Say what these tensors are for."""
        for tensor in tensors_in(tensors):
            for plain in _plain_tensors(tensor):
                if (known := self._live.get(plain.untyped_storage()._cdata)) is not None:
                    known.part = part

    def note_gradients(self) -> None:
        """Find the gradients of the parameters that were seen. Called before something may free them."""
        for reference in self._parameters.values():
            if (parameter := reference()) is not None and parameter.grad is not None:
                self.note(parameter.grad, "gradients")

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """See `storage.resize_`, which is no op. FSDP2 frees and allocates the parameters that it gathers in this way."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._live:
                self._resize(storage._cdata, size).part = "gathered parameters"
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    def reset_peak(self) -> None:
        self.peak, self._peak_clock = self.now, self._clock
        self._history = list(self._live.values())

    def parts_at_peak(self) -> dict[str, int]:
        at = self._peak_clock
        return _by_part(a for a in self._history if a.born <= at and (a.died is None or a.died > at))

    def parts_now(self) -> dict[str, int]:
        return _by_part(self._live.values())

    def _find(self, storage: torch.UntypedStorage, phase: str) -> Allocation:
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None:
            weakref.finalize(storage, self._free, key).atexit = False
            return self._allocate(key, size, phase)
        return known if known.size == size else self._resize(key, size)

    def _allocate(self, key: int, size: int, phase: str, part: str = "") -> Allocation:
        self._clock += 1
        allocation = self._live[key] = Allocation(size, phase, self._clock, part=part)
        self._history.append(allocation)
        self.now += size
        if self.now > self.peak:
            self.peak, self._peak_clock = self.now, self._clock
        return allocation

    def _resize(self, key: int, size: int) -> Allocation:
        old = self._live[key]
        self._free(key)
        return self._allocate(key, size, old.phase, old.part)

    def _free(self, key: int) -> None:
        allocation = self._live.pop(key, None)
        if allocation is not None:
            self._clock += 1
            allocation.died = self._clock
            self.now -= allocation.size


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensor itself, or those that a subclass is made of: a DTensor holds its own part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [plain for x in inner if isinstance(x, Tensor) for plain in _plain_tensors(x)]


def _by_part(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes by part. Activations and temporary tensors are split by the phase that made them."""
    parts: dict[str, int] = {}
    for allocation in allocations:
        if allocation.size:
            part = allocation.part or f"activations ({allocation.phase})"
            parts[part] = parts.get(part, 0) + allocation.size
    return dict(sorted(parts.items(), key=lambda item: -item[1]))
