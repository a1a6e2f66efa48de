"""Run the Triton tiles on CPU tensors, by Triton's interpreter: TRITON_INTERPRET=1 must be set from the start."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.collectives.triton_interpreter import like_a_gpu
from unisono.contrastive.tiled import logit_statistics, sigmoid_sum, softmax_mean, triton_tiles
from unisono.contrastive.tiled.triton_tiles import Blocks, TritonTiles


@contextmanager
def on_triton(slope_bytes: int = triton_tiles.SLOPE_BYTES, small: bool = True) -> Iterator[None]:
    """CPU tensors are computed by the Triton tiles; if `small`, of 16 rows and columns, so that small batches have several."""
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
        stack.enter_context(like_a_gpu())
        yield
