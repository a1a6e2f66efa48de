"""Names in the profiler: what torch.profiler shows around the messages of one of our calls."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

_P = ParamSpec("_P")
_T = TypeVar("_T")


def profiled(call: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return function(*args, **kwargs). While a profiler runs, its trace has it by name: "unisono::backward of all_gather".

    `call`: what the user called, perhaps with arguments in parentheses, which the name leaves out.
    """
    if not profiler._is_profiler_enabled:  # a name costs some microseconds
        return function(*args, **kwargs)
    with profiler.record_function(f"unisono::{call.partition('(')[0]}"):
        return function(*args, **kwargs)
