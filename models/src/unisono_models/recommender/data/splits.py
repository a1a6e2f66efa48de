"""Train, validation and test: random parts of the rows, or of each user's rows. A function of the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono_models.recommender.data.chunks import Chunks
from unisono_models.training.randomness import make_generator


class RowSplits(NamedTuple):
    """Row numbers, ascending."""

    train: Tensor
    valid: Tensor
    test: Tensor


def split_rows(count: int, parts: Sequence[float], *, seed: int) -> RowSplits:
    """All rows at random: RecBole's "RS" without groups.

    Example:
        >>> [len(part) for part in split_rows(25, (0.8, 0.1, 0.1), seed=0)]
        [21, 2, 2]
    """
    return split_groups(torch.zeros(count, dtype=torch.int64), parts, seed=seed)


def split_groups(groups: Tensor, parts: Sequence[float], *, seed: int) -> RowSplits:
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
    return RowSplits(*(order[part == number].sort().values for number in range(3)))


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


def split_chunks(blocks: Chunks, part: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks to train on, to validate with and to test with: int64, sorted, none in two of them.

    part: of the rows, about, for validation, and as many for the test: at least a block each. 0: all is for training. Whole
    groups of blocks are held out if this part is one or more of them, or to validate would be to read all the data. Empty
    blocks are in none of the three.

    Raises: ValueError if there are too few blocks.
    """
    if not 0 <= part < 0.5:
        raise ValueError(f"hold_out: part={part} must be at least 0 and less than 0.5")
    filled = blocks.sizes.nonzero().squeeze(1)
    if part == 0:
        return filled, filled[:0], filled[:0]
    unit = torch.arange(len(filled))
    if blocks.groups is not None:
        groups, of_block = blocks.groups[filled].unique(return_inverse=True)
        unit = of_block if part * len(groups) >= 1 else unit
    place = torch.randperm(int(unit.max()) + 1 if len(unit) else 0, generator=make_generator(seed, "hold out"))[unit]
    ends = torch.zeros(len(place.unique()), dtype=torch.int64).index_add_(0, place, blocks.sizes[filled]).cumsum(0)
    rows = int(ends[-1]) if len(ends) else 0
    target = max(1, round(part * rows))
    first = int(torch.searchsorted(ends, target)) + 1
    second = int(torch.searchsorted(ends, int(ends[first - 1]) + target)) + 1 if first < len(ends) else len(ends)
    if second >= len(ends):
        raise ValueError(
            f"hold_out: part={part}: {len(ends)} blocks with {rows:,} rows are too few to hold out some for validation and "
            "some for the test: make smaller blocks (data.block), or hold out less"
        )
    return filled[place >= second], filled[place < first], filled[(place >= first) & (place < second)]
