"""Whether a classifier recognizes generated images as the classes they were generated for, and which classes there are."""

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono_models.training.distributed.object_collectives import raise_together

_COVERED = 0.1  # a class is covered if generated images have it at least a tenth as often as real ones


@torch.no_grad()
def label_metrics(logits: Tensor, labels: Tensor, *, real_counts: Tensor, group: Group = None) -> dict[str, float]:
    """Return "label_accuracy" and "class_coverage" of the generated images of all ranks.

    label_accuracy: fraction of the images that the classifier assigns to their label. class_coverage: number of classes that
    the classifier finds at least a tenth as often among generated images as they are among real ones. Rows with logits that
    are not finite belong to no class.

    logits: (n, classes), of the classifier.
    labels: (n,), the classes that the images were generated for.
    real_counts: (classes,), the number of real images of each class, the same on all ranks. Classes with 0 do not count.

    Raises: ValueError (RanksError on several ranks), on all ranks, if shapes do not fit.

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
    predicted = logits.argmax(1).masked_fill(~logits.isfinite().all(1), classes)
    correct = (predicted == labels).sum()[None]
    sums = all_reduce(torch.cat([predicted.bincount(minlength=classes + 1), correct]), group=group)
    *counts, _, all_correct = sums.tolist()
    total = all_reduce(correct.new_tensor([len(logits)]), group=group).item()
    real = real_counts.tolist()
    required = [_COVERED * count / max(1, sum(real)) * total for count in real]
    covered = sum(got >= least for got, least, count in zip(counts, required, real, strict=True) if count and total)
    return {"label_accuracy": all_correct / total if total else float("nan"), "class_coverage": float(covered)}
