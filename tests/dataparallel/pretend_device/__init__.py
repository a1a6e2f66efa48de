"""Devices "pretend:0" to "pretend:3": host memory, but with asynchronous streams, so that tests need no GPUs.

Order is as on CUDA and mistakes in it show every time. New and freed memory is NaN; `hold_async_copies()` delays every
queued copy until someone waits for it; `races()` names each use of memory that no wait_stream or record_stream orders.
In a test take the fixture `pretend`, which is this module with the devices there to be used.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
CACHE = Path(__file__).parents[3] / ".cache" / "pretend_device"
_PARTS = ("streams", "memory", "guard", "copies", "kernels")
_COUNTERS = (
    *("h2d", "d2h", "d2d", "local", "h2d_bytes", "d2h_bytes", "d2d_bytes", "local_bytes"),
    *("kernels", "allocations", "pinned_allocations", "live_bytes", "peak_bytes", "host_waits"),
)


class NoCompilerError(RuntimeError):
    """There is nothing to build the device with."""


@cache
def load() -> ctypes.CDLL:
    """Build the device if need be and make it known to torch, as not available yet.

    Must come before the first backward of the process: autograd starts its threads then, one for each device.
    """
    library = ctypes.CDLL(str(_built()))
    library.pretend_races.restype = ctypes.c_char_p
    atexit.register(library.pretend_stop)
    library.pretend_available(0)
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    _register_autocast()
    try:
        torch.ones(1, device="pretend:3", requires_grad=True).sum().backward()
    except RuntimeError as problem:
        raise RuntimeError("the pretend device must be loaded before the first backward of the process") from problem
    return library


def _built() -> Path:
    """The path of the library, compiled at most once for each torch and each state of the sources."""
    files = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    target = CACHE / f"{torch.__version__}-{sys.version_info.major}.{sys.version_info.minor}-{state}" / "pretend.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler or not shutil.which(compiler):
        raise NoCompilerError("the pretend device needs a C++ compiler: there is no g++ or c++")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            _compile(compiler, unfinished)
            unfinished.rename(target)
    return target


def _compile(compiler: str, output: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and warns where there is no GPU

    command = [compiler, "-std=c++20", "-O0", "-g0", "-fPIC", "-shared", "-pthread", "-x", "c++", "-", "-I", str(SOURCES)]
    command += ["-o", str(output), f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    for path in cpp_extension.library_paths():
        command += ["-L", path]
    command += ["-lc10", "-ltorch_cpu"]
    # all in one go: torch's headers take longer than the rest
    program = "".join(f'#include "{part}.cpp"\n' for part in _PARTS)
    done = subprocess.run(command, input=program, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the pretend device did not compile:\n{' '.join(command)}\n{done.stderr}")


def set_available(on: bool) -> None:
    """Whether torch.accelerator finds the devices. Off outside of the tests that ask for them."""
    load().pretend_available(int(on))


@contextmanager
def hold_async_copies() -> Iterator[None]:
    """Queued work runs only when someone properly waits for it: an event, wait_stream, synchronize, a later kernel."""
    library = load()
    library.pretend_hold(1)
    try:
        yield
    finally:
        library.pretend_hold(0)


def counters() -> dict[str, int]:
    """What happened since the last reset.

    Copies and their bytes: h2d, d2h, d2d (between devices), local (within one). kernels. allocations (of device memory),
    pinned_allocations; live_bytes and peak_bytes (of device memory, in blocks of 512). host_waits: how often the host
    waited for a stream: synchronize, item(), copies that block.
    """
    numbers = (ctypes.c_int64 * len(_COUNTERS))()
    load().pretend_counters(numbers)
    return dict(zip(_COUNTERS, numbers, strict=True))


def races() -> list[str]:
    """Since the last reset: uses and frees of device memory that nothing orders after its earlier uses."""
    text: bytes = load().pretend_races()
    return text.decode().splitlines()


def reset_counters() -> None:
    """All counters but live_bytes to zero; races forgotten."""
    load().pretend_reset()


def _device_module(library: ctypes.CDLL) -> types.ModuleType:
    """`torch.pretend`, as `torch.cuda`: what generic code asks a device's module for."""
    module = types.ModuleType("torch.pretend")
    functions: dict[str, Any] = {
        "is_available": lambda: library.pretend_device_count() > 0,
        "is_initialized": lambda: True,
        "device_count": library.pretend_device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": torch.accelerator.synchronize,
        "device": lambda d: torch.accelerator.device_index(d if isinstance(d, int | None) else torch.device(d).index),
        "stream": lambda stream: stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed_all": lambda seed: None,  # the host's generator serves
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "_is_in_bad_fork": lambda: False,
    }
    vars(module).update(functions)
    return module


def _register_autocast() -> None:
    """Under autocast, matrix products take the lower precision."""
    library = torch.library.Library("aten", "IMPL")
    for op in (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.linear.default,
    ):
        library.impl(op, _lowered(op), "AutocastPrivateUse1")
    load.__dict__["autocast"] = library  # its registrations live as long as it does


def _lowered(op: Any) -> Any:
    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("pretend")
        lowered = [x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*lowered, **kwargs)

    return run
