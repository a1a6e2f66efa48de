"""A whole evaluation set through several devices: every batch on one of them, results in order, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import Any

import torch
from torch import nn

from unisono.dataparallel.copying import Copies
from unisono.dataparallel.replicas import Replicas
from unisono.dataparallel.scattering import move
from unisono.dataparallel.surroundings import Surroundings, current, threads_can_follow


def stream(
    checked_out: AbstractContextManager[Replicas],
    batches: Iterable[Any],
    devices: Sequence[torch.device],
    output: torch.device,
    *,
    ahead: int,
    progress: bool | str,
) -> Iterator[Any]:
    """The results of the batches, in order, on `output`. Batch k goes to replica k % len(devices), which has a thread of its
    own; its copy starts at once, while the replica is still at work on the batches before it."""
    waiting: deque[Future[Any]] = deque()
    failure: Exception | None = None
    source = iter(batches)
    with ExitStack() as stack:
        bar = stack.enter_context(_bar(batches, progress)) if progress else None
        replicas = stack.enter_context(checked_out)
        with torch.no_grad():
            replicas.prepare(range(len(devices)))
        surroundings = Surroundings([*devices, output]) if threads_can_follow() else None
        # left before the replicas are given back: none runs any more then, whether the caller took all results or not
        threads = [stack.enter_context(_thread()) for _ in devices]
        stack.callback(lambda: [future.cancel() for future in waiting])
        for number in count():
            i = number % len(devices)
            try:
                batch = next(source)
                waiting.append(_submit(threads[i], replicas, i, batch, devices[i], output, surroundings, number))
            except StopIteration:
                break
            except Exception as error:  # of the loader, or of a copy: after the results of the batches before
                failure = error
                break
            if len(waiting) >= len(devices) * (1 + ahead):
                yield _next(waiting, bar)
        while waiting:
            yield _next(waiting, bar)
    if failure is not None:
        raise failure


class _Here(Executor):
    """Runs what it is given at once, in this thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def _thread() -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix="unisono replica") if threads_can_follow() else _Here()


def _submit(
    thread: Executor,
    replicas: Replicas,
    i: int,
    batch: Any,
    device: torch.device,
    output: torch.device,
    surroundings: Surroundings | None,
    number: int,
) -> Future[Any]:
    copies = Copies()
    moved = move(batch, device, copies)

    def work() -> Any:
        copies.join()
        with torch.no_grad():
            result = replicas.call(i, lambda module: _call(module, moved))
            leaving = Copies()
            moved_result = move(result, output, leaving)
            leaving.join()
        return moved_result

    def attempt() -> Any:
        try:
            if surroundings is not None:
                return surroundings.run(work, device)
            with current(device):
                return work()
        except BaseException as error:
            error.add_note(f"in batch {number} of ReplicaSet.map, in replica {i} on {device}")
            raise

    return thread.submit(attempt)


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def _next(waiting: deque[Future[Any]], bar: Any) -> Any:
    result = waiting.popleft().result()
    if bar is not None:
        bar.update()
    return result


def _bar(batches: Iterable[Any], progress: bool | str) -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("ReplicaSet.map: progress needs tqdm: pip install tqdm") from error
    text = progress if isinstance(progress, str) else None
    return tqdm(total=len(batches) if isinstance(batches, Sized) else None, desc=text, unit="batch")
