"""Gradients averaged or added over ranks when you say so: for steps with several backward passes, where DDP is in the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor

from unisono.collectives import Group
from unisono.collectives.functional.reduce import GradReduce
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.dataparallel.buckets import Bucket, Buffers, Spec, make_buckets
from unisono.dataparallel.gradient_survey import (
    Holdings,
    Survey,
    collect,
    device_problem,
    exchange_holdings,
    sign,
    survey_gradients,
)
from unisono.dataparallel.overlap import Launcher
from unisono.dataparallel.sparse_gradients import add_up_sparse

BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 3  # buckets at a time, outside overlap(): one is being filled while others are on the wire


def sync_gradients(
    parameters: Tensor | Iterable[Tensor],
    *,
    reduce: GradReduce = "mean",
    group: Group = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace every `p.grad` by its mean (or sum) over the ranks: what DDP does in backward, at the time you choose.

    Call it on all ranks after the last backward pass and before the optimizer's step; in a GAN once for each network.
    `parameters` is what clip_grad_norm_ takes; those that require no gradient are left out. A parameter without a gradient
    on this rank counts as zeros and gets one if any rank has one; without one on all ranks it keeps None. Each p.grad stays
    the same tensor. Sparse gradients stay sparse, unless some rank has a dense one for the same parameter.

    reduce="mean" divides by the number of ranks first, as DDP does, and goes with losses of grad_reduce="mean"; "sum" goes
    with grad_reduce="sum". Gradients travel in their own dtype, in buckets of up to `bucket_bytes`.

    The ranks first agree in one small exchange on the parameters and on who has which gradient. If they differ, or if one
    gradient cannot be synced, all ranks raise the same error and no gradient has been touched. DTensor parameters raise
    TypeError: the shards of a table are different rows on each rank, not copies to be averaged. Leave them out.

    To keep the memory of the buckets from step to step, and to overlap with backward, make a GradientSync once.

    Example, 2 ranks whose p.grad is [1.] and [3.]:
        sync_gradients([p])  ->  p.grad is [2.] on both

    Example:
        >>> import torch
        >>> from unisono.dataparallel import sync_gradients
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> sync_gradients(model.parameters())  # one rank: nothing changes
        >>> model.weight.grad
        tensor([[3., 3.]])
    """
    GradientSync(parameters, reduce=reduce, group=group, bucket_bytes=bucket_bytes)()


