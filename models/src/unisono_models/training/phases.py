"""The phases of a training step: names for the profiler, and for the simulation of a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

from torch.autograd.profiler import record_function

Phase = Literal["data", "forward", "loss", "backward", "sync", "optimizer"]
Listener = Callable[[str], AbstractContextManager[object]]

_listener: ContextVar[Listener] = ContextVar("listener", default=record_function)


def phase(name: Phase) -> AbstractContextManager[object]:
    """Mark a part of a step. torch.profiler shows it by its name. A context manager; phases may be nested.

    Example:
        with phase("forward"):
            losses = model(batch)
    """
    return _listener.get()(name)


@contextmanager
def listen_to_phases(listener: Listener) -> Iterator[None]:
    """Enter `listener(name)` for each phase inside the block, instead of the profiler's record_function."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
