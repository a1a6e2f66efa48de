"""Helpers to run the Triton kernels on CPU tensors, by Triton's interpreter: TRITON_INTERPRET=1 must be set from the start."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import interpreter

from unisono.contrastive.tiled import logit_statistics, sigmoid_sum, softmax_mean, triton_tiles
from unisono.contrastive.tiled.triton_tiles import Blocks, TritonTiles

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
def on_triton(slope_bytes: int = triton_tiles.SLOPE_BYTES, small: bool = True) -> Iterator[None]:
    """CPU tensors are computed by the Triton tiles; if `small`, of 16 rows and columns, so that small batches have several.

    New memory is filled with NaN, so that a kernel that reads what nothing has written is seen.
    """
    with ExitStack() as stack:

        def patch(*arguments: Any) -> None:
            stack.enter_context(mock.patch.object(*arguments))

        for module in (logit_statistics, sigmoid_sum, softmax_mean):
            patch(module, "block_kernels", TritonTiles)
        if small:
            patch(triton_tiles, "tile_blocks", lambda *_: Blocks(16, 16, 16))
            patch(triton_tiles, "_PADDING", 16)
            patch(triton_tiles, "_PROGRAMS", 4)
        patch(triton_tiles, "SLOPE_BYTES", slope_bytes)
        patch(interpreter.InterpreterBuilder, "cast_impl", _cast_as_a_gpu_does)
        patch(interpreter.InterpreterBuilder, "create_dot", _dot_of_numbers)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        yield
