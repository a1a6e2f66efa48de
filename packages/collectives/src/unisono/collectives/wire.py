"""The bare communication: no autograd here. Each kernel takes contiguous rows and returns a new tensor.

What only moves data travels as bytes, so every dtype (bool, complex, float8) moves on every backend, and never padded:
the wire carries the payload. Two sets of algorithms, by backend:

- gloo: uneven sizes are native to neither its all_gather nor its reduce_scatter. Asynchronous broadcasts straight into
  the output, and all_to_all plus a local sum in rank order, measured fastest (scripts/bench collectives).
- all others (NCCL and its kin): the fused collective for equal sizes; the list form, which is a group of broadcasts or
  of reductions, for uneven ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import backend_for


def as_bytes(rows: Tensor) -> Tensor:
    """A view of contiguous `rows` as (rows, bytes of a row)."""
    width = math.prod(rows.shape[1:])
    # not view(): a contiguous tensor may have any stride where its size is 0 or 1, zero after expand()
    return rows.as_strided((rows.shape[0], width), (width, 1)).view(torch.uint8)


def all_gather(x: Tensor, sizes: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Every rank's rows, in rank order. `sizes`: rows of each rank."""
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if out.numel() == 0:  # the same on every rank
        return out
    source, target = as_bytes(x), as_bytes(out)
    parts = target.split(list(sizes))
    if backend_for(x.device, pg) == "gloo":
        parts[pg.rank()].copy_(source)
        pending: list[Any] = [
            dist.broadcast(part, group_src=r, group=pg, async_op=True) for r, part in enumerate(parts) if len(part)
        ]
        for work in pending:
            work.wait()
    elif len(set(sizes)) == 1:
        dist.all_gather_into_tensor(target, source, group=pg)
    else:
        dist.all_gather(list(parts), source, group=pg)
    return out


def reduce_scatter(x: Tensor, sizes: Sequence[int], pg: ProcessGroup) -> Tensor:
    """The sum over ranks of this rank's share of the rows. `sizes`: rows of each rank's share."""
    own = sizes[pg.rank()]
    if x.numel() == 0:  # the same on every rank
        return x.new_empty((own, *x.shape[1:]))
    if backend_for(x.device, pg) == "gloo":
        received = all_to_all(x, sizes, [own] * pg.size(), pg)
        return sum_blocks(received.view(pg.size(), own, *x.shape[1:]))
    real = torch.view_as_real(x) if x.is_complex() else x
    out = real.new_empty((own, *real.shape[1:]))
    if len(set(sizes)) == 1:
        dist.reduce_scatter_tensor(out, real, group=pg)
    else:
        dist.reduce_scatter(out, list(real.split(list(sizes))), group=pg)
    return torch.view_as_complex(out) if x.is_complex() else out


def sum_blocks(blocks: Tensor) -> Tensor:
    """Sum over the first dimension, in its order: the same bits on every run.

    For wide dtypes adding block by block is several times faster than Tensor.sum(0); for 16-bit floats Tensor.sum is
    kept, since it accumulates in float32.
    """
    if blocks.dtype in (torch.bfloat16, torch.float16, torch.bool):
        return blocks.sum(0, dtype=blocks.dtype)
    total = blocks[0].clone() if len(blocks) == 1 else blocks[0] + blocks[1]
    for block in blocks[2:]:
        total += block
    return total


def all_reduce(x: Tensor, pg: ProcessGroup) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=pg)
    return out


def broadcast(x: Tensor, root: int, pg: ProcessGroup) -> Tensor:
    out = x.clone() if pg.rank() == root else torch.empty_like(x)
    if out.numel():
        dist.broadcast(as_bytes(out), group_src=root, group=pg)
    return out


def reduce(x: Tensor, root: int, pg: ProcessGroup) -> Tensor:
    """The sum on `root`; zeros elsewhere, where backends leave partial sums."""
    out = x.clone()
    dist.reduce(out, group_dst=root, group=pg)
    return out if pg.rank() == root else torch.zeros_like(x)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], pg: ProcessGroup) -> Tensor:
    """`send[r]` rows go to rank r, `receive[r]` rows come from it."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if math.prod(x.shape[1:]):  # the same on every rank, unlike the number of rows
        dist.all_to_all_single(as_bytes(out), as_bytes(x), list(receive), list(send), group=pg)
    return out


def small_all_gather(message: Tensor, pg: ProcessGroup) -> Tensor:
    """Equal 1-D messages of every rank, as (ranks, length)."""
    out = message.new_empty((pg.size(), message.numel()))
    dist.all_gather_into_tensor(out.view(-1), message, group=pg)
    return out
