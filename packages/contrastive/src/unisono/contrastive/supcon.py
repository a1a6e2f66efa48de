"""supcon_loss: all samples with the same label attract each other."""

import torch
from einops import rearrange, repeat
from torch import Tensor

from unisono.collectives import Group, global_mean
from unisono.collectives.checks import describe
from unisono.collectives.sizes import Sizes
from unisono.contrastive.clip import GradReduce
from unisono.contrastive.tiled.columns import Exchange
from unisono.contrastive.tiled.logit_statistics import logit_statistics
from unisono.contrastive.tiled.tiles import Logits, Precision
from unisono.contrastive.validate import shared_scalar, validate_inputs


def supcon_loss(
    z: Tensor,
    labels: Tensor,
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
    """Compute the supervised contrastive loss (Khosla et al. 2020, L_out) of the global batch.

    `z` is (rows, width), or (rows, views, width) with one label for all views of a row; normalised by the caller. The positives
    of an anchor are all other samples of all ranks with its label. The loss is the mean over the anchors that have a positive,
    and NaN if the whole batch has none. `reference.supcon_loss` is the specification.

    The other arguments are as in clip_loss.

    Backward: as in clip_loss. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import supcon_loss
        >>> z, labels = torch.eye(3)[[0, 0, 1, 1]], torch.tensor([7, 7, 8, 8])
        >>> supcon_loss(z, labels, temperature=0.5)
        tensor(0.2395)
    """
    problem = ""
    views = 1
    if isinstance(z, Tensor) and z.ndim == 3 and not (isinstance(labels, Tensor) and labels.shape == z.shape[:1]):
        problem = f"labels: expected {z.shape[0]} integers, one for each row, got {describe(labels)}"
    elif isinstance(z, Tensor) and z.ndim == 3:
        views = z.shape[1]
        z = rearrange(z, "n view d -> (n view) d")
        labels = repeat(labels, "n -> (n view)", view=views)
        weights = None if weights is None else repeat(weights, "n -> (n view)", view=views)
        if sizes is not None and not isinstance(sizes, str):  # "equal" stays as it is
            sizes = [views * size for size in (sizes.tolist() if isinstance(sizes, Tensor) else sizes)]
    inputs = validate_inputs(
        "supcon_loss",
        z,
        z,
        scale=temperature,
        ids=labels,
        weights=weights,
        sizes=sizes,
        group=group,
        options={
            "exchange": exchange,
            "tile": tile,
            "grad_reduce": grad_reduce,
            "logits": logits,
            "precision": precision,
            "views": views,
        },
        problem=problem,
        names=("temperature", "labels"),
    )
    ids = None if inputs.ids is None else (inputs.ids, inputs.ids)
    scale = 1 / shared_scalar(temperature, group)
    plan = inputs.tile_plan(columns=False, same_id_sums=True, diagonal=False)
    statistics = logit_statistics(inputs.x, inputs.y, scale, ids, plan)
    log_sum, positive_sum, positive_count = statistics.rows.unbind()
    positive_count = positive_count.detach()
    has_positive = positive_count > 0
    losses = torch.where(has_positive, log_sum - positive_sum / positive_count.clamp(min=1), 0.0)
    counted = has_positive.to(losses.dtype)
    if weights is not None:
        counted = counted * weights
    loss = global_mean(losses, weights=counted, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(inputs.x.dtype, torch.float32))
