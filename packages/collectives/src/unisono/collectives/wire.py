"""The bare communication: no autograd here. Each kernel takes contiguous rows and returns a new tensor.

Nothing is padded: the wire carries the payload. What only moves data travels as bytes where the backend minds the dtype,
so that bool, complex and float8 move everywhere. Two sets of algorithms, by backend:

- gloo: its own collectives know equal sizes only, or queue for a thread. Messages from rank to rank, straight into the
  output, measured fastest for all that moves; a reduce_scatter is an exchange and a local sum in rank order.
- all others (NCCL and its kin): the fused collective for equal sizes; the list form, which is a group of broadcasts or
  of reductions, for uneven ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import backend_for

_TAG = 0x0A11  # our messages between two ranks, beside any that the user sends


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
    if backend_for(x.device, pg) == "gloo":
        _exchange([x] * len(sizes), out.split_with_sizes(list(sizes)), pg)
    elif len(set(sizes)) == 1:
        dist.all_gather_single(as_bytes(out), as_bytes(x), group=pg)
    else:
        dist.all_gather(list(as_bytes(out).split_with_sizes(list(sizes))), as_bytes(x), group=pg)
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
        dist.reduce_scatter_single(out, real, group=pg)
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
        if backend_for(x.device, pg) == "gloo":
            _exchange(x.split_with_sizes(list(send)), out.split_with_sizes(list(receive)), pg)
        else:
            dist.all_to_all_single(as_bytes(out), as_bytes(x), list(receive), list(send), group=pg)
    return out


def _exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], pg: ProcessGroup) -> None:
    """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, all at once; any dtype."""
    rank, size = pg.rank(), pg.size()
    pending = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        if incoming[source].numel():
            pending.append(pg.recv([incoming[source]], source, _TAG))
        if outgoing[target].numel():
            pending.append(pg.send([outgoing[target]], target, _TAG))
    incoming[rank].copy_(outgoing[rank])
    for work in pending:
        work.wait()


def small_all_gather(message: Tensor, pg: ProcessGroup) -> Tensor:
    """Equal 1-D messages of every rank, as (ranks, length)."""
    out = message.new_empty((pg.size(), message.numel()))
    dist.all_gather_single(out.view(-1), message, group=pg)
    return out
