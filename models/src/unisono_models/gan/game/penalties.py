"""Penalties on how steep the discriminator is, at real pictures (R1, Mescheder et al. 2018) and at fakes (R2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def squared_gradients(scores: Sequence[Tensor], pictures: Sequence[Tensor]) -> list[Tensor]:
    """For each picture the squared length of the gradient of all ranks' scores by it, (n,) for each of `pictures`.

    scores: (n,) tensors computed from `pictures`, which require a gradient. All ranks call it: where the discriminator looks
    at the whole batch, scores of other ranks depend on a picture, too, and its gradient is that of their sum.

    Backward: through the gradient itself, and so a second time through the collectives.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]], requires_grad=True)
        >>> squared_gradients([(x**2).sum(1)], [x])
        [tensor([ 4., 16.], grad_fn=<SumBackward1>)]
    """
    total = torch.stack([score.sum() for score in scores]).sum()
    gradients = torch.autograd.grad(total, list(pictures), create_graph=True)
    return [gradient.square().flatten(1).sum(1) for gradient in gradients]