class GradientSync:
    """sync_gradients with its memory kept: make it once, call it in every step.

    The arguments are those of sync_gradients. They are checked when it is called, by all ranks together; parameters may be
    frozen, unfrozen, moved or converted between calls.

    Example:
        >>> import torch
        >>> from unisono.dataparallel import GradientSync
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = GradientSync(model.parameters())
        >>> with sync.overlap():
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> model.bias.grad
        tensor([3.])
    """

    def __init__(
        self,
        parameters: Tensor | Iterable[Tensor],
        *,
        reduce: GradReduce = "mean",
        group: Group = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.reduce, self.group, self.bucket_bytes = reduce, group, bucket_bytes
        self._given, self._problem = collect(parameters)
        if reduce not in ("mean", "sum"):
            self._problem = f"reduce must be 'mean' or 'sum', got {reduce!r}"
        if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            self._problem = f"bucket_bytes must be a positive int, got {bucket_bytes!r}"
        self._parameters: list[Tensor] = []  # those that required a gradient in the last call
        self._specs: list[Spec] = []
        self._devices: set[torch.device] = set()
        self._signature = ""
        self._expected: tuple[int, ...] = ()  # the dense gradients of the last call; the same on all ranks
        self._plans: dict[int | None, tuple[tuple[int, ...], list[Bucket]]] = {}
        self._buffers = Buffers()
        self._overlapping = False
        self._abandoned = 0  # buckets that have left when a block raised: where ranks differ, they meet others' buckets

    def __call__(self) -> None:
        """The same as sync_gradients."""
        ranks = self._begin()
        survey = survey_gradients(self._parameters, self._specs)
        if survey.problem and self._refresh():
            survey = survey_gradients(self._parameters, self._specs)
        holdings = self._agree("sync", survey, ranks)
        if ranks.size > 1:
            with self._communicating(ranks):
                self._reduce_sparse(survey.grads, holdings.sparse, ranks)
                self._reduce_dense(survey.grads, holdings.dense, ranks)
            self._expected = holdings.dense

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Inside, gradients travel while backward goes on; when the block is left, all of them are synced.

        Put the last backward pass of a step in the block, and nothing else; what earlier ones have accumulated is included.
        A gradient that changes after its bucket has left (by a second pass in the block) is synced again when the block
        ends: right, but sent twice. Which gradients to expect is learned from the sync before, so the first block does not
        overlap yet. If the backward itself communicates (SyncBatchNorm, gathered losses) and ranks may use different
        parameters, give the GradientSync a group of its own, `group=dist.new_group()`: in one group, all ranks must
        communicate in one order.

        The ranks agree in one small exchange on entering and one on leaving. If the block raises on one rank, the error
        propagates there at once and the gradients are as its own backward left them; the others wait for its buckets,
        and raise when its process ends or the group's timeout has passed.
        """
        ranks = self._begin()
        self._refresh()
        self._agree(f"overlap, expecting {self._expected}", Survey([], [], ""), ranks)
        buckets = self._buckets(self._expected, None) if ranks.size > 1 else []
        launcher = Launcher(self._parameters, self._specs, buckets, self._scale(ranks), ranks)
        self._overlapping = True
        try:
            with launcher.listening():
                yield
        except BaseException:
            self._abandoned += launcher.launched
            self._forget_memory()
            raise
        finally:
            self._overlapping = False
        with self._communicating(ranks):
            launcher.launch_rest()
            survey = survey_gradients(self._parameters, self._specs, late=launcher.late())
            try:
                holdings = self._agree("end of overlap", survey, ranks)
            finally:
                for bucket in buckets:
                    bucket.wait()
            if ranks.size > 1:
                arrived = (set(holdings.dense) & set(self._expected)) - holdings.late
                for bucket in buckets:
                    self._write_back(bucket, survey.grads, arrived)
                self._reduce_sparse(survey.grads, holdings.sparse, ranks)
                self._reduce_dense(survey.grads, tuple(place for place in holdings.dense if place not in arrived), ranks)
        self._expected = holdings.dense

    def __repr__(self) -> str:
        return f"GradientSync({len(self._given)} parameters, reduce={self.reduce!r}, bucket_bytes={self.bucket_bytes})"

    def _begin(self) -> GroupRanks:
        if self._overlapping:
            raise RuntimeError("GradientSync: called inside its own overlap() block, which syncs when it is left")
        trainable = [p for p in self._given if p.requires_grad]
        if len(trainable) != len(self._parameters) or not all(map(is_, trainable, self._parameters)):
            self._parameters = trainable
            self._refresh()
        return resolve_group(self.group)

    def _refresh(self) -> bool:
        """Whether parameters were moved or converted since the last time, or are others."""
        specs = [Spec(p.shape, p.dtype, p.device) for p in self._parameters]
        changed = specs != self._specs
        if changed:
            self._specs, self._signature, self._devices = specs, sign(specs), {spec.device for spec in specs}
            self._expected, self._plans = (), {}
        return changed

    def _agree(self, step: str, survey: Survey, ranks: GroupRanks) -> Holdings:
        options = f"reduce={self.reduce!r}, bucket_bytes={self.bucket_bytes}"
        problem = self._problem or survey.problem or device_problem(self._devices, ranks)
        if self._abandoned:
            step = f"{step}, after blocks that raised when {self._abandoned} buckets had left"
        with torch.inference_mode(False):
            return exchange_holdings(self._specs, survey._replace(problem=problem), (step, options, self._signature), ranks)

    def _scale(self, ranks: GroupRanks) -> float:
        return 1 / ranks.size if self.reduce == "mean" else 1.0

    def _buckets(self, members: tuple[int, ...], slots: int | None) -> list[Bucket]:
        known, buckets = self._plans.get(slots, (None, []))
        if known != members:
            buckets = make_buckets(self._specs, members, self.bucket_bytes, self._buffers, slots)
            self._plans[slots] = members, buckets
        return buckets

    @torch.no_grad()
    def _reduce_dense(self, grads: Sequence[Tensor | None], members: tuple[int, ...], ranks: GroupRanks) -> None:
        """One bucket is filled while others are on the wire."""
        pg, scale = process_group(ranks), self._scale(ranks)
        buckets = self._buckets(members, _IN_FLIGHT)
        alone = any(len(bucket.members) == 1 for bucket in buckets)
        # of gradients that share memory none may be written before all have been read
        shared = (alone or len(buckets) > _IN_FLIGHT) and _share_memory(grads)
        if shared:
            buckets = self._buckets(members, None)
        pending: deque[Bucket] = deque()

        def finish() -> None:
            bucket = pending.popleft()
            bucket.wait()
            self._write_back(bucket, grads)

        for bucket in buckets:
            if len(pending) == _IN_FLIGHT and not shared:
                finish()
            mine = [grads[member] for member in bucket.members]
            dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in mine]
            bucket.fill(dense, scale, in_place=not shared)
            bucket.start(pg)
            pending.append(bucket)
        while pending:
            finish()

    @torch.no_grad()
    def _reduce_sparse(self, grads: Sequence[Tensor | None], members: dict[int, int], ranks: GroupRanks) -> None:
        if not members:
            return
        mine, specs = [grads[member] for member in members], [self._specs[member] for member in members]
        for member, total in zip(
            members, add_up_sparse(mine, specs, [*members.values()], self._scale(ranks), ranks), strict=True
        ):
            grad = grads[member]
            if grad is None:
                self._parameters[member].grad = total
            else:
                grad.copy_(total)

    @torch.no_grad()
    def _write_back(self, bucket: Bucket, grads: Sequence[Tensor | None], only: Collection[int] | None = None) -> None:
        """Into the gradients that are there; a new one where there is none that can hold it."""
        if bucket.in_place:
            bucket.views = []  # the gradient is its owner's again
            return
        targets, sources = [], []
        for member, view in zip(bucket.members, bucket.views, strict=True):
            if only is not None and member not in only:
                continue
            grad = grads[member]
            if grad is None or grad.is_sparse or (not grad.is_contiguous() and torch._debug_has_internal_overlap(grad) == 1):
                parameter = self._parameters[member]
                parameter.grad = torch.empty_like(parameter.detach()).copy_(view)
            elif grad.is_neg() or (bucket.dtype.is_complex and grad.is_conj()):
                grad.copy_(view)
            else:
                targets.append(grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _forget_memory(self) -> None:
        """It may still be on the wire."""
        self._plans, self._buffers = {}, Buffers()

    @contextmanager
    def _communicating(self, ranks: GroupRanks) -> Iterator[None]:
        try:
            with torch.inference_mode(False):  # what is made here outlives the caller's mode
                yield
        except RuntimeError as error:
            self._forget_memory()
            raise RuntimeError(
                f"sync_gradients: the exchange broke off on rank {ranks.rank} of {ranks.size}; some gradients are synced, "
                "some are not, some may be neither: set them to None before another backward"
            ) from error


def _share_memory(grads: Sequence[Tensor | None]) -> bool:
    storages = [grad.untyped_storage()._cdata for grad in grads if grad is not None and not grad.is_sparse]
    return len(set(storages)) < len(storages)
