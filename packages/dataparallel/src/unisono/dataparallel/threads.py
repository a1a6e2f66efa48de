"""One call for each device, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from unisono.dataparallel.devices import Device, full_devices
from unisono.dataparallel.surroundings import Surroundings, current, threads_can_follow


def parallel_apply(
    fns: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    devices: Sequence[Device],
    *,
    kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Call `fns[i](*args[i], **kwargs[i])` with `devices[i]` as the current device, each in a thread of its own; the results
    in order.

    args[i] is a tuple of arguments, or one argument that is not a tuple. The threads have the modes of the caller: gradient
    and inference mode, autocast, default device, context variables, and each device's current stream. Where threads cannot
    follow (torch.compile, torch.func, dispatch modes as of fake tensors), the calls are made one after another, right here.

    If calls fail, the others are waited for, then an ExceptionGroup of all failures is raised; each has a note that says
    which replica failed on which device. (A BaseExceptionGroup if there is a KeyboardInterrupt or SystemExit among them.)

    Backward: that of what is called; results belong to the caller's graph.

    Example:
        >>> parallel_apply([lambda x: x + 1, lambda x, y: x * y], [1, (2, 3)], ["cpu", "cpu"])
        [2, 6]
    """
    places = full_devices("parallel_apply", devices)
    given = [{}] * len(fns) if kwargs is None else kwargs
    if not len(fns) == len(args) == len(given) == len(places):
        counts = f"{len(fns)} fns, {len(args)} args, {len(given)} kwargs and {len(places)} devices"
        raise ValueError(f"parallel_apply: got {counts}; there must be as many of each")

    def call(i: int) -> Any:
        arguments = args[i] if isinstance(args[i], tuple) else (args[i],)
        return fns[i](*arguments, **given[i])

    return run_all(call, places, name="parallel_apply")


def run_all(call: Callable[[int], Any], devices: Sequence[torch.device], *, name: str) -> list[Any]:
    """call(i) for the number of each device, in threads, with the modes of this one."""
    if torch.compiler.is_compiling():
        return [call(i) for i in range(len(devices))]
    surroundings = Surroundings(list(devices)) if threads_can_follow() and len(devices) > 1 else None

    def attempt(i: int) -> tuple[Any, BaseException | None]:
        try:
            if surroundings is not None:
                return surroundings.run(lambda: call(i), devices[i]), None
            with current(devices[i]):
                return call(i), None
        except BaseException as error:  # all of them: the caller is told, whatever ended a replica
            error.add_note(f"in replica {i} on {devices[i]}")
            return None, error

    if surroundings is None:
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
