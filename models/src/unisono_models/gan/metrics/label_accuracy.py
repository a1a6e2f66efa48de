"""What a judge takes generated pictures for: what they were asked to be, and all there is."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono_models.training.distributed.object_collectives import raise_together

_ENOUGH = 0.1  # of its real share, for a class to count as covered


@torch.no_grad()
def label_metrics(logits: Tensor, labels: Tensor, *, real_counts: Tensor, group: Group = None) -> dict[str, float]:
    """Of pictures on all ranks, by the judge's `logits` (n, classes) and the `labels` (n,) that they were asked to have.

    "label_accuracy": part of them that the judge takes for what they were asked to be. "class_coverage": number of classes that
    get at least a tenth of their share of real pictures, by the judge; `real_counts` (classes,): of these, the same on
    all ranks; classes that have none do not count. Logits that are not finite stand for no class.

    Raises: on all ranks, ValueError if shapes do not fit (RanksError on several ranks).

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
        >>> label_metrics(logits, torch.tensor([0, 0]), real_counts=torch.tensor([5, 5, 5]))
        {'label_accuracy': 0.5, 'class_coverage': 2.0}
    """
    with raise_together("label_metrics", group=group):
        if logits.ndim != 2 or labels.shape != logits.shape[:1] or real_counts.shape != logits.shape[1:]:
            raise ValueError(
                f"label_metrics: logits {tuple(logits.shape)}, labels {tuple(labels.shape)}, real_counts "
                f"{tuple(real_counts.shape)}: expected (n, classes), (n,) and (classes,)"
            )
    classes = logits.shape[1]
    taken_for = logits.argmax(1).masked_fill(~logits.isfinite().all(1), classes)
    right = (taken_for == labels).sum()[None]
    *counts, _, right_ones = all_reduce(torch.cat([taken_for.bincount(minlength=classes + 1), right]), group=group).tolist()
    total, real = all_reduce(right.new_tensor([len(logits)]), group=group).item(), real_counts.tolist()
    least = [_ENOUGH * part / max(1, sum(real)) * total for part in real]
    covered = sum(got >= wanted for got, wanted, part in zip(counts, least, real, strict=True) if part and total)
    return {"label_accuracy": right_ones / total if total else float("nan"), "class_coverage": float(covered)}
