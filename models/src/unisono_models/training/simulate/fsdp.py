"""What FSDP2 adds to a simulated step, and what it saves, by formula: it needs streams that a simulated device does not have.

A block's parameters, all that do not belong to a block (the root's), and their gradients and optimizer states lie on `shard`
ranks in equal parts. In a step:
- each block is gathered before its forward and again before its backward, the root once; in float32;
- each gradient is reduced and scattered once, and, if there are several copies of the model (hybrid), all-reduced over them;
- the memory holds the root, and two blocks (one that computes, one that arrives), whole; and the gradient of one block.
"""

from dataclasses import dataclass

from torch import nn

from unisono.collectives import Ledger
from unisono.collectives.ledger.hardware import KernelGroup, Message
from unisono.collectives.traffic import OpTraffic
from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.parallel import find_repeated_blocks


@dataclass(frozen=True)
class ShardedModel:
    """The bytes of a model's trained parameters: of each block, and of the rest; and over how many ranks they lie."""

    blocks: list[int]
    root: int
    shard: int
    replicas: int

    @property
    def parameters(self) -> int:
        return sum(self.blocks) + self.root

    @property
    def gathered(self) -> int:
        """Bytes of whole parameters that are in memory beside this rank's shard."""
        return self.root + sum(sorted(self.blocks)[-2:])

    @property
    def whole_gradients(self) -> int:
        return max([self.root, *self.blocks])


def shard_model(module: nn.Module, config: ParallelConfig, *, world_size: int, gpus: int) -> ShardedModel | None:
    """Return how fsdp or hybrid lays out `module`; None for ddp."""
    if config.kind == "ddp":
        return None
    shard = world_size if config.kind == "fsdp" else config.shard or min(gpus, world_size)
    found = list(find_repeated_blocks(module))
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in found]
    root = sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in inside)
    return ShardedModel(sizes, root, shard, world_size // shard)


def sharded_memory(parts: dict[str, int], model: ShardedModel) -> dict[str, int]:
    """Return the memory by part with FSDP2, from that of a rank with the whole model."""
    changed = dict(parts)
    changed["weights"] = parts.get("weights", 0) - model.parameters + model.parameters // model.shard
    changed["gradients"] = parts.get("gradients", 0) // model.shard
    changed["optimizer"] = parts.get("optimizer", 0) // model.shard
    changed["communication"] = parts.get("communication", 0) + model.gathered + model.whole_gradients
    return changed


def add_sharded_traffic(ledger: Ledger, model: ShardedModel) -> None:
    """Add FSDP2's collectives to the phases of a step, and let its optimizer touch this rank's shard only."""
    ranks, copies = tuple(range(model.shard)), tuple(range(0, model.shard * model.replicas, model.shard))
    for number, size in enumerate([*model.blocks, model.root]):
        part = -(-size // model.shard)
        moved = part * (model.shard - 1)
        gathers = ["forward"] if number == len(model.blocks) else ["forward", "backward"]
        for name in gathers:
            _add(ledger, name, Message("all_gather", ranks, 0, moved, moved))
        _add(ledger, "backward", Message("reduce_scatter", ranks, 0, moved, moved))
        reduced = 2 * part * (model.replicas - 1) // model.replicas
        if reduced:
            _add(ledger, "backward", Message("all_reduce", copies, 0, reduced, reduced))
    if costs := ledger.phases.get("optimizer"):
        costs.bytes_touched //= model.shard
        scaled = {KernelGroup(k, f, b // model.shard, r): n for (k, f, b, r), n in costs.kernel_groups.items()}
        costs.kernel_groups.clear()
        costs.kernel_groups.update(scaled)


def _add(ledger: Ledger, phase: str, message: Message) -> None:
    with ledger.phase(phase) as costs:
        costs.messages[message] += 1
        op = costs.collectives.setdefault(message.name, OpTraffic())
        op.calls, op.sent, op.received = op.calls + 1, op.sent + message.sent, op.received + message.received
