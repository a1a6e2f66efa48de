"""The losses as modules that own what they learn: the scale, as a logarithm, and the bias."""

import copy
import math
from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn

from unisono.contrastive.clip import clip_loss
from unisono.contrastive.sigmoid import sigmoid_loss
from unisono.contrastive.simclr import ntxent_loss
from unisono.contrastive.supcon import supcon_loss

Number: TypeAlias = Tensor | float


class _Loss(nn.Module):
    """Holds the options that every call passes on to `function`."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if unknown := sorted(options.keys() - signature(self.function).parameters.keys()):
            raise ValueError(f"{type(self).__name__}: {', '.join(unknown)} is not an option of {self.function.__name__}")
        self.options = options

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        group = self.options.get("group")
        memo[id(group)] = group  # a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        own = {name: value for name, value in vars(self).items() if name in ("max_scale", "initial_temperature", "learned")}
        return ", ".join(f"{name}={value!r}" for name, value in (own | self.options).items())


class _LossWithScale(_Loss):
    """Called as in open_clip, with the model's own scale and bias, or without them."""

    def __init__(self, init_scale: float, max_scale: float | None, **options: Any) -> None:
        super().__init__(**options)
        self.log_scale = _log_parameter(type(self).__name__, init_scale, max_scale)
        self.max_scale = max_scale

    @property
    def scale(self) -> Tensor:
        return _bounded_exp(self.log_scale, self.max_scale)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Number | None = None,
        logit_bias: Number | None = None,
        *,
        output_dict: bool = False,
        **arguments: Any,
    ) -> Tensor | dict[str, Tensor]:
        scale = self.scale if logit_scale is None else logit_scale
        loss = self._loss(image_features, text_features, scale, logit_bias, **self.options, **arguments)
        return {"contrastive_loss": loss} if output_dict else loss

    def _loss(self, x: Tensor, y: Tensor, scale: Number, bias: Number | None, **options: Any) -> Tensor:
        raise NotImplementedError


class ClipLoss(_LossWithScale):
    """clip_loss with a learned scale of at most `max_scale`, as in CLIP.

    The parameter `log_scale` has one element. Its gradient is the same on every rank, so the module is right inside DDP or
    FSDP and outside of them: nobody has to average the gradient. `options` are those of clip_loss.

    The call `loss(x, y, **arguments)` takes the arguments of clip_loss. The names and the order of all others are open_clip's,
    so that its training loop can use this module: loss(image_features, text_features, logit_scale, logit_bias,
    output_dict=True). A `logit_scale` that the model owns takes the place of this module's, which then gets no gradient. A
    softmax does not depend on a `logit_bias`, so its gradient is zero. `output_dict=True` returns {"contrastive_loss": loss}.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ClipLoss
        >>> loss = ClipLoss(same_id="masked")
        >>> loss(torch.eye(3), torch.eye(3), ids=torch.tensor([0, 1, 1])).backward()
        >>> round(loss.scale.item(), 2)
        14.29
    """

    function = staticmethod(clip_loss)

    def __init__(self, *, init_scale: float = 1 / 0.07, max_scale: float | None = 100.0, **options: Any) -> None:
        super().__init__(init_scale, max_scale, **options)

    def _loss(self, x: Tensor, y: Tensor, scale: Number, bias: Number | None, **options: Any) -> Tensor:
        loss = clip_loss(x, y, scale, **options)
        if isinstance(bias, Tensor) and bias.requires_grad:  # DDP waits for a gradient of each of its parameters
            loss = loss + 0 * bias.sum().to(loss.dtype)
        return loss


