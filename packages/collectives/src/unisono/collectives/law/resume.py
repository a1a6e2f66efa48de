"""Save what a run needs to go on, as state_dicts, and load it on another number of ranks."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save_state(models: Any, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the state_dicts, DTensors as a whole, and the states of the generators. All ranks call it; rank 0's counts."""
    numpy = sys.modules.get("numpy")
    state_dicts = [x.state_dict() for x in (*_unwrapped(models), *optimizers)]
    return {
        "state_dicts": pytree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, state_dicts),
        "generators": (torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()),
    }


def load_state(models: Any, optimizers: Sequence[Any], state: dict[str, Any]) -> None:
    """Load what save_state returned on rank 0 of any number of ranks."""
    state_dicts = iter(state["state_dicts"])
    for model in _unwrapped(models):
        targets = model.state_dict()
        model.load_state_dict({name: _like(targets.get(name), x) for name, x in next(state_dicts).items()})
    for optimizer in optimizers:
        saved = next(state_dicts)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in saved["state"].items():
            if isinstance(values, Mapping):
                saved["state"][number] = {name: _like(params[number], x) for name, x in values.items()}
        optimizer.load_state_dict(saved)
    torch_state, random_state, numpy_state = state["generators"]
    torch.set_rng_state(torch_state)
    random.setstate(random_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def _unwrapped(models: Any) -> Iterator[nn.Module]:
    """Yield the models without DDP, whose state_dicts have the names of one process."""
    for model in pytree.tree_leaves(models):
        if isinstance(model, nn.Module):
            yield model.module if isinstance(model, DistributedDataParallel) else model


def _like(target: Any, x: Any) -> Any:
    """Return `x` divided over ranks as `target` is, if that is a DTensor of its shape."""
    if not hasattr(target, "full_tensor") or getattr(x, "shape", None) != target.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, target.device_mesh, target.placements)
