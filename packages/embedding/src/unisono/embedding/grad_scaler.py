"""GradScaler for models with sharded tables: all ranks skip a step, or none."""

from typing import Any

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with its arguments, for gradients of tables that are sharded over ranks.

    Each rank sees the gradients of its own shards. If those of any rank are infinite or NaN, all ranks skip the step and lower
    the scale, as one process would. (torch's GradScaler would skip on that rank alone, and the ranks' weights would drift
    apart.) All ranks call `unscale_` and `step`. A step in the backward comes too early for it: make the tables with
    `optimizer=` and `sparse=True`.

    `group`: the ranks that skip together, all that have a part of the tables; None: all ranks.

    Example:
        >>> from unisono.embedding import SGD, EmbeddingCollection, Table
        >>> collection = EmbeddingCollection([Table("user", 100, 8)], optimizer=SGD(lr=0.1), sparse=True)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(collection({"user": torch.tensor([3, 5])})["user"].sum()).backward()
        >>> scaler.step(collection.optimizer)
        >>> scaler.update()
    """

    def __init__(self, *args: Any, group: Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Called by `unscale_`, and by `step` for optimizers that unscale for themselves, such as Adam(fused=True)."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {device: all_reduce(flag, op="max", group=self.group) for device, flag in found.items()}
