"""Helpers to run Triton kernels on CPU tensors, by Triton's interpreter: TRITON_INTERPRET=1 must be set from the start."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import interpreter


def run_interpreted(tests: Path) -> None:
    """Run a file of tests in another process, since the interpreter must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


_cast = interpreter.InterpreterBuilder.cast_impl
_dot = interpreter.InterpreterBuilder.create_dot


def _cast_as_a_gpu_does(self: Any, source: Any, dtype: Any) -> Any:
    """The interpreter keeps bfloat16 as integers; it cuts digits off where a GPU rounds to the nearest."""
    types = source.dtype.scalar, dtype.scalar
    if types == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(source.data).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    if types == (tl.bfloat16, tl.float32):
        numbers = torch.from_numpy(source.data).view(torch.bfloat16).float()
        return interpreter.TensorHandle(numbers.numpy(), tl.float32)
    return _cast(self, source, dtype)


def _dot_of_numbers(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """The interpreter multiplies the integers that stand for bfloat16."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (self.cast_impl(each, tl.float32) for each in (a, b))
    return _dot(self, a, b, total, *options)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Round as a GPU does, and fill new memory with NaN, so that a kernel that reads what nothing has written is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with (
            mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", _cast_as_a_gpu_does),
            mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _dot_of_numbers),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
