"""One process: what a tree costs beyond its tensors, what replicas cost beyond their module, and how many copies there are.

torch.nn.parallel refuses CPUs, so its own code is timed with its CUDA calls replaced by the cheapest that do the same there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dataparallel_report import THEIRS, Figure, ratios
from shared_measuring import order_of_turns
from torch import Tensor, nn
from torch.nn.parallel import replicate, scatter_gather

from unisono.dataparallel import ReplicaSet, broadcast, gather, reduce_add, scatter
from unisono.dataparallel.replicas import Replicas

ROOT = Path(__file__).parents[2]
OURS, BARE = "unisono", "tensor_split or cat alone"
CPUS = ["cpu"] * 4
LEAVES = {"1 leaf": 1, "8 leaves": 8, "64 leaves": 64}


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


def time_process(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    rounds = 30 if quick else 300
    figures = []
    with torch_on_cpus():
        for name, number in LEAVES.items():
            tree = {f"leaf {k}": torch.randn(64, 8) for k in range(number)}
            parts = scatter(tree, CPUS)
            figures += take_turns(
                f"scatter to 4, {name}",
                {
                    THEIRS: lambda tree=tree: scatter_gather.scatter(tree, [0, 1, 2, 3]),
                    BARE: lambda tree=tree: [x.tensor_split(4) for x in tree.values()],
                    OURS: lambda tree=tree: scatter(tree, CPUS),
                },
                rounds,
            )
            figures += take_turns(
                f"gather of 4, {name}",
                {
                    THEIRS: lambda parts=parts: scatter_gather.gather(parts, 0),
                    BARE: lambda parts=parts: [
                        torch.cat(leaves) for leaves in zip(*(part.values() for part in parts), strict=True)
                    ],
                    OURS: lambda parts=parts: gather(parts, "cpu"),
                },
                rounds,
            )
        figures += time_replicas(rounds // 3)
    return figures


def time_replicas(rounds: int) -> list[Figure]:
    """What a call costs before any replica computes."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).requires_grad_(False)
    replicas = Replicas(module, [torch.device("cpu")] * 4, 2**20)

    def ours() -> None:
        replicas.prepare(range(4))
        for i in range(4):
            replicas.call(i, lambda module: module)
        replicas.release()

    module.eval()
    contenders = {THEIRS: lambda: replicate(module, [0, 1, 2, 3]), OURS: ours}
    return take_turns(f"4 replicas of {len(list(module.modules()))} modules", contenders, rounds)


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


def take_turns(case: str, contenders: dict[str, Callable[[], Any]], rounds: int) -> list[Figure]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 5):
        for name in order_of_turns(list(contenders), turn):
            start = time.perf_counter()
            result = contenders[name]()
            taken = time.perf_counter() - start
            del result
            if turn >= 5:
                seconds[name].append(taken)
    return ratios(case, THEIRS, seconds)


def count_copies() -> list[tuple[str, str, str]]:
    """(what, tensors, what the devices counted)."""
    sys.path.insert(0, str(ROOT))
    from tests.dataparallel import pretend_device

    try:
        pretend_device.load()
    except pretend_device.NoCompilerError as problem:
        return [("(not counted)", "", str(problem))]
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
    rows = []
    with torch.no_grad():
        for (what, tensors), call in calls.items():
            pretend_device.reset_counters()
            call()
            found = pretend_device.counters()
            copies = found["h2d"] + found["d2h"] + found["d2d"]
            size = found["h2d_bytes"] + found["d2h_bytes"] + found["d2d_bytes"]
            rows.append((what, tensors, f"{copies} copies, {size:,} bytes, {found['allocations']} allocations on devices"))
    return rows
