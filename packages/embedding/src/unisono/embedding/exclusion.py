"""How DDP and FSDP are told to leave the tables alone: their gradients are complete already."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.embedding.sharded_table import ShardedTable


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all sharded tables in `model`, by name. FSDP2: `fully_shard(model, ignored_params=set(them.values()))`.

    Backward: none; it only looks.

    Example:
        >>> from unisono.embedding import ShardedEmbedding
        >>> list(sharded_parameters(nn.Sequential(ShardedEmbedding(9, 4), nn.Linear(4, 2))))
        ['0.weight']
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedTable):
            found[f"{prefix}.weight" if prefix else "weight"] = module.weight
    return found


def exclude_from_ddp(model: nn.Module) -> nn.Module:
    """Mark the tables in `model`, so that DistributedDataParallel(model) neither copies nor averages them. Returns `model`.

    Backward: unchanged; DDP averages the other parameters, and tables with grad_reduce="mean" do the same by themselves.

    Example:
        >>> from unisono.embedding import ShardedEmbedding
        >>> model = exclude_from_ddp(nn.Sequential(ShardedEmbedding(9, 4), nn.Linear(4, 2)))
    """
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *sharded_parameters(model)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model
