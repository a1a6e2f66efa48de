"""Padding: on NCCL and similar backends, uneven parts as equal ones, so that one fused collective takes them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Uneven sizes are padded from so many ranks on, if that sends at most 1.5 times the rows, and on average at most so many
# bytes more for each rank: a broadcast of one rank's part takes some 20 us, in which 50 GB/s move 1 MB.
_PADDED_FROM = 8
_PADDING_BYTES = 1 << 20


def is_padded(sizes: Sequence[int], row_bytes: int) -> bool:
    """Return whether uneven parts are padded to the longest, for the fused collective of NCCL and similar backends.

    Otherwise each rank's part is a broadcast or a reduction of its own, whose number of steps grows with the ranks.
    """
    size, total = len(sizes), sum(sizes)
    padding = size * max(sizes) - total
    return size >= _PADDED_FROM and 2 * padding <= total and padding * row_bytes <= size * _PADDING_BYTES


def row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.dtype.itemsize


def extended(x: Tensor, length: int) -> Tensor:
    """Return `x` with rows of zeros behind it."""
    if len(x) == length:
        return x
    out = x.new_zeros((length, *x.shape[1:]))
    out[: len(x)] = x
    return out


def without_padding(packed: Tensor, padded: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return each rank's rows as views of `packed`, without padding between them, and as views of `padded`.

    Neighbours of equal size are one view: then a batch that is split as evenly as possible has two.
    """
    longest = max(sizes)
    starts = [r for r in range(len(sizes)) if r == 0 or sizes[r] != sizes[r - 1]]
    if len(starts) > len(sizes) // 8:  # one view for each rank, all contiguous, is copied by fewer kernels
        parts = [length for size in sizes for length in (size, longest - size)]
        return list(packed.split_with_sizes(list(sizes))), list(padded.split_with_sizes(parts)[::2])
    runs = [stop - start for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    blocks = padded.view(len(sizes), longest, *padded.shape[1:]).split_with_sizes(runs)
    rows = packed.split_with_sizes([run * sizes[start] for run, start in zip(runs, starts, strict=True)])
    views = [
        part.view(run, -1, *part.shape[1:]) if len(part) else part.view(run, 0, *part.shape[1:])
        for part, run in zip(rows, runs, strict=True)
    ]
    return views, [block[:, : sizes[start]] for block, start in zip(blocks, starts, strict=True)]


def copy_parts(whole: Tensor, into: list[Tensor], source: list[Tensor]) -> Tensor:
    """Copy each part of `source` to its place in `whole`, in few kernels; an index would have to be sent to the device."""
    pairs = [(a, b) for a, b in zip(into, source, strict=True) if a.numel()]
    torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
    return whole
