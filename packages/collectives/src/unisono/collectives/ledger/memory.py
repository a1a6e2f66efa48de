"""Which bytes are alive on the device: in total, at the peak, by what they are for."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
    part: str = ""  # "parameters", "gradients", "optimizer"; otherwise "activations"


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
            if is_traceable_wrapper_subclass(tensor):  # such as a DTensor: its own part is seen by itself
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._live.get(key)
            if known is not None:
                if known.size != storage.nbytes():
                    self._resize(known, storage.nbytes())
            else:
                self._clock += 1
                allocation = Allocation(storage.nbytes(), phase, self._clock)
                self._live[key] = allocation
                self._history.append(allocation)
                weakref.finalize(storage, self._free, key).atexit = False
                self._grow(allocation.size)
                known = allocation
            if not known.part and isinstance(tensor, Parameter):
                self._note_parameter(tensor, known)

    def note(self, tensors: Any, part: str) -> None:
        """Say what these tensors are for."""
        for tensor in tensors_in(tensors):
            if (known := self._live.get(tensor.untyped_storage()._cdata)) is not None:
                known.part = part

    def note_gradients(self) -> None:
        """Find the gradients of the parameters that were seen. Called before something may free them."""
        for reference in self._parameters.values():
            if (parameter := reference()) is not None and parameter.grad is not None:
                self.note(parameter.grad, "gradients")

    def reset_peak(self) -> None:
        self.peak, self._peak_clock = self.now, self._clock
        self._history = list(self._live.values())

    def parts_at_peak(self) -> dict[str, int]:
        at = self._peak_clock
        return _by_part(a for a in self._history if a.born <= at and (a.died is None or a.died > at))

    def parts_now(self) -> dict[str, int]:
        return _by_part(self._live.values())

    def _note_parameter(self, tensor: Tensor, allocation: Allocation) -> None:
        allocation.part = "parameters"
        self._parameters[id(tensor)] = weakref.ref(tensor)

    def _grow(self, size: int) -> None:
        self.now += size
        if self.now > self.peak:
            self.peak, self._peak_clock = self.now, self._clock

    def _resize(self, allocation: Allocation, size: int) -> None:
        self._clock += 1
        change, allocation.size = size - allocation.size, size
        self._grow(change)

    def _free(self, key: int) -> None:
        allocation = self._live.pop(key, None)
        if allocation is not None:
            self._clock += 1
            allocation.died = self._clock
            self.now -= allocation.size


def _by_part(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes by part. Activations and temporary tensors are split by the phase that made them."""
    parts: dict[str, int] = {}
    for allocation in allocations:
        part = allocation.part or f"activations ({allocation.phase})"
        parts[part] = parts.get(part, 0) + allocation.size
    return dict(sorted(parts.items(), key=lambda item: -item[1]))
