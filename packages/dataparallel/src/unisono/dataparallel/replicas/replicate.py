"""Replicas of a module: a template for each, which holds the module's structure, and tensors on the device of each.

Every replica has its own template. If threads shared one module, each would put its own tensors into it: a race.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from unisono.dataparallel.replicas.broadcast import broadcast

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KNOWN = {*vars(nn.Module())}  # attributes of every module; submodules and hooks among them are compared separately
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Replicas:
    """One replica of `module` for each of `devices`, for one caller at a time, from prepare() to release().

    prepare() copies the parameters, differentiably if they require a gradient; it copies frozen ones only if they have
    changed. Replicas on the module's own device use its parameters themselves. Every replica has its own copies of the
    buffers, which are differentiable if the buffer requires a gradient.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], bucket_bytes: int) -> None:
        self._module = module
        self._devices = devices
        self._bucket_bytes = bucket_bytes
        self._templates: list[ModuleTemplate] = []
        self._frozen = {device: CachedCopies(device) for device in devices}
        self._tensors: dict[int, dict[int, Tensor]] = {}  # for each replica, its tensors by the id of the original
        self._versions: dict[int, dict[int, int]] = {}  # for each replica, the versions of its buffers

    def prepare(self, active: Sequence[int]) -> None:
        """Copy what the replicas with these numbers need for a call."""
        if not (self._templates and self._templates[0].fits()):
            self._templates = [ModuleTemplate(self._module) for _ in self._devices]
        parameters = list(self._module.parameters())
        buffers = list(self._module.buffers())
        frozen = [x for x in parameters if not x.requires_grad]
        targets = list(dict.fromkeys(self._devices[i] for i in active))
        found = self._copy_to([x for x in parameters if x.requires_grad], targets)
        for target in targets:
            found[target] |= self._frozen[target].refresh(frozen, bucket_bytes=self._bucket_bytes)
        grad_enabled = torch.is_grad_enabled()  # a buffer may require a gradient, too
        with torch.inference_mode(False), torch.set_grad_enabled(grad_enabled):
            rows = broadcast(buffers, [self._devices[i] for i in active], bucket_bytes=self._bucket_bytes)
        own = {i: {id(x): copy for x, copy in zip(buffers, row, strict=True)} for i, row in zip(active, rows, strict=True)}
        self._tensors = {i: found[self._devices[i]] | own[i] for i in active}
        self._versions = {i: {key: copy._version for key, copy in own[i].items()} for i in active}

    def call(self, i: int, fn: Callable[[nn.Module], Any]) -> Any:
        """Return `fn(module of replica i)`. Only one thread at a time may call a replica."""
        return self._templates[i].call(self._tensors[i], fn)

    def release(self) -> None:
        """Drop the copies of one call."""
        self._tensors = {}
        self._versions = {}

    @torch.no_grad()
    def write_back_buffers(self, rows: Mapping[int, int]) -> None:
        """Write buffers that the replicas have changed into the module's: their mean, weighted by `rows`; for integers the
        first replica's."""
        for part in self._module.modules():
            for buffer in part._buffers.values():
                if buffer is None:
                    continue
                copies = {i: self._tensors[i][id(buffer)] for i in rows}
                if any(copies[i]._version != self._versions[i][id(buffer)] for i in rows):
                    buffer.copy_(_mean(copies, rows, buffer.device))
                elif part.training:
                    # Batch norms change running statistics without a new version. This does too: they may be unchanged.
                    buffer.data.copy_(_mean(copies, rows, buffer.device))

    def _copy_to(self, tensors: Sequence[Tensor], targets: Sequence[torch.device]) -> dict[torch.device, dict[int, Tensor]]:
        """Return copies by device and by the id of the original; the original itself on its own device."""
        found: dict[torch.device, dict[int, Tensor]] = {target: {id(x): x for x in tensors} for target in targets}
        for source in {x.device for x in tensors}:
            here = [x for x in tensors if x.device == source]
            others = [target for target in targets if target != source]
            for target, row in zip(
                others, broadcast(here, others, bucket_bytes=self._bucket_bytes) if others else [], strict=True
            ):
                found[target] |= {id(x): copy for x, copy in zip(here, row, strict=True)}
        return found


