"""Gradients travel in flat buckets: one all_reduce for many of them, in the order in which backward makes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import GroupRanks, process_group
from unisono.collectives.wire import start_all_reduce

_MANY_SMALL = 2**15  # elements: below, on average, one call for all gradients of a bucket beats a scaling copy of each
_FIRST = 2**20  # bytes
_WORTH_NO_COPY = 2**14  # elements


class GradientSpec(NamedTuple):
    """What a gradient looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def fits(self, grad: Tensor, *, layout: torch.layout = torch.strided) -> bool:
        """Whether `grad` is one; with the default layout it can be copied into a bucket and back."""
        return grad.dtype is self.dtype and grad.layout is layout and grad.shape == self.shape and grad.device == self.device


class Buffers:
    """Flat memory, kept from call to call: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self.kept: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def take(self, device: torch.device, dtype: torch.dtype, slot: int, numel: int) -> Tensor:
        """At least `numel` elements; the same memory for the same `slot`."""
        found = self.kept.get((device, dtype, slot))
        if found is None or found.numel() < numel:
            found = self.kept[device, dtype, slot] = torch.empty(numel, dtype=dtype, device=device)
        return found


class Bucket:
    """Some gradients of one device and dtype, side by side.

    `members`: their places in `specs`. Fill it, start it, wait for it; then `views` holds the sums over the ranks.
    """

    def __init__(
        self, members: Sequence[int], specs: Sequence[GradientSpec], buffers: Buffers, slot: int, at_least: int
    ) -> None:
        self.members = tuple(members)
        self.shapes = [specs[member].shape for member in members]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.sizes)
        _, self.dtype, self.device = specs[members[0]]
        self._buffers, self._slot, self._at_least = buffers, slot, at_least
        self._own_views: list[Tensor] = []
        self._own_wire: Tensor | None = None
        self._wire: Tensor | None = None
        self._work: torch.distributed.Work | None = None
        self.views: list[Tensor] = []
        self.in_place = False

    def fill(self, grads: Sequence[Tensor | None], scale: float, *, in_place: bool) -> None:
        """Take `scale` times the gradients, zeros where there is none.

        With `in_place`, a single large gradient is scaled and reduced where it is, without a copy, if its memory allows.
        """
        first = grads[0]
        self.in_place = in_place and len(grads) == 1 and first is not None and _may_travel_itself(first)
        if self.in_place and first is not None:
            self.views, self._wire = [first], _real(first)
            if scale != 1:
                self._wire.mul_(scale)
            return
        self._wire = self._settle()
        self.views = self._own_views
        present = [grad for grad in grads if grad is not None]
        views = self.views
        if len(present) < len(grads):
            torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
            views = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        one_by_one = self.device.type == "cpu" and self.numel >= _MANY_SMALL * len(grads) and not self.dtype.is_complex
        if one_by_one and scale != 1:
            for view, grad in zip(views, present, strict=True):
                torch.mul(grad, scale, out=view)
        elif present:
            torch._foreach_copy_(views, present)
            if scale != 1:
                self._wire.mul_(scale)

    def start(self, pg: ProcessGroup) -> None:
        if self._wire is not None and self.numel:
            self._work = start_all_reduce(self._wire, pg)

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._wire = None

    def _settle(self) -> Tensor:
        """The memory is taken when first needed: what travels in place needs none."""
        if self._own_wire is None:
            flat = self._buffers.take(self.device, self.dtype, self._slot, max(self.numel, self._at_least))[: self.numel]
            parts = flat.split_with_sizes(self.sizes)
            self._own_views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
            self._own_wire = _real(flat)
        return self._own_wire


def plan_buckets(specs: Sequence[GradientSpec], members: Collection[int], bucket_bytes: int) -> list[list[int]]:
    """Which of the `members` share a bucket, in the order in which the buckets become complete.

    Backward makes the gradients of the last parameters first. A bucket has one device and one dtype and at most
    `bucket_bytes`, unless a single gradient is larger. The first of several is smaller: the wire waits for it.
    """
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    used: dict[tuple[torch.device, torch.dtype], int] = {}
    totals = _bytes_by_kind(specs, members)
    limits = {kind: bucket_bytes if total <= bucket_bytes else min(bucket_bytes, _FIRST) for kind, total in totals.items()}
    full: list[list[int]] = []
    for member in sorted(members, reverse=True):
        spec = specs[member]
        kind = spec.device, spec.dtype
        if kind in filling and used[kind] + spec.nbytes > limits[kind]:
            full.append(filling.pop(kind))
            used[kind], limits[kind] = 0, bucket_bytes
        filling.setdefault(kind, []).append(member)
        used[kind] = used.get(kind, 0) + spec.nbytes
    return sorted([*full, *filling.values()], key=lambda bucket: -bucket[-1])


def make_buckets(
    specs: Sequence[GradientSpec], members: Collection[int], bucket_bytes: int, buffers: Buffers, slots: int | None
) -> list[Bucket]:
    """The buckets of `plan_buckets`, which take turns in `slots` pieces of memory, or have one each for slots=None."""
    totals = _bytes_by_kind(specs, members)
    buckets = []
    for place, bucket in enumerate(plan_buckets(specs, members, bucket_bytes)):
        slot = place % slots if slots else place
        room = min(totals[specs[bucket[0]].device, specs[bucket[0]].dtype], bucket_bytes)
        if sum(specs[member].nbytes for member in bucket) > room:
            slot = -1 - slot  # memory of its own kind: the others are of one size, so that none outgrows what another left
        buckets.append(Bucket(bucket, specs, buffers, slot, room // specs[bucket[0]].dtype.itemsize))
    return buckets


def _bytes_by_kind(specs: Sequence[GradientSpec], members: Collection[int]) -> dict[tuple[torch.device, torch.dtype], int]:
    totals: dict[tuple[torch.device, torch.dtype], int] = {}
    for member in members:
        _, dtype, device = specs[member]
        totals[device, dtype] = totals.get((device, dtype), 0) + specs[member].nbytes
    return totals


def _may_travel_itself(grad: Tensor) -> bool:
    """Large, in the order of elements that all ranks share, and all of its memory its own."""
    return (
        grad.numel() >= _WORTH_NO_COPY
        and grad.is_contiguous()
        and not grad.is_conj()
        and not grad.is_neg()
        and grad.untyped_storage().nbytes() == grad.numel() * grad.dtype.itemsize
    )


def _real(x: Tensor) -> Tensor:
    """Backends add real numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


class BucketLauncher:
    """Sends `buckets` while gradients arrive. What it sends is a copy: every p.grad stays what this rank made of it.

    Hooks may run in any of autograd's threads, one for each device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        specs: Sequence[GradientSpec],
        buckets: Sequence[Bucket],
        scale: float,
        ranks: GroupRanks,
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
