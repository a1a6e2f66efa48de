"""parallel_apply: one call for each device at the same time, in threads that have the modes of the caller.

torch keeps most of its modes (gradient mode, autocast, ...) by thread. ThreadContext carries them to a new thread.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from unisono.dataparallel.replicas.devices import Device, is_accelerator, on_stream, resolve_devices

T = TypeVar("T")


def parallel_apply(
    fns: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    devices: Sequence[Device],
    *,
    kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Call `fns[i](*args[i], **kwargs[i])` with `devices[i]` as the current device, each in its own thread; return the results.

    args[i] is a tuple of arguments, or one argument that is not a tuple. The threads have the modes of the caller: gradient
    and inference mode, autocast, default device, context variables, and each device's current stream. Under torch.compile,
    torch.func and dispatch modes (fake tensors), which work in one thread only, the calls are made one after another.

    Backward: that of the functions; the results belong to the caller's graph.

    Raises an ExceptionGroup of all failures after all calls have ended. Each has a note that says which replica failed on
    which device. (It is a BaseExceptionGroup if a KeyboardInterrupt or SystemExit is among them.)

    Example:
        >>> parallel_apply([lambda x: x + 1, lambda x, y: x * y], [1, (2, 3)], ["cpu", "cpu"])
        [2, 6]
    """
    places = resolve_devices("parallel_apply", devices)
    given = [{}] * len(fns) if kwargs is None else kwargs
    if not len(fns) == len(args) == len(given) == len(places):
        counts = f"{len(fns)} fns, {len(args)} args, {len(given)} kwargs and {len(places)} devices"
        raise ValueError(f"parallel_apply: got {counts}; there must be as many of each")

    def call(i: int) -> Any:
        arguments = args[i] if isinstance(args[i], tuple) else (args[i],)
        return fns[i](*arguments, **given[i])

    return run_on_devices(call, places, name="parallel_apply")


def run_on_devices(call: Callable[[int], Any], devices: Sequence[torch.device], *, name: str) -> list[Any]:
    """Call `call(i)` for each device number i, in threads with the modes of this thread; return the results."""
    if torch.compiler.is_compiling():
        return [call(i) for i in range(len(devices))]
    thread_context = ThreadContext(list(devices)) if threads_supported() and len(devices) > 1 else None

    def attempt(i: int) -> tuple[Any, BaseException | None]:
        try:
            if thread_context is not None:
                return thread_context.run(lambda: call(i), devices[i]), None
            with device_context(devices[i]):
                return call(i), None
        except BaseException as error:  # the caller gets every failure, whatever it is
            error.add_note(f"in replica {i} on {devices[i]}")
            return None, error

    if thread_context is None:
        outcomes = [attempt(i) for i in range(len(devices))]
    else:
        with ThreadPoolExecutor(len(devices), thread_name_prefix="unisono replica") as pool:
            outcomes = list(pool.map(attempt, range(len(devices))))
    failed = {i: error for i, (_, error) in enumerate(outcomes) if error is not None}
    if failed:
        where = ", ".join(f"replica {i} on {devices[i]}" for i in failed)
        message = f"{name}: {len(failed)} of {len(devices)} replicas failed: {where}"
        raise BaseExceptionGroup(message, list(failed.values()))  # an ExceptionGroup, if all are Exceptions
    return [result for result, _ in outcomes]


class ThreadContext:
    """The modes of the thread that creates it, in which other threads can run a function.

    They are gradient and inference mode, autocast, function modes (the default device is one), hooks for saved tensors,
    context variables, and the current stream of each device.

    Example:
        >>> import threading, torch
        >>> with torch.no_grad():
        ...     thread_context = ThreadContext([torch.device("cpu")])
        >>> look = lambda: print(torch.is_grad_enabled())
        >>> thread = threading.Thread(target=thread_context.run, args=(look, torch.device("cpu")))
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
        """Return fn() in these modes, with `device` as the current one. Call it in a thread that has no modes of its own."""

        def body() -> T:
            with self._entered(device):
                return fn()

        return self._variables.copy().run(body)  # two threads cannot enter one context

    @contextmanager
    def _entered(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(on_stream(stream))
            stack.enter_context(device_context(device))  # last, because entering a stream changes the device, too
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caching))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            # Pushed, not entered: a mode stores what to restore at its exit, which a second thread would overwrite.
            for mode in self._function:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            yield


def threads_supported() -> bool:
    """Return whether calls may run in other threads.

    They may not while a function is traced or transformed, which works in one thread only, nor under a dispatch mode (fake
    tensors, counters): modes store their state in themselves, and two threads would mix it up.
    """
    if torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device of its type; the CPU needs nothing."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()
