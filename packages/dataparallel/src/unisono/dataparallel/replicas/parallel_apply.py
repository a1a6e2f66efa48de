"""parallel_apply: one call for each device at the same time, in threads that have the modes of the caller.

torch keeps most of its modes (gradient mode, autocast, ...) by thread. ThreadContext carries them to a new thread.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
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
    context = ThreadContext(list(devices)) if threads_supported() and len(devices) > 1 else None
    with executor(len(devices) if context else 0) as threads:
        futures = [
            threads.submit(run_with_note, partial(call, i), device, context, f"in replica {i} on {device}")
            for i, device in enumerate(devices)
        ]
    failed = {i: error for i, future in enumerate(futures) if (error := future.exception()) is not None}
    if failed:
        where = ", ".join(f"replica {i} on {devices[i]}" for i in failed)
        message = f"{name}: {len(failed)} of {len(devices)} replicas failed: {where}"
        raise BaseExceptionGroup(message, list(failed.values()))  # an ExceptionGroup, if all are Exceptions
    return [future.result() for future in futures]


def executor(threads: int) -> Executor:
    """Return an executor with so many threads; with 0 it runs each function at once, in this thread."""
    return ThreadPoolExecutor(threads, thread_name_prefix="unisono replica") if threads else _InlineExecutor()


def run_with_note(fn: Callable[[], T], device: torch.device, context: ThreadContext | None, note: str) -> T:
    """Return fn() with `device` as the current one, in the modes of `context` if given. A failure gets the note."""
    try:
        if context is not None:
            return context.run(fn, device)
        with device_context(device):
            return fn()
    except BaseException as error:
        error.add_note(note)
        raise


class _InlineExecutor(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class ThreadContext:
    """The modes of the thread that creates it, in which other threads can run a function.

    They are gradient and inference mode, autocast, function modes (the default device is one), hooks for saved tensors,
    context variables, and the current stream of each device.
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
