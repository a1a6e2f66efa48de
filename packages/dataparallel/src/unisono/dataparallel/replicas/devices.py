"""Devices, and copies of tensors between them: on separate streams, from and to pinned memory, if the device has streams.

A copy is started and joined later; what the joining thread then runs on its current streams comes after the copy. In between,
the host and the devices do other work. All copies are torch's own differentiable ones, so gradients of any order travel back
the same way; autograd itself orders the streams of a backward pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

Device: TypeAlias = str | int | torch.device


def resolve_device(function: str, argument: str, device: Device) -> torch.device:
    """Return `device` as tensors name theirs: "cuda" becomes the current CUDA device, "cpu:0" becomes "cpu"."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{function}: {argument}={device!r} is not a device: {error}") from error
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    if found.index is not None:
        return found
    return torch.device(found.type, torch.accelerator.current_device_index() if is_accelerator(found) else 0)


def is_accelerator(device: torch.device) -> bool:
    """Return whether this process has such an accelerator. It has none for fake tensors of a missing device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def resolve_devices(function: str, devices: Sequence[Device]) -> list[torch.device]:
    """Return at least one device; the same one may occur several times."""
    if isinstance(devices, (str, int, torch.device)) or not len(devices):
        raise ValueError(
            f"{function}: devices={devices!r} must be a sequence of at least one device, for example ['cuda:0', 'cuda:1']"
        )
    return [resolve_device(function, "devices", device) for device in devices]


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` and its device current, also in several threads at a time. `with stream:` stores the previous stream in
    the stream itself, which threads would overwrite."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


_CPU = torch.device("cpu")
_streams: dict[torch.device, torch.Stream | None] = {}  # None for a device without streams
_lock = Lock()


class Copies:
    """Copies that have been started.

    Usage: `copies = Copies()`; `y = copies.start(x, device)` for each; `copies.join()` before anything reads one of them.
    """

    def __init__(self) -> None:
        self._arriving: list[tuple[Tensor, torch.Stream]] = []  # copies on an accelerator, and the stream that fills them
        self._leaving: dict[torch.Stream, None] = {}  # streams that fill memory of the host, in order

    def start(self, x: Tensor, device: torch.device) -> Tensor:
        """Return `x` on `device`: itself if it is there, otherwise a copy that is complete after join()."""
        source = x.device
        if source == device:
            return x
        if x.layout != torch.strided:  # can be neither pinned nor recorded on a stream
            return x.to(device)
        if source == _CPU and (stream := copy_stream(device)) is not None:
            staged = _pinned(x)
            with on_stream(stream):
                y = staged.to(device, non_blocking=True)
            self._arriving.append((y, stream))
            return y
        if device == _CPU and (stream := copy_stream(source)) is not None:
            stream.wait_stream(torch.accelerator.current_stream(source))  # which computes x
            if x.is_leaf and x.requires_grad:
                x = x.view_as(x)  # so that its gradient is accumulated on the current stream, not on that of the copy
            with on_stream(stream):
                y = x.to(device, non_blocking=True)  # into pinned memory
            x.record_stream(stream)  # so that its memory is not reused before the copy
            self._leaving[stream] = None
            return y
        # Between two accelerators, torch orders the copy among the work of both current streams.
        return x.to(device, non_blocking=device != _CPU)

    def join(self) -> None:
        """Make the current streams of this thread wait for the copies; copies to the host are complete on return."""
        for stream in dict.fromkeys(stream for _, stream in self._arriving):
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        for y, stream in self._arriving:
            y.record_stream(torch.accelerator.current_stream(stream.device))
        for stream in self._leaving:
            stream.synchronize()
        self._arriving = []
        self._leaving = {}


def copy_tensors(pairs: Iterable[tuple[Tensor, torch.device]]) -> list[Tensor]:
    """Copy each tensor to the device that comes with it. All copies are started before the first is waited for."""
    copies = Copies()
    arrived = [copies.start(x, device) for x, device in pairs]
    copies.join()
    return arrived


def copy_to_devices(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Return `x` on each of `devices`: itself on its own device, otherwise a copy.

    Backward: the sum of the gradients in the order of `devices`. Autograd alone would add them in the order of arrival, and
    the last digits would change from run to run.
    """
    recording = x.requires_grad and torch.is_grad_enabled()
    if len(devices) < 2 or not recording or torch._C._are_functorch_transforms_active():
        return copy_tensors((x, device) for device in devices)
    return copy_tensors(zip(_Fork.apply(x, len(devices)), devices, strict=True))


def sum_on_device(xs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of `xs` on `device`, added in their order: a new tensor."""
    arrived = copy_tensors((x, device) for x in xs)
    if len(arrived) == 1:
        return arrived[0].clone() if arrived[0] is xs[0] else arrived[0]
    total = arrived[0] + arrived[1]
    for x in arrived[2:]:
        total = total + x if torch.is_grad_enabled() else total.add_(x)
    return total


class _Fork(torch.autograd.Function):
    """Several views of one tensor, one for each copy, so that every device's gradient returns on its own stream.

    Backward: the sum of the gradients in order, which is differentiable itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_on_device(gradients, gradients[0].device), None


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream of this process for copies to and from `device`; None if it has no streams."""
    if device not in _streams:
        with _lock:
            if device not in _streams:
                _streams[device] = _new_stream(device)
    return _streams[device]


def _new_stream(device: torch.device) -> torch.Stream | None:
    if not is_accelerator(device):
        return None
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):  # an accelerator without streams
        return None


def _pinned(x: Tensor) -> Tensor:
    """Return `x` in pinned memory, which a device can read while the host does other work."""
    if x.is_pinned():
        return x
    return torch.empty_like(x, pin_memory=True, requires_grad=False).copy_(x)  # differentiable, which pin_memory() is not
