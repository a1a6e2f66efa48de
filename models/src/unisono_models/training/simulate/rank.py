"""simulate_step: one training step of one rank of many, with the model's own code on tensors without data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from unisono.collectives import Hardware, Ledger, ModelledTime, simulate_rank
from unisono.collectives.ledger.fake_values import known_values
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.phases import listen_to_phases
from unisono_models.training.simulate.training import BuildTraining, SimulatedTraining, largest_share

PARTS = ("weights", "gradients", "optimizer", "tables", "activations", "loss", "communication", "batch", "temporary")
"""The parts of a rank's memory, in the order in which they are shown."""
_PART_OF = {
    "parameters": "weights",
    "gathered parameters": "communication",
    "gradient buckets": "gradients",
    "activations (data)": "batch",
    "activations (forward)": "activations",
    "activations (loss)": "loss",
    "activations (sync)": "communication",
    "activations (backward)": "temporary",
    "activations (optimizer)": "temporary",
}


@dataclass(frozen=True)
class Topology:
    """How many ranks there are: `hosts` with `gpus` ranks each. Fewer ranks than a host has are on one host."""

    hosts: int
    gpus: int

    @property
    def world_size(self) -> int:
        return self.hosts * self.gpus

    @classmethod
    def of(cls, world_size: int, gpus: int) -> Topology:
        return cls(1, world_size) if world_size <= gpus else cls(-(-world_size // gpus), gpus)

    def __str__(self) -> str:
        return f"{self.hosts} x {self.gpus}"


@dataclass(frozen=True)
class StepCosts:
    """What one step costs rank 0, which has the largest share of the batch."""

    topology: Topology
    batch: int
    rows: int
    """Rows of the batch on this rank."""
    memory: dict[str, int]
    """Bytes at the peak, by part."""
    ledger: Ledger
    notes: tuple[str, ...]

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def time(self, hardware: Hardware) -> ModelledTime:
        """The modelled time of the step. `hardware` may have another number of GPUs on a host."""
        return self.ledger.time(replace(hardware, gpus_per_host=self.topology.gpus))

    def link_bytes(self, hardware: Hardware) -> tuple[float, float]:
        """Bytes that this GPU sends in a step over the links inside its host, and over its NIC."""
        hardware = replace(hardware, gpus_per_host=self.topology.gpus)
        found = [(hardware.link_bytes(message), times) for message, times in self.ledger.total.messages.items()]
        return sum(inside * times for (inside, _), times in found), sum(network * times for (_, network), times in found)

    @property
    def host_syncs(self) -> Counter[str]:
        return Counter(str(sync) for sync in self.ledger.host_syncs)


def simulate_step(
    build: BuildTraining, config: Any, topology: Topology, *, device: Literal["cuda", "cpu"] = "cuda", **options: Any
) -> StepCosts:
    """Build the training of `config` on rank 0 of `topology`, and count its second step: the first one allocates more.

    Args:
        device: "cuda", or "cpu" to compare with real ranks on CPUs.
        options: For `simulate_rank`: the memory and the capability of the device.
    """
    world_size = topology.world_size
    parallel: Any = getattr(config, "parallel", None)
    if getattr(parallel, "kind", "") == "hybrid" and parallel.shard is None:  # real ranks ask each other for their hosts
        config = replace(config, parallel=replace(parallel, shard=topology.gpus))
    with (
        warnings.catch_warnings(),
        simulate_rank(world_size, 0, device=device, devices_per_host=topology.gpus, **options) as ledger,
        known_values(ledger),
        listen_to_phases(ledger.phase),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message="simulate_rank: torch.compile is left out")  # the page says it
        training = build(config, Ranks(0, world_size, 0, torch.device(device)))
        training.step()
        note_parts(ledger, training)
        ledger.reset()
        training.step()
        memory = _by_part(ledger.memory_at_peak)
    batch = config.data.batch
    return StepCosts(topology, batch, largest_share(batch, world_size), memory, ledger, training.notes)


def note_parts(ledger: Ledger, training: SimulatedTraining) -> None:
    """Tell the ledger what the tensors of the training are for."""
    ledger.memory.note(list(training.module.buffers()), "parameters")
    ledger.memory.note(list(training.tables), "tables")


def _by_part(found: Mapping[str, int]) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for name, size in found.items():
        parts[_PART_OF.get(name, name if name in parts else "temporary")] += size
    return parts
