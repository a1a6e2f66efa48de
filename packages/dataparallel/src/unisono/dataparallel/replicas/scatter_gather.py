"""scatter and gather: split a tree of tensors over devices, and put the parts together again."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unisono.collectives.pytree import TreeStructure, tree_flatten
from unisono.collectives.sizes import even_sizes
from unisono.dataparallel.replicas.devices import Copies, Device, copy_to_devices, resolve_device, resolve_devices

T = TypeVar("T")
Tree = TypeVar("Tree")


class Replicate(Generic[T]):
    """Marks a leaf or a whole subtree that scatter must not split: every device gets all of it. gather takes the first tree's.

    Example:
        >>> import torch
        >>> scatter((torch.arange(4), Replicate(torch.ones(2))), ["cpu", "cpu"])
        [(tensor([0, 1]), tensor([1., 1.])), (tensor([2, 3]), tensor([1., 1.]))]
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({self.value!r})"


def scatter(tree: Tree, devices: Sequence[Device], *, dim: int = 0, sizes: Sequence[int] | None = None) -> list[Tree]:
    """Split the tensors of `tree` along `dim` over `devices`; return one tree of the same structure for each device.

    Each tensor is split as evenly as possible, longer parts first, or into parts of `sizes`. If a tensor is shorter than the
    number of devices, the last ones get an empty part. Tensors without dimensions, and what is inside Replicate, go whole to
    every device; so does anything that is not a tensor, as the same object. A part that stays on the device of its tensor is
    a view of it. Copies from the host run on separate streams, from pinned memory; memory that is pinned already is read
    where it is, while the host does other work.

    Backward: gather of the parts' gradients; what went whole to every device gets their sum.

    Example:
        >>> import torch
        >>> scatter({"x": torch.arange(5), "flag": True}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2]), 'flag': True}, {'x': tensor([3, 4]), 'flag': True}]
    """
    trees, _ = split_tree("scatter", tree, resolve_devices("scatter", devices), dim=dim, sizes=sizes)
    return trees


def gather(trees: Sequence[Tree], device: Device, *, dim: int = 0) -> Tree:
    """Concatenate the tensors of `trees`, which have one structure, along `dim` on `device`, in the order of the trees.

    Tensors without dimensions become a vector with one entry for each tree. What is not a tensor stays as it is if it is
    equal in all trees, otherwise it becomes a list with one entry for each tree. What is inside Replicate is taken from the
    first tree. Tensors of the result are new, also those of a single tree.

    Backward: scatter. Every part gets its slice of the gradient, on its own device.

    Example:
        >>> import torch
        >>> gather([{"x": torch.tensor([1, 2]), "n": 2}, {"x": torch.tensor([3]), "n": 1}], "cpu")
        {'x': tensor([1, 2, 3]), 'n': [2, 1]}
    """
    target = resolve_device("gather", "device", device)
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
    result: Tree = structure.unflatten([_join(column, dim, structure, place) for place, column in enumerate(columns)])
    return result


def split_tree(
    function: str, tree: Tree, devices: Sequence[torch.device], *, dim: int, sizes: Sequence[int] | None = None
) -> tuple[list[Tree], list[int] | None]:
    """Return what scatter returns, and the rows of each device (of its longest part); None if there was nothing to split."""
    leaves, structure = tree_flatten(tree)
    if sizes is not None and (len(sizes) != len(devices) or min(sizes) < 0):
        raise ValueError(f"{function}: sizes={tuple(sizes)} must have one length for each of {len(devices)} devices")
    columns: list[Sequence[Any]] = []  # for each leaf, what every device gets
    longest = -1
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (leaf.ndim or leaf.layout != torch.strided):
            columns.append(_divide(function, leaf, len(devices), dim, sizes, structure, place))
            longest = max(longest, leaf.shape[dim])
        elif isinstance(leaf, PackedSequence):
            raise TypeError(
                f"{function}: tree{structure.paths()[place]} is a PackedSequence, which cannot be split; pad it first"
            )
        elif getattr(leaf, "ndim", 0) and hasattr(leaf, "__array__"):
            raise TypeError(
                f"{function}: tree{structure.paths()[place]} is a {type(leaf).__name__}, which cannot be split; "
                "make it a tensor (torch.as_tensor), or wrap it in Replicate to give every device all of it"
            )
        else:
            columns.append(_repeat(leaf, devices))
    copies = Copies()
    trees = [
        structure.unflatten([start_copy(column[k], device, copies) for column in columns]) for k, device in enumerate(devices)
    ]
    copies.join()
    if longest < 0:
        return trees, None
    return trees, list(even_sizes(longest, len(devices)) if sizes is None else sizes)


def start_copy(leaf: Any, device: torch.device, copies: Copies) -> Any:
    """Return `leaf` on `device`; complete when `copies` are joined."""
    return copies.start(leaf, device) if isinstance(leaf, Tensor) else leaf


def move_tree(tree: Any, device: torch.device, copies: Copies) -> Any:
    """Return `tree` on `device`, without Replicate marks; complete when `copies` are joined."""
    leaves, structure = tree_flatten(tree)
    inner = (
        move_tree(leaf.value, device, copies) if isinstance(leaf, Replicate) else start_copy(leaf, device, copies)
        for leaf in leaves
    )
    return structure.unflatten(list(inner))


def _repeat(leaf: Any, devices: Sequence[torch.device]) -> Sequence[Any]:
    """Return all of `leaf` for every device."""
    if isinstance(leaf, Tensor):
        return copy_to_devices(leaf, devices)
    if not isinstance(leaf, Replicate):
        return [leaf] * len(devices)
    leaves, structure = tree_flatten(leaf.value)
    columns = [_repeat(inner, devices) for inner in leaves]
    return [structure.unflatten([column[k] for column in columns]) for k in range(len(devices))]


def _divide(
    function: str, x: Tensor, number: int, dim: int, sizes: Sequence[int] | None, structure: TreeStructure, place: int
) -> Sequence[Tensor]:
    if x.layout != torch.strided:
        raise TypeError(
            f"{function}: tree{structure.paths()[place]} has layout {x.layout}, which cannot be split; "
            "make it dense, or wrap it in Replicate to give every device all of it"
        )
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function}: dim={dim} is out of range for tree{structure.paths()[place]} of shape {tuple(x.shape)}")
    if sizes is None:
        return x.tensor_split(number, dim)
    if sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"{function}: sizes={tuple(sizes)} add up to {sum(sizes)}, but tree{structure.paths()[place]} of shape "
            f"{tuple(x.shape)} has {x.shape[dim]} along dim {dim}"
        )
    return x.split_with_sizes(list(sizes), dim)


def _move(column: Sequence[Any], target: torch.device, copies: Copies, structure: TreeStructure, place: int) -> list[Any]:
    if all(isinstance(leaf, Tensor) for leaf in column):
        return [copies.start(x, target) for x in column]
    kinds = {Tensor if isinstance(leaf, Tensor) else Replicate if isinstance(leaf, Replicate) else object for leaf in column}
    if len(kinds) > 1:
        found = ", ".join(type(leaf).__name__ for leaf in column)
        raise TypeError(f"gather: trees: {_name(structure, place)} is {found}, tree by tree; it must be of one kind in all")
    if Replicate in kinds:
        return [Replicate(move_tree(column[0].value, target, copies))]
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
