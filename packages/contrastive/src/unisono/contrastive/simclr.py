"""ntxent_loss: two views of each sample, as in SimCLR."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import softplus

from unisono.collectives import Group, global_mean
from unisono.collectives.sizes import Sizes
from unisono.contrastive.clip import GradReduce
from unisono.contrastive.tiled.columns import Exchange
from unisono.contrastive.tiled.logit_statistics import logit_statistics
from unisono.contrastive.tiled.softmax_mean import softmax_mean
from unisono.contrastive.tiled.tiles import Logits, Precision, statistics_dtype
from unisono.contrastive.validate import as_scalar, shared_scalar, validate_inputs


def ntxent_loss(
    z0: Tensor,
    z1: Tensor,
    temperature: Tensor | float,
    *,
    group: Group = None,
    sizes: Sizes = None,
    weights: Tensor | None = None,
    exchange: Exchange = "auto",
    logits: Logits = "auto",
    grad_reduce: GradReduce = "mean",
    precision: Precision = "exact",
    tile: int | None = None,
) -> Tensor:
    """Compute the normalised temperature-scaled cross entropy (SimCLR, Chen et al. 2020) of the global batch of two views.

    Row i of `z0` and row i of `z1` are views of one sample; both are (rows, width), normalised by the caller. The positive of
    each of the 2N views is the other view of its sample. Its negatives are the 2N - 2 views of all other samples on all ranks.
    `reference.ntxent_loss` is the specification.

    weights: one for each sample. The other arguments are as in clip_loss.

    Backward: as in clip_loss. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ntxent_loss
        >>> z = torch.eye(3)
        >>> ntxent_loss(z, z, temperature=0.1)
        tensor(0.0002)
    """
    options = {"exchange": exchange, "tile": tile, "grad_reduce": grad_reduce, "logits": logits, "precision": precision}
    names = ("temperature", "ids")
    inputs = validate_inputs(
        "ntxent_loss", z0, z1, scale=temperature, weights=weights, sizes=sizes, group=group, options=options, names=names
    )
    # Anchors are both views; candidates are both views, swapped. So partners lie on the diagonal, and each view meets itself
    # half a batch off the diagonal.
    samples = inputs.x.shape[0]
    anchors = torch.cat([inputs.x, inputs.y])
    candidates = torch.cat([inputs.y, inputs.x])
    sizes = None if inputs.sizes is None else tuple(2 * size for size in inputs.sizes)
    plan = inputs.tile_plan(excluded_diagonals=(0, samples, -samples), columns=False, sizes=sizes)
    if sizes is not None and weights is None and not torch.compiler.is_compiling():
        scale = 1 / as_scalar(temperature).to(statistics_dtype(anchors.device))
        return softmax_mean(anchors, candidates, scale, plan, grad_reduce)
    scale = 1 / shared_scalar(temperature, group)
    statistics = logit_statistics(anchors, candidates, scale, None, plan)
    losses = softplus(statistics.rows[0] - statistics.diagonal, threshold=50)
    losses = rearrange(losses, "(view n) -> n view", view=2)
    loss = global_mean(losses, weights=weights, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(inputs.x.dtype, torch.float32))
