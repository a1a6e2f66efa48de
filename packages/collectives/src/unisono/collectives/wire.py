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

# Tags of our messages between two ranks, which no message of the user should have. They take turns: with one tag for all,
# gloo takes up to twice as long when one message directly follows another.
_TAGS = range(0x0A10, 0x0A18)
_STRIDE = 0x10  # from the tag of one tensor to that of the next in start_hop
# Backends do not add these integers. In a wider dtype the sum is the same, and it wraps around on the way back.
_SUM_DTYPES = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
# What every backend sends. torch's own collectives also take bool and complex, its messages do not.
_SENT_AS_THEY_ARE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
}
_RADIX = 4  # up to so many ranks, a small all_gather is one round of direct messages
# Uneven sizes are padded from so many ranks on, if that sends at most 1.5 times the rows, and on average at most so many
# bytes more for each rank: a broadcast of one rank's part takes some 20 us, in which 50 GB/s move 1 MB.
_PADDED_FROM = 8
_PADDING_BYTES = 1 << 20
_CPU = torch.device("cpu")
_turns: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def as_bytes(rows: Tensor) -> Tensor:
    """View contiguous `rows` as (rows, bytes of a row)."""
    width = math.prod(rows.shape[1:])
    # not view(): a contiguous tensor may have any stride where its size is 0 or 1, zero after expand()
    return rows.as_strided((rows.shape[0], width), (width, 1)).view(torch.uint8)


def payload(rows: Tensor) -> Tensor:
    """Return contiguous `rows` as they are sent: as bytes if backends do not know the dtype."""
    return rows if rows.dtype in _SENT_AS_THEY_ARE else as_bytes(rows)


