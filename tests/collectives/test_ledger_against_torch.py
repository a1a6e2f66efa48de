"""The ledger's counts against torch's own: kernels by the profiler, FLOPs by FlopCounterMode, memory by the allocator."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from unisono.collectives import Ledger, count_costs, simulate_rank

Job = tuple[nn.Module, Tensor, Callable[[], None]]


def mlp() -> Job:
    return job(nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64)), torch.randn(128, 64))


def convolutions() -> Job:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
    )
    return job(model, torch.randn(4, 3, 32, 32))


def transformer() -> Job:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
            weights = (q @ k.transpose(1, 2) / 8).softmax(-1)
            return x + F.silu(self.out(weights @ v))

    return job(nn.Sequential(Block(), Block()), torch.randn(4, 32, 64))


def job(model: nn.Module, x: Tensor) -> Job:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return model, x, step


JOBS = {"mlp": mlp, "convolutions": convolutions, "transformer": transformer}
SEVERAL = {"native_layer_norm_backward": 3}  # kernels of CUDA for one op
NO_KERNEL = {  # views and allocations, and functions that call the op that is counted
    "as_strided", "t", "transpose", "view", "expand", "detach", "reshape", "narrow", "slice", "chunk", "split", "flatten",
    "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "result_type", "resolve_conj", "to", "linear",
    "matmul", "conv2d", "layer_norm", "softmax", "square", "adaptive_avg_pool2d",
}  # fmt: skip


@pytest.fixture(params=JOBS)
def made(request: pytest.FixtureRequest) -> Job:
    torch.manual_seed(0)
    found = JOBS[request.param]()
    found[2]()  # the first run initialises libraries
    found[0].zero_grad(set_to_none=True)
    return found


def op_name(event: Any) -> str:
    """torch's engine adds gradients in place, but not under a dispatch mode such as the ledger's."""
    name = str(event.name).removeprefix("aten::")
    return "add" if name == "add_" else name


def ledger_of(step: Callable[[], None]) -> Ledger:
    with count_costs(device="cpu") as ledger:
        step()
    return ledger


def test_kernels_are_the_ops_that_the_profiler_counts(made: Job) -> None:
    ledger = ledger_of(made[2])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made[2]()
    calls = Counter({name: n // SEVERAL.get(name, 1) for name, n in ledger.by_op.items()})
    calls["convolution_backward"] = calls["convolution"]  # the ledger counts its gradients one by one
    seen: Counter[str] = Counter()
    for event in profiler.events() or ():
        outer = event.cpu_parent
        while outer is not None and op_name(outer) not in calls:
            outer = outer.cpu_parent
        if outer is None and event.name.startswith("aten::"):  # not part of an op that is counted
            seen[op_name(event)] += 1
    assert {name: seen[name] for name in calls} == dict(calls)
    assert set(seen) - set(calls) <= NO_KERNEL


def test_flops_are_those_of_flop_counter_mode(made: Job) -> None:
    with FlopCounterMode(display=False) as counter:
        made[2]()
    assert sum(ledger_of(made[2]).flops.values()) == counter.get_total_flops() > 0


def test_peak_memory_is_that_of_the_allocator(made: Job) -> None:
    model, x, step = made
    given = sum(t.numel() * t.element_size() for t in (x, *model.parameters()))
    ledger = ledger_of(step)
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):  # oneDNN has temporary copies in its own layout
        assert 0 < ledger.peak_memory - given <= peak
    else:
        assert ledger.peak_memory - given == pytest.approx(peak, rel=1e-3)


def test_a_simulation_of_a_cpu_counts_what_a_real_run_counts(made: Job) -> None:
    model, x, step = made
    real = ledger_of(step)
    with simulate_rank(2, device="cpu") as simulated:
        model.to(torch.float64).to(torch.float32)  # the same weights, fake now
        fake = torch.empty(x.shape)
        simulated.reset()
        model.zero_grad(set_to_none=True)
        model(fake).square().mean().backward()
    assert (simulated.by_op, simulated.flops, simulated.bytes_touched) == (real.by_op, real.flops, real.bytes_touched)
    assert simulated.peak_memory == pytest.approx(real.peak_memory, rel=0.01)
