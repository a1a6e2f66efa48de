"""Trees of tensors: flatten and unflatten them, and gather all leaves of a tree in one message.

tree_flatten opens what torch's pytree opens, and also dataclasses, UserDicts (the batches of tokenizers) and subclasses of
dict, list and tuple. pytree takes those for leaves and would not find the tensors in them.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from unisono.collectives.autograd import LinearMap
from unisono.collectives.checks import call_site, checks_enabled, describe, stable_repr, user_frame, validate_across_ranks
from unisono.collectives.coalesced import apply_coalesced
from unisono.collectives.groups import GroupRanks
from unisono.collectives.sizes import (
    Sizes,
    as_tuple,
    dim_error,
    from_rows,
    gradient_error,
    join_graph,
    length_of,
    promises_equal,
    raise_local_error,
    resolve_sizes,
    sizes_error,
    to_rows,
)

_LEAVES = {Tensor, nn.Parameter, bool, int, float, str, type(None)}  # what most leaves are: a fast path knows them


def tree_flatten(tree: Any) -> tuple[list[Any], TreeStructure]:
    """Return the leaves of `tree` in order, and its structure. None is a leaf."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree], TreeStructure(None, (None,), None)
    if kind is dict or kind is list or kind is tuple:  # most trees: several times as fast
        leaves = list(tree.values()) if kind is dict else list(tree)
        if all(type(leaf) in _LEAVES for leaf in leaves):
            return leaves, TreeStructure(kind, list(tree) if kind is dict else range(len(leaves)), None)
    nodes, spec = pytree.tree_flatten(tree, is_leaf=_is_closed)
    if not any(map(_is_unregistered, nodes)):
        return nodes, TreeStructure(spec, range(len(nodes)), None)
    leaves = []
    parts: list[_UnregisteredNode | None] = []
    for node in nodes:
        if _is_unregistered(node):
            inner, structure = tree_flatten(_node_contents(node))
            leaves += inner
            parts.append(_UnregisteredNode(node, structure, len(inner)))
        else:
            leaves.append(node)
            parts.append(None)
    return leaves, TreeStructure(spec, range(len(nodes)), parts)


class TreeStructure:
    """The structure of a tree without its leaves. Two are equal if they have the same types and names in the same order."""

    def __init__(
        self, frame: pytree.TreeSpec | type | None, keys: Sequence[Any], parts: list[_UnregisteredNode | None] | None
    ) -> None:
        self._frame = frame  # dict, list or tuple if it holds leaves only; None for a leaf; otherwise the spec of pytree
        self._keys = keys  # for each node its key in the dict, otherwise its number
        self._parts = parts  # for each node of the spec an unregistered node, or None for a leaf; None: all are leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build a tree of this structure with other leaves."""
        frame = self._frame
        if frame is None:
            return leaves[0]
        if frame is dict:
            return dict(zip(self._keys, leaves, strict=True))
        if frame is list or frame is tuple:
            return frame(leaves)
        if self._parts is None:
            return pytree.tree_unflatten(leaves, self._spec())
        remaining = iter(leaves)
        nodes = [
            next(remaining) if part is None else part.unflatten([next(remaining) for _ in range(part.size)])
            for part in self._parts
        ]
        return pytree.tree_unflatten(nodes, self._spec())

    def paths(self) -> list[str]:
        """Return for each leaf how to reach it from the tree, for messages: "['images'][0]"."""
        nodes, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self._keys), self._spec()))
        names = [pytree.keystr(path) for path, _ in nodes]
        inner = [[""] if part is None else part.structure.paths() for part in self._parts or [None] * len(names)]
        return [name + path for name, paths in zip(names, inner, strict=True) for path in paths]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeStructure):
            return False
        if self._frame in (dict, list, tuple, None) and other._frame is self._frame:
            return self._keys == other._keys
        return self._spec() == other._spec() and self._parts == other._parts

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """The same text in every process for equal structures: ranks compare it."""
        inner = "".join(f" {type(part.node).__name__}{part.structure}" for part in self._parts or [] if part)
        return f"{_spec_text(self._spec())}{inner}"

    def _spec(self) -> pytree.TreeSpec:
        if isinstance(self._frame, pytree.TreeSpec):
            return self._frame
        return pytree.tree_structure(self.unflatten([None for _ in self._keys]))


class _UnregisteredNode:
    """A node that is not registered with pytree, and the structure of what it holds."""

    def __init__(self, node: Any, structure: TreeStructure, size: int) -> None:
        self.node = node
        self.structure = structure
        self.size = size  # number of leaves

    def unflatten(self, leaves: list[Any]) -> Any:
        return _with_contents(self.node, self.structure.unflatten(leaves))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _UnregisteredNode) and type(self.node) is type(other.node) and self.structure == other.structure
        )

    __hash__ = None  # type: ignore[assignment]


def _spec_text(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "*"
    children = ", ".join(map(_spec_text, spec.children()))
    return f"{spec.type.__name__}({stable_repr(spec.context)}, [{children}])"


def _is_closed(node: Any) -> bool:
    """Return whether pytree must not open it. A PackedSequence stays closed: its tensors mean nothing apart."""
    return isinstance(node, PackedSequence) or _is_unregistered(node)


def _is_unregistered(node: Any) -> bool:
    """Return whether it holds other values but is not registered with pytree."""
    kind = type(node)
    if kind is Tensor or kind in pytree.SUPPORTED_NODES:
        return False
    if isinstance(node, tuple):
        return not pytree.is_namedtuple_instance(node)
    return isinstance(node, (dict, list, UserDict)) or (is_dataclass(node) and not isinstance(node, type))


def _node_contents(node: Any) -> Any:
    if is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in fields(node) if hasattr(node, field.name)}
    if isinstance(node, UserDict):
        return dict(node.data)
    return dict(node) if isinstance(node, dict) else list(node)


