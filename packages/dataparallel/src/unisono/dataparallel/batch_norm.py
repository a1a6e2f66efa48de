"""Batch norm over all ranks as a module, and the conversion of a model to it."""

from __future__ import annotations

import copy
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.collectives import Group
from unisono.dataparallel.batch_normalization import sync_batch_norm

_Module = TypeVar("_Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d and 3d in one, with the statistics of the global batch: see sync_batch_norm.

    Any device and backend; local batches may be uneven or empty. Parameters, buffers and state_dict are those of
    nn.BatchNorm*d and nn.SyncBatchNorm. eval() with running statistics never communicates; with track_running_stats=False
    also eval() normalizes by the global batch, so all ranks must call it. momentum=None averages over all batches so far.

    Backward: as sync_batch_norm. The gradients of weight and bias are those of the local part, right beside DDP, FSDP and
    sync_gradients.

    Example:
        >>> import torch
        >>> from unisono.dataparallel import SyncBatchNorm
        >>> norm = SyncBatchNorm(2)
        >>> norm(torch.randn(8, 2, 5, 5)).shape
        torch.Size([8, 2, 5, 5])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None and self.running_mean is not None:
                momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()  # stays on the device
        kept = self.track_running_stats or not self.training
        return sync_batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            training=self.training or (self.running_mean is None and self.running_var is None),
            momentum=momentum,
            eps=self.eps,
            group=self.group,
        )

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.group is None else f"{text}, group={self.group}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # the same ranks; a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class _SyncBatchNormAct(SyncBatchNorm):
    """What timm's BatchNormAct2d becomes: its submodules `drop` and `act` follow the norm."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(input)))
        return y


def convert_sync_batchnorm(module: _Module, *, group: Group = None) -> _Module:
    """Make every nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm in `module`, or `module` itself, a SyncBatchNorm.

    In place: the modules stay the objects they are and only change their class, so parameters, buffers, optimizers, hooks,
    shared layers, flags, device and dtype stay as they were. timm's BatchNormAct2d keeps its activation. Other subclasses
    of torch's batch norms do what nobody here knows: a TypeError names them, and nothing is changed. So do lazy ones: run a
    batch first.

    group: as everywhere; None leaves an nn.SyncBatchNorm or SyncBatchNorm its own group and gives all others the default one.

    Example:
        >>> from torch import nn
        >>> from unisono.dataparallel import convert_sync_batchnorm
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    norms = [(name, norm, _class_for(norm)) for name, norm in module.named_modules() if isinstance(norm, _BatchNorm)]
    unknown = [f"{name or 'module'}: {type(norm).__module__}.{type(norm).__qualname__}" for name, norm, cls in norms if not cls]
    if unknown:
        raise TypeError(
            f"convert_sync_batchnorm: no class for {'; '.join(unknown)}. Known are nn.BatchNorm1d, 2d, 3d, nn.SyncBatchNorm "
            "and timm's BatchNormAct2d; run a batch through lazy ones first, make others a subclass of SyncBatchNorm"
        )
    for _, norm, cls in norms:
        own = vars(norm).pop("process_group", vars(norm).get("group"))
        norm.__class__ = cls  # type: ignore[assignment]
        vars(norm)["group"] = own if group is None else group
    return module


def _class_for(norm: _BatchNorm) -> type[SyncBatchNorm] | None:
    kind = type(norm)
    if isinstance(norm, SyncBatchNorm):
        return type(norm)
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return SyncBatchNorm
    if kind.__module__.startswith("timm.") and kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct"):
        return _SyncBatchNormAct
    return None
