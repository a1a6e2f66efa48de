"""AdamW with parameter groups, and a learning rate that is a function of the step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unisono_models.clip.config import OptimizerConfig
from unisono_models.training.distributed.parallel import find_repeated_blocks
from unisono_models.training.errors import UserError
from unisono_models.training.schedule import learning_rate_factor


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Make AdamW for the trained parameters. Vectors and scalars have no weight decay; `layer_decay` slows lower layers."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameter, depth in _depths(model):
        scale = config.layer_decay**depth
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        group = groups.setdefault((scale, decay), {"params": [], "weight_decay": decay, "scale": scale})
        group["params"].append(parameter)
    if not groups:
        raise UserError(
            "every parameter is frozen, so there is nothing to train: --model.image.no-frozen or --model.text.no-frozen"
        )
    return torch.optim.AdamW(groups.values(), lr=config.lr, betas=(config.beta1, config.beta2))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, steps: int) -> float:
    """Set the learning rate of `step` out of `steps` in the optimizer, and return it: a linear warm-up, then a cosine."""
    factor = learning_rate_factor(step, steps, warmup=config.warmup, final=config.final)
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor * group["scale"]
    return config.lr * factor


def _depths(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each trained parameter and the number of layers of its tower above it: 0 for heads and losses."""
    depths: dict[int, int] = {}
    for tower in (module for name, module in model.named_modules() if name.endswith("trunk")):
        blocks = list(find_repeated_blocks(tower))
        block_of = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
        below = 0  # the number of blocks before a parameter, in the order of the model
        for parameter in tower.parameters():
            block = block_of.get(id(parameter))
            if block is not None:
                depths[id(parameter)] = len(blocks) - block
                below = block + 1
            elif below == 0:  # part of the stem
                depths[id(parameter)] = len(blocks) + 1
            else:  # part of the next block, or a norm after the last one, which counts as the head
                depths[id(parameter)] = len(blocks) - below
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield parameter, depths.get(id(parameter), 0)
