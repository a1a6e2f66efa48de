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
        """Let go of the tensors that belong to one call's graph, and of buffers that the call may have changed unsaid."""
        self._tensors = {}
        if any(part.training for part in self._module.modules()):
            for buffers in self._buffers:
                buffers.forget()

    @torch.no_grad()
    def take_back_buffers(self, rows: Mapping[int, int]) -> None:
        """Write what the replicas changed in their buffers into the module's: their mean, weighted by `rows`; the first
        one's, where there is no mean."""
        for part in self._module.modules():
            buffers = [x for x in part._buffers.values() if x is not None]
            # torch's batch_norm does not say that it writes to the running statistics, but to their count it does
            if any(self._buffers[i].changed(x) for i in rows for x in buffers):
                for buffer in buffers:
                    _take_mean(buffer, {i: self._tensors[i][id(buffer)] for i in rows}, rows)

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


def _take_mean(buffer: Tensor, copies: Mapping[int, Tensor], rows: Mapping[int, int]) -> None:
    first, *others = (copy.to(buffer.device) for copy in copies.values())
    if others and (first.is_floating_point() or first.is_complex()):
        total = sum(rows.values())
        weights = [rows[i] / total for i in copies][1:]
        # by differences: the mean of equal values is that value, to the bit
        first = first + sum((weight * (x - first) for weight, x in zip(weights, others, strict=True)), torch.zeros_like(first))
    buffer.copy_(first)
