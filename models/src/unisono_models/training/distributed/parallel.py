"""A model over ranks, as the config says: DDP or FSDP2, mixed precision, activation checkpointing, compiled blocks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object
from unisono_models.training.randomness import recompute_with_same_dropout


def parallelize(model: nn.Module, config: ParallelConfig, ranks: Ranks) -> nn.Module:
    """The model, changed in place and wrapped, ready for training on `ranks`. Call it before making the optimizer.

    The model is on its device, of the dtype that `parameter_dtype` says, with the same weights on every rank. Without a process
    group it stays one, but may be checkpointed and compiled all the same.
    """
    blocks = list(find_repeated_blocks(model))
    if config.compile:
        # Blocks of a class share the limit beyond which torch compiles no more. Each may need graphs of its own: for the
        # forward, the one that is computed again, and evaluation, of one row or of more.
        limits: Any = torch.compiler.config
        limits.recompile_limit = max(limits.recompile_limit, 8 * len(blocks))
        for block in blocks:
            block.compile(dynamic=True)
    if (
        config.checkpoint_activations
    ):  # around what is compiled: inside, the compiler would have to know of `recompute_with_same_dropout`
        _checkpoint(model, blocks)
    if not dist.is_initialized():
        return model
    if config.kind == "ddp":
        # said of depthwise convolutions, whose gradients have a dimension of one element with a stride of its own
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model.to(memory_format=torch.channels_last)  # what convolutions are fastest with; FSDP2 refuses it
        on = [ranks.device] if ranks.device.type != "cpu" else None
        # Buffers of integers are constants here: sent at each step, they would only take time.
        constant = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
        ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *constant}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
        return DistributedDataParallel(model, device_ids=on)
    return _shard(model, blocks, config, ranks)


def parameter_dtype(config: ParallelConfig) -> torch.dtype:
    """Of the parameters."""
    return torch.float64 if config.precision == "float64" else torch.float32


def autocast_context(config: ParallelConfig, ranks: Ranks) -> AbstractContextManager[object]:
    """The context for forwards: autocast where the config asks for bfloat16."""
    if config.precision != "bfloat16":
        return nullcontext()
    # What FSDP2 has gathered is freed after a backward: a copy kept from one micro-batch to the next would take its gradient.
    return torch.autocast(ranks.device.type, torch.bfloat16, cache_enabled=config.kind == "ddp")


def find_repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers a model is stacked from: what is sharded, checkpointed and compiled one by one.

    Known by their place: members of a ModuleList or Sequential of one class that is not torch's own; the innermost such.
    """
    found: dict[str, nn.Module] = {}
    for name, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len({type(child) for child in parent}) == 1:
            child = next(iter(parent))
            if not type(child).__module__.startswith("torch.nn") and any(True for _ in child.parameters()):
                found |= {f"{name}.{key}": member for key, member in parent.named_children()}
    for name, block in found.items():
        if not any(other.startswith(f"{name}.") for other in found):
            yield block


def _checkpoint(model: nn.Module, blocks: list[nn.Module]) -> None:
    chosen = {id(block) for block in blocks}
    wrap = partial(checkpoint_wrapper, context_fn=recompute_with_same_dropout, preserve_rng_state=False)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in chosen)


def _shard(model: nn.Module, blocks: list[nn.Module], config: ParallelConfig, ranks: Ranks) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes as long to import as torch

    # No MixedPrecisionPolicy: parameters of bfloat16 beside activations of float32 are more than layers on a CPU can do. With
    # autocast the numbers are those of DDP, for the price of gathering float32.
    mesh = _mesh(config, ranks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mesh(config: ParallelConfig, ranks: Ranks) -> DeviceMesh:
    kind = ranks.device.type
    if config.kind == "fsdp":
        return init_device_mesh(kind, (ranks.size,))
    shard = config.shard
    if shard is None:
        hosts = set(all_gather_object(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))))
        if len(hosts) > 1:
            raise ValueError(f"parallel.shard: hosts have {sorted(hosts)} ranks, so none is that of one host: give a number")
        shard = hosts.pop()
    if shard < 1 or ranks.size % shard:
        raise ValueError(f"parallel.shard: {shard} ranks to a copy do not divide the {ranks.size} ranks there are")
    return init_device_mesh(kind, (ranks.size // shard, shard), mesh_dim_names=("replicate", "shard"))
