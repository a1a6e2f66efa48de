"""What a real step costs: bytes that the allocator gave out, and bytes that left through the sockets of the process."""

import importlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from unisono_models.training.distributed.launch import Ranks

_TCP_INFO_BYTES_SENT = 200  # the offset of tcpi_bytes_sent in linux/tcp.h's tcp_info
_TCP_INFO_BYTES_RETRANS = 208
_ALLOCATES = {
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "resize_", "zeros", "zeros_like", "new_empty")
}


def config_of(model: str, recipe: str, fields: list[str]):
    """Return the config of a recipe with some fields set, as the command line sets them."""
    return importlib.import_module(f"unisono_models.{model}.recipes").RECIPES.choose([recipe, *fields])[1]


def real_step(model: str, recipe: str, fields: list[str], device: str = "cpu") -> dict[str, int]:
    """Build a training on this real rank, take two steps, and return the costs of the second one."""
    torch.set_num_threads(1)
    config = config_of(model, recipe, fields)
    build = importlib.import_module(f"unisono_models.{model}.simulate").build_training
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        training = build(config, Ranks(dist.get_rank(), dist.get_world_size(), 0, torch.device(device)))
        training.step()
        dist.barrier()
        sent = socket_bytes()
        with record_function("the second step"):
            training.step()
        sent = socket_bytes() - sent
        dist.barrier()
    return {"peak": peak_of(profiler), "sent": sent}


def peak_of(profiler: profile) -> int:
    """Return the largest number of bytes of tensors alive at once in the second step, by the events of torch's allocator.

    What a kernel allocates and frees before it returns is its workspace and no tensor: those of oneDNN are not those of cuDNN.
    """
    blocks: dict[int, tuple[int, int, Any]] = {}
    changes: list[tuple[int, int]] = []
    step = None
    for event, kernel in sorted(_events(profiler), key=lambda found: found[0].start_time_ns):
        if event.name == "the second step":
            step = event
        if event.tag != torch._C._profiler._EventType.Allocation:
            continue
        time, address, size = event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            blocks[address] = (time, size, kernel)
        elif address in blocks:
            born, size, kernel = blocks.pop(address)
            if kernel is None or time > kernel.end_time_ns:
                changes += [(born, size), (time, -size)]
    assert step is not None
    changes += [(born, size) for born, size, _ in blocks.values()]
    now = peak = 0
    for time, change in sorted(changes):
        now += change
        if step.start_time_ns <= time <= step.end_time_ns:
            peak = max(peak, now)
    return peak


def _events(profiler: profile) -> Iterator[tuple[Any, Any]]:
    """All events, each with the innermost op around it that does more than allocate."""
    waiting = [(event, None) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event, kernel = waiting.pop()
        yield event, kernel
        inner = event if event.name.startswith("aten::") and event.name not in _ALLOCATES else kernel
        waiting += [(child, inner) for child in event.children]


def socket_bytes() -> int:
    """Return the bytes that this process has sent over all of its TCP connections, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        if len(info) >= _TCP_INFO_BYTES_RETRANS + 8:
            total += struct.unpack_from("Q", info, _TCP_INFO_BYTES_SENT)[0]
            total -= struct.unpack_from("Q", info, _TCP_INFO_BYTES_RETRANS)[0]
    return total
