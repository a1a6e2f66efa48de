"""A model on several ranks: DDP or FSDP2, mixed precision, activation checkpointing, compiled blocks."""

import os
import socket
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

from unisono.dataparallel import broadcast_parameters
from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import recompute_with_same_dropout


def parallelize(model: nn.Module, config: ParallelConfig, ranks: Ranks) -> nn.Module:
    """Change the model in place, wrap it, and return it ready for training on `ranks`. Call it before making the optimizer.

    The model has to be on its device, in the dtype of `parameter_dtype`, with the same weights on every rank. Without a process
    group it is only checkpointed and compiled, if the config says so.
    """
    blocks = list(find_repeated_blocks(model))
    if config.compile:
        # All blocks of a class share torch's limit of recompilations. Each block may need several graphs: for the forward, the
        # recomputed forward, and evaluation, of one row or of more.
        limits: Any = torch.compiler.config
        limits.recompile_limit = max(limits.recompile_limit, 8 * len(blocks))
        for block in blocks:
            block.compile(dynamic=True)
    if config.checkpoint_activations:  # outside of what is compiled, since the compiler does not know our dropout keys
        checkpoint_blocks(model, blocks)
    if not dist.is_initialized():
        return model
    if config.kind == "ddp":
        # DDP warns about depthwise convolutions, whose gradients have a dimension of size 1 with an unusual stride.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model.to(memory_format=torch.channels_last)  # the fastest for convolutions; FSDP2 does not accept it
        device_ids = [ranks.device] if ranks.device.type != "cpu" else None
        # Buffers of integers are constants in our models: to broadcast them at each step would only take time.
        constant = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
        ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *constant}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
        return DistributedDataParallel(model, device_ids=device_ids)
    return _shard(model, blocks, config, ranks)


def parameter_dtype(config: ParallelConfig) -> torch.dtype:
    """Return the dtype that the parameters have."""
    return torch.float64 if config.precision == "float64" else torch.float32


def autocast_context(config: ParallelConfig, ranks: Ranks) -> AbstractContextManager[object]:
    """Return the context for forward passes: autocast if the precision is bfloat16."""
    if config.precision != "bfloat16":
        return nullcontext()
    # FSDP2 frees gathered parameters after a backward. A cached bfloat16 copy would outlive them, and take their gradient.
    return torch.autocast(ranks.device.type, torch.bfloat16, cache_enabled=config.kind == "ddp")


def find_repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Find the layers that a model is a stack of. They are sharded, checkpointed and compiled one by one.

    These are the members of a ModuleList or Sequential that all have the same class, which is not one of torch.nn. Where such
    lists are nested, the innermost count.
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


def checkpoint_blocks(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let the backward recompute the activations of these blocks, with the same dropout."""
    chosen = {id(block) for block in blocks}
    wrap = partial(checkpoint_wrapper, context_fn=recompute_with_same_dropout, preserve_rng_state=False)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in chosen)


def _shard(model: nn.Module, blocks: list[nn.Module], config: ParallelConfig, ranks: Ranks) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes as long to import as torch

    # No MixedPrecisionPolicy: layers on a CPU cannot mix bfloat16 parameters with float32 activations. With autocast the
    # numbers are those of DDP, at the price of gathering float32.
    mesh = _mesh(config, ranks)
    if not any(parameter.is_meta for parameter in model.parameters()):  # they have no values yet
        broadcast_parameters(model)  # as DDP does; FSDP2 would keep the differences between ranks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _mesh(config: ParallelConfig, ranks: Ranks) -> DeviceMesh:
    kind = ranks.device.type
    if config.kind == "fsdp":
        return init_device_mesh(kind, (ranks.world_size,))
    shard = config.shard
    if shard is None:
        hosts = [tuple(host) for host in all_gather_object([socket.gethostname(), os.environ.get("LOCAL_WORLD_SIZE")])]
        counts = {hosts.count(host) if host[1] is None else int(host[1]) for host in hosts}
        if len(counts) > 1:
            raise UserError(f"--parallel.shard: the hosts have different numbers of ranks, {sorted(counts)}: give a number")
        shard = counts.pop()
    if shard < 1 or ranks.world_size % shard:
        raise UserError(f"--parallel.shard {shard}: it does not divide the number of ranks, {ranks.world_size}")
    return init_device_mesh(kind, (ranks.world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