class Started(NamedTuple):
    """A collective that has begun. Nobody may touch its tensors, which `finish` keeps alive, until all works are done."""

    works: Sequence[dist.Work]
    finish: Callable[[], Tensor]

    def result(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.finish()


_P = ParamSpec("_P")
_R = TypeVar("_R", Tensor, Started)


def _on_any_device(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """Let `function`, one of whose arguments is a group, take tensors on devices that this group cannot send from.

    gloo sends host memory only: a tensor on another device is copied there and back. A group without a CPU backend hands CPU
    tensors to its side group.
    """

    @wraps(function)
    def call(x: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        place, pg = next((k, arg) for k, arg in enumerate(args) if isinstance(arg, ProcessGroup))
        on_host = is_staged(x.device, pg)
        serving = serving_group(_CPU if on_host else x.device, pg)
        if serving is pg and not on_host:
            return function(x, *args, **kwargs)
        others = list(args)
        others[place] = serving
        if not on_host:
            return function(x, *others, **kwargs)  # type: ignore[arg-type]
        result = function(x.cpu(), *others, **kwargs)  # type: ignore[arg-type]
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


def all_gather(x: Tensor, sizes: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Return every rank's rows, in rank order. `sizes`: rows of each rank."""
    return start_gather(x, sizes, pg, async_op=False).result()


@_on_any_device
def start_gather(x: Tensor, sizes: Sequence[int], pg: ProcessGroup, *, async_op: bool = True) -> Started:
    """Begin what all_gather does. `async_op`: on a stream of its own, if the backend has streams."""
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if out.numel() == 0:  # the same on every rank
        return Started((), lambda: out)
    if backend_for(x.device, pg) == "gloo":
        parts = out.split_with_sizes(list(sizes))
        works = _start_exchange([x] * len(sizes), parts, pg)
        parts[pg.rank()].copy_(x)
    elif len(set(sizes)) == 1:
        works = _works(dist.all_gather_single(payload(out), payload(x), group=pg, async_op=async_op))
    elif is_padded(sizes, _row_bytes(x)):
        extended = _extended(x, max(sizes))
        every = x.new_empty((max(sizes) * len(sizes), *x.shape[1:]))
        works = _works(dist.all_gather_single(payload(every), payload(extended), group=pg, async_op=async_op))
        return Started(works, lambda: _keeping(extended, _copy_parts(out, *_without_padding(out, every, sizes))))
    else:
        parts = payload(out).split_with_sizes(list(sizes))
        works = _works(dist.all_gather(list(parts), payload(x), group=pg, async_op=async_op))
    return Started(works, lambda: _keeping(x, out))


def is_padded(sizes: Sequence[int], row_bytes: int) -> bool:
    """Return whether uneven parts are padded to the longest, for the fused collective of NCCL and similar backends.

    Otherwise each rank's part is a broadcast or a reduction of its own, whose number of steps grows with the ranks.
    """
    size, total = len(sizes), sum(sizes)
    padding = size * max(sizes) - total
    return size >= _PADDED_FROM and 2 * padding <= total and padding * row_bytes <= size * _PADDING_BYTES


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.dtype.itemsize


def _extended(x: Tensor, length: int) -> Tensor:
    """Return `x` with rows of zeros behind it."""
    if len(x) == length:
        return x
    out = x.new_zeros((length, *x.shape[1:]))
    out[: len(x)] = x
    return out


def _without_padding(packed: Tensor, padded: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
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


def _copy_parts(whole: Tensor, into: list[Tensor], source: list[Tensor]) -> Tensor:
    """Copy each part of `source` to its place in `whole`, in few kernels; an index would have to be sent to the device."""
    pairs = [(a, b) for a, b in zip(into, source, strict=True) if a.numel()]
    torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
    return whole


def reduce_scatter(x: Tensor, sizes: Sequence[int], pg: ProcessGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over ranks of this rank's share of the rows. `sizes`: rows of each rank's share."""
    return start_reduce_scatter(x, sizes, pg, reduce_dtype, async_op=False).result()


@_on_any_device
def start_reduce_scatter(
    x: Tensor, sizes: Sequence[int], pg: ProcessGroup, reduce_dtype: torch.dtype | None = None, *, async_op: bool = True
) -> Started:
    """Begin what reduce_scatter does."""
    own = (sizes[pg.rank()], *x.shape[1:])
    if x.numel() == 0:  # the same on every rank
        return Started((), lambda: x.new_empty(own))
    on_gloo = backend_for(x.device, pg) == "gloo"
    adds_in = sum_dtype(x, reduce_dtype)
    if adds_in != x.dtype and not (on_gloo and adds_in.itemsize > x.dtype.itemsize):  # gloo: the wider dtype is not sent
        started = start_reduce_scatter(x.to(adds_in), sizes, pg, async_op=async_op)
        return Started(started.works, lambda: started.finish().to(x.dtype))
    if on_gloo:
        shares = x.split_with_sizes(list(sizes))
        arriving = [shares[r] if r == pg.rank() else x.new_empty(own) for r in range(pg.size())]
        return Started(_start_exchange(shares, arriving, pg), lambda: sum_in_order(arriving, adds_in))
    real = torch.view_as_real(x) if x.is_complex() else x
    rows = own[0]
    if len(set(sizes)) > 1 and is_padded(sizes, _row_bytes(x)):
        rows = max(sizes)
        padded = real.new_zeros((rows * len(sizes), *real.shape[1:]))
        parts, places = _without_padding(real, padded, sizes)
        real = _copy_parts(padded, places, parts)
    out = real.new_empty((rows, *real.shape[1:]))
    if len(real) == rows * len(sizes):
        works = _works(dist.reduce_scatter_single(out, real, group=pg, async_op=async_op))
    else:
        works = _works(dist.reduce_scatter(out, list(real.split_with_sizes(list(sizes))), group=pg, async_op=async_op))

    def finish() -> Tensor:
        kept = out if rows == own[0] else out[: own[0]].clone()  # a view would keep the padding
        return _keeping(real, torch.view_as_complex(kept) if x.is_complex() else kept)

    return Started(works, finish)


def sum_in_order(blocks: Sequence[Tensor], adds_in: torch.dtype | None = None) -> Tensor:
    """Return the sum of `blocks` in their order: the same bits on every run. `adds_in`: a dtype at least as wide as theirs.

    16-bit floats are added in float32 at least.
    """
    dtype = blocks[0].dtype
    if len(blocks) == 1:
        return blocks[0].clone()
    if dtype in (torch.bfloat16, torch.float16, torch.bool) and adds_in in (dtype, torch.float32, None):
        return torch.stack(list(blocks)).sum(0, dtype=dtype)
    wide = adds_in or dtype
    total = blocks[0].to(wide) + blocks[1].to(wide)
    for block in blocks[2:]:
        total += block.to(wide)
    return total.to(dtype)


def all_reduce(x: Tensor, pg: ProcessGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over ranks, added in `reduce_dtype`."""
    return start_sum(x, pg, reduce_dtype, async_op=False).result()


@_on_any_device
def start_sum(x: Tensor, pg: ProcessGroup, reduce_dtype: torch.dtype | None = None, *, async_op: bool = True) -> Started:
    """Begin what all_reduce does."""
    out = x.to(sum_dtype(x, reduce_dtype), copy=True)
    return Started(_works(dist.all_reduce(out, group=pg, async_op=async_op)), lambda: out.to(x.dtype))


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
def broadcast(x: Tensor, root: int, pg: ProcessGroup) -> Tensor:
    out = x.clone() if pg.rank() == root else torch.empty_like(x)
    if out.numel():
        dist.broadcast(payload(out), group_src=root, group=pg)
    return out


@_on_any_device
def reduce(x: Tensor, root: int, pg: ProcessGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum on `root`, and zeros elsewhere: backends leave partial sums there."""
    out = x.to(sum_dtype(x, reduce_dtype), copy=True)
    dist.reduce(out, group_dst=root, group=pg)
    return out.to(x.dtype) if pg.rank() == root else torch.zeros_like(x)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], pg: ProcessGroup) -> Tensor:
    """Send `send[r]` rows to rank r and receive `receive[r]` rows from it."""
    return start_all_to_all(x, send, receive, pg, async_op=False).result()


@_on_any_device
def start_all_to_all(
    x: Tensor, send: Sequence[int], receive: Sequence[int], pg: ProcessGroup, *, async_op: bool = True
) -> Started:
    """Begin what all_to_all does."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if math.prod(x.shape[1:]) == 0:  # the same on every rank, unlike the number of rows
        return Started((), lambda: out)
    if backend_for(x.device, pg) == "gloo":
        leaving, arriving = x.split_with_sizes(list(send)), out.split_with_sizes(list(receive))
        works = _start_exchange(leaving, arriving, pg)
        arriving[pg.rank()].copy_(leaving[pg.rank()])
    else:
        splits = list(receive), list(send)
        works = _works(dist.all_to_all_single(payload(out), payload(x), *splits, group=pg, async_op=async_op))
    return Started(works, lambda: _keeping(x, out))


@_on_any_device
def point_to_point(x: Tensor, send: Sequence[int], receive: Sequence[int], pg: ProcessGroup) -> Tensor:
    """all_to_all among few partners: shift, gather and scatter. It posts only the messages that have rows.

    The caller says so, not the sizes: a rank that happens to send to few ranks in an all_to_all does not know what others do.
    """
    if backend_for(x.device, pg) == "gloo":
        return all_to_all(x, send, receive, pg)
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


def small_all_gather(message: Tensor, pg: ProcessGroup) -> Tensor:
    """Return the 1-D messages of all ranks, which have equal lengths, as (ranks, length)."""
    return start_small_all_gather(message, pg)()


def start_small_all_gather(message: Tensor, pg: ProcessGroup) -> Callable[[], Tensor]:
    """Start small_all_gather. Call the result, once, to wait for the messages of all ranks and to get them."""
    pg = serving_group(message.device, pg)
    with untraced():
        rounds = _all_gather_rounds(message, pg)
        next(rounds)  # starts the first round

    def wait() -> Tensor:
        with untraced():
            return next(rounds)

    return wait


def _all_gather_rounds(message: Tensor, pg: ProcessGroup) -> Iterator[Tensor]:
    """Yield twice: when the first messages are on their way, and, after the last ones, the messages of all ranks.

    On gloo, up to four ranks exchange direct messages. From there on this is Bruck's algorithm: in each round a rank sends
    all that it has to three others and so has four times as much. That is 15 messages in five rounds for 1,024 ranks, where
    gloo's own all_gather takes 1,023 steps one after another, and direct messages to all take 1,023 calls.
    """
    rank, size = pg.rank(), pg.size()
    if is_staged(message.device, pg) or backend_for(message.device, pg) != "gloo":
        out = message.new_empty((size, message.numel()))
        work = dist.all_gather_single(out.view(-1), message, group=pg, async_op=True)
        yield out
        if work is not None:
            work.wait()
        yield out
        return
    if size <= _RADIX:
        out = message.new_empty((size, message.numel()))
        rows = out.unbind()
        works = _start_exchange([message] * size, rows, pg)
        rows[rank].copy_(message)
        yield out
        for work in works:
            work.wait()
        yield out
        return
    tag = next(_turns.setdefault(pg, cycle(_TAGS)))
    blocks = message.new_empty((size, message.numel()))  # those of this rank and of the ranks behind it, in this order
    blocks[0] = message
    known = 1
    while known < size:
        pending = []
        for first in range(known, min(_RADIX * known, size), known):
            count = min(known, size - first)
            pending.append(pg.send([blocks[:count]], (rank - first) % size, tag))
            pending.append(pg.recv([blocks[first : first + count]], (rank + first) % size, tag))
        if known == 1:
            yield blocks
        for work in pending:
            work.wait()
        known *= _RADIX
    yield blocks.roll(rank, 0)


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


def _start_exchange(leaving: Sequence[Tensor], arriving: Sequence[Tensor], pg: ProcessGroup) -> list[dist.Work]:
    """Start to send `leaving[r]` to rank r and to receive `arriving[r]` from it; any dtype. The own entry is not touched."""
    rank, size = pg.rank(), pg.size()
    tag = next(_turns.setdefault(pg, cycle(_TAGS)))
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


def reduces_natively(x: Tensor, op: str, pg: ProcessGroup) -> bool:
    """Return whether reduce_natively gives what torch gives for one stacked tensor, and is the faster way to it."""
    if x.is_complex() or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False
    if op == "product" and x.dtype in (torch.bfloat16, torch.float16):
        return False  # backends round after each factor, torch once
    return backend_for(x.device, pg) != "gloo" or x.numel() * x.element_size() <= _GLOO_NATIVE


@_on_any_device
def reduce_natively(x: Tensor, op: str, pg: ProcessGroup) -> Tensor:
    """Return the max, min or product over the ranks, by the backend's own operation. NaN wins, as torch has it."""
    ordered = x.is_floating_point() and op != "product"
    out = _as_ordered_integers(x, op) if ordered else x.to(_SUM_DTYPES.get(x.dtype, x.dtype), copy=True)
    dist.all_reduce(out, op=_NATIVE[op], group=pg)
    if not ordered:
        return out.to(x.dtype)
    wide = torch.float64 if out.dtype is torch.int64 else torch.float32
    return _flip_negative(out).view(wide).to(x.dtype)


def _as_ordered_integers(x: Tensor, op: str) -> Tensor:
    """Return integers in the order of the floats, NaN before or after all: the backends' max and min may drop a NaN."""
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


def _keeping(x: Tensor, out: Tensor) -> Tensor:
    """Return `out`. Whoever holds this call holds `x`, too, which is being sent."""
    return out
