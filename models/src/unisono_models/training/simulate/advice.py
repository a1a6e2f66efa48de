"""Which settings would make a step fit into the memory of a device: each one is tried by another simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from unisono_models.training.errors import UserError
from unisono_models.training.simulate.rank import StepCosts, Topology
from unisono_models.training.simulate.training import largest_share

Simulate = Callable[[Any, Topology], StepCosts]
_MAX_RANKS = 4096


@dataclass(frozen=True)
class Remedy:
    """A setting as the user types it, and what a step costs with it."""

    options: str
    costs: StepCosts


def list_settings(config: Any, topology: Topology) -> Iterator[tuple[str, Any, Topology]]:
    """List settings that save memory, the ones that cost the least time first: as typed, the config, the topology.

    They change neither the batch nor the result. A model has only some of them.
    """
    rows = largest_share(config.data.batch, topology.world_size)
    loss: Any = getattr(config, "loss", None)
    parallel: Any = getattr(config, "parallel", None)
    tables: Any = getattr(config, "tables", None)
    if tables is not None and tables.plan != "row":
        yield "--tables.plan row", replace(config, tables=replace(tables, plan="row")), topology
    if hasattr(parallel, "kind") and tables is None and parallel.kind == "ddp" and topology.world_size > 1:
        if topology.hosts > 1:
            yield "--parallel.kind hybrid", replace(config, parallel=replace(parallel, kind="hybrid")), topology
        yield "--parallel.kind fsdp", replace(config, parallel=replace(parallel, kind="fsdp")), topology
    if hasattr(loss, "exchange") and loss.exchange != "ring" and topology.world_size > 1:
        yield "--loss.exchange ring", replace(config, loss=replace(loss, exchange="ring")), topology
    checkpointed = None
    if hasattr(parallel, "checkpoint_activations") and tables is None and not parallel.checkpoint_activations:
        checkpointed = replace(config, parallel=replace(parallel, checkpoint_activations=True))
        yield "--parallel.checkpoint-activations", checkpointed, topology
    if hasattr(loss, "micro_batch"):
        size = (loss.micro_batch or rows) // 2
        while size >= 1:
            smaller = replace(loss, micro_batch=size)
            yield f"--loss.micro-batch {size}", replace(config, loss=smaller), topology
            if checkpointed is not None:
                options = f"--parallel.checkpoint-activations --loss.micro-batch {size}"
                yield options, replace(checkpointed, loss=smaller), topology
            size //= 4
    more = Topology(topology.hosts * 2, topology.gpus)
    while more.world_size <= max(_MAX_RANKS, 2 * topology.world_size):
        yield f"--hosts {more.hosts}", config, more
        more = Topology(more.hosts * 2, more.gpus)


def find_remedies(
    simulate: Simulate,
    config: Any,
    topology: Topology,
    *,
    memory: int,
    wanted: int = 3,
    beat: Callable[[], None] = lambda: None,
) -> list[Remedy]:
    """Try settings until `wanted` of them fit into `memory` bytes. Of two that differ in a number only, the first counts."""
    found: list[Remedy] = []
    kinds: set[str] = set()
    for options, changed, where in list_settings(config, topology):
        kind = " ".join(word for word in options.split() if not word.isdecimal())
        if kind in kinds:
            continue
        beat()
        try:
            costs = simulate(changed, where)
        except UserError:  # this model cannot have the setting
            continue
        if costs.peak <= memory:
            kinds.add(kind)
            found.append(Remedy(options, costs))
        if len(found) == wanted:
            break
    return found
