"""Metrics of click models: the exact area under the ROC curve (AUC), log loss, accuracy and calibration."""

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unisono.collectives import Group, all_gather, all_to_all_single, exchange_sizes
from unisono.collectives.groups import resolve_group
from unisono_models.training.distributed.object_collectives import validate_on_all_ranks

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SAMPLES = 256  # per rank: no rank gets more than about 1 + 2 * world_size / _SAMPLES times an even share of the scores


@torch.no_grad()
def area_under_curve(scores: Tensor, labels: Tensor, *, group: Group = None) -> float:
    """Compute the probability that a row of label 1 scores higher than one of label 0, over the rows of all ranks.

    A tie counts half. The result is exact: pairs are counted in integers and divided once, so every rank gets the same float,
    with the same bits for any split and any order of the rows. It is NaN if one of the labels does not occur.

    No rank holds all rows: each sends its distinct scores, with their numbers of rows of either label, to the rank that has
    that range of scores. A rank counts twice the pairs of its range in an int64, which suffices for 2e9 rows of each label.

    Args:
        scores: (rows,) of a floating point dtype, the same on all ranks. Ranks may have different numbers of rows, or none.
        labels: (rows,), 0 or 1, of any dtype.

    Raises: ValueError on all ranks if one has a NaN among its scores, another label, or another dtype than the others.

    Example:
        >>> area_under_curve(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))  # one of four pairs is a tie
        0.875
    """
    sizes = _validate("area_under_curve", "scores", scores, labels, group)
    return _area(scores, labels, group) if sum(sizes) else math.nan


@torch.no_grad()
def click_metrics(logits: Tensor, labels: Tensor, *, group: Group = None) -> dict[str, float]:
    """Compute the metrics of predicted clicks over the rows of all ranks: the same on every rank.

    `logits` and `labels` are the scores and labels of area_under_curve, with the same errors.

    Returns: "auc"; "log_loss", in nats; "accuracy", where a logit above 0 predicts a click; "rate", of clicks;
    "predicted_rate", the mean probability, which is near the rate if the model is calibrated; "rows". Means are taken in
    float64. Without any row all but "rows" are NaN.

    Example:
        >>> found = click_metrics(torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
        >>> {name: round(value, 4) for name, value in found.items()}
        {'auc': 0.75, 'log_loss': 0.6157, 'accuracy': 0.5, 'rate': 0.5, 'predicted_rate': 0.4549, 'rows': 4.0}
    """
    rows = sum(_validate("click_metrics", "logits", logits, labels, group))
    if not rows:
        return dict.fromkeys(("auc", "log_loss", "accuracy", "rate", "predicted_rate"), math.nan) | {"rows": 0.0}
    logits64 = logits.double()
    clicked = labels == 1
    values = {
        "log_loss": -logsigmoid(torch.where(clicked, logits64, -logits64)),  # an infinite logit gives 0 or infinity, not NaN
        "accuracy": (logits64 > 0) == clicked,
        "rate": clicked,
        "predicted_rate": logits64.sigmoid(),
    }
    sums = torch.stack([x.sum(dtype=torch.float64) for x in values.values()])
    all_sums = all_gather(sums[None], group=group).T.tolist()
    means = {name: math.fsum(parts) / rows for name, parts in zip(values, all_sums, strict=True)}
    return {"auc": _area(logits, labels, group)} | means | {"rows": float(rows)}


def _validate(function: str, name: str, scores: Tensor, labels: Tensor, group: Group) -> list[int]:
    """Return how many rows each rank has. Raises: ValueError on all ranks if one has a bad call."""
    problem = _validation_error(name, scores, labels)
    if problem:
        return validate_on_all_ranks(function, problem, same="", value=0, group=group)
    same = f"{name} of {scores.dtype} on {scores.device.type}"
    return validate_on_all_ranks(function, "", same=same, value=len(scores), group=group)


def _validation_error(name: str, scores: object, labels: object) -> str:
    for argument, x in ((name, scores), ("labels", labels)):
        if not isinstance(x, Tensor):
            return f"{argument}: expected a Tensor, got {type(x).__name__}"
    assert isinstance(scores, Tensor) and isinstance(labels, Tensor)
    if scores.ndim != 1 or scores.shape != labels.shape:
        return f"{name} and labels must be of one shape (rows,), got {tuple(scores.shape)} and {tuple(labels.shape)}"
    if scores.dtype not in _DTYPES:
        return f"{name} of {scores.dtype}: expected one of {', '.join(map(str, _DTYPES))}"
    if scores.device != labels.device:
        return f"{name} are on {scores.device}, labels on {labels.device}"
    if (bad := scores.isnan()).any():
        return f"{name}: nan at row {int(bad.int().argmax())} cannot be put in order"
    if (bad := (labels != 0) & (labels != 1)).any():
        row = int(bad.int().argmax())
        return f"labels: {labels[row].item()} at row {row}; a label is 0 or 1"
    return ""


def _area(scores: Tensor, labels: Tensor, group: Group) -> float:
    clicked = labels == 1
    values, counts = _tally(scores, torch.stack([clicked, ~clicked], 1).long())
    if resolve_group(group).size > 1:
        _, counts = _tally(*_send_to_ranges(values, counts, group))
    ones, zeros = counts.unbind(1)
    twice_below = 2 * zeros.cumsum(0) - zeros  # a zero of the same score is below by half
    own = torch.stack([(ones * twice_below).sum(), ones.sum(), zeros.sum()])
    ranges = all_gather(own[None], group=group).tolist()
    below = accumulate((zeros for _, _, zeros in ranges), initial=0)
    twice_won = sum(twice + 2 * ones * lower for (twice, ones, _), lower in zip(ranges, below, strict=False))
    pairs = sum(ones for _, ones, _ in ranges) * sum(zeros for _, _, zeros in ranges)
    return twice_won / (2 * pairs) if pairs else math.nan  # integers of any size: rounded once


def _tally(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values in ascending order, and for each the sum of its rows of `counts`."""
    values, order = values.sort()
    last = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=last[:-1])  # not diff(): infinities have no difference
    totals = counts[order].cumsum(0)[last]
    return values[last], totals.diff(dim=0, prepend=totals.new_zeros(1, 2))


def _send_to_ranges(values: Tensor, counts: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Exchange values and counts: each rank gets those of one range. Ranges ascend with the rank, as `values` have to."""
    ranks = resolve_group(group)
    sizes = exchange_sizes(values, group=group)
    step = -(-sum(sizes) // (ranks.size * _SAMPLES))
    # Every sample stands for the same number of scores, so a rank with most of the rows contributes most of the samples.
    samples = all_gather(values[::step], sizes=[-(-size // step) for size in sizes], group=group).sort().values
    bounds = samples[[rank * len(samples) // ranks.size for rank in range(1, ranks.size)]]
    ends = [0, *torch.searchsorted(values, bounds, right=True).tolist(), len(values)]  # right: equal scores stay together
    send = [stop - start for start, stop in pairwise(ends)]
    send_to = torch.tensor(send, device=values.device)
    receive = all_to_all_single(send_to, send_sizes=[1] * ranks.size, receive_sizes=[1] * ranks.size, group=group).tolist()
    moved = [all_to_all_single(x, send_sizes=send, receive_sizes=receive, group=group) for x in (values, counts)]
    return moved[0], moved[1]
