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
_KNOWN = {*vars(nn.Module())}  # what every module has; among it the parts and hooks, which are looked at by themselves
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Skeleton:
    """A copy of `module` whose parameters and buffers are put in for each call.

    Plain attributes (numbers, texts, flags, `training`) follow those of the module at every call. Others are copied; hooks that
    are methods of the module or its parts are those of the copy, all other hooks are shared.
    """

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {id(x): _stand_in(x) for x in chain(module.parameters(), module.buffers())}
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor):  # what old-style weight_norm leaves: deepcopy refuses tensors of a graph
                    memo.setdefault(id(value), value.detach())
        memo |= {id(owner): owner for owner in _outside_hooks(module)}
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
        """Whether the module still has the parts, names, hooks and attributes that it had when this was made."""
        return all(_same(_look(part), look) for (part, _), look in zip(self._pairs, self._looks, strict=True))

    def call(self, tensors: Mapping[int, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """fn(module) with `tensors` in place: for each parameter and buffer of the module, by its id."""
        self._follow()
        for names, own, name in self._slots:
            names[name] = tensors[id(own[name])]
        for twin in self._recurrent:  # they keep a list of their weights beside
            twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
        try:
            result = fn(self._module)
            self._keep_reassigned(tensors)
            return result
        finally:
            if not torch.is_grad_enabled():  # else a checkpointed part will run once more, in backward
                for names, _, name in self._slots:
                    names[name] = None
                for twin in self._recurrent:
                    twin._flat_weights = []

    @torch.no_grad()
    def _keep_reassigned(self, tensors: Mapping[int, Tensor]) -> None:
        """Buffers that the call has replaced, instead of writing to them. Not those of another shape: caches that grow."""
        for part, twin in self._pairs:
            for name, own in part._buffers.items():
                found = twin._buffers.get(name)
                if own is not None and found is not None and found is not tensors[id(own)] and found.shape == own.shape:
                    tensors[id(own)].copy_(found)

    def _follow(self) -> None:
        for part, twin in self._pairs:
            own, other = vars(part), vars(twin)
            for name, value in own.items():
                if isinstance(value, _PLAIN) and other.get(name) is not value:
                    other[name] = value


def _look(part: nn.Module) -> list[object]:
    """What cannot change without a new skeleton: to be compared by identity."""
    own = vars(part)
    seen: list[object] = [type(part)]
    for group in (part._modules, *(own[name] for name in _HOOKS if own.get(name))):
        seen += [x for pair in group.items() for x in pair]
    for name, x in chain(part._parameters.items(), part._buffers.items()):
        seen += [name, x is None]
    for name, x in own.items():
        if name not in _KNOWN and not isinstance(x, _PLAIN):
            seen += [name, x]
    return seen


def _same(one: list[object], other: list[object]) -> bool:
    return len(one) == len(other) and all(a is b or (type(a) in (str, int) and a == b) for a, b in zip(one, other, strict=True))


def _outside_hooks(module: nn.Module) -> list[object]:
    """What hooks belong to, if not to the module: recorders and the like, which are to see all replicas."""
    parts = {id(part) for part in module.modules()}
    hooks = [hook for part in module.modules() for name in _HOOKS for hook in vars(part).get(name, {}).values()]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return [owner for owner in owners if id(owner) not in parts]


def _stand_in(x: Tensor) -> Tensor:
    if is_lazy(x):
        raise ValueError("ReplicaSet: module: it has parameters without a shape yet; call it once before it is replicated")
    empty = torch.empty(0, dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty
