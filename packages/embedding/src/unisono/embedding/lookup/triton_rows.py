"""The operations of kernels.py by Triton, for rows of 16, 32 and 64 bits on CUDA. triton_kernels.py has the kernels.

The host reads nothing from the device: grids follow from shapes, and how many different numbers there are stays on the device.
Rows of 16 bits are summed and updated in float32, and rounded once, when they are written.

Each launch is a custom op with registered costs, so that the ledger counts it on fake tensors. What depends on values is
counted as the most that it may be: `update` touches as many rows as there are positions.
"""

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from unisono.collectives import register_cost
from unisono.collectives.triton_choice import on_device_of
from unisono.embedding.lookup import triton_kernels
from unisono.embedding.lookup.compiled import Step

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_PROGRAMS = 1 << 14  # each takes several rows if there are more of them; a GPU runs some thousands at once
_CHUNK = 256  # positions that are summed first at least, if they belong to one row
_NO_CHUNKS = 1024  # positions up to which nothing is summed first
_WIDEST = 1024  # columns that a program holds at once
_UNIQUE_BLOCK = 1024  # sorted numbers of a program
_UNIQUE_COUNTS = 1024  # counts of such blocks that a program adds at once
_COMPILED: dict[str, Any] = {"enable_fp_fusion": False}  # sums and products are rounded as on a CPU


