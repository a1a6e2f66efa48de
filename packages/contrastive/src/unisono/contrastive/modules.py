"""Losses as modules that own what they learn: the scale, as a logarithm, and the bias."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unisono.contrastive.clip import clip_loss
from unisono.contrastive.sigmoid import sigmoid_loss
from unisono.contrastive.views import ntxent_loss, supcon_loss


class ClipLoss(nn.Module):
    """clip_loss with a learned scale, kept at most `max_scale`, as CLIP does it.

    The parameter `log_scale` has one element. Its gradient is the same on every rank, so the module is right inside DDP or
    FSDP and also beside them: nobody has to average it. `options` are those of clip_loss.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ClipLoss
        >>> loss = ClipLoss(same_id="masked")
        >>> loss(torch.eye(3), torch.eye(3), ids=torch.tensor([0, 1, 1])).backward()
        >>> round(loss.scale.item(), 2)
        14.29
    """

    def __init__(self, *, init_scale: float = 1 / 0.07, max_scale: float | None = 100.0, **options: Any) -> None:
        super().__init__()
        self.log_scale = _logarithm("ClipLoss", init_scale, max_scale)
        self.max_scale, self.options = max_scale, options

    @property
    def scale(self) -> Tensor:
        return _bounded_exp(self.log_scale, self.max_scale)

    def forward(self, x: Tensor, y: Tensor, **arguments: Any) -> Tensor:
        return clip_loss(x, y, self.scale, **self.options, **arguments)

    def extra_repr(self) -> str:
        return _show(max_scale=self.max_scale, **self.options)


class SigmoidLoss(nn.Module):
    """sigmoid_loss with a learned scale and bias, from 10 and -10 as SigLIP has them; no bound unless `max_scale` is given.

    The gradients of `log_scale` and `bias` are the same on every rank, as in ClipLoss.

    Example:
        >>> import torch
        >>> from unisono.contrastive import SigmoidLoss
        >>> loss = SigmoidLoss()
        >>> loss(torch.eye(3), torch.eye(3))
        tensor(0.6932, grad_fn=<ToCopyBackward0>)
    """

    def __init__(
        self, *, init_scale: float = 10.0, init_bias: float = -10.0, max_scale: float | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.log_scale = _logarithm("SigmoidLoss", init_scale, max_scale)
        self.bias = nn.Parameter(torch.full((1,), init_bias))
        self.max_scale, self.options = max_scale, options

    @property
    def scale(self) -> Tensor:
        return _bounded_exp(self.log_scale, self.max_scale)

    def forward(self, x: Tensor, y: Tensor, **arguments: Any) -> Tensor:
        return sigmoid_loss(x, y, self.scale, self.bias, **self.options, **arguments)

    def extra_repr(self) -> str:
        return _show(max_scale=self.max_scale, **self.options)


class _WithTemperature(nn.Module):
    def __init__(
        self, *, temperature: float = 0.1, learned: bool = False, min_temperature: float = 0.01, **options: Any
    ) -> None:
        super().__init__()
        if not temperature > 0 or not min_temperature > 0:
            raise ValueError(
                f"{type(self).__name__}: temperature={temperature!r} and min_temperature={min_temperature!r} must be positive"
            )
        self.min_temperature, self.options, self._fixed = min_temperature, options, temperature
        self.log_scale = _logarithm(type(self).__name__, 1 / temperature, 1 / min_temperature) if learned else None

    @property
    def temperature(self) -> Tensor | float:
        if self.log_scale is None:
            return self._fixed
        return 1 / _bounded_exp(self.log_scale, 1 / self.min_temperature)

    def extra_repr(self) -> str:
        return _show(temperature=float(self.temperature), learned=self.log_scale is not None, **self.options)


class NTXentLoss(_WithTemperature):
    """ntxent_loss with a fixed temperature, or with a learned one that stays at least `min_temperature`.

    Example:
        >>> import torch
        >>> from unisono.contrastive import NTXentLoss
        >>> NTXentLoss(temperature=0.5)(torch.eye(3), torch.eye(3))
        tensor(0.4327)
    """

    def forward(self, z0: Tensor, z1: Tensor, **arguments: Any) -> Tensor:
        return ntxent_loss(z0, z1, self.temperature, **self.options, **arguments)


class SupConLoss(_WithTemperature):
    """supcon_loss with a fixed temperature, or with a learned one that stays at least `min_temperature`.

    Example:
        >>> import torch
        >>> from unisono.contrastive import SupConLoss
        >>> SupConLoss(temperature=0.5)(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([7, 7, 8, 8]))
        tensor(0.2395)
    """

    def forward(self, z: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
        return supcon_loss(z, labels, self.temperature, **self.options, **arguments)


def _logarithm(module: str, scale: float, largest: float | None) -> nn.Parameter:
    if not scale > 0 or (largest is not None and scale > largest * (1 + 1e-9)):
        raise ValueError(f"{module}: the initial scale {scale!r} must be positive and at most {largest!r}")
    return nn.Parameter(torch.full((1,), math.log(scale)))  # one element and not a scalar: FSDP shards no scalars


def _bounded_exp(logarithm: Tensor, largest: float | None) -> Tensor:
    """exp, after the parameter itself has been put back below its bound: it would otherwise stay above without gradient."""
    if largest is not None:
        with torch.no_grad():
            logarithm.clamp_(max=math.log(largest))
    return logarithm.exp()


def _show(**settings: object) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
