"""Buckets leave during backward: each as soon as its gradients are there, all in one order on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from unisono.collectives.groups import GroupRanks, process_group
from unisono.dataparallel.buckets import Bucket, Spec


class Launcher:
    """Sends `buckets` while gradients arrive. What it sends is a copy: every p.grad stays what this rank made of it.

    Hooks may run in any of autograd's threads, one for each device.
    """

    def __init__(
        self, parameters: Sequence[Tensor], specs: Sequence[Spec], buckets: Sequence[Bucket], scale: float, ranks: GroupRanks
    ) -> None:
        self.parameters, self.specs, self.buckets, self.scale, self.ranks = parameters, specs, buckets, scale, ranks
        self.launched = 0
        self._lock = Lock()
        self._awaited = [set(bucket.members) for bucket in buckets]
        self._streams: list[set[torch.Stream]] = [set() for _ in buckets]
        self._sent: dict[int, tuple[Tensor | None, int]] = {}  # the gradient, and how often it had been written to

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, buckets leave by themselves."""
        handles = []
        try:
            for place, bucket in enumerate(self.buckets):
                for member in bucket.members:
                    hook = partial(self._arrive, place, member)
                    handles.append(self.parameters[member].register_post_accumulate_grad_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def launch_rest(self) -> None:
        """Send what has not left, with zeros for gradients that never came."""
        with self._lock:
            while self.launched < len(self.buckets):
                self._launch()

    def late(self) -> list[int]:
        """Members whose p.grad is no longer what was sent: more was added."""
        now = ((member, self.parameters[member].grad, sent) for member, sent in self._sent.items())
        return [member for member, grad, (sent, writes) in now if grad is not sent or _writes(grad) != writes]

    def _arrive(self, place: int, member: int, parameter: Tensor) -> None:
        with self._lock:
            self._awaited[place].discard(member)
            if parameter.device.type != "cpu":
                self._streams[place].add(torch.accelerator.current_stream(parameter.device))
            while self.launched < len(self.buckets) and not self._awaited[self.launched]:
                self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        if streams := self._streams[self.launched]:
            # the last gradient may have come on another stream than the others, or from another device
            current = torch.accelerator.current_stream(bucket.device)
            for stream in streams - {current}:
                current.wait_stream(stream)
        grads = [self.parameters[member].grad for member in bucket.members]
        for member, grad in zip(bucket.members, grads, strict=True):
            self._sent[member] = grad, _writes(grad)
        dense = [
            grad if grad is not None and self.specs[member].fits(grad) else None
            for member, grad in zip(bucket.members, grads, strict=True)
        ]
        with torch.no_grad():
            bucket.fill(dense, self.scale, in_place=False)
            bucket.start(process_group(self.ranks))
        self.launched += 1


def _writes(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
