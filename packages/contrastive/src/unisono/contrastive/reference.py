"""The specification: each loss as the naive formula of its paper, in one process, on the whole batch.

The losses of this package must give these values and gradients on any number of ranks, and the tests compare them. These
functions hold all logits and loop over the rows: use them to read and to test, not to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid


def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    same_id: str = "positive",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    decoupled: bool = False,
    hardness: float = 0.0,
    direction: str = "both",
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> Tensor:
    """Compute the cross entropy of each row of `x` among all candidates, and of each row of `y`. Without options this is

    logits = scale * x @ y.T
    labels = torch.arange(len(x))
    loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    """
    ids = torch.arange(len(x)) if ids is None else ids
    weights = x.new_ones(len(x)) if weights is None else weights
    candidates, candidate_ids = y, ids
    if negatives is not None:
        unlike_any = -1 - torch.arange(len(negatives))
        candidates = torch.cat([y, negatives])
        candidate_ids = torch.cat([ids, unlike_any if negative_ids is None else negative_ids])

    def mean_loss(anchors: Tensor, candidates: Tensor, candidate_ids: Tensor) -> Tensor:
        losses = []
        for i, anchor in enumerate(anchors):
            logits = scale * (candidates @ anchor)
            partner = torch.arange(len(candidates)) == i
            same = candidate_ids == ids[i]
            positive = same if same_id == "positive" else partner
            negative = logits[~same]
            importance = (hardness * negative).exp()
            denominator = (importance * negative.exp()).sum() / (importance.mean() if len(negative) else 1)
            if decoupled and len(negative) == 0:
                losses.append(0 * logits.sum())
                continue
            if not decoupled:
                denominator = denominator + logits[positive].exp().sum()
            target = (1 - label_smoothing) * logits[positive].mean() + label_smoothing * logits[positive | ~same].mean()
            losses.append(denominator.log() - target)
        return (weights * torch.stack(losses)).sum() / weights.sum()

    x_to_y = mean_loss(x, candidates, candidate_ids)
    return x_to_y if direction == "x_to_y" else (x_to_y + mean_loss(y, x, ids)) / 2


def sigmoid_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    same_id: str = "positive",
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the binary cross entropy of every pair (i, j); the class is whether it is a positive pair."""
    ids = torch.arange(len(x)) if ids is None else ids
    weights = x.new_ones(len(x)) if weights is None else weights
    logits = scale * x @ y.T + bias
    same = ids.unsqueeze(1) == ids
    losses = -logsigmoid(torch.where(same, logits, -logits))
    if same_id == "masked":
        losses = losses.masked_fill(same & ~torch.eye(len(x), dtype=torch.bool), 0)
    return (losses * (weights.unsqueeze(1) + weights) / 2).sum() / weights.sum()


def ntxent_loss(z0: Tensor, z1: Tensor, temperature: Tensor | float, *, weights: Tensor | None = None) -> Tensor:
    """Compute the cross entropy of each view among all other views; its label is the other view of its sample."""
    n = len(z0)
    z = torch.cat([z0, z1])
    weights = z.new_ones(n) if weights is None else weights
    logits = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    partners = (torch.arange(2 * n) + n) % (2 * n)
    losses = cross_entropy(logits, partners, reduction="none")
    return (losses * weights.repeat(2)).sum() / (2 * weights.sum())


def supcon_loss(z: Tensor, labels: Tensor, temperature: Tensor | float, *, weights: Tensor | None = None) -> Tensor:
    """Compute the mean over the anchors with a positive of -log softmax, averaged over the positives of the anchor."""
    weights = z.new_ones(len(z)) if weights is None else weights
    losses, counted = [], []
    for i in range(len(z)):
        logits = z @ z[i] / temperature
        others = torch.arange(len(z)) != i
        positive = others & (labels == labels[i])
        if positive.any():
            losses.append(weights[i] * (logits[others].logsumexp(0) - logits[positive].mean()))
            counted.append(weights[i])
    return torch.stack(losses).sum() / torch.stack(counted).sum()


def multi_tower_loss(towers: Sequence[Tensor], scale: Tensor | float, **options: Any) -> Tensor:
    """Compute the mean of clip_loss over all pairs of towers."""
    return torch.stack([clip_loss(x, y, scale, **options) for x, y in combinations(towers, 2)]).mean()
