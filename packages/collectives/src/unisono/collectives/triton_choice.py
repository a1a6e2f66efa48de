"""Whether Triton kernels may compute instead of torch's operations. The packages that have such kernels ask here.

They may where Triton imports, unless UNISONO_TRITON=0 is in the environment, which is read at every call, and once they have
given what torch's operations give.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SWITCH = "UNISONO_TRITON"


def why_no_triton() -> str:
    """Say why no Triton kernel may run in this process; "" if they may."""
    return f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else _import_problem()


@cache
def _import_problem() -> str:
    if find_spec("triton") is None:
        return "there is no Triton"
    try:
        import triton  # type: ignore[import-untyped]  # noqa: F401
    except Exception as error:
        warnings.warn(f"unisono: torch computes, because Triton does not import: {error}", stacklevel=2)
        return f"Triton does not import: {error}"
    return ""


def agrees_once(
    problems: MutableMapping[Any, str], key: Hashable, device: torch.device, compare: Callable[[], str], *, instead: str
) -> bool:
    """Whether `compare` has found no difference between Triton kernels and torch's operations when `key` was new.

    It compiles the kernels and makes the host wait, which no mode of the caller sees. If it returns a difference or raises, a
    warning says so and what happens `instead`, and the answer is False from then on. While a CUDA graph is captured the answer
    is False, too, unless it is known: neither a wait nor a compiler can be in the graph.

    `problems`: remembers what `compare` returned.
    """
    if key not in problems:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
                problem = compare()
        except Exception as error:  # whatever a compiler or a driver may say
            problem = f"{type(error).__name__}: {error}"
        problems[key] = problem
        if problem:
            warnings.warn(
                f"{instead}. The Triton kernels gave: {problem}. {SWITCH}=0 chooses torch's operations without this test.",
                stacklevel=2,
            )
    return not problems[key]


@contextmanager
def on_device_of(x: Tensor) -> Iterator[tuple[int, int]]:
    """Triton launches on the current device, so make it that of `x`. Gives its compute capability."""
    if not x.is_cuda:  # the interpreter
        yield 9, 0
        return
    with torch.cuda.device(x.device):
        yield torch.cuda.get_device_capability(x.device)
