"""Put the trees of several devices together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.collectives.pytree import TreeStructure, tree_flatten
from unisono.dataparallel.copying import Copies
from unisono.dataparallel.devices import Device, full_device
from unisono.dataparallel.scattering import Replicate, move

Tree = TypeVar("Tree")


def gather(trees: Sequence[Tree], device: Device, *, dim: int = 0) -> Tree:
    """Put the tensors of `trees`, which have one structure, together along `dim` on `device`, in the order of the trees.

    Tensors without dimensions become a vector with one entry for each tree. What is not a tensor is kept once if it is equal
    in all trees, else as a list with one entry for each tree: no value is lost. Of what stands in Replicate the first
    tree's is taken. Tensors of the result are new, also those of a single tree.

    Backward: scatter: every part gets its slice of the gradient, on its own device.

    Example:
        >>> import torch
        >>> gather([{"x": torch.tensor([1, 2]), "n": 2}, {"x": torch.tensor([3]), "n": 1}], "cpu")
        {'x': tensor([1, 2, 3]), 'n': [2, 1]}
    """
    target = full_device("gather", "device", device)
    if not len(trees):
        raise ValueError("gather: trees=[]: expected at least one tree")
    flat = [tree_flatten(tree) for tree in trees]
    structure = flat[0][1]
    for number, (_, other) in enumerate(flat[1:], 1):
        if other != structure:
            raise ValueError(
                f"gather: trees: tree {number} is {other}, but tree 0 is {structure}; they must have one structure"
            )
    copies = Copies()
    columns = [
        _move(column, target, copies, structure, place)
        for place, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
    ]
    copies.join()
    result: Tree = structure.rebuild([_join(column, dim, structure, place) for place, column in enumerate(columns)])
    return result


def _move(column: Sequence[Any], target: torch.device, copies: Copies, structure: TreeStructure, place: int) -> list[Any]:
    if all(isinstance(leaf, Tensor) for leaf in column):
        return [copies.start(x, target) for x in column]
    kinds = {Tensor if isinstance(leaf, Tensor) else Replicate if isinstance(leaf, Replicate) else object for leaf in column}
    if len(kinds) > 1:
        found = ", ".join(type(leaf).__name__ for leaf in column)
        raise TypeError(f"gather: trees: {_name(structure, place)} is {found}, tree by tree; it must be of one kind in all")
    if Replicate in kinds:
        return [Replicate(move(column[0].value, target, copies))]
    return list(column)


def _join(column: list[Any], dim: int, structure: TreeStructure, place: int) -> Any:
    first = column[0]
    if isinstance(first, Replicate):
        return first.value
    if not isinstance(first, Tensor):
        return first if all(_equal(first, other) for other in column[1:]) else column
    dtype = first.dtype
    if any(x.dtype != dtype for x in column):
        found = ", ".join(str(x.dtype) for x in column)
        raise ValueError(f"gather: trees: {_name(structure, place)} has dtypes {found}, tree by tree; they must be the same")
    if first.ndim == 0 and not any(x.ndim for x in column):
        return torch.stack(column)
    try:
        return torch.cat(column, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in column)
        raise ValueError(
            f"gather: trees: {_name(structure, place)} has shapes {shapes}, tree by tree, which do not fit along dim={dim}"
        ) from error


def _equal(one: Any, other: Any) -> bool:
    """Objects whose == gives no plain truth, as that of arrays does, are equal only if they are the same."""
    if one is other:
        return True
    equal = type(one) is type(other) and one == other
    return bool(equal) if getattr(equal, "ndim", 0) == 0 else False


def _name(structure: TreeStructure, place: int) -> str:
    path = structure.paths()[place]
    return f"the leaf {path}" if path else "each tree"
