"""Flat buckets of gradients: one all_reduce for many gradients, in the order in which backward makes them.

BucketLauncher sends them during backward: each as soon as its gradients exist, in the same order on every rank.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from threading import Lock
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils.hooks import RemovableHandle

from unisono.collectives.groups import GroupRanks, process_group
from unisono.collectives.wire import start_all_reduce

_MANY_SMALL = 2**15  # below this mean size of gradients, scaling a whole bucket once is faster than scaling each copy
_FIRST = 2**20  # bytes from which the first bucket is sent
_WORTH_NO_COPY = 2**14  # elements from which a single gradient is reduced in place
_ALONE = 2**22  # bytes from which, on a CPU, a message of its own takes less time than a copy into a bucket and back


class GradientSpec(NamedTuple):
    """Shape, dtype and device of a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def fits(self, grad: Tensor, *, layout: torch.layout = torch.strided) -> bool:
        """Return whether `grad` matches; with the default layout it can be copied into a bucket and back."""
        return grad.dtype is self.dtype and grad.layout is layout and grad.shape == self.shape and grad.device == self.device


class Buffers:
    """Flat memory that is reused from call to call: new pages cost more than the copy into them."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def take(self, device: torch.device, dtype: torch.dtype, slot: int, numel: int) -> Tensor:
        """Return at least `numel` elements: the same memory for the same `slot`."""
        found = self.tensors.get((device, dtype, slot))
        if found is None or found.numel() < numel:
            found = self.tensors[device, dtype, slot] = torch.empty(numel, dtype=dtype, device=device)
        return found


class Bucket:
    """Gradients of one device and dtype in one flat tensor.

    `members`: their places in `specs`. `at_least`: elements of a slot that other buckets use, too; None if it is not shared.
    Call fill, start and wait; then `views` holds the sums over the ranks. A bucket with a flag has one element more: after
    wait(), flag_is_up() says on every rank whether any rank has called raise_flag().
    """

    def __init__(
        self,
        members: Sequence[int],
        specs: Sequence[GradientSpec],
        buffers: Buffers,
        slot: int,
        at_least: int | None,
        *,
        has_flag: bool = False,
    ) -> None:
        self.members = tuple(members)
        self.shapes = [specs[member].shape for member in members]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.sizes)
        _, self.dtype, self.device = specs[members[0]]
        self._buffers = buffers
        self._slot = slot
        self._at_least = at_least
        self._own_views: list[Tensor] = []
        self._own_wire: Tensor | None = None
        self._wire: Tensor | None = None
        self._work: torch.distributed.Work | None = None
        self.views: list[Tensor] = []
        self.in_place = False
        self.has_flag = has_flag
        self._flag = torch.empty(0)
        # whether its memory can become that of its gradient
        self._is_exchangeable = at_least is None and len(self.members) == 1 and not has_flag and self.device.type == "cpu"
        self.last_to_come = len(self.members) - 1  # the gradient that backward computed last: the one of the first parameter

    def needs_no_copy(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether this is a single large gradient that can be scaled and reduced where it is."""
        return len(grads) == 1 and grads[0] is not None and _can_reduce_in_place(grads[0])

    def fill(self, grads: Sequence[Tensor | None], scale: float, *, in_place: bool) -> None:
        """Copy `scale` times the gradients into the bucket, zeros for None.

        With `in_place`, a gradient that needs no copy is scaled where it is.
        """
        first = grads[0]
        self.in_place = in_place and self.needs_no_copy(grads)
        if self.in_place and first is not None:
            self.views = [first]
            self._wire = _real(first)
            if scale != 1:
                self._wire.mul_(scale)
            return
        self._wire = self._allocate()
        if self.has_flag:
            self._flag.zero_()
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

    def raise_flag(self) -> None:
        self._flag.fill_(1)

    def flag_is_up(self) -> bool:
        """Return whether any rank has raised it. On an accelerator, the host would wait for the device."""
        return bool(self._flag)

    def exchange(self, grad: Tensor) -> bool:
        """Give the memory with the sum to `grad` and take that of `grad` instead of a copy. Return whether it was possible."""
        if not (self._is_exchangeable and _is_the_only_one(grad)):
            return False
        mine, grad.data = grad.data, self.views[0]
        self.views = []  # the bucket must not hold the memory of the gradient any longer
        self._own_views, self._own_wire = [mine], _real(mine.view(-1))
        return True

    def start(self, pg: ProcessGroup) -> None:
        if self._wire is not None and self._wire.numel():
            self._work = start_all_reduce(self._wire, pg)

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._wire = None

    def _allocate(self) -> Tensor:
        """Return the flat tensor. Its memory is taken when first needed: a gradient that is reduced in place needs none."""
        if self._own_wire is None:
            length = self.numel + self.has_flag
            if self._is_exchangeable:
                flat = torch.empty(length, dtype=self.dtype, device=self.device)
            else:
                flat = self._buffers.take(self.device, self.dtype, self._slot, max(length, self._at_least or 0))[:length]
            parts = flat[: self.numel].split_with_sizes(self.sizes)
            self._flag = flat[self.numel :] if self.has_flag else self._flag
            self._own_views = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
            self._own_wire = _real(flat)
        return self._own_wire


