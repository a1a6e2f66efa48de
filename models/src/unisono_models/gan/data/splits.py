"""What is kept from training, where data comes without a test set: decided once for all runs, not by their seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono_models.training.randomness import derive_seed, uniform

_SEED = 0  # of the split: another would make other data sets, and runs could not be compared


def hold_out(labels: Tensor | None, *, count: int, part: float) -> Tensor:
    """bool, (count,): True for what is kept from training: of each class the same `part`, rounded, and never all.

    Example:
        >>> hold_out(torch.tensor([0] * 10 + [1] * 5), count=15, part=0.2).view(3, 5).sum(1).sum().item()
        3
    """
    _check(part)
    draws, held = uniform(_SEED, "gan: held out", 0, torch.arange(count)), torch.zeros(count, dtype=torch.bool)
    classes = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    for label in classes.unique():
        members = (classes == label).nonzero().squeeze(1)
        order = members[draws[members].argsort(stable=True)]
        held[order[: min(round(part * len(members)), len(members) - 1)]] = True
    return held


def hold_out_families(families: Sequence[str], labels: Sequence[int], *, part: float) -> Tensor:
    """The same for samples of which some are variants of each other: those of one family stay together.

    Of the families of each class (that of a family's first sample) the same `part` is held out.

    Example:
        >>> hold_out_families(["cat", "dog", "cat", "cow"], [0, 0, 0, 0], part=0.5).tolist()
        [True, False, True, True]
    """
    _check(part)
    class_of: dict[str, int] = {}
    for family, label in zip(families, labels, strict=True):
        class_of.setdefault(family, label)
    held: set[str] = set()
    for label in sorted(set(class_of.values())):
        members = sorted(family for family in class_of if class_of[family] == label)
        members.sort(key=lambda family: derive_seed(_SEED, "gan: held out", family))
        held.update(members[: round(part * len(members))])
    return torch.tensor([family in held for family in families], dtype=torch.bool)


def _check(part: float) -> None:
    if not 0 < part < 1:
        raise ValueError(f"data.test_part={part}: must be above 0 and below 1")
