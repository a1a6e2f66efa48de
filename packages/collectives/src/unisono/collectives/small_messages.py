"""small_all_gather: the messages of a few integers in which ranks tell each other their sizes and whether they agree."""

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import backend_for, serving_group
from unisono.collectives.wire import is_staged, next_tag, start_exchange, untraced

_RADIX = 4  # up to so many ranks, a small all_gather is one round of direct messages


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
        works = start_exchange([message] * size, rows, pg)
        rows[rank].copy_(message)
        yield out
        for work in works:
            work.wait()
        yield out
        return
    tag = next_tag(pg)
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