def deduplicate(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`unique`, `order`, `starts` and `unique_count` of kernels.Deduplicated, padded. There must be at least one number."""
    n = numbers.numel()
    ordered, order = numbers.sort(stable=True)
    unique = torch.empty_like(ordered)
    starts, counts, count = (order.new_empty(size) for size in (n, triton.cdiv(n, _UNIQUE_BLOCK), 1))
    _place_unique_op(ordered, counts, unique, starts, count)
    return unique, order, starts, count


def sum_bags(rows: Tensor, index: Tensor | None, order: Tensor | None, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Sum rows[index[order[p]]] * weights[order[p]] for the positions p of each bag; one of `index` and `order` may be None."""
    out = rows.new_empty((starts.numel(), rows.shape[1]))
    of_positions = index if order is None else order
    assert of_positions is not None
    _sum_bags_op(rows, index, order, starts, weights, _new_chunk_sums(rows, of_positions.numel(), _dtype(rows)), out)
    return out


def update(
    step: Step,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    part: slice,
    grads: Tensor,
    *,
    bags: Tensor | None = None,
    order: Tensor | None = None,
    starts: Tensor | None = None,
    count: Tensor | None = None,
    weights: Tensor | None = None,
    divisors: Tensor | None = None,
    squares: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Sum the gradients of each of rows[part] and make the optimizer's step, in place.

    The gradient of rows[k] is the sum of grads[bags[order[p]]] * weights[order[p]] for p from starts[k] to starts[k + 1],
    divided by divisors[k] and times `factor`; without `order`, it is grads[k].
    `count`: how many rows there are, if not all are. `squares`: the sums of squares of whole rows.
    """
    first, second = [*states, None, None][:2]
    positions = 0 if order is None else order.numel()
    beta1, beta2 = step.betas
    numbers = [factor, step.weight_decay, -step.rate, step.eps, float(step.columns), 1 - beta1, beta2, 1 - beta2]
    chunk_sums = _new_chunk_sums(grads, positions, _dtype(weight))
    _update_op(
        weight, first, second, rows, grads, bags, order, starts, count, weights, divisors, squares, chunk_sums,
        part.start, part.stop, step.rule, numbers,
    )  # fmt: skip


def _dtype(rows: Tensor) -> torch.dtype:
    """Of sums: that of the optimizer's state."""
    return torch.promote_types(rows.dtype, torch.float32)


def _chunk(positions: int) -> int:
    """How many positions a chunk has: about as many as there are chunks, so that neither takes a program long."""
    return max(_CHUNK, 1 << (max(positions - 1, 1).bit_length() + 1) // 2)


def _new_chunk_sums(rows: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    chunks = positions // _chunk(positions) if positions > _NO_CHUNKS else 0
    return rows.new_empty((chunks, rows.shape[1]), dtype=dtype)


def _options(width: int) -> dict[str, Any]:
    block_width = min(max(triton.next_power_of_2(width), 16), _WIDEST)
    warps = max(block_width // 128, 1)
    block_rows = max(min(512 * warps // block_width, 16), 1)
    return {"block_rows": block_rows, "block_width": block_width, "num_warps": warps, **_COMPILED}


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _sum_chunks(
    rows: Tensor,
    index: Tensor | None,
    order: Tensor | None,
    starts: Tensor,
    weights: Tensor | None,
    chunk_sums: Tensor,
    positions: int,
) -> None:
    width, segments = rows.shape[1], starts.numel()
    options = _options(width)
    triton_kernels.chunk_sums_kernel[(len(chunk_sums), triton.cdiv(width, options["block_width"]))](
        rows, index, order, weights, starts, chunk_sums, segments, positions, segments.bit_length(), width, _chunk(positions),
        has_index=index is not None, has_order=order is not None, has_weights=weights is not None, **options,
    )  # fmt: skip


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@torch.library.custom_op("unisono_embedding::triton_sum_bags", mutates_args=("chunk_sums", "sums"))
def _sum_bags_op(
    rows: Tensor,
    index: Tensor | None,
    order: Tensor | None,
    starts: Tensor,
    weights: Tensor | None,
    chunk_sums: Tensor,
    sums: Tensor,
) -> None:
    of_positions = index if order is None else order
    assert of_positions is not None
    positions, segments = of_positions.numel(), starts.numel()
    with on_device_of(rows):
        if len(chunk_sums):
            _sum_chunks(rows, index, order, starts, weights, chunk_sums, positions)
        triton_kernels.sum_bags_kernel[(min(segments, _PROGRAMS),)](
            rows, index, order, weights, starts, chunk_sums, sums, segments, positions, rows.shape[1], _chunk(positions),
            has_index=index is not None, has_order=order is not None, has_weights=weights is not None,
            has_chunks=len(chunk_sums) > 0, dtype=_TRITON_DTYPES[chunk_sums.dtype], **_options(rows.shape[1]),
        )  # fmt: skip


@torch.library.custom_op("unisono_embedding::triton_update", mutates_args=("weight", "state0", "state1", "chunk_sums"))
def _update_op(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    rows: Tensor,
    grads: Tensor,
    bags: Tensor | None,
    order: Tensor | None,
    starts: Tensor | None,
    count: Tensor | None,
    weights: Tensor | None,
    divisors: Tensor | None,
    squares: Tensor | None,
    chunk_sums: Tensor,
    first_row: int,
    last_row: int,
    rule: int,
    numbers: Sequence[float],
) -> None:
    positions, width = 0 if order is None else order.numel(), weight.shape[1]
    options = _options(width)
    with on_device_of(weight):
        if len(chunk_sums):
            assert starts is not None
            _sum_chunks(grads, bags, order, starts, weights, chunk_sums, positions)
        triton_kernels.update_kernel[(min(last_row - first_row, _PROGRAMS),)](
            weight, state0, state1, rows, grads, bags, order, starts, count, weights, divisors, squares, chunk_sums,
            first_row, last_row, 0 if starts is None else starts.numel(), positions, width, _chunk(positions),
            *map(_bits, numbers), rule=rule, has_starts=starts is not None, has_count=count is not None,
            has_bags=bags is not None, has_order=order is not None, has_weights=weights is not None,
            has_divisors=divisors is not None, has_squares=squares is not None, has_chunks=len(chunk_sums) > 0,
            has_decay=numbers[1] != 0, is_single=width <= options["block_width"], dtype=_TRITON_DTYPES[chunk_sums.dtype],
            **options,
        )  # fmt: skip


@torch.library.custom_op("unisono_embedding::triton_place_unique", mutates_args=("counts", "unique", "starts", "count"))
def _place_unique_op(ordered: Tensor, counts: Tensor, unique: Tensor, starts: Tensor, count: Tensor) -> None:
    n, blocks = ordered.numel(), counts.numel()
    with on_device_of(ordered):
        triton_kernels.count_unique_kernel[(blocks,)](ordered, counts, n, block=_UNIQUE_BLOCK, **_COMPILED)
        triton_kernels.place_unique_kernel[(blocks,)](
            ordered, counts, unique, starts, count, n, blocks, block=_UNIQUE_BLOCK, block_counts=_UNIQUE_COUNTS, **_COMPILED
        )


@_place_unique_op.register_kernel("cpu")
def _(ordered: Tensor, counts: Tensor, unique: Tensor, starts: Tensor, count: Tensor) -> None:
    """For the ledger, which follows the values of integers on CPUs."""
    found, sizes = torch.unique_consecutive(ordered, return_counts=True)
    n = len(found)
    unique[:n], unique[n:] = found, ordered[-1]
    starts[:n], starts[n:] = sizes.cumsum(0) - sizes, len(ordered)
    count.fill_(n)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(0 if t is None else t.numel() * t.element_size() for t in tensors)


def _sum_bags_bytes(rows: Tensor, index: Tensor | None, order: Tensor | None, *args: Any, out: None) -> int:
    starts, weights, chunk_sums, sums = args
    of_positions = index if order is None else order
    assert of_positions is not None
    read = of_positions.numel() * rows.shape[1] * rows.element_size()
    return read + _bytes(index, order, starts, weights, sums, chunk_sums, chunk_sums)


def _update_bytes(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    rows: Tensor,
    grads: Tensor,
    *args: Any,
    out: None,
) -> int:
    bags, order, starts, count, weights, divisors, squares, chunk_sums, first_row, last_row = args[:10]
    changed: int = sum(_bytes(t) // len(weight) for t in (weight, state0, state1) if t is not None) * (last_row - first_row)
    read: int = (last_row - first_row if order is None else order.numel()) * grads.shape[1] * grads.element_size()
    tensors = (rows, bags, order, starts, count, weights, divisors, squares, chunk_sums, chunk_sums)
    return 2 * changed + read + _bytes(*tensors)


for _op in (_sum_bags_op, _update_op, _place_unique_op):
    _op.register_fake(lambda *_: None)
_ops = torch.ops.unisono_embedding
register_cost(
    _ops.triton_sum_bags,
    kernels=lambda *args, out: 1 + (len(args[5]) > 0),
    bytes_touched=_sum_bags_bytes,
)
register_cost(_ops.triton_update, kernels=lambda *args, out: 1 + (len(args[12]) > 0), bytes_touched=_update_bytes)
register_cost(_ops.triton_place_unique, kernels=2, bytes_touched=lambda *args, out: _bytes(*args, args[0], args[1]))