def plan_buckets(specs: Sequence[GradientSpec], members: Collection[int], bucket_bytes: int) -> list[list[int]]:
    """Return which of the `members` share a bucket, in the order in which the buckets become complete.

    Backward makes the gradients of the last parameters first. A bucket has one device and one dtype and is complete when it
    has `bucket_bytes`, as in DDP; the first of several is complete earlier. Large gradients are alone, which spares copies.
    """
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    totals: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for member in members:
        totals[specs[member].device, specs[member].dtype] += specs[member].nbytes
    limits = {kind: bucket_bytes if total <= bucket_bytes else min(bucket_bytes, _FIRST) for kind, total in totals.items()}
    used = dict.fromkeys(totals, 0)
    full: list[list[int]] = []
    for member in sorted(members, reverse=True):
        spec = specs[member]
        kind = spec.device, spec.dtype
        if spec.nbytes >= (min(_ALONE, bucket_bytes) if spec.device.type == "cpu" else bucket_bytes):
            full.append([member])
            continue
        filling.setdefault(kind, []).append(member)
        used[kind] += spec.nbytes
        if used[kind] >= limits[kind]:
            full.append(filling.pop(kind))
            used[kind] = 0
            limits[kind] = bucket_bytes
    return sorted([*full, *filling.values()], key=lambda bucket: -bucket[-1])


def make_buckets(
    specs: Sequence[GradientSpec],
    members: Collection[int],
    bucket_bytes: int,
    buffers: Buffers,
    slots: int | None,
    *,
    has_flag: bool = False,
) -> list[Bucket]:
    """Return the buckets of `plan_buckets`. They take turns in `slots` pieces of memory; with slots=None each has its own.

    `has_flag`: the last one has a flag if it is on a CPU. It must be the same on all ranks: a flag is an element more to send.
    """
    plan = plan_buckets(specs, members, bucket_bytes)
    if slots is None:
        flagged = len(plan) - 1 if has_flag and plan and specs[plan[-1][0]].device.type == "cpu" else None
        return [Bucket(bucket, specs, buffers, place, None, has_flag=place == flagged) for place, bucket in enumerate(plan)]
    sizes = [sum(specs[member].shape.numel() for member in bucket) for bucket in plan]
    kinds = [specs[bucket[0]][1:] for bucket in plan]
    rooms = dict.fromkeys(kinds, 0)
    for kind, size, bucket in zip(kinds, sizes, plan, strict=True):
        rooms[kind] = max(rooms[kind], size if len(bucket) > 1 else 0)
    buckets = []
    for place, (kind, size, bucket) in enumerate(zip(kinds, sizes, plan, strict=True)):
        turn = place % slots
        slot = turn if size <= rooms[kind] else -1 - turn  # its own memory: the other slots have another size
        buckets.append(Bucket(bucket, specs, buffers, slot, rooms[kind]))
    return buckets


def _can_reduce_in_place(grad: Tensor) -> bool:
    """Return whether it is large, contiguous (as on all ranks), and the only owner of its memory."""
    return (
        grad.numel() >= _WORTH_NO_COPY
        and grad.is_contiguous()
        and not grad.is_conj()
        and not grad.is_neg()
        and grad.untyped_storage().nbytes() == grad.numel() * grad.dtype.itemsize
    )


def _storage_references(x: Tensor) -> int:
    storage = x.untyped_storage()
    return sys.getrefcount(storage)


_STORAGE_REFERENCES = _storage_references(torch.empty(1, device="cpu"))  # of a storage that only one function knows


def _is_the_only_one(grad: Tensor) -> bool:
    """Return whether `grad` is known only as p.grad, and nothing else knows its memory, not even numpy or DLPack."""
    storage = grad.untyped_storage()
    return (
        grad._use_count() == 2  # p.grad, and `grad` itself
        and torch._C._storage_Use_Count(storage._cdata) == 2  # `grad` and `storage`
        and storage.resizable()
        and not storage.is_shared()  # by processes
        and sys.getrefcount(storage) == _STORAGE_REFERENCES  # nobody else holds it in Python
        and grad.is_contiguous()
        and not (grad.requires_grad or grad.is_conj() or grad.is_neg())
    )


def _real(x: Tensor) -> Tensor:
    """View complex numbers as real ones: backends add those only."""
    return torch.view_as_real(x) if x.is_complex() else x


class GradientState(NamedTuple):
    """The gradients of some parameters at one time, to find out later which of them have changed."""

    grads: list[Tensor | None]
    versions: list[int]

    @classmethod
    def now(cls, parameters: Iterable[Tensor]) -> Self:
        grads = [p.grad for p in parameters]
        return cls(grads, [0 if grad is None else grad._version for grad in grads])

    def changes(self, later: "GradientState") -> list[bool]:
        """Say for each gradient whether it is another tensor later, or was written in between."""
        pairs = zip(*self, *later, strict=True)
        return [a is not b or version != later_version for a, version, b, later_version in pairs]


