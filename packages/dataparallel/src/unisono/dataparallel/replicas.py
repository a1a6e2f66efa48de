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

    Parameters are copied by every prepare(), differentiably if they are to get a gradient; those that require none, when they
    have changed. Replicas on the module's own device use its parameters themselves. Every replica has its own buffers.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], bucket_bytes: int) -> None:
        self._module, self._devices, self._bucket_bytes = module, devices, bucket_bytes
        self._skeletons: list[Skeleton] = []
        self._frozen = {device: KeptCopies(device) for device in devices}
        self._tensors: dict[int, dict[int, Tensor]] = {}  # of each replica, by the id of the original
        self._versions: dict[int, dict[int, int]] = {}  # of its buffers

    def prepare(self, active: Sequence[int]) -> None:
        """Make the replicas of these numbers ready to be called."""
        if not (self._skeletons and self._skeletons[0].fits()):
            self._skeletons = [Skeleton(self._module) for _ in self._devices]
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
        return self._skeletons[i].call(self._tensors[i], fn)

    def release(self) -> None:
        """Let go of the copies of one call."""
        self._tensors, self._versions = {}, {}

    @torch.no_grad()
    def take_back_buffers(self, rows: Mapping[int, int]) -> None:
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
