"""Communication without autograd: the calls of torch.distributed. Each function takes contiguous rows and returns a new tensor.

Nothing is padded: exactly the payload is sent. Collectives that only move data send it as bytes where the backend does not
know the dtype, so bool, complex and float8 work everywhere. The algorithms depend on the backend:

- gloo: messages from rank to rank, straight into the output. Its own collectives take equal sizes only, or queue for a
  thread; messages were measured fastest for everything that moves data. A reduce_scatter is an exchange and a local sum in
  rank order.
- all others (NCCL and similar): the fused collective for equal sizes; the list form, which is a group of broadcasts or of
  reductions, for uneven ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import backend_for

# Tags of our messages between two ranks, which no message of the user should have. They take turns: with one tag for all,
# gloo takes up to twice as long when one message directly follows another.
_TAGS = range(0x0A10, 0x0A18)
_STRIDE = 0x10  # from the tag of one tensor to that of the next in start_hop
# Backends do not add these integers. In a wider dtype the sum is the same, and it wraps around on the way back.
_SUM_DTYPES = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_turns: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def as_bytes(rows: Tensor) -> Tensor:
    """View contiguous `rows` as (rows, bytes of a row)."""
    width = math.prod(rows.shape[1:])
    # not view(): a contiguous tensor may have any stride where its size is 0 or 1, zero after expand()
    return rows.as_strided((rows.shape[0], width), (width, 1)).view(torch.uint8)


def all_gather(x: Tensor, sizes: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Return every rank's rows, in rank order. `sizes`: rows of each rank."""
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if out.numel() == 0:  # the same on every rank
        return out
    if backend_for(x.device, pg) == "gloo":
        parts = out.split_with_sizes(list(sizes))
        _exchange([x] * len(sizes), parts, pg, meanwhile=lambda: parts[pg.rank()].copy_(x))
    elif len(set(sizes)) == 1:
        dist.all_gather_single(as_bytes(out), as_bytes(x), group=pg)
    else:
        dist.all_gather(list(as_bytes(out).split_with_sizes(list(sizes))), as_bytes(x), group=pg)
    return out


