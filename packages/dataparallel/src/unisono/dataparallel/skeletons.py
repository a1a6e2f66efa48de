"""The structure of a module without its tensors: what a replica runs, with tensors that are put into it for a call.

Every replica has one of its own. One module shared by threads would be a race: each puts its own tensors into it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Skeleton:
    """A copy of `module` whose parameters and buffers are put in for each call.

    Plain attributes (numbers, texts, flags, `training`) follow those of the module at every call. Other attributes are
    copied once; so are hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {id(x): _stand_in(x) for x in chain(module.parameters(), module.buffers())}
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor):  # what old-style weight_norm leaves: deepcopy refuses tensors of a graph
                    memo.setdefault(id(value), value.detach())
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise TypeError(
                f"ReplicaSet: module: a {type(module).__name__} that cannot be copied has no replicas: {error}; "
                "keep what cannot be copied outside of the module"
            ) from error
        self._pairs = [(part, memo[id(part)]) for part in module.modules()]
        self._looks = [_look(part) for part, _ in self._pairs]
        self._slots: list[tuple[dict[str, Any], Mapping[str, Any], str]] = []
        for part, twin in self._pairs:
            self._slots += [(twin._parameters, part._parameters, name) for name, x in part._parameters.items() if x is not None]
            self._slots += [(twin._buffers, part._buffers, name) for name, x in part._buffers.items() if x is not None]
        self._recurrent = [twin for _, twin in self._pairs if isinstance(twin, nn.RNNBase)]

    def fits(self) -> bool:
        """Whether the module still has the parts, names and hooks that it had when this was made."""
        return all(_look(part) == look for (part, _), look in zip(self._pairs, self._looks, strict=True))

    def call(self, tensors: Mapping[int, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """fn(module) with `tensors` in place: for each parameter and buffer of the module, by its id."""
        self._follow()
        for names, own, name in self._slots:
            names[name] = tensors[id(own[name])]
        for twin in self._recurrent:  # they keep a list of their weights beside
            twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
        try:
            return fn(self._module)
        finally:
            for names, _, name in self._slots:  # a graph ends with its call
                names[name] = None
            for twin in self._recurrent:
                twin._flat_weights = []

    def _follow(self) -> None:
        for part, twin in self._pairs:
            own, other = vars(part), vars(twin)
            for name, value in own.items():
                if isinstance(value, _PLAIN) and other.get(name) is not value:
                    other[name] = value


def _look(part: nn.Module) -> tuple[object, ...]:
    """What cannot change without a new skeleton."""
    own = vars(part)
    hooks = [tuple(own[name]) for name in _HOOKS if own.get(name)]
    names = [name for name, x in part._parameters.items() if x is not None]
    buffers = [name for name, x in part._buffers.items() if x is not None]
    return list(part._modules.items()), names, buffers, hooks


def _stand_in(x: Tensor) -> Tensor:
    if is_lazy(x):
        raise ValueError("ReplicaSet: module: it has parameters without a shape yet; call it once before it is replicated")
    empty = torch.empty(0, dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty
