"""A model of the time that a ledger's counts take on named hardware. It is never a measurement.

The figures of the datasheets are public; what a program sustains of them is an assumption, shown beside them. Replace any of
them: `H100_SXM.with_constant("launch", 3)`, or `dataclasses.replace(H100_SXM, gpus_per_host=4)`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any, NamedTuple


class KernelGroup(NamedTuple):
    """Kernels of one op call: how many, their FLOPs and bytes, and the name of the rate at which they multiply."""

    kernels: int
    flops: int
    bytes_touched: int
    rate: str  # "bfloat16", "float32", "tf32", ...; "" without a matmul


class Message(NamedTuple):
    """One collective as the links see it. `ranks` are global ranks, `rank` is this one's."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    sent: int
    received: int


class Constant(NamedTuple):
    """A figure of the model: what it uses, and what the datasheet says, if that differs."""

    name: str
    unit: str
    value: float
    datasheet: float | None


@dataclass(frozen=True)
class Hardware:
    """One GPU, its host and its network. Rates are per second, for one GPU, and bandwidths are those of one direction.

    `peak_…` are figures of the datasheet, for dense matrices; the model uses the others, which a good program may sustain.
    """

    name: str
    peak_flops: Mapping[str, float]
    flops: Mapping[str, float]
    peak_memory_bandwidth: float
    memory_bandwidth: float
    memory: int
    peak_link_bandwidth: float
    link_bandwidth: float
    gpus_per_host: int = 8
    peak_network_bandwidth: float = 50e9  # one NIC of 400 Gb/s for each GPU
    network_bandwidth: float = 45e9
    launch_seconds: float = 5e-6  # a kernel, from Python, without a graph
    host_sync_seconds: float = 20e-6  # until the queue is full again
    link_latency: float = 1e-6  # a hop inside a host
    network_latency: float = 5e-6  # a hop between hosts
    message_seconds: float = 0.5e-6  # one message of an all_to_all

    def compute_seconds(self, kernel: KernelGroup) -> float:
        if not kernel.flops:
            return 0.0
        if kernel.rate not in self.flops:
            raise KeyError(f"{self.name}: no rate for matmuls of {kernel.rate}; it has {', '.join(self.flops)}")
        return kernel.flops / self.flops[kernel.rate]

    def collective_seconds(self, message: Message) -> float:
        """The time of one collective: the slower of the links inside the host and the NIC, and the latency of the hops."""
        if len(message.ranks) == 1:
            return 0.0
        inside, network, hops = self._on_links(message)
        return self.launch_seconds + hops + max(inside / self.link_bandwidth, network / self.network_bandwidth)

    def link_bytes(self, message: Message) -> tuple[float, float]:
        """Bytes that this GPU sends over the links inside its host, and over its NIC, in one collective."""
        return self._on_links(message)[:2] if len(message.ranks) > 1 else (0.0, 0.0)

    def _on_links(self, message: Message) -> tuple[float, float, float]:
        """Bytes inside the host, bytes on the NIC, and seconds of the hops.

        all_gather, reduce_scatter and all_reduce are rings in which every GPU of a host uses its own NIC, broadcast and reduce
        are trees, all_to_all and point to point send directly.
        """
        size = len(message.ranks)
        host = message.rank // self.gpus_per_host
        local = sum(rank // self.gpus_per_host == host for rank in message.ranks)
        hosts = ceil(size / local)
        volume = max(message.sent, message.received)
        inside: float
        network: float
        outside = (size - local) / (size - 1)  # the share of the other ranks that are on other hosts
        if message.name in ("all_gather", "reduce_scatter", "all_reduce"):
            inside, network = volume, volume * outside / local
            hops = (local - 1) * self.link_latency + (hosts - 1) * self.network_latency
            if message.name == "all_reduce":  # a tree, up and down
                hops = 2 * (ceil(log2(local)) * self.link_latency + ceil(log2(hosts)) * self.network_latency)
        elif message.name in ("broadcast", "reduce"):
            is_root = message.sent > 0 if message.name == "broadcast" else message.received > 0
            payload = volume // (size - 1) if is_root else volume  # the root is counted as if it sent to each rank directly
            inside, network = payload, payload / local if hosts > 1 else 0
            hops = ceil(log2(local)) * self.link_latency + ceil(log2(hosts)) * self.network_latency
        elif message.name in ("send", "recv"):  # the other end may be on another host
            inside, network = volume, volume if hosts > 1 else 0
            hops = self.network_latency if hosts > 1 else self.link_latency
        else:
            inside, network = volume * (1 - outside), volume * outside
            hops = (size - 1) * self.message_seconds + (self.network_latency if hosts > 1 else self.link_latency)
        return inside, network, hops

    def constants(self) -> list[Constant]:
        """Return all figures of the model that can be replaced, each in the unit that people say."""
        rates = [Constant(name, "TFLOP/s", rate / 1e12, self.peak_flops[name] / 1e12) for name, rate in self.flops.items()]
        others = []
        for name, (unit, scale) in _UNITS.items():
            peak = getattr(self, f"peak_{name}", None)
            public = name.removesuffix("_seconds")
            others.append(Constant(public, unit, getattr(self, name) / scale, None if peak is None else peak / scale))
        return rates + others

    def with_constant(self, name: str, value: float) -> "Hardware":
        """Return this hardware with one of its `constants()` replaced, in the same unit.

        Example:
            >>> H100_SXM.with_constant("launch", 3).launch_seconds
            3e-06
        """
        if name in self.flops:
            return replace(self, flops={**self.flops, name: value * 1e12})
        field_name = name if name in _UNITS else f"{name}_seconds"
        if field_name not in _UNITS:
            known = ", ".join(constant.name for constant in self.constants())
            raise KeyError(f"{self.name} has no constant {name!r}; it has {known}")
        scaled = float(f"{value * _UNITS[field_name][1]:.12g}")  # 3 microseconds are 3e-06, not 2.9999999999999997e-06
        changed: dict[str, Any] = {field_name: int(scaled) if name == "memory" else scaled}
        return replace(self, **changed)

    def __str__(self) -> str:
        lines: dict[str, list[str]] = {}
        for name, unit, value, datasheet in self.constants():
            shown = f"{name.replace('_', ' ')} {value:,.4g}" + ("" if datasheet is None else f" of {datasheet:,.4g}")
            lines.setdefault(unit, []).append(shown)
        head = f"model of {self.name}, {self.gpus_per_host} GPUs a host; what a program sustains, of what the datasheet says:"
        return "\n".join([head, *(f"  {unit}: {', '.join(shown)}" for unit, shown in lines.items())])


@dataclass
class TimeParts:
    """Seconds of one phase, by what takes them. `kernels` adds the longest of compute, memory and launch of each op."""

    compute: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    links: float = 0.0
    host_syncs: float = 0.0
    kernels: float = 0.0

    @property
    def lower_bound(self) -> float:
        """Everything overlaps: the longest part."""
        return max(self.compute, self.memory, self.launches, self.links) + self.host_syncs

    @property
    def estimate(self) -> float:
        """Nothing overlaps: one kernel after the other, then the collectives and the waits of the host."""
        return self.kernels + self.links + self.host_syncs

    def __add__(self, other: "TimeParts") -> "TimeParts":
        return TimeParts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class ModelledTime:
    """The time of a ledger on `hardware`, in seconds, by phase. A model, not a measurement."""

    hardware: Hardware
    phases: dict[str, TimeParts] = field(default_factory=dict)

    @property
    def total(self) -> TimeParts:
        return sum(self.phases.values(), TimeParts())

    @property
    def lower_bound(self) -> float:
        return self.total.lower_bound

    @property
    def estimate(self) -> float:
        return self.total.estimate

    def __str__(self) -> str:
        columns = ["compute", "memory", "launches", "links", "host_syncs", "lower_bound", "estimate"]
        rows = ["modelled milliseconds".ljust(24) + "".join(f"{name.replace('_', ' '):>13}" for name in columns)]
        for name, parts in [*self.phases.items(), ("total", self.total)]:
            rows.append(name.ljust(24) + "".join(f"{getattr(parts, column) * 1e3:>13,.3f}" for column in columns))
        return "\n".join([*rows, str(self.hardware)])


def time_parts(
    kernel_groups: Counter[KernelGroup], messages: Counter[Message], host_syncs: int, hardware: Hardware
) -> TimeParts:
    parts = TimeParts(host_syncs=host_syncs * hardware.host_sync_seconds)
    for kernel, times in kernel_groups.items():
        compute = hardware.compute_seconds(kernel)
        memory = kernel.bytes_touched / hardware.memory_bandwidth
        launches = kernel.kernels * hardware.launch_seconds
        parts.compute += times * compute
        parts.memory += times * memory
        parts.launches += times * launches
        parts.kernels += times * max(compute, memory, launches)
    point_to_point = {"send": 0.0, "recv": 0.0}
    for message, times in messages.items():
        seconds = times * hardware.collective_seconds(message)
        if message.name in point_to_point:
            point_to_point[message.name] += seconds
        else:
            parts.links += seconds
    parts.links += max(point_to_point.values())  # both directions at once: a ring sends one block and receives the next
    return parts


_UNITS = {  # of the constants beside the rates of matmuls
    "memory": ("GB", 1e9),
    "memory_bandwidth": ("TB/s", 1e12),
    "link_bandwidth": ("GB/s", 1e9),
    "network_bandwidth": ("GB/s", 1e9),
    "launch_seconds": ("microseconds", 1e-6),
    "host_sync_seconds": ("microseconds", 1e-6),
    "link_latency": ("microseconds", 1e-6),
    "network_latency": ("microseconds", 1e-6),
    "message_seconds": ("microseconds", 1e-6),
}
H100_SXM = Hardware(
    name="H100 SXM",
    peak_flops={
        "float64": 67e12, "float32": 67e12, "tf32": 494.5e12, "bfloat16": 989e12, "float16": 989e12, "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
    },
    flops={
        "float64": 50e12, "float32": 50e12, "tf32": 350e12, "bfloat16": 600e12, "float16": 600e12, "float8_e4m3fn": 1100e12,
        "float8_e5m2": 1100e12,
    },
    peak_memory_bandwidth=3.35e12,
    memory_bandwidth=2.6e12,
    memory=80 * 10**9,
    peak_link_bandwidth=450e9,
    link_bandwidth=360e9,
)  # fmt: skip
A100_SXM = Hardware(
    name="A100 SXM 80 GB",
    peak_flops={"float64": 19.5e12, "float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
    flops={"float64": 15e12, "float32": 15e12, "tf32": 110e12, "bfloat16": 220e12, "float16": 220e12},
    peak_memory_bandwidth=2.039e12,
    memory_bandwidth=1.6e12,
    memory=80 * 10**9,
    peak_link_bandwidth=300e9,
    link_bandwidth=240e9,
)
