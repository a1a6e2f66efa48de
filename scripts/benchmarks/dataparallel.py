"""Are scatter, gather and replicas as fast as torch.nn.parallel's, and is GradientSync as fast as DDP?"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, replicate, scatter_gather

from benchmarks.harness.benchmark import Benchmark, Column, Section, Target
from benchmarks.harness.measure import Prepared, Seconds, take_turns
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Results, combine_rounds
from unisono.dataparallel import GradientSync, ReplicaSet, broadcast, gather, reduce_add, scatter, sync_gradients
from unisono.dataparallel.replicas import Replicas

TORCH = "torch.nn.parallel"
UNISONO = "unisono"
BARE = "tensor_split or cat alone"
DDP = "DDP"
SYNC = "GradientSync"
OVERLAP = "GradientSync.overlap"
COPIES = "copies"
CPUS = ["cpu"] * 4
LEAVES = {"1 leaf": 1, "8 leaves": 8, "64 leaves": 64}


@dataclass(frozen=True)
class DataParallel(Benchmark):
    """Time unisono.dataparallel against torch.nn.parallel in one process, and against DDP on two ranks.

    One process: scatter, gather and the making of replicas on CPUs, in turns with torch's own code, whose CUDA-only calls
    are replaced by tensor_split and cat; and the number of copies to four devices, counted on the pretended devices of
    tests/dataparallel (needs a C++ compiler). Two ranks with gloo: the time that syncing adds to a backward pass which
    itself computes almost nothing. Takes two minutes: leave the machine alone. --quick runs a tenth of the rounds.
    """

    title = "dataparallel"
    plot_title = "Time as a ratio to torch.nn.parallel and to DDP (shorter is faster, 1 is equal)"
    needs_linux = False

    def is_ours(self, contender: str) -> bool:
        return contender in (UNISONO, SYNC, OVERLAP, "sync_gradients")

    def run(self, ranks: Ranks) -> list[Measurement]:
        ranks.expect(2 + len(MODELS))
        measurements = []
        [cases] = ranks.run("one process", 1, time_one_process, self.quick)
        for name, sizes in MODELS.items():
            # of both ranks, which wait for each other, the first
            cases |= ranks.run(f"gradient sync, {name}", 2, time_sync, name, sizes, self.quick)[0]
        for case, seconds in cases.items():
            measurements += [combine_rounds(case, name, [seconds]) for name in seconds]
        # In a process of its own: the pretended devices must exist before the first backward.
        [counts] = ranks.run("copies", 1, count_copies)
        return measurements + [Measurement(COPIES, call, numbers=numbers) for call, numbers in counts.items()]

    def sections(self, results: Results) -> list[Section]:
        time = [
            Column("case", lambda m: m.case),
            Column("contender", lambda m: m.contender),
            Column("ratio", lambda m: ratio(results, m), "{:.2f}", "ratio", plot="ratio"),
            Column("ratio of the fastest fifths", lambda m: ratio(results, m, 0.2), "{:.2f}", "ratio_of_fastest_fifths"),
            Column("median µs", lambda m: 1e3 * m.wall_ms, "{:,.1f}"),
        ]
        copies = [
            Column("call", lambda m: m.contender),
            Column("tensors", lambda m: m["tensors"]),
            Column("copies", lambda m: m["copies"]),
            Column("bytes", lambda m: m["bytes"], "{:,}"),
            Column("allocations on devices", lambda m: m["allocations"]),
        ]
        counts = results.of(COPIES)
        timed = [m for m in results.measurements if m.is_timed]

        def section(heading: str, *, is_sync: bool) -> Section:
            rows = [m for m in timed if ("sync" in m.case) == is_sync]
            return Section(heading, time, rows, label=lambda m: f"{m.case}: {m.contender}")

        return [
            section("Time in one process: scatter, gather, replicas", is_sync=False),
            section("Time on two ranks: gradient sync", is_sync=True),
            Section(
                "Copies, as counted by four asynchronous devices",
                copies,
                counts,
                before="" if counts else "Not counted: there is no C++ compiler.",
            ),
        ]

    def targets(self, results: Results) -> list[Target]:
        def worst(word: str, contender: str) -> tuple[float, str]:
            return max((ratio(results, m), f"{m.case}, {contender}") for m in results.by(contender) if word in m.case)

        def further_leaf(call: str) -> tuple[float, str]:
            """Compare the cost of each leaf after the first."""
            ours, theirs = ([m.wall_ms for m in results.by(name) if m.case.startswith(call)] for name in (UNISONO, TORCH))
            return (ours[-1] - ours[0]) / (theirs[-1] - theirs[0]), "from 1 leaf to 64"

        return [
            Target.at_most(1.0, "scatter, each leaf, against torch.nn.parallel", *further_leaf("scatter")),
            Target.at_most(1.0, "gather, each leaf, against torch.nn.parallel", *further_leaf("gather")),
            Target.at_most(1.0, "replicas against torch.nn.parallel", *worst("replicas", UNISONO)),
            Target.at_most(1.05, "GradientSync against DDP's communication", *worst("gradient sync", SYNC)),
            Target.at_most(1.05, "overlap() against DDP's communication", *worst("gradient sync", OVERLAP)),
        ]


def ratio(results: Results, m: Measurement, quantile: float = 0.5) -> float:
    unit = results.find(m.case, DDP if "sync" in m.case else TORCH)
    assert unit is not None
    return float(np.quantile(m.wall, quantile) / np.quantile(unit.wall, quantile))


# What follows runs on the ranks. First, one process. torch.nn.parallel rejects CPUs, so its own code is timed with its CUDA
# calls replaced by the cheapest calls that do the same on CPUs.


class CpuScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target_gpus: Any, chunk_sizes: Any, dim: int, x: Tensor) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return x.tensor_split(len(target_gpus), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, torch.cat(grads, ctx.dim)


class CpuGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target_device: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.sizes, ctx.dim = [part.size(dim) for part in parts], dim
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *grad.split(ctx.sizes, ctx.dim)


@contextmanager
def torch_on_cpus() -> Iterator[None]:
    def copies(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [list(tensors) for _ in devices]

    with (
        mock.patch.object(scatter_gather, "Scatter", CpuScatter),
        mock.patch.object(scatter_gather, "Gather", CpuGather),
        mock.patch.object(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies),
    ):
        yield


def time_one_process(quick: bool) -> dict[str, dict[str, list[Seconds]]]:
    torch.set_num_threads(1)
    rounds = range(30 if quick else 300)
    seconds = {}
    with torch_on_cpus():
        for name, number in LEAVES.items():
            tree = {f"leaf {k}": torch.randn(64, 8) for k in range(number)}
            parts = scatter(tree, CPUS)
            scatters = {
                TORCH: lambda tree=tree: scatter_gather.scatter(tree, [0, 1, 2, 3]),
                BARE: lambda tree=tree: [x.tensor_split(4) for x in tree.values()],
                UNISONO: lambda tree=tree: scatter(tree, CPUS),
            }
            gathers = {
                TORCH: lambda parts=parts: scatter_gather.gather(parts, 0),
                BARE: lambda parts=parts: [torch.cat(each) for each in zip(*(part.values() for part in parts), strict=True)],
                UNISONO: lambda parts=parts: gather(parts, "cpu"),
            }
            seconds[f"scatter to 4, {name}"] = take_turns(scatters, rounds, warm_up=5)
            seconds[f"gather of 4, {name}"] = take_turns(gathers, rounds, warm_up=5)
        seconds |= time_replicas(rounds[: len(rounds) // 3])
    return seconds


def time_replicas(rounds: range) -> dict[str, dict[str, list[Seconds]]]:
    """Time what a call costs before any replica computes."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).requires_grad_(False).eval()
    replicas = Replicas(module, [torch.device("cpu")] * 4, 2**20)

    def make_ours() -> None:
        replicas.prepare(range(4))
        for i in range(4):
            replicas.call(i, lambda module: module)
        replicas.release()

    calls = {TORCH: lambda: replicate(module, [0, 1, 2, 3]), UNISONO: make_ours}
    return {f"4 replicas of {len(list(module.modules()))} modules": take_turns(calls, rounds, warm_up=5)}


