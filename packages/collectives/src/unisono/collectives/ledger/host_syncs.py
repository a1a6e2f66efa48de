"""Host syncs: calls that make the CPU wait for the device, and the lines that cause them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.checks import user_frame
from unisono.collectives.ledger.cost_rules import tensors_in

aten = torch.ops.aten

_LEDGER = __name__.rpartition(".")[0]
_SKIPPED = ("torch", "contextlib", "functools", "unittest")


@dataclass(frozen=True)
class HostSync:
    """One wait of the CPU for the device.

    `line` is the innermost line outside of torch, `user_line` the innermost line outside of torch and of unisono.
    """

    op: str
    line: str
    user_line: str
    phase: str

    def __str__(self) -> str:
        by = "" if self.line == self.user_line else f", called by {self.user_line}"
        return f"{self.op} at {self.line}{by}"


class HostSyncError(RuntimeError):
    """The CPU would wait for the device here. Raised under `host_syncs="raise"`."""


def innermost_line() -> str:
    """Return the innermost line that is neither torch's nor the ledger's: 'train.py:12 in main'."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _SKIPPED and not module.startswith(_LEDGER):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def new_host_sync(op: str, phase: str) -> HostSync:
    return HostSync(op, innermost_line(), user_frame(), phase)


def sync_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> str:
    """Return what makes the CPU wait for the device if `func(*args, **kwargs)` is called; "" if nothing does."""
    packet = func._overloadpacket
    if packet in _WAITS:
        return _WAITS[packet] if _on(device_type, args) and kwargs.get("output_size") is None else ""
    if packet in _COPIES:
        return _waiting_copy(packet, args, kwargs, device_type)
    if packet in INDEXED and args[0].device.type == device_type:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "boolean index"
        if any(index.device.type == "cpu" for index in indices):
            return "index on the CPU, copied to the device"
    return ""


def _on(device_type: str, args: tuple[Any, ...]) -> bool:
    return any(x.device.type == device_type for x in tensors_in(args))


def _waiting_copy(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> str:
    if packet is aten._to_copy:
        source, target = args[0], kwargs.get("device") or args[0].device
        non_blocking = kwargs.get("non_blocking", False)
    else:
        source, target = args[1], args[0].device
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not isinstance(source, Tensor):
            return ""
    from_type, to_type = source.device.type, torch.device(target).type
    if from_type == to_type or device_type not in (from_type, to_type) or source.numel() == 0:
        return ""
    if to_type == device_type:
        if non_blocking and _is_pinned(source):
            return ""
        return "copy from pageable memory to the device"
    return "" if non_blocking else "copy to the CPU"


def _is_pinned(source: Tensor) -> bool:
    return getattr(source, "_unisono_pinned", False) or (type(source) is Tensor and source.is_pinned())


_WAITS = {
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten._unique: "unique",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique_consecutive",
    aten.equal: "equal",
    aten.allclose: "allclose",
    aten.is_nonzero: "bool",
    aten.bincount: "bincount",
    aten.repeat_interleave: "repeat_interleave without output_size",
}
_COPIES = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put}
