"""The losses as their papers have them: one process, the whole batch, plain torch. What the ranks must reproduce."""

import torch
import torch.nn.functional as F
from torch import Tensor


def clip(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
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
    """Anchor by anchor: no vectorisation to get wrong."""
    weights = torch.ones(len(x), dtype=x.dtype) if weights is None else weights
    ids = torch.arange(len(x)) if ids is None else ids
    candidates = y if negatives is None else torch.cat([y, negatives])
    candidate_ids = (
        ids
        if negatives is None
        else torch.cat([ids, negative_ids if negative_ids is not None else -1 - torch.arange(len(negatives))])
    )
    sides = [_one_side(x, candidates, scale, ids, candidate_ids, same_id, label_smoothing, decoupled, hardness)]
    if direction == "both":
        sides.append(_one_side(y, x, scale, ids, ids, same_id, label_smoothing, decoupled, hardness))
    return sum((weights * side).sum() / weights.sum() for side in sides) / len(sides)


def _one_side(anchors, candidates, scale, ids, candidate_ids, same_id, label_smoothing, decoupled, hardness) -> Tensor:
    losses = []
    for i, anchor in enumerate(anchors):
        logits = scale * (candidates @ anchor)
        same = candidate_ids == ids[i]
        own = torch.arange(len(candidates)) == i
        positive = same if same_id == "positive" else own
        candidate = torch.ones_like(same) if same_id == "positive" else own | ~same
        negative = logits[~same]
        if hardness and len(negative):
            importance = (hardness * negative).exp()
            negative_sum = (importance * negative.exp()).sum() / importance.mean()
        else:
            negative_sum = negative.exp().sum()
        denominator = negative_sum if decoupled else negative_sum + logits[positive].exp().sum()
        if decoupled and not len(negative):
            losses.append(0 * logits.sum())
            continue
        target = (1 - label_smoothing) * logits[positive].mean() + label_smoothing * logits[candidate].mean()
        losses.append(denominator.log() - target)
    return torch.stack(losses)


def clip_by_cross_entropy(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    logits, labels = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None = None,
    same_id: str = "positive",
    weights: Tensor | None = None,
) -> Tensor:
    weights = torch.ones(len(x), dtype=x.dtype) if weights is None else weights
    ids = torch.arange(len(x)) if ids is None else ids
    total = 0 * x.sum()
    for i in range(len(x)):
        for j in range(len(y)):
            same = bool(ids[i] == ids[j])
            if same_id == "masked" and same and i != j:
                continue
            sign = 1 if i == j or same else -1
            total = total - (weights[i] + weights[j]) / 2 * F.logsigmoid(sign * (scale * x[i] @ y[j] + bias))
    return total / weights.sum()


def ntxent(z0: Tensor, z1: Tensor, temperature: Tensor, weights: Tensor | None = None) -> Tensor:
    n, z = len(z0), torch.cat([z0, z1])
    weights = torch.ones(n, dtype=z.dtype) if weights is None else weights
    logits = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    partners = (torch.arange(2 * n) + n) % (2 * n)
    losses = F.cross_entropy(logits, partners, reduction="none")
    return (losses * weights.repeat(2)).sum() / (2 * weights.sum())


def supcon(z: Tensor, labels: Tensor, temperature: Tensor, weights: Tensor | None = None) -> Tensor:
    weights = torch.ones(len(z), dtype=z.dtype) if weights is None else weights
    losses, counted = [], []
    for i in range(len(z)):
        others = torch.arange(len(z)) != i
        logits = z @ z[i] / temperature
        positive = others & (labels == labels[i])
        if positive.any():
            losses.append(weights[i] * (torch.logsumexp(logits[others], 0) - logits[positive].mean()))
            counted.append(weights[i])
    return torch.stack(losses).sum() / torch.stack(counted).sum()


def multi_tower(towers: list[Tensor], scale: Tensor, **options) -> Tensor:
    pairs = [(a, b) for k, a in enumerate(towers) for b in towers[k + 1 :]]
    return sum(clip(a, b, scale, **options) for a, b in pairs) / len(pairs)