def count_copies() -> dict[str, dict[str, Any]]:
    """Return what four pretended devices count in each call; nothing if there is no compiler to build them."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.dataparallel import pretend_device

    try:
        pretend_device.load()
    except pretend_device.NoCompilerError:
        return {}
    pretend_device.set_available(True)
    devices = [f"pretend:{k}" for k in range(4)]
    module = nn.Sequential(*[nn.Linear(32, 32) for _ in range(50)])
    replicas = ReplicaSet(module.eval(), devices, output_device="cpu")
    batch = {"x": torch.randn(64, 32), "y": torch.arange(64), "mask": torch.ones(64, 1)}
    state: dict[str, Any] = {}
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("scatter to 4 devices", "3"): lambda: state.update(parts=scatter(batch, devices)),
        ("gather from 4 devices to the host", "3 times 4"): lambda: gather(state["parts"], "cpu"),
        ("broadcast to 4 devices", "100"): lambda: state.update(rows=broadcast(list(module.parameters()), devices)),
        ("reduce_add on one of them", "100 times 4"): lambda: reduce_add(state["rows"], devices[0]),
        ("first call of a ReplicaSet", "1, and 100 parameters"): lambda: replicas(batch["x"]),
        ("each further call", "1"): lambda: replicas(batch["x"]),
    }
    counts = {}
    with torch.no_grad():
        for (name, tensors), call in calls.items():
            pretend_device.reset_counters()
            call()
            found = pretend_device.counters()
            copies = found["h2d"] + found["d2h"] + found["d2d"]
            size = found["h2d_bytes"] + found["d2h_bytes"] + found["d2d_bytes"]
            counts[name] = {"tensors": tensors, "copies": copies, "bytes": size, "allocations": found["allocations"]}
    return counts


# Second, two ranks: the time that syncing adds to a backward pass. The model computes almost nothing: one fill makes the
# gradient of each parameter.


def resnet50_sizes() -> list[int]:
    sizes = [64 * 3 * 49, 64, 64]
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            sizes += [width * inner, inner, inner, inner * inner * 9, inner, inner, inner * inner * 4, inner * 4, inner * 4]
            if block == 0:
                sizes += [width * inner * 4, inner * 4, inner * 4]
            width = inner * 4
    return [*sizes, 2048 * 1000, 1000]


MODELS = {
    "200 small parameters": [1000 + 45 * k for k in range(200)],
    "ResNet-50": resnet50_sizes(),
    "4 of 4 M": [2**22] * 4,
}


class Fill(torch.autograd.Function):
    """Gives a parameter a gradient of ones, at the price of one fill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.shape = p.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(ctx.shape)