class ModuleTemplate:
    """A copy of `module` without its tensors; each call puts parameters and buffers into it.

    Plain attributes (numbers, strings, flags, `training`) are updated from the module at every call. Others are copied once.
    Hooks that are methods of the module or of a submodule become methods of the copy; all other hooks are shared.
    """

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {id(x): _placeholder(x) for x in chain(module.parameters(), module.buffers())}
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor):  # old-style weight_norm leaves one; deepcopy fails on tensors of a graph
                    memo.setdefault(id(value), value.detach())
        memo |= {id(owner): owner for owner in _outside_hooks(module)}
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise TypeError(
                f"ReplicaSet: module: cannot copy this {type(module).__name__}: {error}; "
                "keep what cannot be copied outside of the module"
            ) from error
        self._pairs = [(part, memo[id(part)]) for part in module.modules()]
        self._fingerprints = [_fingerprint(part) for part, _ in self._pairs]
        self._slots: list[tuple[dict[str, Any], Mapping[str, Any], str]] = []
        for part, twin in self._pairs:
            self._slots += [(twin._parameters, part._parameters, name) for name, x in part._parameters.items() if x is not None]
            self._slots += [(twin._buffers, part._buffers, name) for name, x in part._buffers.items() if x is not None]
        self._recurrent = [twin for _, twin in self._pairs if isinstance(twin, nn.RNNBase)]

    def fits(self) -> bool:
        """Return whether the module still has the submodules, names, hooks and attributes that it had at the copy."""
        return all(
            _same(_fingerprint(part), fingerprint)
            for (part, _), fingerprint in zip(self._pairs, self._fingerprints, strict=True)
        )

    def call(self, tensors: Mapping[int, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """Return `fn(copy of the module)`, with `tensors` in place of each parameter and buffer, by the id of the original."""
        self._update_attributes()
        for names, own, name in self._slots:
            names[name] = tensors[id(own[name])]
        for twin in self._recurrent:  # they also have a list of their weights
            twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
        try:
            result = fn(self._module)
            self._copy_reassigned_buffers(tensors)
            return result
        finally:
            if not torch.is_grad_enabled():  # otherwise a checkpointed submodule runs again in backward
                for names, _, name in self._slots:
                    names[name] = None
                for twin in self._recurrent:
                    twin._flat_weights = []

    @torch.no_grad()
    def _copy_reassigned_buffers(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy buffers that the call has reassigned, instead of writing to them. Other shapes are skipped: caches that grow."""
        for part, twin in self._pairs:
            for name, own in part._buffers.items():
                found = twin._buffers.get(name)
                if own is not None and found is not None and found is not tensors[id(own)] and found.shape == own.shape:
                    tensors[id(own)].copy_(found)

    def _update_attributes(self) -> None:
        for part, twin in self._pairs:
            own, other = vars(part), vars(twin)
            for name, value in own.items():
                if isinstance(value, _PLAIN) and other.get(name) is not value:
                    other[name] = value


class CachedCopies:
    """Copies on one device of tensors on other devices, which are renewed only when the originals change.

    Only for frozen tensors: fused optimizers write to their parameters without a new version.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._originals: dict[int, Tensor] = {}  # by id; holding the tensor keeps its id from being reused
        self._copies: dict[int, Tensor] = {}
        self._states: dict[int, tuple[object, ...]] = {}
        self._storages: list[StorageWeakRef] = []  # keep the addresses of the storages from being reused

    def refresh(self, tensors: Sequence[Tensor], *, bucket_bytes: int) -> dict[int, Tensor]:
        """Return a copy of each of `tensors`, by its id; itself, if it is on the device."""
        elsewhere = [x for x in tensors if x.device != self._device]
        stale = [x for x in elsewhere if self._states.get(id(x)) != _state(x)]
        if stale or len(elsewhere) < len(self._originals):
            # As plain tensors, because they outlive the mode of the caller.
            with torch.inference_mode(False), torch.no_grad():
                (fresh,) = broadcast(stale, [self._device], bucket_bytes=bucket_bytes)
            known = self._copies | {id(x): copy for x, copy in zip(stale, fresh, strict=True)}
            self._originals = {id(x): x for x in elsewhere}
            self._copies = {key: known[key] for key in self._originals}
            self._states = {key: _state(x) for key, x in self._originals.items()}
            self._storages = [StorageWeakRef(x.untyped_storage()) for x in elsewhere if x.layout == torch.strided]
        return {id(x): self._copies.get(id(x), x) for x in tensors}


def _state(x: Tensor) -> tuple[object, ...]:
    """Return a value that differs whenever `x` was written to or has other memory. For tensors of inference mode, which have
    no version, and for sparse ones, it always differs."""
    if x.is_inference() or x.layout != torch.strided:
        return (object(),)
    return x._version, x.untyped_storage()._cdata, x.storage_offset(), x.stride()


def _fingerprint(part: nn.Module) -> list[object]:
    """Return what must stay the same for a template to fit, to be compared by identity."""
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
    """Return the owners of hooks that are not submodules, such as recorders: all replicas share them."""
    parts = {id(part) for part in module.modules()}
    hooks = [hook for part in module.modules() for name in _HOOKS for hook in vars(part).get(name, {}).values()]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return [owner for owner in owners if id(owner) not in parts]


def _placeholder(x: Tensor) -> Tensor:
    if is_lazy(x):
        raise ValueError("ReplicaSet: module: it has parameters without a shape yet; call it once before you replicate it")
    empty = torch.empty(0, dtype=x.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _mean(copies: Mapping[int, Tensor], rows: Mapping[int, int], device: torch.device) -> Tensor:
    """Return the mean weighted by `rows`; for integers the first one."""
    first, *others = (copy.to(device) for copy in copies.values())
    if others and (first.is_floating_point() or first.is_complex()):
        total = sum(rows.values())
        weights = [rows[i] / total for i in copies][1:]
        # By differences: the mean of equal values is that value, to the bit, also for infinities.
        zero = torch.zeros_like(first)
        shares = (torch.where(x == first, zero, weight * (x - first)) for weight, x in zip(weights, others, strict=True))
        first = first + sum(shares, zero)
    return first