def _with_contents(node: Any, contents: Any) -> Any:
    """Return a copy of `node` with other contents; its type and its other attributes stay."""
    if isinstance(node, tuple) and not is_dataclass(node):
        return type(node)(contents)
    twin = copy.copy(node)
    if is_dataclass(node):
        frozen = type(node).__dataclass_params__.frozen  # type: ignore[union-attr]
        for name, value in contents.items():
            object.__setattr__(twin, name, value) if frozen else setattr(twin, name, value)
    elif isinstance(node, UserDict):
        twin.data = contents
    elif isinstance(node, dict):
        for key, value in contents.items():
            dict.__setitem__(twin, key, value)
        attributes = getattr(node, "__dict__", {})
        if attributes is node:
            twin.__dict__ = twin
        for key in [key for key, value in attributes.items() if key in node and value is node[key]]:
            vars(twin)[key] = contents[key]  # a dict whose keys are attributes, too
    else:
        list.__setitem__(twin, slice(None), contents)
    return twin


Tree = TypeVar("Tree")


def all_gather_tree(
    tree: Tree, dim: int, sizes: Sizes, kind: str, ranks: GroupRanks, reduce_dtype: torch.dtype | None = None
) -> Tree:
    """all_gather the tensors of `tree`. Anything else in it must be equal on all ranks and stays as it is."""
    leaves, structure = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        resolved = [
            resolve_sizes("all_gather", x, dim, sizes, ranks) for x in tensors
        ]  # a transform hides who needs a gradient
    else:
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        problem = _tree_error(tree, tensors, others)
        if kind == "all_gather":
            problem = problem or next((bad for x in tensors if (bad := gradient_error(x))), "")
        table = _validate_leaves(tensors, dim, sizes, (str(structure), stable_repr(others), kind), problem, ranks)
        lengths = [tuple(row[0] for row in leaf) for leaf in table]
        resolved = [(join_graph(x, rows), length) for x, rows, length in zip(tensors, table, lengths, strict=True)]
    site = call_site()
    plans = [
        LinearMap(
            kind, ranks, (lengths[ranks.rank],), lengths, reduce_dtype=reduce_dtype, call="all_gather of a tree", site=site
        )
        for _, lengths in resolved
    ]
    gathered = [from_rows(y, dim) for y in apply_coalesced([to_rows(x, dim) for x, _ in resolved], plans)]
    for place, y in zip(places, gathered, strict=True):
        leaves[place] = y
    result: Tree = structure.unflatten(leaves)
    return result


def _tree_error(tree: object, tensors: list[Tensor], others: list[Any]) -> str:
    """Return an error for values that the user may want to be gathered, but that are not tensors; otherwise ""."""
    arrays = [type(leaf).__name__ for leaf in others if hasattr(leaf, "__array__")]
    if arrays or (not tensors and any(leaf is not None for leaf in others)) or tree is None:
        kind = arrays[0] if arrays else type(tree).__name__
        return f"x: expected a Tensor or a tree of tensors, got {kind}{'' if arrays else ' without any tensor'}"
    return ""


def _validate_leaves(
    tensors: list[Tensor], dim: int, sizes: Sizes, same: tuple[object, ...], problem: str, ranks: GroupRanks
) -> list[list[list[int]]]:
    """Return for every leaf and every rank its length along `dim` and whether it needs a gradient.

    sizes="equal" is a promise for each leaf: the leaves of one tree may have different lengths.
    """
    promised = promises_equal(sizes)
    given = None if promised else as_tuple(sizes, 0, ranks)
    problem = problem or sizes_error("sizes", given, ranks)
    problem = problem or next((bad for x in tensors if (bad := dim_error(x, dim))), "")
    if len({x.device for x in tensors}) > 1:
        problem = f"x: the leaves of a tree must be on one device, got {sorted({str(x.device) for x in tensors})}"
    lengths = [0 if problem else length_of(x, dim) for x in tensors]
    if given is not None and not problem and any(length != given[ranks.rank] for length in lengths):
        problem = f"sizes={tuple(given)} promises {given[ranks.rank]} along dim {dim}, but the leaves have {lengths}"
    recording = torch.is_grad_enabled()
    if sizes is not None and not checks_enabled():
        raise_local_error("all_gather", problem, ranks)
        return [
            [[size, x.requires_grad and recording] for size in given or (length,) * ranks.size]
            for x, length in zip(tensors, lengths, strict=True)
        ]

    def common(x: Tensor) -> tuple[object, ...]:
        return str(x.dtype), x.ndim, [size for d, size in enumerate(x.shape) if promised or d != dim % x.ndim]

    table = validate_across_ranks(
        "all_gather",
        ranks,
        same=(
            "all_gather",
            dim,
            same,
            "equal" if promised else given and tuple(given),
            [] if problem else [common(x) for x in tensors],
        ),
        numbers=[n for x, length in zip(tensors, lengths, strict=True) for n in (length, x.requires_grad and recording)],
        words=lambda: (
            f"all_gather(a tree of {', '.join(map(describe, tensors))}, dim={dim}) at {user_frame()}, "
            f"in {same[0]}, other values {same[1]}"
        ),
        device=tensors[0].device if tensors else None,
        rule=f"The tree, its dtypes, every dimension{'' if promised else f' but {dim}'}, and what is not a tensor must be the "
        "same on every rank.",
        problem=problem,
    )
    return [[row[2 * leaf : 2 * leaf + 2] for row in table] for leaf in range(len(tensors))]