class SigmoidLoss(_LossWithScale):
    """sigmoid_loss with a learned scale and bias, initially 10 and -10 as in SigLIP. `max_scale=None` sets no bound.

    The gradients of `log_scale` and `bias` are the same on every rank, and the call is that of open_clip's SigLipLoss, as in
    ClipLoss: a `logit_scale` or `logit_bias` of the model takes the place of this module's own.

    Example:
        >>> import torch
        >>> from unisono.contrastive import SigmoidLoss
        >>> loss = SigmoidLoss()
        >>> loss(torch.eye(3), torch.eye(3))
        tensor(0.6932, grad_fn=<ToCopyBackward0>)
    """

    function = staticmethod(sigmoid_loss)

    def __init__(
        self, *, init_scale: float = 10.0, init_bias: float = -10.0, max_scale: float | None = None, **options: Any
    ) -> None:
        super().__init__(init_scale, max_scale, **options)
        self.bias = nn.Parameter(torch.full((1,), init_bias))

    def _loss(self, x: Tensor, y: Tensor, scale: Number, bias: Number | None, **options: Any) -> Tensor:
        return sigmoid_loss(x, y, scale, self.bias if bias is None else bias, **options)


class _LossWithTemperature(_Loss):
    def __init__(
        self, *, temperature: float = 0.1, learned: bool = False, min_temperature: float = 0.01, **options: Any
    ) -> None:
        super().__init__(**options)
        name = type(self).__name__
        if not temperature > 0 or not min_temperature > 0:
            raise ValueError(f"{name}: temperature={temperature!r} and min_temperature={min_temperature!r} must be positive")
        self.min_temperature = min_temperature
        self.initial_temperature = temperature
        self.learned = learned
        self.log_scale = _log_parameter(name, 1 / temperature, 1 / min_temperature) if learned else None

    @property
    def temperature(self) -> Tensor | float:
        if self.log_scale is None:
            return self.initial_temperature
        return 1 / _bounded_exp(self.log_scale, 1 / self.min_temperature)


class NTXentLoss(_LossWithTemperature):
    """ntxent_loss with a fixed temperature or, if `learned`, with a learned one of at least `min_temperature`.

    Example:
        >>> import torch
        >>> from unisono.contrastive import NTXentLoss
        >>> NTXentLoss(temperature=0.5)(torch.eye(3), torch.eye(3))
        tensor(0.4327)
    """

    function = staticmethod(ntxent_loss)

    def forward(self, z0: Tensor, z1: Tensor, **arguments: Any) -> Tensor:
        return ntxent_loss(z0, z1, self.temperature, **self.options, **arguments)


class SupConLoss(_LossWithTemperature):
    """supcon_loss with a fixed temperature or, if `learned`, with a learned one of at least `min_temperature`.

    Example:
        >>> import torch
        >>> from unisono.contrastive import SupConLoss
        >>> SupConLoss(temperature=0.5)(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([7, 7, 8, 8]))
        tensor(0.2395)
    """

    function = staticmethod(supcon_loss)

    def forward(self, z: Tensor, labels: Tensor, **arguments: Any) -> Tensor:
        return supcon_loss(z, labels, self.temperature, **self.options, **arguments)


def _log_parameter(module: str, scale: float, largest: float | None) -> nn.Parameter:
    if not scale > 0 or (largest is not None and scale > largest * (1 + 1e-9)):
        raise ValueError(f"{module}: the initial scale {scale!r} must be positive and at most {largest!r}")
    return nn.Parameter(torch.full((1,), math.log(scale)))  # one element instead of a scalar, because FSDP shards no scalars


class _Bounded(torch.autograd.Function):
    """The minimum of a logarithm and its bound. Beyond the bound only a gradient that leads back passes.

    CLIP clamps its parameter in place after each step, which would not work with a sharded parameter.
    """

    @staticmethod
    def forward(ctx: Any, logarithm: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(logarithm)
        ctx.bound = bound
        return logarithm.clamp(max=bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logarithm,) = ctx.saved_tensors
        return torch.where((logarithm >= ctx.bound) & (grad < 0), 0.0, grad), None


def _bounded_exp(logarithm: Tensor, largest: float | None) -> Tensor:
    bounded: Tensor = logarithm if largest is None else _Bounded.apply(logarithm, math.log(largest))
    return bounded.exp()
