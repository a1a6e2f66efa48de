"""Losses on one tower: two views of the same samples, or samples with labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import softplus

from unisono.collectives import Group, global_mean
from unisono.collectives.checks import describe
from unisono.contrastive.blocks import Exchange
from unisono.contrastive.calls import options_complaint, settle, shared
from unisono.contrastive.clip import GradReduce
from unisono.contrastive.statistics import pair_statistics
from unisono.contrastive.walk import Logits, Pairs

NAMES = ("temperature", "labels")


def ntxent_loss(
    z0: Tensor,
    z1: Tensor,
    temperature: Tensor | float,
    *,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    weights: Tensor | None = None,
    exchange: Exchange = "auto",
    logits: Logits = "auto",
    grad_reduce: GradReduce = "mean",
    tile: int | None = None,
) -> Tensor:
    """The normalised temperature-scaled cross entropy (SimCLR, Chen et al. 2020) over the global batch of two views.

    Row i of `z0` and of `z1` are views of one sample, normalised by the caller. Each of the 2N views has the other view of
    its sample as positive and the 2N - 2 views of all other samples, on all ranks, as negatives. `weights`: of each sample.

    Backward: as in clip_loss. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ntxent_loss
        >>> z = torch.eye(3)
        >>> ntxent_loss(z, z, temperature=0.1)
        tensor(0.0002)
    """
    name = "ntxent_loss"
    problem = options_complaint(exchange, grad_reduce, tile, logits)
    options = f"exchange={exchange}, tile={tile}, grad_reduce={grad_reduce}"
    call = settle(
        name, z0, z1, scale=temperature, weights=weights, sizes=sizes, group=group, same=options, problem=problem, names=NAMES
    )
    scale = 1 / shared(temperature, group)
    # Anchors are both views; candidates are both views swapped, so that partners meet on the diagonal and each view itself
    # is half a batch off it.
    samples = call.x.shape[0]
    anchors, candidates = torch.cat([call.x, call.y]), torch.cat([call.y, call.x])
    plan = Pairs(left_out=(0, samples, -samples), columns=False, exchange=exchange, tile=tile, logits=logits)
    doubled = None if call.sizes is None else tuple(2 * size for size in call.sizes)
    found = pair_statistics(anchors, candidates, scale, None, plan, doubled, group)
    losses = rearrange(softplus(found.rows[0] - found.diagonal, threshold=50), "(view n) -> n view", view=2)
    loss = global_mean(losses, weights=weights, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(call.x.dtype, torch.float32))


def supcon_loss(
    z: Tensor,
    labels: Tensor,
    temperature: Tensor | float,
    *,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    weights: Tensor | None = None,
    exchange: Exchange = "auto",
    logits: Logits = "auto",
    grad_reduce: GradReduce = "mean",
    tile: int | None = None,
) -> Tensor:
    """The supervised contrastive loss (Khosla et al. 2020, L_out) over the global batch.

    `z`: (rows, width), or (rows, views, width) with one label for all views of a row; normalised by the caller. All
    samples of all ranks with an anchor's label are its positives. The mean is over the anchors that have one: without any
    in the whole batch the loss is NaN.

    Backward: as in clip_loss. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import supcon_loss
        >>> z, labels = torch.eye(3)[[0, 0, 1, 1]], torch.tensor([7, 7, 8, 8])
        >>> supcon_loss(z, labels, temperature=0.5)
        tensor(0.2395)
    """
    name = "supcon_loss"
    problem = options_complaint(exchange, grad_reduce, tile, logits)
    views = 1
    if isinstance(z, Tensor) and z.ndim == 3 and not (isinstance(labels, Tensor) and labels.shape == z.shape[:1]):
        problem = problem or f"labels: expected {z.shape[0]} integers, one for each row, got {describe(labels)}"
    elif isinstance(z, Tensor) and z.ndim == 3:
        views = z.shape[1]
        z = rearrange(z, "n view d -> (n view) d")
        labels = repeat(labels, "n -> (n view)", view=views)
        weights = None if weights is None else repeat(weights, "n -> (n view)", view=views)
        sizes = None if sizes is None else [views * size for size in sizes]
    options = f"exchange={exchange}, tile={tile}, grad_reduce={grad_reduce}, views={views}"
    call = settle(
        name,
        z,
        z,
        scale=temperature,
        ids=labels,
        weights=weights,
        sizes=sizes,
        group=group,
        same=options,
        problem=problem,
        names=NAMES,
    )
    keys = None if call.ids is None else (call.ids, call.ids)
    plan = Pairs(columns=False, sums=True, diagonal=False, exchange=exchange, tile=tile, logits=logits)
    found = pair_statistics(call.x, call.y, 1 / shared(temperature, group), keys, plan, call.sizes, group)
    everyone, positives, number = found.rows[0], found.rows[1], found.rows[2].detach()
    losses = torch.where(number > 0, everyone - positives / number.clamp(min=1), 0.0)
    counted = (number > 0).to(losses.dtype)
    loss = global_mean(losses, weights=counted if weights is None else counted * weights, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(call.x.dtype, torch.float32))
