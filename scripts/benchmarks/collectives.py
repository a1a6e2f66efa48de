"""Is all_gather of uneven lengths, with gradients, as fast as torch's own call on equal lengths?"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, require_at_least
from benchmarks.harness.measure import Seconds, take_turns
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Ratio, Results, combine_rounds
from unisono.collectives import all_gather, count_bytes, exchange_sizes

Direction = Literal["forward", "backward", "sizes"]
Lengths = Literal["equal", "skewed"]

KNOWN = "unisono, sizes known"
UNKNOWN = "unisono, sizes exchanged first"
BACKWARD = "unisono, backward"
EXCHANGE = "unisono, exchange_sizes"
PADDED = "pad to the longest (our predecessors)"
# Every ratio is to torch's own call on the same total bytes, split equally, into an output that is allocated once.
# The code calls it by the newer names all_gather_single and reduce_scatter_single, since the older ones warn at every call.
UNITS: dict[Direction, str] = {
    "forward": "all_gather_into_tensor",
    "backward": "reduce_scatter_tensor",
    "sizes": "all_gather_into_tensor, 1 int64",
}
HEADINGS: dict[Direction, str] = {
    "forward": "Forward: all_gather",
    "backward": "Backward of all_gather",
    "sizes": "Exchange of sizes",
}


class Payload(NamedTuple):
    """The bytes of all ranks together. Rows of the small payload are short, so that 70 % of them is a whole number."""

    name: str
    bytes: int
    width: int  # float32 numbers in a row
    rounds: int

    @property
    def rows(self) -> int:
        return self.bytes // (4 * self.width)


PAYLOADS = (Payload("1 KB", 2**10, 4, 200), Payload("1 MB", 2**20, 256, 60), Payload("64 MB", 2**26, 256, 10))


class Workload(NamedTuple):
    direction: Direction
    payload: Payload
    lengths: Lengths


WORKLOADS = [
    *(Workload("forward", payload, lengths) for payload in PAYLOADS for lengths in ("equal", "skewed")),
    *(Workload("backward", payload, lengths) for payload in PAYLOADS for lengths in ("equal", "skewed")),
    Workload("sizes", PAYLOADS[0], "skewed"),
]


@dataclass(frozen=True)
class Collectives(Benchmark):
    """Time unisono.collectives against torch's own collectives and against padding to the longest.

    Real gloo processes on this machine, one thread each; 1 KB, 1 MB and 64 MB of float32 in all; equal and skewed lengths.
    All contenders of a workload take turns in every round, and each is compared with torch's own call in the same round.
    Takes some minutes: leave the machine alone. --quick runs a tenth of the rounds.
    """

    world_sizes: tuple[int, ...] = (2, 4)
    """Numbers of ranks. Each must divide 64, so that the payloads split equally."""

    title = "the collectives"
    plot_title = "Collectives on gloo: time as a ratio to torch's own call (shorter is faster, 1 is equal)"
    needs_linux = False

    def validate(self) -> None:
        require_at_least(2, world_sizes=self.world_sizes)
        if any(64 % size for size in self.world_sizes):
            raise SystemExit(f"--world-sizes {self.world_sizes}: each must divide 64, so that the payloads split equally")

    def run(self, ranks: Ranks) -> list[Measurement]:
        measurements = []
        ranks.expect(len(self.world_sizes) * len(WORKLOADS))
        for world_size in self.world_sizes:
            for work in WORKLOADS:
                direction, payload, lengths = work
                rounds = max(2, payload.rounds // 10) if self.quick else payload.rounds
                case = f"{world_size} ranks, {direction}, {payload.name}, {lengths}"
                found = ranks.run(case, world_size, measure, work, rounds, fresh=False)
                seconds = [rank_seconds for rank_seconds, _ in found]
                about = {"ranks": world_size, "direction": direction, "payload": payload.name, "lengths": lengths}
                for name in seconds[0]:
                    bytes_sent = [sent[name] for _, sent in found]
                    measurements.append(combine_rounds(case, name, seconds, **about, bytes_sent=bytes_sent))
        return measurements

    def sections(self, results: Results) -> list[Section]:
        columns = [
            Column("payload", lambda m: m["payload"]),
            Column("lengths", lambda m: m["lengths"]),
            Column("contender", lambda m: m.contender),
            Column("ratio", lambda m: ratio(results, m), "{:.2f}", "ratio", plot="ratio"),
            Column("median ms", lambda m: m.wall_ms, "{:.3f}"),
            Column("CPU ms", lambda m: m["ranks"] * m.cpu_ms, "{:.3f}"),
            Column("sent, mean", lambda m: float(np.mean(m["bytes_sent"])), "{:,.0f}", in_terminal=False),
            Column("sent, largest", lambda m: max(m["bytes_sent"]), "{:,}", in_terminal=False),
        ]
        sections = []
        for direction, heading in HEADINGS.items():
            for size in self.world_sizes:
                rows = [m for m in results.measurements if (m["direction"], m["ranks"]) == (direction, size)]
                sections.append(Section(f"{heading}, {size} ranks", columns, rows, label=label))
        return sections

    def targets(self, results: Results) -> list[Target]:
        def worst(contender: str, payload: str) -> tuple[float, str]:
            found = [m for m in results.by(contender) if m["payload"] == payload]
            return max((ratio(results, m).median, describe(m)) for m in found)

        targets = []
        for name in (payload.name for payload in PAYLOADS):
            limit = 1.3 if name == "1 KB" else 1.0
            targets.append(Target.at_most(limit, f"all_gather, sizes known, {name}", *worst(KNOWN, name)))
        for name in (payload.name for payload in PAYLOADS):
            targets.append(Target.at_most(1.0, f"backward of all_gather, {name}", *worst(BACKWARD, name)))
        targets.append(Target.at_most(1.3, "exchange of sizes", *worst(EXCHANGE, "1 KB")))
        speedups = []  # of the two that have to find out the sizes
        for ours in results.by(UNKNOWN):
            padded = results.find(ours.case, PADDED)
            if padded and ours["lengths"] == "skewed" and ours["payload"] == "64 MB":
                speedups.append((float(np.median(padded.wall / ours.wall)), describe(ours)))
        targets.append(Target.at_least(4, "speed against our predecessors' algorithm, 64 MB skewed", *min(speedups)))
        return targets


def ratio(results: Results, m: Measurement) -> Ratio:
    unit = results.find(m.case, UNITS[m["direction"]])
    assert unit is not None
    return Ratio.quartiles(m.wall / unit.wall)


def label(m: Measurement) -> str:
    return f"{m['payload']}, {m['lengths']}: {m.contender}"


def describe(m: Measurement) -> str:
    return f"{m['ranks']} ranks" if m["direction"] == "sizes" else f"{m['ranks']} ranks, {m['lengths']}"


# What follows runs on the ranks.


class Contender(NamedTuple):
    call: Callable[[], Any]
    expected: Any  # what `call` must return on this rank


def measure(work: Workload, rounds: int) -> tuple[dict[str, list[Seconds]], dict[str, int]]:
    """Check every contender and count the bytes that it sends, then time all of them in turns."""
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
    contenders = make_contenders(work)
    sent = {name: check(name, contender) for name, contender in contenders.items()}
    calls = {name: contender.call for name, contender in contenders.items()}
    return take_turns(calls, range(rounds), warm_up=max(1, rounds // 10)), sent


def check(name: str, contender: Contender) -> int:
    """Return the payload bytes that one call sends. Raise if its result is wrong."""
    with count_bytes() as traffic:
        result = contender.call()
    if not torch.equal(torch.as_tensor(result), torch.as_tensor(contender.expected)):
        raise RuntimeError(f"{name}: wrong result on rank {dist.get_rank()} of {dist.get_world_size()}")
    return traffic.sent


def row_counts(rows: int, world_size: int, lengths: Lengths) -> list[int]:
    """Return the rows of each rank: the same number, or 70 % on rank 0 and the rest split equally."""
    if lengths == "equal":
        return [rows // world_size] * world_size
    first = round(0.7 * rows)
    others = world_size - 1
    rest = rows - first
    return [first] + [rest // others + (r < rest % others) for r in range(others)]


def make_contenders(work: Workload) -> dict[str, Contender]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = row_counts(work.payload.rows, world_size, work.lengths)
    # The same on every rank; whole numbers, so that sums in any order are equal to the last bit.
    whole = torch.randint(-1000, 1000, (work.payload.rows, work.payload.width), dtype=torch.float32)
    own = whole.split(sizes)[rank].clone()
    if work.direction == "forward":
        return forward_contenders(whole, own, sizes)
    if work.direction == "backward":
        return backward_contenders(whole, own, sizes)
    return exchange_contenders(own, sizes)


def forward_contenders(whole: Tensor, own: Tensor, sizes: Sequence[int]) -> dict[str, Contender]:
    share = whole.chunk(len(sizes))[dist.get_rank()].clone()
    reused = torch.empty_like(whole)
    x = own.clone().requires_grad_()

    def gather_into(out: Tensor) -> Tensor:
        dist.all_gather_single(out, share)
        return out

    calls: dict[str, Callable[[], Tensor]] = {
        UNITS["forward"]: lambda: gather_into(reused),
        KNOWN: lambda: all_gather(x, sizes=sizes),
        UNKNOWN: lambda: all_gather(x),
        # All others must allocate, too; at 64 MB fresh pages may cost more than sending.
        f"{UNITS['forward']}, new output": lambda: gather_into(torch.empty_like(whole)),
    }
    if len(set(sizes)) == 1:
        calls["torch.distributed.nn + cat"] = lambda: torch.cat(differentiable.all_gather(x))
    calls[PADDED] = lambda: pad_to_longest(own)
    return {name: Contender(call, whole) for name, call in calls.items()}


def backward_contenders(whole: Tensor, own: Tensor, sizes: Sequence[int]) -> dict[str, Contender]:
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
        contenders["torch.distributed.nn, backward"] = backward_of(torch.cat(differentiable.all_gather(x)))
    return contenders


def exchange_contenders(own: Tensor, sizes: Sequence[int]) -> dict[str, Contender]:
    length = torch.tensor([len(own)])
    reused = torch.empty(len(sizes), dtype=torch.int64)

    def unit() -> Tensor:
        dist.all_gather_single(reused, length)
        return reused

    return {UNITS["sizes"]: Contender(unit, sizes), EXCHANGE: Contender(lambda: exchange_sizes(own), sizes)}


def pad_to_longest(x: Tensor) -> Tensor:
    """Do what our predecessors do: gather the lengths, pad all to the longest, gather a list, join it, select the real rows."""
    world_size = dist.get_world_size()
    length = torch.tensor(len(x))
    gathered = [torch.empty_like(length) for _ in range(world_size)]
    dist.all_gather(gathered, length)
    lengths = torch.stack(gathered)
    longest = int(lengths.max())

    padded = torch.nn.functional.pad(x, (0, 0, 0, longest - len(x)))
    pieces = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(pieces, padded)

    is_real = torch.arange(longest) < lengths[:, None]
    return torch.cat(pieces).index_select(0, is_real.flatten().nonzero().flatten())
