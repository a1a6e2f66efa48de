"""Copies of tensors on another device that are made anew only when the originals change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from unisono.dataparallel.replicas.broadcast import broadcast


class CachedCopies:
    """Copies on one device, of tensors that are elsewhere.

    For tensors that nobody trains: of the fused optimizers torch does not know that they write to their parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._originals: dict[int, Tensor] = {}  # by their ids, which are theirs as long as they are kept
        self._copies: dict[int, Tensor] = {}
        self._marks: dict[int, tuple[object, ...]] = {}
        self._storages: list[StorageWeakRef] = []  # as long as they are known, their addresses are theirs as well

    def refresh(self, tensors: Sequence[Tensor], *, bucket_bytes: int) -> dict[int, Tensor]:
        """A copy for each of `tensors`, by its id; itself, if it is on the device."""
        away = [x for x in tensors if x.device != self._device]
        stale = [x for x in away if self._marks.get(id(x)) != _mark(x)]
        if stale or len(away) < len(self._originals):
            # as plain tensors, whatever mode the caller is in: they outlive it
            with torch.inference_mode(False), torch.no_grad():
                (fresh,) = broadcast(stale, [self._device], bucket_bytes=bucket_bytes)
            known = self._copies | {id(x): copy for x, copy in zip(stale, fresh, strict=True)}
            self._originals = {id(x): x for x in away}
            self._copies = {key: known[key] for key in self._originals}
            self._marks = {key: _mark(x) for key, x in self._originals.items()}
            self._storages = [StorageWeakRef(x.untyped_storage()) for x in away if x.layout == torch.strided]
        return {id(x): self._copies.get(id(x), x) for x in tensors}


def _mark(x: Tensor) -> tuple[object, ...]:
    """Another one whenever `x` was written to, or was given other memory. Of tensors of inference mode, which do not count
    their changes, and of sparse ones always another one."""
    if x.is_inference() or x.layout != torch.strided:
        return (object(),)
    return x._version, x.untyped_storage()._cdata, x.storage_offset(), x.stride()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KNOWN = {*vars(nn.Module())}  # what every module has; among it the parts and hooks, which are looked at by themselves
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class ModuleTemplate:
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


class Replicas:
    """Of `module`, one for each of `devices`; for one user at a time, from prepare() to release().

    Parameters are copied by every prepare(), differentiably if they are to get a gradient; those that require none, when they
    have changed. Replicas on the module's own device use its parameters themselves. Every replica has its own buffers.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], bucket_bytes: int) -> None:
        self._module, self._devices, self._bucket_bytes = module, devices, bucket_bytes
        self._templates: list[ModuleTemplate] = []
        self._frozen = {device: CachedCopies(device) for device in devices}
        self._tensors: dict[int, dict[int, Tensor]] = {}  # of each replica, by the id of the original
        self._versions: dict[int, dict[int, int]] = {}  # of its buffers

    def prepare(self, active: Sequence[int]) -> None:
        """Make the replicas of these numbers ready to be called."""
        if not (self._templates and self._templates[0].fits()):
            self._templates = [ModuleTemplate(self._module) for _ in self._devices]
        parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
        frozen = [x for x in parameters if not x.requires_grad]
        targets = list(dict.fromkeys(self._devices[i] for i in active))
        found = self._spread([x for x in parameters if x.requires_grad], targets)
        for target in targets:
            found[target] |= self._frozen[target].refresh(frozen, bucket_bytes=self._bucket_bytes)
        with torch.inference_mode(False), torch.no_grad():
            rows = broadcast(buffers, [self._devices[i] for i in active], bucket_bytes=self._bucket_bytes)
        own = {i: {id(x): copy for x, copy in zip(buffers, row, strict=True)} for i, row in zip(active, rows, strict=True)}
        self._tensors = {i: found[self._devices[i]] | own[i] for i in active}
        self._versions = {i: {key: copy._version for key, copy in own[i].items()} for i in active}

    def call(self, i: int, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(the module of replica i). Only one thread at a time for each replica."""
        return self._templates[i].call(self._tensors[i], fn)

    def release(self) -> None:
        """Let go of the copies of one call."""
        self._tensors, self._versions = {}, {}

    @torch.no_grad()
    def write_back_buffers(self, rows: Mapping[int, int]) -> None:
        """Write what the replicas changed in their buffers into the module's: their mean, weighted by `rows`; the first
        one's, where there is no mean."""
        for part in self._module.modules():
            for buffer in part._buffers.values():
                if buffer is None:
                    continue
                copies = {i: self._tensors[i][id(buffer)] for i in rows}
                if any(copies[i]._version != self._versions[i][id(buffer)] for i in rows):
                    buffer.copy_(_mean(copies, rows, buffer.device))
                elif part.training:
                    # batch norms write to their running statistics unsaid; so does this, for it may have changed nothing
                    buffer.data.copy_(_mean(copies, rows, buffer.device))

    def _spread(self, tensors: Sequence[Tensor], targets: Sequence[torch.device]) -> dict[torch.device, dict[int, Tensor]]:
        """Copies, by device and by the id of the original; the original itself where it is there already."""
        found: dict[torch.device, dict[int, Tensor]] = {target: {id(x): x for x in tensors} for target in targets}
        for source in {x.device for x in tensors}:
            here = [x for x in tensors if x.device == source]
            others = [target for target in targets if target != source]
            for target, row in zip(
                others, broadcast(here, others, bucket_bytes=self._bucket_bytes) if others else [], strict=True
            ):
                found[target] |= {id(x): copy for x, copy in zip(here, row, strict=True)}
        return found


def _mean(copies: Mapping[int, Tensor], rows: Mapping[int, int], device: torch.device) -> Tensor:
    """Weighted by `rows`; the first one, where there is no mean."""
    first, *others = (copy.to(device) for copy in copies.values())
    if others and (first.is_floating_point() or first.is_complex()):
        total = sum(rows.values())
        weights = [rows[i] / total for i in copies][1:]
        # by differences: the mean of equal values is that value, to the bit, also of infinities
        zero = torch.zeros_like(first)
        shares = (torch.where(x == first, zero, weight * (x - first)) for weight, x in zip(weights, others, strict=True))
        first = first + sum(shares, zero)
    return first
