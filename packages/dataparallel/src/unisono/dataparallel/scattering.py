"""Split a tree of tensors over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unisono.collectives.pytree import TreeStructure, tree_flatten
from unisono.collectives.sizes import even_sizes
from unisono.dataparallel.copying import Copies, spread
from unisono.dataparallel.devices import Device, full_devices

T = TypeVar("T")
Tree = TypeVar("Tree")


class Replicate(Generic[T]):
    """Marks a leaf, or a whole subtree, that is not to be split: scatter gives all of it to every device, and gather takes
    that of the first tree.

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
    """Split the tensors of `tree` along `dim` over `devices`: one tree of the same structure for each device, always.

    Each tensor is split as evenly as it goes, longer parts first, or into parts of `sizes`. Nothing is lost: a tensor that
    is shorter than the number of devices leaves the last ones an empty part. Tensors without dimensions, and what stands in
    Replicate, go to every device whole; so does anything that is not a tensor, as the same object. A part on the device
    where its tensor already is, is a view of it. Copies from the host run on streams of their own, from pinned memory; what
    is pinned already is read where it is, while the host goes on.

    Backward: gather of the parts' gradients; what went to every device whole gets their sum.

    Example:
        >>> import torch
        >>> scatter({"x": torch.arange(5), "flag": True}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2]), 'flag': True}, {'x': tensor([3, 4]), 'flag': True}]
    """
    trees, _ = split("scatter", tree, full_devices("scatter", devices), dim=dim, sizes=sizes)
    return trees


def split(
    function: str, tree: Tree, devices: Sequence[torch.device], *, dim: int, sizes: Sequence[int] | None = None
) -> tuple[list[Tree], list[int] | None]:
    """What scatter gives, and the rows of each device (of its longest part); None if nothing was there to split."""
    leaves, structure = tree_flatten(tree)
    if sizes is not None and (len(sizes) != len(devices) or min(sizes) < 0):
        raise ValueError(f"{function}: sizes={tuple(sizes)} must have one length for each of {len(devices)} devices")
    columns: list[Sequence[Any]] = []  # of each leaf, what every device gets
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
    trees = [structure.rebuild([start(column[k], device, copies) for column in columns]) for k, device in enumerate(devices)]
    copies.join()
    if longest < 0:
        return trees, None
    return trees, list(even_sizes(longest, len(devices)) if sizes is None else sizes)


def start(leaf: Any, device: torch.device, copies: Copies) -> Any:
    """`leaf` on `device`, once `copies` are joined."""
    return copies.start(leaf, device) if isinstance(leaf, Tensor) else leaf


def move(tree: Any, device: torch.device, copies: Copies) -> Any:
    """`tree` on `device`, once `copies` are joined; what stands in Replicate as if it did not."""
    leaves, structure = tree_flatten(tree)
    inner = (
        move(leaf.value, device, copies) if isinstance(leaf, Replicate) else start(leaf, device, copies) for leaf in leaves
    )
    return structure.rebuild(list(inner))


def _repeat(leaf: Any, devices: Sequence[torch.device]) -> Sequence[Any]:
    """All of `leaf` for every device."""
    if isinstance(leaf, Tensor):
        return spread(leaf, devices)
    if not isinstance(leaf, Replicate):
        return [leaf] * len(devices)
    leaves, structure = tree_flatten(leaf.value)
    columns = [_repeat(inner, devices) for inner in leaves]
    return [structure.rebuild([column[k] for column in columns]) for k in range(len(devices))]


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