def reduce_scatter(x: Tensor, sizes: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Return the sum over ranks of this rank's share of the rows. `sizes`: rows of each rank's share."""
    own = (sizes[pg.rank()], *x.shape[1:])
    if x.numel() == 0:  # the same on every rank
        return x.new_empty(own)
    if x.dtype in _SUM_DTYPES:
        return reduce_scatter(x.to(_SUM_DTYPES[x.dtype]), sizes, pg).to(x.dtype)
    if backend_for(x.device, pg) == "gloo":
        shares = x.split_with_sizes(list(sizes))
        arriving = [shares[r] if r == pg.rank() else x.new_empty(own) for r in range(pg.size())]
        _exchange(shares, arriving, pg)
        return sum_in_order(arriving)
    real = torch.view_as_real(x) if x.is_complex() else x
    out = real.new_empty((own[0], *real.shape[1:]))
    if len(set(sizes)) == 1:
        dist.reduce_scatter_single(out, real, group=pg)
    else:
        dist.reduce_scatter(out, list(real.split_with_sizes(list(sizes))), group=pg)
    return torch.view_as_complex(out) if x.is_complex() else out


def sum_in_order(blocks: Sequence[Tensor]) -> Tensor:
    """Return the sum of `blocks` in their order: the same bits on every run. 16-bit floats are added in float32."""
    if len(blocks) == 1:
        return blocks[0].clone()
    if blocks[0].dtype in (torch.bfloat16, torch.float16, torch.bool):
        return torch.stack(list(blocks)).sum(0, dtype=blocks[0].dtype)
    total = blocks[0] + blocks[1]
    for block in blocks[2:]:
        total += block
    return total


def all_reduce(x: Tensor, pg: ProcessGroup) -> Tensor:
    out = x.to(_SUM_DTYPES.get(x.dtype, x.dtype), copy=True)
    dist.all_reduce(out, group=pg)
    return out.to(x.dtype)


def start_all_reduce(x: Tensor, pg: ProcessGroup) -> dist.Work:
    """Start to replace dense `x`, in place, by its sum over the ranks. Do not touch it before you have waited for the work."""
    refuse_make_fx("all_reduce")
    work = dist.all_reduce(x, group=pg, async_op=True)
    if work is None:
        raise RuntimeError(f"all_reduce: this rank is not in group {pg.group_name!r}")
    return work


def broadcast(x: Tensor, root: int, pg: ProcessGroup) -> Tensor:
    out = x.clone() if pg.rank() == root else torch.empty_like(x)
    if out.numel():
        dist.broadcast(as_bytes(out), group_src=root, group=pg)
    return out


def reduce(x: Tensor, root: int, pg: ProcessGroup) -> Tensor:
    """Return the sum on `root`, and zeros elsewhere: backends leave partial sums there."""
    out = x.to(_SUM_DTYPES.get(x.dtype, x.dtype), copy=True)
    dist.reduce(out, group_dst=root, group=pg)
    return out.to(x.dtype) if pg.rank() == root else torch.zeros_like(x)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Send `send[r]` rows to rank r and receive `receive[r]` rows from it."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if math.prod(x.shape[1:]) == 0:  # the same on every rank, unlike the number of rows
        return out
    if backend_for(x.device, pg) == "gloo":
        leaving, arriving = x.split_with_sizes(list(send)), out.split_with_sizes(list(receive))
        _exchange(leaving, arriving, pg, meanwhile=lambda: arriving[pg.rank()].copy_(leaving[pg.rank()]))
    else:
        dist.all_to_all_single(as_bytes(out), as_bytes(x), list(receive), list(send), group=pg)
    return out


def start_hop(leaving: Sequence[Tensor], arriving: Sequence[Tensor], pg: ProcessGroup) -> list[dist.Work]:
    """Start to send `leaving` to the next rank of the ring, and to receive `arriving` from the previous one.

    All tensors are contiguous. Do not touch them before you have waited for every returned work, which keeps them alive.
    """
    refuse_make_fx("Ring")
    target = (pg.rank() + 1) % pg.size()
    source = (pg.rank() - 1) % pg.size()
    if backend_for((*leaving, *arriving)[0].device, pg) == "gloo":
        tag = next(_turns.setdefault(pg, cycle(_TAGS)))  # also if nothing is sent, so that all ranks use the same tag
        return [
            *(pg.send([x], target, tag + _STRIDE * k) for k, x in enumerate(leaving) if x.numel()),
            *(pg.recv([x], source, tag + _STRIDE * k) for k, x in enumerate(arriving) if x.numel()),
        ]
    sends = [x for x in leaving if x.numel()]
    receives = [x for x in arriving if x.numel()]
    if not sends and not receives:
        return []
    # In one batch: if they are issued one by one, NCCL runs the send first and waits for the partner's receive.
    ops = [dist.P2POp(dist.isend, as_bytes(x), group=pg, group_peer=target) for x in sends]
    ops += [dist.P2POp(dist.irecv, as_bytes(x), group=pg, group_peer=source) for x in receives]
    return list(dist.batch_isend_irecv(ops))


def small_all_gather(message: Tensor, pg: ProcessGroup) -> Tensor:
    """Return the 1-D messages of all ranks, which have equal lengths, as (ranks, length)."""
    with untraced():
        return all_gather(message, [message.numel()] * pg.size(), pg).view(pg.size(), -1)


def is_traced_by_make_fx() -> bool:
    """Return whether make_fx records what is called now. Its graph would have the sends and receives, but no wait for them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def refuse_make_fx(name: str) -> None:
    if is_traced_by_make_fx():
        raise RuntimeError(f"{name}: make_fx cannot trace it: its graph would not wait for the messages. Use torch.compile")


def untraced() -> AbstractContextManager[object]:
    """Keep what is called inside out of a graph of make_fx, where its results are constants."""
    if not is_traced_by_make_fx():
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def _exchange(
    leaving: Sequence[Tensor], arriving: Sequence[Tensor], pg: ProcessGroup, meanwhile: Callable[[], object] | None = None
) -> None:
    """Send `leaving[r]` to rank r and receive `arriving[r]` from it, all at once; any dtype. The own entry is not touched."""
    rank, size = pg.rank(), pg.size()
    tag = next(_turns.setdefault(pg, cycle(_TAGS)))
    pending = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        if leaving[target].numel():
            pending.append(pg.send([leaving[target]], target, tag))
        if arriving[source].numel():
            pending.append(pg.recv([arriving[source]], source, tag))
    if meanwhile:
        meanwhile()
    for work in pending:
        work.wait()
