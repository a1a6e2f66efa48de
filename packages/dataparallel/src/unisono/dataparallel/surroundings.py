"""What a thread inherits from the one that starts it: torch keeps most of its modes by thread, and a new one has none."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from unisono.dataparallel.devices import is_accelerator, on_stream

T = TypeVar("T")


class Surroundings:
    """The modes of the thread that makes it, for others to run in: gradient and inference mode, autocast, function modes
    (the default device is one), hooks for saved tensors, context variables, and the current stream of each device.

    Example:
        >>> import threading, torch
        >>> with torch.no_grad():
        ...     surroundings = Surroundings([torch.device("cpu")])
        >>> look = lambda: print(torch.is_grad_enabled())
        >>> thread = threading.Thread(target=surroundings.run, args=(look, torch.device("cpu")))
        >>> thread.start(), thread.join()
        False
        (None, None)
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", *(device.type for device in devices if device.type != "meta")}
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._caching = torch.is_autocast_cache_enabled()
        self._function = _get_current_function_mode_stack()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._variables = contextvars.copy_context()
        self._streams = {d: torch.accelerator.current_stream(d) for d in devices if is_accelerator(d)}

    def run(self, fn: Callable[[], T], device: torch.device) -> T:
        """fn() in these surroundings, with `device` as the current one. Call it in a thread that has no modes of its own."""

        def body() -> T:
            with self._entered(device):
                return fn()

        return self._variables.copy().run(body)  # a copy: one context cannot be entered by two threads

    @contextmanager
    def _entered(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(on_stream(stream))
            stack.enter_context(current(device))  # last: entering a stream changes the device, too
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caching))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            # pushed as they are: entering a mode that another thread is in would mix up what it remembers for its end
            for mode in self._function:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            yield


def threads_can_follow() -> bool:
    """Not where a function is being traced or transformed, which is seen in one thread only, and not under a dispatch mode
    (fake tensors, counters): modes keep what they are doing in themselves, and two threads would mix it up."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one of its kind; there is but one CPU."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()