class BucketLauncher:
    """Sends `buckets` during backward. It sends copies: every p.grad stays what this rank has computed.

    `agreed` is asked before the first bucket is sent: where ranks are about to send different buckets, none is sent. It waits
    for a message that had the time of the first gradients to arrive. Hooks may run in any of autograd's threads, one for each
    device.

    A bucket with a flag is sent by launch_rest(). Its flag is raised if this rank's gradients are not exactly those that the
    buckets hold, all dense, or if one has changed after it was sent.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        specs: Sequence[GradientSpec],
        buckets: Sequence[Bucket],
        scale: float,
        ranks: GroupRanks,
        agreed: Callable[[], bool],
    ) -> None:
        self.specs = specs
        self.buckets = buckets
        self.scale = scale
        self.ranks = ranks
        self.launched = 0
        self._agreed = agreed
        self._lock = Lock()
        self._parameters = [[parameters[member] for member in bucket.members] for bucket in buckets]
        self._before = [GradientState.now(members) for members in self._parameters]
        self._sent: list[GradientState] = []
        self._is_usual = True  # every bucket was sent with all its gradients, and there are no others
        self._unexpected: list[Tensor] = []
        if sum(len(bucket.members) for bucket in buckets) < len(parameters):
            expected = {member for bucket in buckets for member in bucket.members}
            self._unexpected = [p for place, p in enumerate(parameters) if place not in expected]
        self._complete = [False for _ in buckets]
        self._streams: dict[Tensor, torch.Stream] = {}  # on which the gradient was computed, if not on a CPU
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def sending_during_backward(self) -> Iterator[None]:
        """Send each bucket as soon as its gradients exist, while the block runs."""
        try:
            for place, bucket in enumerate(self.buckets):
                if bucket.device.type != "cpu":
                    self._handles += [p.register_post_accumulate_grad_hook(self._note_stream) for p in self._parameters[place]]
                self._await(place, bucket.last_to_come)
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def launch_rest(self) -> None:
        """Send the remaining buckets, with zeros for gradients that were not computed."""
        self._complete = [True for _ in self.buckets]
        self._launch_complete()

    def late(self) -> list[int]:
        """Return the members whose p.grad has changed after it was sent."""
        late: list[int] = []
        for bucket, parameters, sent in zip(self.buckets, self._parameters, self._sent, strict=False):
            late += compress(bucket.members, sent.changes(GradientState.now(parameters)))
        return late

    def _await(self, place: int, which: int) -> None:
        """Send bucket `place` when its gradient `which`, and all others, have been computed.

        The hook waits for the gradient that came last in the step before. If others are missing when it has come, the next
        hook waits for one of them. That takes far less time than a hook for every gradient.
        """

        def on_gradient(parameter: Tensor) -> None:
            missing = self._missing(place)
            if missing:
                self._await(place, missing[-1])
                return
            self.buckets[place].last_to_come = which
            self._complete[place] = not self.buckets[place].has_flag
            self._launch_complete()

        self._handles.append(self._parameters[place][which].register_post_accumulate_grad_hook(on_gradient))

    def _missing(self, place: int) -> list[int]:
        parameters = self._parameters[place]
        if self.buckets[place].device.type == "cpu":
            came = self._before[place].changes(GradientState.now(parameters))
        else:
            came = [p in self._streams for p in parameters]
        return [which for which, it_came in enumerate(came) if not it_came]

    def _note_stream(self, parameter: Tensor) -> None:
        self._streams[parameter] = torch.accelerator.current_stream(parameter.device)

    def _launch_complete(self) -> None:
        with self._lock:
            while self.launched < len(self.buckets) and self._complete[self.launched] and (self.launched or self._agreed()):
                self._launch()

    def _launch(self) -> None:
        bucket, parameters = self.buckets[self.launched], self._parameters[self.launched]
        if bucket.device.type != "cpu" and (streams := {self._streams[p] for p in parameters if p in self._streams}):
            # The last gradient may have been computed on another stream than the others, or on another device.
            current = torch.accelerator.current_stream(bucket.device)
            for stream in streams - {current}:
                current.wait_stream(stream)
        state = GradientState.now(parameters)
        dense = [
            grad if grad is not None and self.specs[member].fits(grad) else None
            for member, grad in zip(bucket.members, state.grads, strict=True)
        ]
        self._is_usual = self._is_usual and all(grad is not None for grad in dense)
        with torch.no_grad():
            bucket.fill(dense, self.scale, in_place=False)
            if bucket.has_flag and not self._has_sent_everything():
                bucket.raise_flag()
            bucket.start(process_group(self.ranks))
        self._sent.append(state)
        self.launched += 1

    def _has_sent_everything(self) -> bool:
        return self._is_usual and all(p.grad is None for p in self._unexpected) and not self.late()
