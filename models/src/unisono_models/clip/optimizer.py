"""AdamW over groups of parameters, and a learning rate that is a function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unisono_models.clip.config import OptimizerConfig
from unisono_models.training.distributed.parallel import find_repeated_blocks
from unisono_models.training.schedule import learning_rate_factor


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW on what is trained. No weight decay for vectors and scalars; lower layers learn more slowly by `layer_decay`."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameter, depth in _depths(model):
        scale, decay = config.layer_decay**depth, config.weight_decay if parameter.ndim > 1 else 0.0
        group = groups.setdefault((scale, decay), {"params": [], "weight_decay": decay, "scale": scale})
        group["params"].append(parameter)
    if not groups:
        raise ValueError("optimizer: every parameter is frozen: there is nothing to train")
    return torch.optim.AdamW(groups.values(), lr=config.lr, betas=(config.beta1, config.beta2))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of `step` out of `steps`: up in a line, down in a cosine. Returned, and set in the optimizer."""
    part = learning_rate_factor(step, steps, warmup=config.warmup, final=config.final)
    for group in optimizer.param_groups:
        group["lr"] = config.lr * part * group["scale"]
    return config.lr * part


def _depths(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Each trained parameter, and how many layers of its tower are above it: 0 for heads and losses."""
    depths: dict[int, int] = {}
    for tower in (module for name, module in model.named_modules() if name.endswith("trunk")):
        blocks = list(find_repeated_blocks(tower))
        places = {id(p): place for place, block in enumerate(blocks) for p in block.parameters()}
        below = 0  # blocks that came before a parameter, in the order of the model
        for parameter in tower.parameters():
            place = places.get(id(parameter))
            if place is None:  # of a stem, or of the block that follows, or a norm behind the last, which is as the head
                depths[id(parameter)] = len(blocks) - below if below else len(blocks) + 1
            else:
                depths[id(parameter)], below = len(blocks) - place, place + 1
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield parameter, depths.get(id(parameter), 0)
