"""sigmoid_loss: every pair of the global batch is classified on its own."""

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.collectives.functional.reduce import scale_loss_gradient
from unisono.collectives.sizes import Sizes
from unisono.contrastive.clip import GradReduce, SameId
from unisono.contrastive.tiled.columns import Exchange
from unisono.contrastive.tiled.sigmoid_sum import sigmoid_sum
from unisono.contrastive.tiled.tiles import Precision, statistics_dtype
from unisono.contrastive.validate import number_error, shared_scalar, validate_inputs


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
    sizes: Sizes = None,
    exchange: Exchange = "auto",
    grad_reduce: GradReduce = "mean",
    precision: Precision = "exact",
    tile: int | None = None,
) -> Tensor:
    """Compute the sigmoid loss (SigLIP, Zhai et al. 2023) of the global batch: the same value on every rank.

    The loss is the sum over all pairs (i, j) of softplus(-sign * (scale * x_i . y_j + bias)), divided by the number of rows.
    The sign is + for partners (i == j) and - for all other pairs. `reference.sigmoid_loss` is the specification.

    The arguments are as in clip_loss: row i of `x` belongs to row i of `y`, `ids` makes more pairs positive or leaves them out,
    and a pair (i, j) has the weight (weights[i] + weights[j]) / 2.

    Backward: as in clip_loss, for x, y, scale, bias and weights. The gradient is computed together with the value: call
    under torch.no_grad() where you need only the value.

    Example:
        >>> import torch
        >>> from unisono.contrastive import sigmoid_loss
        >>> x = torch.eye(3)
        >>> sigmoid_loss(x, x, scale=10.0, bias=-5.0)  # on one rank, or with the three rows on any ranks
        tensor(0.0201)
    """
    options: dict[str, object] = {"same_id": same_id, "exchange": exchange, "tile": tile, "grad_reduce": grad_reduce}
    options |= {"precision": precision, "weights": weights is not None}
    options["a gradient for bias"] = isinstance(bias, Tensor) and bias.requires_grad
    problem = number_error(bias, "bias")
    inputs = validate_inputs(
        "sigmoid_loss", x, y, scale=scale, ids=ids, weights=weights, sizes=sizes, group=group, options=options, problem=problem
    )
    plan = inputs.tile_plan(same_id_sums=ids is not None)
    scale = shared_scalar(scale, group)
    bias = shared_scalar(bias, group)
    local_sum = sigmoid_sum(inputs.x, inputs.y, scale, bias, weights, inputs.ids, same_id == "masked", plan)

    wide = statistics_dtype(x.device)
    local_count = x.new_full((), x.shape[0], dtype=wide) if weights is None else weights.sum(dtype=wide)
    sums = all_reduce(torch.stack([local_sum, local_count]), group=group)
    loss = scale_loss_gradient(sums[0] / sums[1], grad_reduce, group)
    return loss.to(torch.promote_types(inputs.x.dtype, torch.float32))
