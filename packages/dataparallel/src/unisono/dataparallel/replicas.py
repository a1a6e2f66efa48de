"""What the replicas of a module run with: a skeleton each, and tensors on the device of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.dataparallel.coalescing import broadcast
from unisono.dataparallel.kept_copies import KeptCopies
from unisono.dataparallel.skeletons import Skeleton


class Replicas:
    """Of `module`, one for each of `devices`; for one user at a time, from prepare() to release().

    Parameters that are to get a gradient are copied for each call, differentiably; all others, and buffers, when they have
    changed. Replicas on the module's own device use its parameters themselves. Every replica has its own buffers.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], bucket_bytes: int) -> None:
        self._module, self._devices, self._bucket_bytes = module, devices, bucket_bytes
        self._skeletons: list[Skeleton] = []
        self._parameters = {device: KeptCopies(device, own=False) for device in devices}
        self._buffers = [KeptCopies(device, own=True) for device in devices]
        self._tensors: dict[int, dict[int, Tensor]] = {}

    def prepare(self, active: Sequence[int]) -> None:
        """Make the replicas of these numbers ready to be called."""
        if not (self._skeletons and self._skeletons[0].fits()):
            self._skeletons = [Skeleton(self._module) for _ in self._devices]
        parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
        trained = [x for x in parameters if x.requires_grad and torch.is_grad_enabled()]
        others = [x for x in parameters if not (x.requires_grad and torch.is_grad_enabled())]
        targets = list(dict.fromkeys(self._devices[i] for i in active))
        found = {target: self._parameters[target].refresh(others, bucket_bytes=self._bucket_bytes) for target in targets}
        for target, copies in self._spread(trained, targets).items():
            found[target] |= copies
        self._tensors = {
            i: found[self._devices[i]] | self._buffers[i].refresh(buffers, bucket_bytes=self._bucket_bytes) for i in active
        }

    def call(self, i: int, fn: Callable[[nn.Module], Any]) -> Any:
        """fn(the module of replica i). Only one thread at a time for each replica."""
        return self._skeletons[i].call(self._tensors[i], fn)

    def release(self) -> None:
        """Let go of the tensors that belong to one call's graph."""
        self._tensors = {}

    @torch.no_grad()
    def take_back_buffers(self, rows: Mapping[int, int]) -> None:
        """Write what the replicas changed in their buffers into the module's: their mean, weighted by `rows`; the first
        one's, where there is no mean."""
        for buffer in self._module.buffers():
            changed = {i: copy for i in rows if (copy := self._buffers[i].changed(buffer)) is not None}
            if not changed:
                continue
            first, total = next(iter(changed.values())), sum(rows[i] for i in changed)
            if len(changed) == 1 or not (first.is_floating_point() or first.is_complex()):
                buffer.copy_(first)
            else:
                shares = [copy.to(buffer.device) * (rows[i] / total) for i, copy in changed.items()]
                buffer.copy_(torch.stack(shares).sum(0))

    def _spread(self, tensors: Sequence[Tensor], targets: Sequence[torch.device]) -> dict[torch.device, dict[int, Tensor]]:
        """Copies with gradients, by device and by the id of the original; the original where it is there already."""
        found: dict[torch.device, dict[int, Tensor]] = {target: {id(x): x for x in tensors} for target in targets}
        for source in {x.device for x in tensors}:
            here = [x for x in tensors if x.device == source]
            others = [target for target in targets if target != source]
            for target, row in zip(
                others, broadcast(here, others, bucket_bytes=self._bucket_bytes) if others else [], strict=True
            ):
                found[target] |= {id(x): copy for x, copy in zip(here, row, strict=True)}
        return found
