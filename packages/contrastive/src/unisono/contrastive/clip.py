"""clip_loss: every pair against all others of the global batch, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unisono.collectives import Group, all_reduce, global_mean
from unisono.collectives.checks import describe
from unisono.contrastive.blocks import Exchange
from unisono.contrastive.calls import is_integral, options_complaint, settle, shared
from unisono.contrastive.statistics import pair_statistics
from unisono.contrastive.walk import Entry, Logits, Pairs

GradReduce = Literal["mean", "sum"]
SameId = Literal["positive", "masked"]
Direction = Literal["both", "x_to_y"]


def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    same_id: SameId = "positive",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    decoupled: bool = False,
    hardness: float = 0.0,
    direction: Direction = "both",
    negatives: Tensor | None = None,
    negative_ids: Tensor | None = None,
    group: Group = None,
    sizes: Sequence[int] | None = None,
    exchange: Exchange = "auto",
    logits: Logits = "auto",
    grad_reduce: GradReduce = "mean",
    tile: int | None = None,
) -> Tensor:
    """The softmax contrastive loss (InfoNCE, CLIP) of the global batch: the same value on every rank.

    Row i of `x` belongs to row i of `y`; both are (rows, width), normalised by the caller if they are to be. Ranks may have
    different numbers of rows, also none. `scale` multiplies the dot products (1 / temperature).

    ids: rows with the same id on any rank are not each other's negatives. same_id="positive" makes them positives which
        share the target equally; "masked" leaves them out.
    weights: how much each pair counts as an anchor, differentiable; a pair of weight 0 still is a negative for others.
    label_smoothing: as in torch's cross_entropy, over all candidates.
    decoupled: positives are left out of the denominator (DCL, Yeh et al. 2021).
    hardness: negatives count in proportion to exp(hardness * logit) (Robinson et al. 2020).
    direction: "x_to_y" has only `x` as anchors, as in retrieval.
    negatives: this rank's share of more candidates for `x`, (any number, width), without gradient: a NegativeQueue's. Those
        of all ranks count. With `ids`, `negative_ids` are theirs.
    sizes: every rank's number of rows, if known; otherwise one small exchange tells.
    exchange: "gather" takes all ranks' `y` at once, "ring" one rank's after the other; "auto" decides by memory.
    logits: "keep" holds those of this rank's rows for the backward, "recompute" forms them once more, a tile at a time; "auto"
        keeps up to 128 MiB.
    tile: rows and columns of logits formed at a time.

    Backward: gradients for x, y, scale and weights that are those of the global loss once they are averaged over the
    ranks, as DDP and FSDP do (grad_reduce="mean"), or once they are added ("sum"). The one of `scale` is the same on every
    rank. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import clip_loss
        >>> x = torch.eye(3)
        >>> clip_loss(x, x, scale=10.0)  # alone, or with the three rows on any ranks
        tensor(9.0796e-05)
    """
    name = "clip_loss"
    problem = options_complaint(
        exchange,
        grad_reduce,
        tile,
        logits,
        same_id=(same_id, ("positive", "masked")),
        direction=(direction, ("both", "x_to_y")),
    )
    if not 0 <= label_smoothing < 1:
        problem = problem or f"label_smoothing={label_smoothing!r} must be in [0, 1)"
    if hardness < 0:
        problem = problem or f"hardness={hardness!r} must not be negative"
    options = f"same_id={same_id}, label_smoothing={label_smoothing}, decoupled={decoupled}, hardness={hardness}, {direction}"
    options += f", exchange={exchange}, tile={tile}, grad_reduce={grad_reduce}, ids={ids is not None}"
    options += f", negatives={negatives is not None}"
    call = settle(
        name,
        x,
        y,
        scale=scale,
        ids=ids,
        weights=weights,
        more=negatives,
        sizes=sizes,
        group=group,
        same=options,
        problem=problem or _negatives_complaint(ids, negatives, negative_ids),
    )
    x, y, ids, scale = call.x, call.y, call.ids, shared(scale, group)

    shares = ids is not None and same_id == "positive"  # the same ids share the target
    apart = ids is not None and (not shares or decoupled or hardness > 0)  # and are not among the others of the denominator
    where: Literal["all", "other"] = "other" if apart else "all"
    entries = [Entry(1.0 + hardness, where)]
    if hardness:
        entries.append(Entry(hardness, where))
    if hardness and shares and not decoupled:
        entries.append(Entry(1.0, "same"))
    plan = Pairs(tuple(entries), columns=direction == "both", sums=ids is not None, exchange=exchange, tile=tile, logits=logits)
    keys = None
    if ids is not None:
        keys = ids, ids if negative_ids is None else torch.cat([ids, negative_ids.to(ids)])
    found = pair_statistics(x, y, scale, keys, plan, call.sizes, group)

    def anchor_losses(by: Tensor, own: Tensor, others: Tensor, count: Tensor | float) -> Tensor:
        """The loss of each anchor of one side, from its statistics. `count`: of candidates, its own partner included."""
        diagonal, same = found.diagonal, by[-1].detach() if ids is not None else 0.0
        rest = by[0]
        if hardness:
            number = torch.as_tensor(count - 1 - same, dtype=rest.dtype, device=rest.device)
            rest = torch.where(number > 0, number.log() + by[0] - by[1], -torch.inf)
        if hardness and shares and not decoupled:
            rest = _log_add(rest, by[2])
        target = (diagonal + by[-2]) / (same + 1) if shares else diagonal
        if decoupled:
            losses = torch.where(rest == -torch.inf, 0.0, rest - target)
        else:  # not logaddexp(rest, diagonal) - target, where a loss near zero and its gradient would lose all digits
            losses = softplus(rest - diagonal, threshold=50)
            if shares:
                losses = losses + (same * diagonal - by[-2]) / (same + 1)
        if label_smoothing:
            total = all_reduce(others.sum(0, dtype=rest.dtype), group=group)
            uniform = scale.to(rest.dtype) * (own.to(rest.dtype) @ total)
            if ids is not None and not shares:
                uniform, count = uniform - by[-2], count - same
            losses = losses + label_smoothing * (target - uniform / count)
        return losses

    losses = anchor_losses(found.rows, x, y, call.candidates(group))
    if direction == "both":
        partners = x.shape[0]  # the columns beyond are nobody's anchors
        backwards = anchor_losses(found.columns[:, :partners], y[:partners], x, call.candidates(group, columns=False))
        losses = (losses + backwards) / 2
    loss = global_mean(losses, weights=weights, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(x.dtype, torch.float32))


def multi_tower_loss(towers: Sequence[Tensor], scale: Tensor | float, **options: Any) -> Tensor:
    """The mean of `clip_loss` over all pairs of two or more towers: image, text and sound of the same things, say.

    Row i of every tower belongs together. `options` are those of clip_loss; direction="x_to_y" goes from the earlier
    tower to the later.

    Backward: as in clip_loss.

    Example:
        >>> import torch
        >>> from unisono.contrastive import multi_tower_loss
        >>> x = torch.eye(3)
        >>> multi_tower_loss([x, x, x], scale=10.0)
        tensor(9.0796e-05)
    """
    if len(towers) < 2:
        raise ValueError(f"multi_tower_loss: towers: expected two or more, got {len(towers)}")
    losses = [clip_loss(x, y, scale, **options) for x, y in combinations(towers, 2)]
    return torch.stack(losses).mean()


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """logaddexp, with a second derivative also where one side is -inf."""
    no_a, no_b = a == -torch.inf, b == -torch.inf
    both = torch.logaddexp(a.masked_fill(no_a, 0), b.masked_fill(no_b, 0))
    return torch.where(no_a, b, torch.where(no_b, a, both))


def _negatives_complaint(ids: Tensor | None, negatives: Tensor | None, negative_ids: Tensor | None) -> str:
    if negatives is None and negative_ids is not None:
        return "negative_ids are given without negatives"
    if negatives is not None and (ids is None) != (negative_ids is None):
        return "ids and negative_ids go together: without one of them nobody knows which negatives to mask"
    if isinstance(negatives, Tensor) and negative_ids is not None:
        fits = isinstance(negative_ids, Tensor) and negative_ids.shape == negatives.shape[:1] and is_integral(negative_ids)
        if not fits:
            return f"negative_ids: expected {negatives.shape[0]} integers, one for each negative, got {describe(negative_ids)}"
    return ""