class Model(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Fill.apply(x, weight)
        return x.sum()


def time_sync(name: str, sizes: list[int], quick: bool) -> dict[str, dict[str, list[Seconds]]]:
    torch.set_num_threads(1)
    rounds = 80 if sum(sizes) < 10**7 else 24
    seconds = take_turns(sync_calls(sizes), range(max(4, rounds // 10) if quick else rounds), warm_up=3)
    # The difference is taken in each round, so that what slows down both on a shared machine cancels out.
    plain = seconds.pop("plain backward")
    no_sync = seconds.pop("DDP, no_sync")
    for contender, without in ((DDP, no_sync), (OVERLAP, plain)):
        pairs = zip(seconds[contender], without, strict=True)
        seconds[contender] = [Seconds(a.wall - b.wall, a.cpu - b.cpu) for a, b in pairs]
    return {f"gradient sync, {name}": seconds}


def sync_calls(sizes: list[int]) -> dict[str, Callable[[], Any] | Prepared]:
    x = torch.ones(1)
    plain, wrapped = Model(sizes), DistributedDataParallel(Model(sizes))
    parameters = list(plain.parameters())
    sync = GradientSync(parameters)

    def forward(model: nn.Module) -> Tensor:
        model.zero_grad()
        return model(x)

    def forward_without_sync() -> Tensor:
        with wrapped.no_sync():
            return forward(wrapped)

    def overlap(loss: Tensor) -> None:
        with sync.overlap():
            loss.backward()

    def one_by_one(_: None) -> None:
        for p in parameters:
            p.grad.mul_(1 / dist.get_world_size())
            dist.all_reduce(p.grad)

    return {
        DDP: Prepared(lambda: forward(wrapped), Tensor.backward),
        "DDP, no_sync": Prepared(forward_without_sync, Tensor.backward),
        "plain backward": Prepared(lambda: forward(plain), Tensor.backward),
        OVERLAP: Prepared(lambda: forward(plain), overlap),
        SYNC: Prepared(lambda: forward(plain).backward(), lambda _: sync()),
        "sync_gradients": Prepared(lambda: forward(plain).backward(), lambda _: sync_gradients(parameters)),
        "one all_reduce each": Prepared(lambda: forward(plain).backward(), one_by_one),
    }
