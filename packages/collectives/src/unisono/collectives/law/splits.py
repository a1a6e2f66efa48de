"""Splits: which rows of the whole batch each rank gets."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from unisono.collectives.pytree import tree_flatten
from unisono.collectives.sizes import even_sizes

NAMES = ("even", "uneven", "empty")


def split_sizes(split: str | Sequence[int], rows: int, world_size: int) -> tuple[int, ...]:
    """Return how many rows each rank gets.

    "even": as even as possible. "uneven": rank r gets about r + 1 parts. "empty": the last rank gets none. Or the sizes
    themselves.

    Example:
        >>> split_sizes("uneven", 12, 3), split_sizes("empty", 12, 3)
        ((2, 4, 6), (6, 6, 0))
    """
    if not isinstance(split, str):
        return tuple(split)
    if world_size == 1:
        return (rows,)
    if split == "even":
        return tuple(even_sizes(rows, world_size))
    if split == "empty":
        return (*even_sizes(rows, world_size - 1), 0)
    parts = world_size * (world_size + 1) // 2
    ends = [rows * done // parts for done in accumulate(range(1, world_size + 1))]
    return tuple(end - start for start, end in pairwise([0, *ends]))


def count_rows(batch: Any) -> int:
    """Return the length of the batch: that of all its tensors along dim 0."""
    leaves, structure = tree_flatten(batch)
    lengths = {path or "batch": len(leaf) for path, leaf in zip(structure.paths(), leaves, strict=True) if _has_rows(leaf)}
    if not lengths:
        raise ValueError(
            "check: batch has no tensor with rows: give it a tensor, or a dict, list or tuple of tensors, with the samples "
            "along dim 0; or a function that returns the batches of this rank"
        )
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"check: the batch cannot be split: its tensors have different lengths along dim 0: {lengths}. Bring the samples "
            "to dim 0, and leave what is not per sample to the step"
        )
    return next(iter(lengths.values()))


def take_rows(batch: Any, start: int, end: int) -> Any:
    """Return the rows from `start` to `end` of every tensor of the tree; what has no rows stays."""
    leaves, structure = tree_flatten(batch)
    return structure.unflatten([leaf[start:end] if _has_rows(leaf) else leaf for leaf in leaves])


def as_float64(batch: Any) -> Any:
    """Return the batch with its floating tensors in float64."""
    leaves, structure = tree_flatten(batch)
    return structure.unflatten(
        [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    )


def tensors_with_rows(tree: Any) -> list[Tensor]:
    """Return the tensors of `tree` that have rows."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.ndim > 0]


def _has_rows(leaf: Any) -> bool:
    return (isinstance(leaf, Tensor) or type(leaf).__module__ == "numpy") and getattr(leaf, "ndim", 0) > 0
