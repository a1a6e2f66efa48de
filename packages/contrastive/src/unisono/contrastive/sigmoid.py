"""sigmoid_loss: every pair of the global batch judged by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.collectives.functional.reduce import scale_loss_gradient
from unisono.contrastive.blocks import Exchange
from unisono.contrastive.calls import number_complaint, options_complaint, settle, shared
from unisono.contrastive.clip import GradReduce, SameId
from unisono.contrastive.sigmoid_sum import sigmoid_sum
from unisono.contrastive.tiles import statistics_dtype
from unisono.contrastive.walk import Pairs


def sigmoid_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    same_id: SameId = "positive",
    weights: Tensor | None = None,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    exchange: Exchange = "auto",
    grad_reduce: GradReduce = "mean",
    tile: int | None = None,
) -> Tensor:
    """The sigmoid loss (SigLIP, Zhai et al. 2023) of the global batch: the same value on every rank.

    The sum over all pairs (i, j) of softplus(-sign * (scale * x_i . y_j + bias)), the sign being + for partners and - for all
    others, divided by the number of rows. Arguments are as in clip_loss: row i of `x` belongs to row i of `y`, `ids` makes
    more positives or masks them, and a pair (i, j) counts (weights[i] + weights[j]) / 2.

    Backward: as in clip_loss, for x, y, scale, bias and weights. It is computed along with the value: where there will be
    none, call under torch.no_grad().

    Example:
        >>> import torch
        >>> from unisono.contrastive import sigmoid_loss
        >>> x = torch.eye(3)
        >>> sigmoid_loss(x, x, scale=10.0, bias=-5.0)  # alone, or with the three rows on any ranks
        tensor(0.0201)
    """
    name = "sigmoid_loss"
    problem = options_complaint(exchange, grad_reduce, tile, same_id=(same_id, ("positive", "masked")))
    problem = problem or number_complaint(bias, "bias")
    options = f"same_id={same_id}, exchange={exchange}, tile={tile}, grad_reduce={grad_reduce}"
    options += f", ids={ids is not None}, weights={weights is not None}"
    options += f", a gradient for bias: {isinstance(bias, Tensor) and bias.requires_grad}"
    call = settle(name, x, y, scale=scale, ids=ids, weights=weights, sizes=sizes, group=group, same=options, problem=problem)
    plan = Pairs(sums=ids is not None, exchange=exchange, tile=tile)
    scale, bias = shared(scale, group), shared(bias, group)
    local = sigmoid_sum(call.x, call.y, scale, bias, weights, call.ids, same_id == "masked", plan, call.sizes, group)

    wide = statistics_dtype(x.device)
    count = x.new_full((), x.shape[0], dtype=wide) if weights is None else weights.sum(dtype=wide)
    sums = all_reduce(torch.stack([local, count]), group=group)
    loss = scale_loss_gradient(sums[0] / sums[1], grad_reduce, group)
    return loss.to(torch.promote_types(call.x.dtype, torch.float32))
