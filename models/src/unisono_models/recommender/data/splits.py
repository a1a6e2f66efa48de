"""Random splits into train, validation and test: by rows, by each user's rows, or by chunks. They depend on the seed alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono_models.recommender.data.chunks import Chunks
from unisono_models.training.randomness import make_generator


class SplitIndices(NamedTuple):
    """int64 numbers of rows or chunks, ascending. None is in two splits."""

    train: Tensor
    valid: Tensor
    test: Tensor


def split_rows(count: int, parts: Sequence[float], *, seed: int) -> SplitIndices:
    """Split all rows at random: RecBole's "RS" without groups.

    Example:
        >>> [len(split) for split in split_rows(25, (0.8, 0.1, 0.1), seed=0)]
        [21, 2, 2]
    """
    return split_groups(torch.zeros(count, dtype=torch.int64), parts, seed=seed)


def split_groups(groups: Tensor, parts: Sequence[float], *, seed: int) -> SplitIndices:
    """Split the rows of each group at random: RecBole's "RS" grouped by user.

    Each split gets its fraction of a group, rounded down, and the first split gets the rest. A fraction that is less than one
    row becomes one row, for the last split first, while more than one row is left to the first split.
    """
    validate_parts(parts)
    keys = torch.rand(len(groups), generator=make_generator(seed, "split"), dtype=torch.float64)
    order = keys.argsort()
    order = order[groups[order].argsort(stable=True)]
    _, counts = groups[order].unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    position = torch.arange(len(groups)) - first.repeat_interleave(counts)
    ends = torch.tensor([_split_ends(count, parts) for count in counts.tolist()], dtype=torch.int64).view(-1, 2)
    split = (position[:, None] >= ends.repeat_interleave(counts, dim=0)).sum(1)
    return SplitIndices(*(order[split == number].sort().values for number in range(3)))


def _split_ends(count: int, parts: Sequence[float]) -> tuple[int, int]:
    """Where the first and the second split of `count` rows end."""
    counts = [int(part * count) for part in parts]
    counts[0] = count - counts[1] - counts[2]
    for number in (2, 1):
        if counts[0] <= 1:
            break
        if 0 < parts[number] * count < 1:
            counts[number] += 1
            counts[0] -= 1
    return counts[0], counts[0] + counts[1]


def validate_parts(parts: Sequence[float]) -> None:
    if len(parts) != 3 or min(parts) < 0 or abs(sum(parts) - 1) > 1e-6:
        raise ValueError(f"split: parts={tuple(parts)} must be three fractions that add up to 1: train, validation, test")


def split_chunks(chunks: Chunks, part: float, seed: int) -> SplitIndices:
    """Choose the chunks to train on, to validate with and to test with. Empty chunks are in no split.

    Args:
        part: About this fraction of the rows is for validation, and as much for the test: at least a chunk each. 0 leaves all
            rows to training. If the fraction is at least one group of chunks, whole groups are held out: validation would
            otherwise have to read all the data.

    Raises: ValueError if there are too few chunks.
    """
    if not 0 <= part < 0.5:
        raise ValueError(f"split_chunks: part={part} must be at least 0 and less than 0.5")
    filled = chunks.sizes.nonzero().squeeze(1)
    if part == 0:
        return SplitIndices(filled, filled[:0], filled[:0])
    unit = torch.arange(len(filled))
    if chunks.groups is not None:
        groups, group_of_chunk = chunks.groups[filled].unique(return_inverse=True)
        if part * len(groups) >= 1:
            unit = group_of_chunk
    units = int(unit.max()) + 1 if len(unit) else 0
    position = torch.randperm(units, generator=make_generator(seed, "hold out"))[unit]
    ends = torch.zeros(units, dtype=torch.int64).index_add_(0, position, chunks.sizes[filled]).cumsum(0)
    rows = int(ends[-1]) if units else 0
    target = max(1, round(part * rows))
    first = int(torch.searchsorted(ends, target)) + 1
    second = units
    if first < units:
        second = int(torch.searchsorted(ends, int(ends[first - 1]) + target)) + 1
    if second >= units:
        raise ValueError(
            f"split_chunks: part={part}: {units} chunks with {rows:,} rows are too few to hold out some for validation and "
            "some for the test: make smaller chunks (data.chunk_rows), or hold out less"
        )
    valid = position < first
    test = (position >= first) & (position < second)
    return SplitIndices(filled[position >= second], filled[valid], filled[test])
