"""The moving average of the generator's weights: what is shown, evaluated and kept."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

Network = TypeVar("Network", bound=nn.Module)
_WARM_UP = 0.05  # the half-life is at most this part of the pictures seen: the first weights do not linger


def start_average(network: Network) -> Network:
    """A copy to be averaged into, without gradients."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def update_average(average: nn.Module, network: nn.Module, *, pictures: int, seen: int, half_life: float) -> None:
    """Move `average` towards `network`, which has just learned from `pictures` more and from `seen` so far.

    A weight counts half after `half_life` pictures, and sooner at the beginning. Pure function of its arguments: the same on
    every rank, and after a restart.

    Example:
        >>> import torch
        >>> network = nn.Linear(1, 1)
        >>> average = start_average(network)
        >>> _ = network.weight.data.fill_(2), average.weight.fill_(0)
        >>> update_average(average, network, pictures=8, seen=10_000, half_life=8)
        >>> average.weight
        Parameter containing:
        tensor([[1.]])
    """
    decay = 0.5 ** (pictures / max(1e-9, min(half_life, _WARM_UP * seen)))
    get_ema_multi_avg_fn(decay)(list(average.parameters()), list(network.parameters()), None)
