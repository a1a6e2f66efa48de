"""Splits into train, validation and test: at random by rows, by each user's rows or by chunks; by time; or leave one out.

They depend on the data and the seed alone, not on the number of ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono_models.recommender.data.chunks import Chunks
from unisono_models.training.errors import UserError
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


def split_by_time(times: Tensor, parts: Sequence[float]) -> SplitIndices:
    """Split rows by their times: the oldest are for training, the newest for the test. Equal times keep the order of the rows.

    Example:
        >>> [rows.tolist() for rows in split_by_time(torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0]), (0.6, 0.2, 0.2))]
        [[1, 3, 4], [2], [0]]
    """
    validate_parts(parts)
    order = times.argsort(stable=True)
    first, second = _split_ends(len(times), parts)
    return SplitIndices(*(part.sort().values for part in (order[:first], order[first:second], order[second:])))


def leave_one_out(groups: Tensor, times: Tensor | None, *, seed: int) -> SplitIndices:
    """Keep the last row of each group for the test, and the one before it for validation. Without times, two random rows.

    A group of two rows has none for validation, and a group of one row is for training.

    Example:
        >>> users, times = torch.tensor([7, 7, 7, 8, 8, 9]), torch.tensor([3.0, 1.0, 2.0, 5.0, 6.0, 1.0])
        >>> [rows.tolist() for rows in leave_one_out(users, times, seed=0)]
        [[1, 3, 5], [2], [0, 4]]
    """
    if times is None:
        times = torch.rand(len(groups), generator=make_generator(seed, "split"), dtype=torch.float64)
    order = sort_groups_by_time(groups, times)
    _, counts = groups[order].unique_consecutive(return_counts=True)
    from_end = counts.cumsum(0).repeat_interleave(counts) - 1 - torch.arange(len(groups))
    sizes = counts.repeat_interleave(counts)
    test = (from_end == 0) & (sizes > 1)
    valid = (from_end == 1) & (sizes > 2)
    return SplitIndices(*(order[chosen].sort().values for chosen in (~test & ~valid, valid, test)))


def sort_groups_by_time(groups: Tensor, times: Tensor | None) -> Tensor:
    """Sort rows by their group, and those of a group by time. Equal times, or no times, keep the order of the rows.

    Example:
        >>> sort_groups_by_time(torch.tensor([8, 7, 8, 7]), torch.tensor([2.0, 3.0, 1.0, 3.0]))
        tensor([1, 3, 2, 0])
    """
    order = torch.arange(len(groups)) if times is None else times.argsort(stable=True)
    return order[groups[order].argsort(stable=True)]


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
        given = " ".join(f"{part:g}" for part in parts)
        raise UserError(f"--data.parts {given}: must be three fractions that add up to 1: training, validation, test")


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
        raise UserError(
            f"--data.parts: {units} chunks with {rows:,} rows are too few to hold out {part:g} of them for validation and "
            "as much for the test: make smaller chunks (--data.chunk-rows), or hold out less"
        )
    valid = position < first
    test = (position >= first) & (position < second)
    return SplitIndices(filled[position >= second], filled[valid], filled[test])
