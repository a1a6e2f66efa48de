"""Communication without autograd: the calls of torch.distributed. Each function takes contiguous rows and returns a new tensor.

Collectives that only move data send it as bytes where backends do not know the dtype, so bool, complex and float8 work
everywhere; otherwise as it is, so that profilers and the flight recorder show dtype and shape. The algorithms depend on the
backend:

- gloo: messages from rank to rank, straight into the output. Its own collectives take equal sizes only, or queue for a
  thread; messages were measured fastest for everything that moves data. A reduce_scatter is an exchange and a local sum in
  rank order. Nothing is padded. gloo sends host memory only: tensors on other devices are copied there and back.
- all others (NCCL and similar): the fused collective for equal sizes. Uneven sizes are padded to the longest for it where
  the padding is small; otherwise the list form, which is a group of broadcasts or of reductions, sends exactly the payload.

CPU tensors in a group without a CPU backend travel over its side group (groups.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import cycle
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _coalescing_manager

from unisono.collectives.groups import backend_for, is_fake_group, serving_group
from unisono.collectives.padding import copy_parts, extended, is_padded, row_bytes, without_padding

# Tags of our messages between two ranks, which no message of the user should have. They take turns: with one tag for all,
# gloo takes up to twice as long when one message directly follows another.
_TAGS = range(0x0A10, 0x0A18)
_STRIDE = 0x10  # from the tag of one tensor to that of the next in start_hop
# Backends do not add these integers. In a wider dtype the sum is the same, and it wraps around on the way back.
_SUM_DTYPES = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
# What every backend sends. torch's own collectives also take bool and complex, its messages do not.
SENT_AS_THEY_ARE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
}
_CPU = torch.device("cpu")
_turns: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def next_tag(pg: ProcessGroup) -> int:
    """Return the tag of the next messages, the same on all ranks: each of them calls this at the same points."""
    return next(_turns.setdefault(pg, cycle(_TAGS)))


def as_bytes(rows: Tensor) -> Tensor:
    """View contiguous `rows` as (rows, bytes of a row)."""
    width = math.prod(rows.shape[1:])
    # not view(): a contiguous tensor may have any stride where its size is 0 or 1, zero after expand()
    return rows.as_strided((rows.shape[0], width), (width, 1)).view(torch.uint8)


def payload(rows: Tensor) -> Tensor:
    """Return contiguous `rows` as they are sent: as bytes if backends do not know the dtype."""
    return rows if rows.dtype in SENT_AS_THEY_ARE else as_bytes(rows)


class Started(NamedTuple):
    """A collective that has begun. Nobody may touch its tensors until all works are done.

    The functions that begin one take `async_op`: whether it gets a stream of its own, if the backend has streams.
    """

    works: Sequence[dist.Work]
    finish: Callable[[], Tensor]  # returns the result, after the works
    sent: Tensor | None = None  # must stay alive as long

    def result(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.finish()


_P = ParamSpec("_P")
_R = TypeVar("_R", Tensor, Started)
_Function = Callable[Concatenate[Tensor, ProcessGroup, _P], _R]


def _on_any_device(function: _Function[_P, _R]) -> _Function[_P, _R]:
    """Let `function` take tensors on devices that the group cannot send from.

    gloo sends host memory only: a tensor on another device is copied there and back. A group without a CPU backend hands CPU
    tensors to its side group.
    """

    @wraps(function)
    def call(x: Tensor, pg: ProcessGroup, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_staged(x.device, pg):
            return function(x, serving_group(x.device, pg), *args, **kwargs)
        result = function(x.cpu(), serving_group(_CPU, pg), *args, **kwargs)
        if isinstance(result, Started):
            return Started(result.works, lambda: result.finish().to(x.device))
        return result.to(x.device)

    return call


def is_staged(device: torch.device, pg: ProcessGroup) -> bool:
    """Return whether tensors on `device` must be copied to host memory to be sent: gloo would send their device pointer."""
    if device.type == "cpu" or backend_for(device, pg) != "gloo":
        return False
    if serving_group(_CPU, pg) is pg and _CPU not in pg._device_types:
        raise RuntimeError(f"group {pg.group_name!r}: gloo cannot send tensors on {device} without a CPU group")
    return True


@_on_any_device
def start_all_gather(x: Tensor, pg: ProcessGroup, sizes: Sequence[int], *, async_op: bool = True) -> Started:
    """Begin to gather every rank's rows, in rank order. `sizes`: rows of each rank."""
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if out.numel() == 0:  # the same on every rank
        return Started((), lambda: out)
    if backend_for(x.device, pg) == "gloo":
        parts = out.split_with_sizes(list(sizes))
        works = start_exchange([x] * len(sizes), parts, pg)
        parts[pg.rank()].copy_(x)
    elif len(set(sizes)) == 1:
        works = _works(dist.all_gather_single(payload(out), payload(x), group=pg, async_op=async_op))
    elif is_padded(sizes, row_bytes(x)):
        own = extended(x, max(sizes))
        every = x.new_empty((max(sizes) * len(sizes), *x.shape[1:]))
        works = _works(dist.all_gather_single(payload(every), payload(own), group=pg, async_op=async_op))
        return Started(works, lambda: copy_parts(out, *without_padding(out, every, sizes)), own)
    else:
        parts = payload(out).split_with_sizes(list(sizes))
        works = _works(dist.all_gather(list(parts), payload(x), group=pg, async_op=async_op))
    return Started(works, lambda: out, x)


