"""Which devices take part: torch's own names, made full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

Device: TypeAlias = str | int | torch.device


def full_device(function: str, argument: str, device: Device) -> torch.device:
    """`device` as tensors name theirs: "cuda" is the current CUDA device, "cpu:0" is "cpu"."""
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
    """Of the kind that this process has: not so for fake tensors of a device that is not there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def full_devices(function: str, devices: Sequence[Device]) -> list[torch.device]:
    """At least one; the same device may stand there several times."""
    if isinstance(devices, (str, int, torch.device)) or not len(devices):
        raise ValueError(
            f"{function}: devices={devices!r} must be a sequence of at least one device, ['cuda:0', 'cuda:1'] for instance"
        )
    return [full_device(function, "devices", device) for device in devices]


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Makes `stream`, and its device, the current one. Unlike `with stream:`, which remembers in the stream what to go back
    to, for several threads at a time."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
