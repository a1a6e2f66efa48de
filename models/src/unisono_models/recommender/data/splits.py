"""Train, validation and test: random parts of the rows, or of each user's rows. A function of the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono_models.training.randomness import make_generator


class Parts(NamedTuple):
    """Row numbers, ascending."""

    train: Tensor
    valid: Tensor
    test: Tensor


def split_rows(count: int, parts: Sequence[float], *, seed: int) -> Parts:
    """All rows at random: RecBole's "RS" without groups.

    Example:
        >>> [len(part) for part in split_rows(25, (0.8, 0.1, 0.1), seed=0)]
        [21, 2, 2]
    """
    return split_groups(torch.zeros(count, dtype=torch.int64), parts, seed=seed)


def split_groups(groups: Tensor, parts: Sequence[float], *, seed: int) -> Parts:
    """The rows of each group at random: RecBole's "RS" grouped by user.

    Each part has its share of a group, rounded down, and the first part the rest; but a share that is less than one row is
    one, the last part's first, as long as more than one is left to the first.
    """
    check_parts(parts)
    keys = torch.rand(len(groups), generator=make_generator(seed, "split"), dtype=torch.float64)
    order = keys.argsort()
    order = order[groups[order].argsort(stable=True)]
    _, counts = groups[order].unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(groups)) - first.repeat_interleave(counts)
    ends = torch.tensor([_ends(int(count), parts) for count in counts.tolist()], dtype=torch.int64).view(-1, 2)
    limits = ends.repeat_interleave(counts, dim=0)
    part = (place[:, None] >= limits).sum(1)
    return Parts(*(order[part == number].sort().values for number in range(3)))


def _ends(count: int, parts: Sequence[float]) -> tuple[int, int]:
    """Where the first and the second part of `count` rows end."""
    counts = [int(part * count) for part in parts]
    counts[0] = count - counts[1] - counts[2]
    for number in (2, 1):
        if counts[0] <= 1:
            break
        if 0 < parts[number] * count < 1:
            counts[number] += 1
            counts[0] -= 1
    return counts[0], counts[0] + counts[1]


def check_parts(parts: Sequence[float]) -> None:
    if len(parts) != 3 or min(parts) < 0 or abs(sum(parts) - 1) > 1e-6:
        raise ValueError(f"split: parts={tuple(parts)} must be three shares that add up to 1: train, validation, test")