@_on_any_device
def start_reduce_scatter(
    x: Tensor, pg: ProcessGroup, sizes: Sequence[int], reduce_dtype: torch.dtype | None = None, *, async_op: bool = True
) -> Started:
    """Begin to add this rank's share of the rows over the ranks. `sizes`: rows of each rank's share."""
    own = (sizes[pg.rank()], *x.shape[1:])
    if x.numel() == 0:  # the same on every rank
        return Started((), lambda: x.new_empty(own))
    on_gloo = backend_for(x.device, pg) == "gloo"
    adds_in = sum_dtype(x, reduce_dtype)
    if adds_in != x.dtype and not (on_gloo and adds_in.itemsize > x.dtype.itemsize):  # gloo: the wider dtype is not sent
        started = start_reduce_scatter(x.to(adds_in), pg, sizes, async_op=async_op)
        return Started(started.works, lambda: started.finish().to(x.dtype))
    if on_gloo:
        shares = x.split_with_sizes(list(sizes))
        arriving = [shares[r] if r == pg.rank() else x.new_empty(own) for r in range(pg.size())]
        return Started(start_exchange(shares, arriving, pg), lambda: sum_in_order(arriving, adds_in), x)
    real = torch.view_as_real(x) if x.is_complex() else x
    rows = own[0]
    if len(set(sizes)) > 1 and is_padded(sizes, row_bytes(x)):
        rows = max(sizes)
        padded = real.new_zeros((rows * len(sizes), *real.shape[1:]))
        parts, places = without_padding(real, padded, sizes)
        real = copy_parts(padded, places, parts)
    out = real.new_empty((rows, *real.shape[1:]))
    if len(real) == rows * len(sizes):
        works = _works(dist.reduce_scatter_single(out, real, group=pg, async_op=async_op))
    else:
        works = _works(dist.reduce_scatter(out, list(real.split_with_sizes(list(sizes))), group=pg, async_op=async_op))

    def finish() -> Tensor:
        kept = out if rows == own[0] else out[: own[0]].clone()  # a view would keep the padding
        return torch.view_as_complex(kept) if x.is_complex() else kept

    return Started(works, finish, real)


def sum_in_order(blocks: Sequence[Tensor], adds_in: torch.dtype | None = None) -> Tensor:
    """Return the sum of `blocks` in their order: the same bits on every run. `adds_in`: a dtype at least as wide as theirs.

    16-bit floats are added in float32 at least.
    """
    dtype = blocks[0].dtype
    if len(blocks) == 1:
        return blocks[0].clone()
    if dtype in (torch.bfloat16, torch.float16, torch.bool) and adds_in in (dtype, torch.float32, None):
        return torch.stack(list(blocks)).sum(0, dtype=dtype)
    if adds_in not in (dtype, None):
        return sum_in_order([block.to(adds_in) for block in blocks]).to(dtype)
    total = blocks[0] + blocks[1]
    for block in blocks[2:]:
        total += block
    return total


@_on_any_device
def start_sum(x: Tensor, pg: ProcessGroup, reduce_dtype: torch.dtype | None = None, *, async_op: bool = True) -> Started:
    """Begin to add `x` over the ranks, in `reduce_dtype`."""
    out = _summands(x, reduce_dtype)
    works = _works(dist.all_reduce(out, group=pg, async_op=async_op))
    return Started(works, lambda: out if out.dtype == x.dtype else out.to(x.dtype))


