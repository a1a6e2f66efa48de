"""What holds the leaves of a tree, and how to put others in their place.

torch's pytree, and what people pass beside the types that are registered with it: dataclasses, UserDicts (the batches of
tokenizers), and subclasses of dict, list and tuple. pytree would take those for leaves, and leave the tensors in them alone.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_LEAVES = {Tensor, nn.Parameter, bool, int, float, str, type(None)}  # what most leaves are: known at a glance


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree` in order, and its structure. None is a leaf."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree], Structure(None, (None,), None)
    if kind is dict or kind is list or kind is tuple:  # of leaves only, as most trees: several times as fast
        leaves = list(tree.values()) if kind is dict else list(tree)
        if all(type(leaf) in _LEAVES for leaf in leaves):
            return leaves, Structure(kind, list(tree) if kind is dict else range(len(leaves)), None)
    nodes, spec = pytree.tree_flatten(tree, is_leaf=_closed)
    if not any(map(_foreign, nodes)):
        return nodes, Structure(spec, range(len(nodes)), None)
    leaves = []
    parts: list[_Part | None] = []
    for node in nodes:
        if _foreign(node):
            inner, structure = flatten(_contents(node))
            leaves += inner
            parts.append(_Part(node, structure, len(inner)))
        else:
            leaves.append(node)
            parts.append(None)
    return leaves, Structure(spec, range(len(nodes)), parts)


class Structure:
    """Of a tree without its leaves. Equal ones hold the same types in the same order, under the same names."""

    def __init__(self, frame: pytree.TreeSpec | type | None, keys: Sequence[Any], parts: list[_Part | None] | None) -> None:
        # dict, list or tuple: one of leaves only; None: a leaf; or else what pytree makes of it
        self._frame = frame
        self._keys = keys  # of each node: that of the dict, otherwise its number
        self._parts = parts  # a foreign node, or None for a leaf, in the order of the spec; None where there are only leaves

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """A tree of this structure with other leaves."""
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
            next(remaining) if part is None else part.rebuild([next(remaining) for _ in range(part.size)])
            for part in self._parts
        ]
        return pytree.tree_unflatten(nodes, self._spec())

    def paths(self) -> list[str]:
        """How to reach each leaf from the tree, for messages: "['images'][0]"."""
        nodes, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self._keys), self._spec()))
        names = [pytree.keystr(path) for path, _ in nodes]
        inner = [[""] if part is None else part.structure.paths() for part in self._parts or [None] * len(names)]
        return [name + path for name, paths in zip(names, inner, strict=True) for path in paths]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return False
        if self._frame in (dict, list, tuple, None) and other._frame is self._frame:
            return self._keys == other._keys
        return self._spec() == other._spec() and self._parts == other._parts

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        inner = "".join(f" {type(part.node).__name__}{part.structure}" for part in self._parts or [] if part)
        return f"{self._spec()}{inner}"

    def _spec(self) -> pytree.TreeSpec:
        if isinstance(self._frame, pytree.TreeSpec):
            return self._frame
        return pytree.tree_structure(self.rebuild([None for _ in self._keys]))


class _Part:
    """A node that pytree does not know, and the structure of what it holds."""

    def __init__(self, node: Any, structure: Structure, size: int) -> None:
        self.node, self.structure, self.size = node, structure, size

    def rebuild(self, leaves: list[Any]) -> Any:
        return _replaced(self.node, self.structure.rebuild(leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Part) and type(self.node) is type(other.node) and self.structure == other.structure

    __hash__ = None  # type: ignore[assignment]


def _closed(node: Any) -> bool:
    """Not for pytree to open. A PackedSequence is not for anybody: its tensors mean nothing apart."""
    return isinstance(node, PackedSequence) or _foreign(node)


def _foreign(node: Any) -> bool:
    """Holds others, but pytree does not know how."""
    kind = type(node)
    if kind is Tensor or kind in pytree.SUPPORTED_NODES:
        return False
    if isinstance(node, tuple):
        return not pytree.is_namedtuple_instance(node)
    return isinstance(node, (dict, list, UserDict)) or (is_dataclass(node) and not isinstance(node, type))


def _contents(node: Any) -> Any:
    if is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in fields(node) if hasattr(node, field.name)}
    if isinstance(node, UserDict):
        return dict(node.data)
    return dict(node) if isinstance(node, dict) else list(node)


def _replaced(node: Any, contents: Any) -> Any:
    """A copy of `node`, whose own type and other attributes are kept, with other contents."""
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
