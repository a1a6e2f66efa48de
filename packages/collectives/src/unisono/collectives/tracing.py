"""What torch.compile is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """torch.compiler.disable, which would import the compiler, for seconds, even where nothing is compiled."""

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            result: _T = torch.compiler.disable(fn)(*args, **kwargs)
            return result
        return fn(*args, **kwargs)

    return call