def _summands(x: Tensor, reduce_dtype: torch.dtype | None) -> Tensor:
    """Return a copy of `x` in the dtype in which the ranks add."""
    dtype = sum_dtype(x, reduce_dtype)
    return x.clone() if dtype == x.dtype else x.to(dtype)  # clone takes half the time of to(copy=True)


def sum_dtype(x: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the ranks add: `reduce_dtype`, or that of `x` if the backend can add it."""
    if reduce_dtype is None or x.is_complex() or not x.is_floating_point():
        return _SUM_DTYPES.get(x.dtype, x.dtype)
    return reduce_dtype


def start_all_reduce(x: Tensor, pg: ProcessGroup) -> dist.Work:
    """Start to replace dense `x`, in place, by its sum over the ranks. Do not touch it before you have waited for the work."""
    refuse_make_fx("all_reduce")
    work = dist.all_reduce(x, group=pg, async_op=True)
    if work is None:
        raise RuntimeError(f"all_reduce: this rank is not in group {pg.group_name!r}")
    return work


@_on_any_device
def broadcast(x: Tensor, pg: ProcessGroup, root: int) -> Tensor:
    out = x.clone() if pg.rank() == root else torch.empty_like(x)
    if out.numel():
        dist.broadcast(payload(out), group_src=root, group=pg)
    return out


@_on_any_device
def reduce(x: Tensor, pg: ProcessGroup, root: int, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum on `root`, and zeros elsewhere: backends leave partial sums there."""
    out = _summands(x, reduce_dtype)
    dist.reduce(out, group_dst=root, group=pg)
    return out.to(x.dtype) if pg.rank() == root else torch.zeros_like(x)


@_on_any_device
def start_all_to_all(
    x: Tensor, pg: ProcessGroup, send: Sequence[int], receive: Sequence[int], *, async_op: bool = True
) -> Started:
    """Begin to send `send[r]` rows to rank r and to receive `receive[r]` rows from it."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if math.prod(x.shape[1:]) == 0:  # the same on every rank, unlike the number of rows
        return Started((), lambda: out)
    if backend_for(x.device, pg) == "gloo":
        leaving, arriving = x.split_with_sizes(list(send)), out.split_with_sizes(list(receive))
        works = start_exchange(leaving, arriving, pg)
        arriving[pg.rank()].copy_(leaving[pg.rank()])
    else:
        splits = list(receive), list(send)
        works = _works(dist.all_to_all_single(payload(out), payload(x), *splits, group=pg, async_op=async_op))
    return Started(works, lambda: out, x)


@_on_any_device
def point_to_point(x: Tensor, pg: ProcessGroup, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """all_to_all among few partners: shift, gather and scatter. It posts only the messages that have rows.

    The caller says so, not the sizes: a rank that happens to send to few ranks in an all_to_all does not know what others do.
    """
    if backend_for(x.device, pg) == "gloo":
        return start_all_to_all(x, pg, send, receive).result()
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if math.prod(x.shape[1:]) == 0:
        return out
    rank = pg.rank()
    leaving, arriving = payload(x).split_with_sizes(list(send)), payload(out).split_with_sizes(list(receive))
    ops = [
        *(dist.P2POp(dist.isend, part, group=pg, group_peer=r) for r, part in enumerate(leaving) if len(part) and r != rank),
        *(dist.P2POp(dist.irecv, part, group=pg, group_peer=r) for r, part in enumerate(arriving) if len(part) and r != rank),
    ]
    works = dist.batch_isend_irecv(ops) if ops else []
    if send[rank]:
        arriving[rank].copy_(leaving[rank])
    for work in works:
        work.wait()
    return out


def start_hop(leaving: Sequence[Tensor], arriving: Sequence[Tensor], pg: ProcessGroup) -> list[dist.Work]:
    """Start to send `leaving` to the next rank of the ring, and to receive `arriving` from the previous one.

    All tensors are contiguous. Do not touch them before you have waited for every returned work, which keeps them alive.
    """
    refuse_make_fx("Ring")
    target = (pg.rank() + 1) % pg.size()
    source = (pg.rank() - 1) % pg.size()
    device = (*leaving, *arriving)[0].device
    if is_staged(device, pg):
        on_host = [torch.empty_like(x, device="cpu") for x in arriving]
        works = start_hop([x.cpu() for x in leaving], on_host, serving_group(_CPU, pg))
        return [_StagedHop(works, on_host, arriving)]  # type: ignore[list-item]
    pg = serving_group(device, pg)
    if backend_for(device, pg) == "gloo":
        tag = next_tag(pg)  # also if nothing is sent, so that all ranks use the same tag
        return [
            *(pg.send([x], target, tag + _STRIDE * k) for k, x in enumerate(leaving) if x.numel()),
            *(pg.recv([x], source, tag + _STRIDE * k) for k, x in enumerate(arriving) if x.numel()),
        ]
    sends = [x for x in leaving if x.numel()]
    receives = [x for x in arriving if x.numel()]
    if not sends and not receives:
        return []
    # In one batch: if they are issued one by one, NCCL runs the send first and waits for the partner's receive.
    ops = [dist.P2POp(dist.isend, payload(x), group=pg, group_peer=target) for x in sends]
    ops += [dist.P2POp(dist.irecv, payload(x), group=pg, group_peer=source) for x in receives]
    return list(dist.batch_isend_irecv(ops))


class _StagedHop:
    """A hop through host memory."""

    def __init__(self, works: list[dist.Work], on_host: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
        self._works, self._on_host, self._arriving = works, on_host, arriving

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for target, source in zip(self._arriving, self._on_host, strict=True):
            target.copy_(source)


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


def start_exchange(leaving: Sequence[Tensor], arriving: Sequence[Tensor], pg: ProcessGroup) -> list[dist.Work]:
    """Start to send `leaving[r]` to rank r and to receive `arriving[r]` from it; any dtype. The own entry is not touched."""
    rank, size = pg.rank(), pg.size()
    tag = next_tag(pg)
    pending = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        if leaving[target].numel():
            pending.append(pg.send([leaving[target]], target, tag))
        if arriving[source].numel():
            pending.append(pg.recv([arriving[source]], source, tag))
    return pending


_NATIVE = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
_GLOO_NATIVE = 1 << 20  # bytes: beyond them an exchange and a local reduction take less time on gloo


def reduces_natively(x: Tensor, pg: ProcessGroup, op: str) -> bool:
    """Return whether reduce_natively gives what torch gives for one stacked tensor, and is the faster way to it."""
    if x.is_complex() or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False
    if op == "product" and x.dtype in (torch.bfloat16, torch.float16):
        return False  # backends round after each factor, torch once
    return backend_for(x.device, pg) != "gloo" or x.numel() * x.element_size() <= _GLOO_NATIVE


@_on_any_device
def reduce_natively(x: Tensor, pg: ProcessGroup, op: str) -> Tensor:
    """Return the max, min or product over the ranks, by the backend's own operation. NaN wins, as torch has it."""

    def reduced(out: Tensor) -> Tensor:
        dist.all_reduce(out, op=_NATIVE[op], group=pg)
        return out

    if op == "product":
        return reduced(x.to(_SUM_DTYPES.get(x.dtype, x.dtype), copy=True)).to(x.dtype)
    return with_ordered_integers(x, op, reduced)


def with_ordered_integers(x: Tensor, op: str, reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the max or min by `reduced`, which reduces a new tensor of integers: the backends' own may drop a NaN."""
    if not x.is_floating_point():
        return reduced(x.to(_SUM_DTYPES.get(x.dtype, x.dtype), copy=True)).to(x.dtype)
    integers = reduced(_as_ordered_integers(x, op))
    wide = torch.float64 if integers.dtype is torch.int64 else torch.float32
    return _flip_negative(integers).view(wide).to(x.dtype)


def _as_ordered_integers(x: Tensor, op: str) -> Tensor:
    """Return integers in the order of the floats, NaN before or after all."""
    wide = x if x.dtype is torch.float64 else x.float()
    integers = _flip_negative(wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32))
    limits = torch.iinfo(integers.dtype)
    return integers.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def _flip_negative(bits: Tensor) -> Tensor:
    """Return the bits with all but the sign inverted where they are negative. It is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)


def coalesce(begin: Callable[[], Sequence[Started]], pg: ProcessGroup) -> list[Tensor]:
    """Return the results of the fused collectives that `begin` starts: torch merges them into one launch.

    They are all of one kind, with equal sizes on all ranks.
    """
    if is_fake_group(pg):  # it launches nothing, and fake tensors do not know the merged call
        return [started.result() for started in begin()]
    with _coalescing_manager(group=pg):
        all_started = begin()  # their works are placeholders: the manager waits
    return [started.finish() for started in all_started]


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]
