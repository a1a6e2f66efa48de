"""count_costs: kernels, matmul FLOPs, bytes touched, collectives, host syncs and peak memory of a piece of code."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from unisono.collectives.checks import validate_choice
from unisono.collectives.ledger.cost_rules import OpCost, launches_nothing, op_cost, tensors_in
from unisono.collectives.ledger.fake_values import run_on_fake_tensors
from unisono.collectives.ledger.hardware import H100_SXM, Hardware, KernelGroup, Message, ModelledTime, TimeParts, time_parts
from unisono.collectives.ledger.host_syncs import HostSync, HostSyncError, new_host_sync, sync_of
from unisono.collectives.ledger.memory import LiveMemory
from unisono.collectives.traffic import CollectiveCall, OpTraffic, Traffic, collective_call

OnSync = Literal["count", "raise"]


@dataclass
class Costs:
    """What a piece of code costs on one rank."""

    kernels: int = 0
    by_op: Counter[str] = field(default_factory=Counter)
    """Kernels by op."""
    flops: dict[torch.dtype, int] = field(default_factory=dict)
    """FLOPs of matmuls, convolutions and attention, by the dtype of their inputs."""
    bytes_touched: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    host_syncs: list[HostSync] = field(default_factory=list)
    kernel_groups: Counter[KernelGroup] = field(default_factory=Counter)
    """How often each cost occurred: what the time model needs."""
    messages: Counter[Message] = field(default_factory=Counter)

    @property
    def collectives(self) -> dict[str, OpTraffic]:
        """Calls, bytes sent and bytes received, by collective."""
        return self.traffic.by_op

    def add(self, name: str, cost: OpCost) -> None:
        self.kernels += cost.kernels
        self.by_op[name] += cost.kernels
        self.bytes_touched += cost.bytes_touched
        if cost.dtype is not None:
            self.flops[cost.dtype] = self.flops.get(cost.dtype, 0) + cost.flops
        self.kernel_groups[KernelGroup(cost.kernels, cost.flops, cost.bytes_touched, _rate(cost.dtype))] += 1

    def add_call(self, call: CollectiveCall) -> None:
        self.traffic.add(call)
        ranks = _global_ranks(call.group)
        self.messages[Message(call.name, ranks, ranks[call.group.rank()], call.sent, call.received)] += 1

    def time(self, hardware: Hardware = H100_SXM) -> TimeParts:
        """Return the modelled seconds of these costs."""
        return time_parts(self.kernel_groups, self.messages, len(self.host_syncs), hardware)

    def merge(self, other: "Costs") -> None:
        self.kernels += other.kernels
        self.by_op += other.by_op
        self.bytes_touched += other.bytes_touched
        for dtype, flops in other.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0) + flops
        for name, op in other.collectives.items():
            own = self.collectives.setdefault(name, OpTraffic())
            own.calls, own.sent, own.received = own.calls + op.calls, own.sent + op.sent, own.received + op.received
        self.host_syncs += other.host_syncs
        self.kernel_groups += other.kernel_groups
        self.messages += other.messages


class Tentative:
    """Ops that have run and are not counted yet, and the tensors that are needed of their results."""

    def __init__(self) -> None:
        self.ops: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []
        self.needed: list[torch.Tensor] = []

    def without_unneeded(self) -> Iterator[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]]:
        needed = {_storage(x) for x in self.needed}
        for func, args, kwargs, result in reversed(self.ops):
            results = tensors_in(result)
            if not any(_storage(x) in needed for x in results):
                continue
            names = [argument.name for argument in func._schema.arguments]
            if "output_mask" in names:  # one op for several gradients, such as those of a convolution or a norm
                mask = [grad is not None and _storage(grad) in needed for grad in result]
                args = (*args[: names.index("output_mask")], mask, *args[names.index("output_mask") + 1 :])
                result = tuple(grad if wanted else None for grad, wanted in zip(result, mask, strict=True))
            needed |= {_storage(x) for x in tensors_in(args, kwargs)}
            yield func, args, kwargs, result


class Ledger:
    """What the code inside `count_costs` or `simulate_rank` costs on one rank: in total, and in `phases`.

    A kernel is one launch on the device: each op of ATen that is no view and no allocation launches one, some launch several,
    a `_foreach_` op launches one for some dozens of tensors. Collectives are counted apart. Bytes touched are the inputs that
    the kernels read plus the outputs that they write, as if nothing stayed in a cache.
    """

    def __init__(self, device: str, *, host_syncs: OnSync = "count") -> None:
        self.device = device
        self.keeps_data = device != "cpu"
        """Whether small tensors on the CPU are real in a simulation."""
        self.memory = LiveMemory()
        self.phases: dict[str, Costs] = {}
        self._on_sync = host_syncs
        self._phase: list[str] = []
        self._in_optimizer = 0
        self._tentative: Tentative | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[Costs]:
        """Count what runs inside under this name. Without it, costs are those of "forward", "backward" or "optimizer"."""
        self._phase.append(name)
        try:
            yield self.phases.setdefault(name, Costs())
        finally:
            self._phase.pop()

    @property
    def current_phase(self) -> str:
        if self._phase:
            return self._phase[-1]
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "optimizer" if self._in_optimizer else "forward"

    def reset(self) -> None:
        """Forget all counts, for instance those of building the model. What is alive stays in the memory."""
        self.phases.clear()
        self.memory.reset_peak()

    @property
    def total(self) -> Costs:
        total = Costs()
        for costs in self.phases.values():
            total.merge(costs)
        return total

    @property
    def kernels(self) -> int:
        return sum(costs.kernels for costs in self.phases.values())

    @property
    def bytes_touched(self) -> int:
        return sum(costs.bytes_touched for costs in self.phases.values())

    @property
    def flops(self) -> dict[torch.dtype, int]:
        return self.total.flops

    @property
    def by_op(self) -> Counter[str]:
        return self.total.by_op

    @property
    def collectives(self) -> dict[str, OpTraffic]:
        return self.total.collectives

    @property
    def traffic(self) -> Traffic:
        return self.total.traffic

    @property
    def host_syncs(self) -> list[HostSync]:
        return [sync for costs in self.phases.values() for sync in costs.host_syncs]

    @property
    def peak_memory(self) -> int:
        """The largest number of bytes of tensors alive on the device at once."""
        return self.memory.peak

    @property
    def memory_at_peak(self) -> dict[str, int]:
        """Bytes at the peak by part: parameters, gradients, optimizer, and activations by the phase that made them."""
        self.memory.note_gradients()
        return self.memory.parts_at_peak()

    @property
    def memory_at_end(self) -> dict[str, int]:
        self.memory.note_gradients()
        return self.memory.parts_now()

    def time(self, hardware: Hardware = H100_SXM) -> ModelledTime:
        """Return how long this takes on `hardware`, by phase: a model with its constants shown, not a measurement.

        Its `lower_bound` overlaps everything, its `estimate` nothing. `print` shows the parts and the constants.
        """
        return ModelledTime(hardware, {name: costs.time(hardware) for name, costs in self.phases.items()})

    def add_host_sync(self, op: str) -> None:
        sync = new_host_sync(op, self.current_phase)
        if self._on_sync == "raise":
            raise HostSyncError(f"the CPU would wait for the device: {sync}")
        self._costs().host_syncs.append(sync)

    @contextmanager
    def tentative(self) -> Iterator["Tentative"]:
        """Count of the ops inside only those on which `needed` depends, which is set inside."""
        outer, self._tentative = self._tentative, Tentative()
        ops = self._tentative
        try:
            yield ops
        finally:
            self._tentative = outer
        for func, args, kwargs, result in ops.without_unneeded():
            self._add_kernels(func, args, kwargs, result)

    def see(self, tensors: list[torch.Tensor]) -> bool:
        """Follow the memory of those tensors that are on the device. Returns whether there are any."""
        found = [x for x in tensors if x.device.type == self.device]
        self.memory.see(found, self.current_phase)
        return bool(found)

    def _costs(self) -> Costs:
        return self.phases.setdefault(self.current_phase, Costs())

    def _add_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        call = collective_call(func, args, result)
        if call is not None:
            self._costs().add_call(call)
        if not self.see(tensors_in(args, kwargs, result)):
            return
        if call is not None or func.namespace in ("c10d", "_c10d_functional"):
            return
        if self._tentative is not None:
            self._tentative.ops.append((func, args, kwargs, result))
        else:
            self._add_kernels(func, args, kwargs, result)

    def _add_kernels(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not launches_nothing(func):
            self._costs().add(func._schema.name.removeprefix("aten::"), op_cost(func, args, kwargs, result))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer += 1
        self.see([parameter for group in optimizer.param_groups for parameter in group["params"]])
        self.memory.note_gradients()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer -= 1
        self.memory.note([list(state.values()) for state in optimizer.state.values()], "optimizer")

    def __str__(self) -> str:
        total = self.total
        flops = ", ".join(f"{count / 1e9:,.3f} GFLOP {str(dtype)[6:]}" for dtype, count in total.flops.items()) or "none"
        rows = [f"{'phase':<24}{'kernels':>10}{'GFLOP':>14}{'MB touched':>14}{'collectives':>13}{'MB sent':>12}{'syncs':>8}"]
        for name, costs in [*self.phases.items(), ("total", total)]:
            rows.append(
                f"{name:<24}{costs.kernels:>10,}{sum(costs.flops.values()) / 1e9:>14,.3f}{costs.bytes_touched / 1e6:>14,.2f}"
                f"{costs.traffic.calls:>13,}{costs.traffic.sent / 1e6:>12,.2f}{len(costs.host_syncs):>8,}"
            )
        rows += ["", f"matmuls: {flops}", f"peak memory: {self.peak_memory / 1e6:,.2f} MB"]
        rows += [f"  {part:<36}{size / 1e6:>12,.2f} MB" for part, size in self.memory_at_peak.items()]
        if total.collectives:
            rows += ["", str(total.traffic)]
        if total.host_syncs:
            counted = Counter(str(sync) for sync in total.host_syncs)
            rows += ["", "host syncs:", *(f"{count:>6} x {text}" for text, count in counted.most_common())]
        return "\n".join(rows)


@contextmanager
def count_costs(*, device: str | None = None, host_syncs: OnSync = "count") -> Iterator[Ledger]:
    """Count what the code inside costs on this rank, forward and backward, on whatever tensors and group are there.

    Use `simulate_rank` to count for a GPU and a number of ranks that are not there.

    Arguments:
        device: the type of the device whose kernels and memory are counted; the accelerator if there is one, otherwise "cpu".
        host_syncs: "raise" raises HostSyncError at the first call that makes the CPU wait for the device.

    Example:
        >>> import torch
        >>> from unisono.collectives import count_costs
        >>> x, w = torch.ones(8, 4), torch.ones(4, 2, requires_grad=True)
        >>> with count_costs(device="cpu") as ledger:
        ...     (x @ w).sum().backward()
        >>> ledger.flops  # one product forward, one backward
        {torch.float32: 256}
        >>> ledger.phases["backward"].by_op  # the gradient of sum() is a view
        Counter({'mm': 1})
    """
    validate_choice("count_costs", "host_syncs", host_syncs, ("count", "raise"))
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    ledger = Ledger(torch.device(device).type, host_syncs=host_syncs)
    with counting(ledger):
        yield ledger


@contextmanager
def counting(ledger: Ledger, *, fake: bool = False) -> Iterator[None]:
    before = register_optimizer_step_pre_hook(ledger._before_step)
    after = register_optimizer_step_post_hook(ledger._after_step)
    try:
        with ledger.memory.following_resizes(), _CountingMode(ledger, fake):
            yield
    finally:
        before.remove()
        after.remove()


class _CountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, for seconds, only to keep it away from code that is not compiled

    def __init__(self, ledger: Ledger, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, ledger = kwargs or {}, self.ledger
        if any(map(is_traceable_wrapper_subclass_type, types)):  # such as DTensor: count the ops on its own part that follow
            ledger.see(tensors_in(args, kwargs))
            return NotImplemented
        if not hasattr(func, "_schema") or func.namespace == "prim":
            return func(*args, **kwargs)
        if ledger.device != "cpu" and (waits := sync_of(func, args, kwargs, ledger.device)):
            ledger.add_host_sync(waits)
        result = run_on_fake_tensors(func, args, kwargs, keep_data=ledger.keeps_data) if self.fake else func(*args, **kwargs)
        ledger._add_op(func, args, kwargs, result)
        return result


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _rate(dtype: torch.dtype | None) -> str:
    if dtype is None:
        return ""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return str(dtype).removeprefix("torch.")


def _global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    ranks = _ranks.get(group)
    if ranks is None:
        ranks = _ranks[group] = tuple(dist.get_process_group_ranks(group))
    return ranks


_ranks: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()
