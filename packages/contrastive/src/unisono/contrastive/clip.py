"""clip_loss: every pair against all other pairs of the global batch, in both directions."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unisono.collectives import Group, all_reduce, global_mean
from unisono.collectives.checks import describe
from unisono.collectives.sizes import Sizes
from unisono.contrastive.tiled.columns import Exchange
from unisono.contrastive.tiled.logit_statistics import logit_statistics
from unisono.contrastive.tiled.softmax_mean import softmax_mean
from unisono.contrastive.tiled.tiles import Logits, LogSumExp, Precision
from unisono.contrastive.validate import as_scalar, is_integral, shared_scalar, validate_inputs

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
    sizes: Sizes = None,
    exchange: Exchange = "auto",
    logits: Logits = "auto",
    grad_reduce: GradReduce = "mean",
    precision: Precision = "exact",
    tile: int | None = None,
) -> Tensor:
    """Compute the softmax contrastive loss (InfoNCE, CLIP) of the global batch: the same value on every rank.

    The loss is the cross entropy of scale * x @ y.T, by row and by column, over the rows of all ranks. Row i of `x` belongs
    to row i of `y`; both are (rows, width), and the caller normalises them if they should be. Ranks may have different
    numbers of rows, or none. `scale` multiplies the dot products (1 / temperature). `reference.clip_loss` is the specification.

    ids: one integer per row. Rows with the same id, on any rank, are not each other's negatives. same_id="positive" makes them
        positives that share the target equally; "masked" leaves them out.
    weights: how much each pair counts as an anchor, differentiable. A pair of weight 0 is still a negative of the others.
    label_smoothing: as in torch's cross_entropy, over all candidates.
    decoupled: leave the positives out of the denominator (DCL, Yeh et al. 2021).
    hardness: weight negatives in proportion to exp(hardness * logit) (Robinson et al. 2020).
    direction: "x_to_y" takes only the rows of `x` as anchors, as in retrieval.
    negatives: this rank's share of additional candidates for `x`, (any number, width), such as hard negatives, or those of a
        NegativeQueue. Those of all ranks count. If `ids` are given, `negative_ids` must be given, too.
    sizes: each rank's number of rows, if you know them, or "equal" if you promise that all ranks have as many as this one; only
        checked() compares them then. Otherwise one small collective exchanges them.
    exchange: "gather" brings the `y` of all ranks at once, "ring" one rank's `y` after the other; "auto" decides by memory.
    logits: "keep" holds the logits of this rank's rows for the backward, "recompute" computes them again tile by tile; "auto"
        keeps up to 128 MiB.
    precision: how the backward rounds on accelerators. With 16-bit features, "exact" multiplies gradients of the logits of 16
        bits and more, "fast" rounds them once to the dtype of the features, which saves half of the backward's matmuls. With
        float32 features "fast" allows TF32 in the backward. Sums have 32 bits. On CPUs and with float64 both are the same.
    tile: the number of rows and columns of one tile of logits.

    Backward: gradients for x, y, negatives, scale and weights. They are those of the global loss after averaging over the
    ranks, as DDP and FSDP do (grad_reduce="mean"), or after adding them up ("sum"; also the one to take for a penalty on
    gradients, see the README). The gradient of `scale` is the same on every rank. All ranks must run it.

    Example:
        >>> import torch
        >>> from unisono.contrastive import clip_loss
        >>> x = torch.eye(3)
        >>> clip_loss(x, x, scale=10.0)  # on one rank, or with the three rows on any ranks
        tensor(9.0796e-05)
    """
    problem = _negatives_error(ids, negatives, negative_ids)
    if not 0 <= label_smoothing < 1:
        problem = f"label_smoothing={label_smoothing!r} must be in [0, 1)"
    if hardness < 0:
        problem = f"hardness={hardness!r} must not be negative"
    options: dict[str, object] = {"same_id": same_id, "label_smoothing": label_smoothing, "decoupled": decoupled}
    options |= {"hardness": hardness, "direction": direction, "exchange": exchange, "tile": tile}
    options |= {"grad_reduce": grad_reduce, "logits": logits, "precision": precision}
    inputs = validate_inputs(
        "clip_loss",
        x,
        y,
        scale=scale,
        ids=ids,
        weights=weights,
        negatives=negatives,
        sizes=sizes,
        group=group,
        options=options,
        problem=problem,
    )
    x, y, ids = inputs.x, inputs.y, inputs.ids
    plain = inputs.paired and ids is None and weights is None and not (label_smoothing or decoupled or hardness)
    if plain and inputs.sizes is not None and not torch.compiler.is_compiling():
        plan = inputs.tile_plan(columns=direction == "both")
        return softmax_mean(x, y, as_scalar(scale), plan, grad_reduce)
    scale = shared_scalar(scale, group)

    shared_target = ids is not None and same_id == "positive"  # rows with the same id share the target
    only_negatives = ids is not None and (not shared_target or decoupled or hardness > 0)
    where: Literal["all", "other"] = "other" if only_negatives else "all"
    log_sum_exps = [LogSumExp(1.0 + hardness, where)]
    if hardness:
        log_sum_exps.append(LogSumExp(hardness, where))
    if hardness and shared_target and not decoupled:
        log_sum_exps.append(LogSumExp(1.0, "same"))
    sums = ids is not None and (shared_target or hardness > 0 or label_smoothing > 0)
    plan = inputs.tile_plan(log_sum_exps=tuple(log_sum_exps), columns=direction == "both", same_id_sums=sums)
    row_and_column_ids = None
    if ids is not None:
        column_ids = ids if negative_ids is None else torch.cat([ids, negative_ids.to(ids)])
        row_and_column_ids = ids, column_ids
    statistics = logit_statistics(x, y, scale, row_and_column_ids, plan)

    def anchor_losses(by_anchor: Tensor, anchors: Tensor, candidates: Tensor, count: Tensor | float) -> Tensor:
        """Compute the loss of each anchor from its statistics. `count`: the number of candidates on all ranks."""
        diagonal = statistics.diagonal
        parts = by_anchor.unbind()  # not by_anchor[k], each of which would have a backward of its own
        same_count = parts[-1].detach() if sums else 0.0  # candidates with the same id, without the partner
        rest = parts[0]  # the log-sum-exp of the denominator, without the partner
        if hardness:
            number = count - 1 - same_count
            if isinstance(number, Tensor):
                rest = torch.where(number > 0, number.log() + parts[0] - parts[1], -torch.inf)
            else:  # no tensor: copying a number to a GPU would make the host wait
                rest = parts[0] - parts[1] + math.log(number) if number > 0 else torch.full_like(rest, -torch.inf)
        if hardness and shared_target and not decoupled:
            rest = _logaddexp(rest, parts[2])
        target = (diagonal + parts[-2]) / (same_count + 1) if shared_target else diagonal
        if decoupled:
            losses = torch.where(rest == -torch.inf, 0.0, rest - target)
        else:  # logaddexp(rest, diagonal) - target would lose all digits of a loss near zero and of its gradient
            losses = softplus(rest - diagonal, threshold=50)
            if shared_target:
                losses = losses + (same_count * diagonal - parts[-2]) / (same_count + 1)
        if label_smoothing:
            total = all_reduce(candidates.sum(0, dtype=rest.dtype), group=group)
            uniform = scale.to(rest.dtype) * (anchors.to(rest.dtype) @ total)
            if ids is not None and not shared_target:
                uniform = uniform - parts[-2]
                count = count - same_count
            losses = losses + label_smoothing * (target - uniform / count)
        return losses

    losses = anchor_losses(statistics.rows, x, y, inputs.global_rows(y))
    if direction == "both":
        partners = x.shape[0]  # the columns after these are negatives, which are no anchors
        columns = statistics.columns[:, :partners]
        losses = (losses + anchor_losses(columns, y[:partners], x, inputs.global_rows(x))) / 2
    loss = global_mean(losses, weights=weights, grad_reduce=grad_reduce, group=group)
    return loss.to(torch.promote_types(x.dtype, torch.float32))


def multi_tower_loss(towers: Sequence[Tensor], scale: Tensor | float, **options: Any) -> Tensor:
    """Compute the mean of `clip_loss` over all pairs of two or more towers, such as image, text and sound of the same things.

    Row i of every tower belongs together. `options` are those of clip_loss. With direction="x_to_y" the anchors of a pair
    are the rows of its first tower.

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


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """torch.logaddexp, but with a second derivative where one side is -inf."""
    no_a = a == -torch.inf
    no_b = b == -torch.inf
    both = torch.logaddexp(a.masked_fill(no_a, 0), b.masked_fill(no_b, 0))
    return torch.where(no_a, b, torch.where(no_b, a, both))


def _negatives_error(ids: Tensor | None, negatives: Tensor | None, negative_ids: Tensor | None) -> str:
    if negatives is None and negative_ids is not None:
        return "negative_ids are given without negatives"
    if negatives is not None and (ids is None) != (negative_ids is None):
        return "ids and negative_ids go together: give both, or neither"
    if isinstance(negatives, Tensor) and negative_ids is not None:
        fits = isinstance(negative_ids, Tensor) and negative_ids.shape == negatives.shape[:1] and is_integral(negative_ids)
        if not fits:
            return f"negative_ids: expected {negatives.shape[0]} integers, one for each negative, got {describe(negative_ids)}"
    return ""
