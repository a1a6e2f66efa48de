"""What the benchmark of the collectives times, and the timing itself. Runs on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from shared_measuring import order_of_turns, time_call
from torch import Tensor

from unisono.collectives import all_gather, count_bytes, exchange_sizes

Direction = Literal["forward", "backward", "sizes"]
Lengths = Literal["equal", "skewed"]

KNOWN = "unisono, sizes known"
ASKED = "unisono, sizes asked for"
BACKWARD = "unisono, backward"
EXCHANGE = "unisono, exchange_sizes"
PADDED = "pad to the longest (the seeds)"
TORCH_NN = "torch.distributed.nn + cat"
TORCH_NN_BACKWARD = "torch.distributed.nn, backward"
NEW_OUTPUT = "all_gather_into_tensor, new output"

# What every ratio is to: torch's own call on the same total bytes, split equally, into an output that is allocated once.
# They are called by the newer names all_gather_single and reduce_scatter_single, since the older ones warn at every call.
UNITS: dict[Direction, str] = {
    "forward": "all_gather_into_tensor",
    "backward": "reduce_scatter_tensor",
    "sizes": "all_gather_into_tensor, 1 int64",
}


class Payload(NamedTuple):
    """The bytes of all ranks together. Rows are short in the small payload, so that 70/10/10/10 comes out."""

    name: str
    bytes: int
    width: int  # float32 in a row
    rounds: int

    @property
    def rows(self) -> int:
        return self.bytes // (4 * self.width)


PAYLOADS = (Payload("1 KB", 2**10, 4, 200), Payload("1 MB", 2**20, 256, 60), Payload("64 MB", 2**26, 256, 10))


@dataclass(frozen=True)
class Case:
    """One set of contenders that are timed in turn."""

    direction: Direction
    payload: Payload
    lengths: Lengths


class Contender(NamedTuple):
    call: Callable[[], Any]
    expected: Any  # what `call` must return on this rank


class Samples(NamedTuple):
    """One contender on one rank: seconds of each round, and the payload bytes that one call sends."""

    wall: list[float]
    cpu: list[float]
    sent: int


def row_counts(rows: int, world_size: int, lengths: Lengths) -> list[int]:
    """Rows of each rank: all alike, or 70 % on rank 0 and the others alike."""
    if lengths == "equal":
        return [rows // world_size] * world_size
    first, others = round(0.7 * rows), world_size - 1
    rest = rows - first
    return [first] + [rest // others + (r < rest % others) for r in range(others)]


def measure(case: Case, rounds: int) -> dict[str, Samples]:
    """Check every contender of `case`, count its bytes, then time all of them `rounds` times in turn. Runs on each rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
    contenders = contenders_of(case)
    sent = {name: check(name, contender) for name, contender in contenders.items()}
    for _ in range(max(1, rounds // 10)):
        for contender in contenders.values():
            time_call(contender.call)

    names = list(contenders)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(rounds):
        for name in order_of_turns(names, i):
            times[name].append(time_call(contenders[name].call))
    return {name: Samples([wall for wall, _ in times[name]], [cpu for _, cpu in times[name]], sent[name]) for name in names}


def check(name: str, contender: Contender) -> int:
    """The payload bytes that one call sends, once its result is found right."""
    with count_bytes() as traffic:
        result = contender.call()
    if not torch.equal(torch.as_tensor(result), torch.as_tensor(contender.expected)):
        raise RuntimeError(f"{name}: wrong result on rank {dist.get_rank()} of {dist.get_world_size()}")
    return traffic.sent


def contenders_of(case: Case) -> dict[str, Contender]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = row_counts(case.payload.rows, world_size, case.lengths)
    # The same on every rank; whole numbers, so that sums in any order are equal to the last bit.
    whole = torch.randint(-1000, 1000, (case.payload.rows, case.payload.width), dtype=torch.float32)
    own = whole.split(sizes)[rank].clone()
    if case.direction == "forward":
        return forward_contenders(whole, own, sizes)
    if case.direction == "backward":
        return backward_contenders(whole, own, sizes)
    return exchange_contenders(own, sizes)


def forward_contenders(whole: Tensor, own: Tensor, sizes: list[int]) -> dict[str, Contender]:
    share = whole.chunk(len(sizes))[dist.get_rank()].clone()
    reused = torch.empty_like(whole)
    x = own.clone().requires_grad_()

    def unit() -> Tensor:
        dist.all_gather_single(reused, share)
        return reused

    def unit_with_new_output() -> Tensor:  # as all others must; at 64 MB fresh pages may cost more than sending
        out = torch.empty_like(whole)
        dist.all_gather_single(out, share)
        return out

    calls: dict[str, Callable[[], Tensor]] = {
        UNITS["forward"]: unit,
        KNOWN: lambda: all_gather(x, sizes=sizes),
        ASKED: lambda: all_gather(x),
        NEW_OUTPUT: unit_with_new_output,
    }
    if len(set(sizes)) == 1:
        calls[TORCH_NN] = lambda: torch.cat(differentiable.all_gather(x))
    calls[PADDED] = lambda: pad_to_longest(own)
    return {name: Contender(call, whole) for name, call in calls.items()}


def backward_contenders(whole: Tensor, own: Tensor, sizes: list[int]) -> dict[str, Contender]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    grad = whole * (rank + 1)
    ranks_sum = world_size * (world_size + 1) // 2
    share = whole.chunk(world_size)[rank] * ranks_sum
    reused = torch.empty_like(share)
    x = torch.zeros_like(own).requires_grad_()

    def unit() -> Tensor:
        dist.reduce_scatter_single(reused, grad)
        return reused

    def backward_of(y: Tensor) -> Contender:
        return Contender(lambda: torch.autograd.grad(y, x, grad, retain_graph=True)[0], own * ranks_sum)

    contenders = {UNITS["backward"]: Contender(unit, share), BACKWARD: backward_of(all_gather(x, sizes=sizes))}
    if len(set(sizes)) == 1:
        contenders[TORCH_NN_BACKWARD] = backward_of(torch.cat(differentiable.all_gather(x)))
    return contenders


def exchange_contenders(own: Tensor, sizes: list[int]) -> dict[str, Contender]:
    length = torch.tensor([len(own)])
    reused = torch.empty(len(sizes), dtype=torch.int64)

    def unit() -> Tensor:
        dist.all_gather_single(reused, length)
        return reused

    return {UNITS["sizes"]: Contender(unit, sizes), EXCHANGE: Contender(lambda: exchange_sizes(own), sizes)}


def pad_to_longest(x: Tensor) -> Tensor:
    """What the seeds do: ask for the lengths, pad all to the longest, gather a list, join it, pick the real rows."""
    world_size = dist.get_world_size()
    length = torch.tensor(len(x))
    answers = [torch.empty_like(length) for _ in range(world_size)]
    dist.all_gather(answers, length)
    lengths = torch.stack(answers)
    longest = int(lengths.max())

    padded = torch.nn.functional.pad(x, (0, 0, 0, longest - len(x)))
    pieces = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(pieces, padded)

    is_real = torch.arange(longest) < lengths[:, None]
    return torch.cat(pieces).index_select(0, is_real.flatten().nonzero().flatten())
