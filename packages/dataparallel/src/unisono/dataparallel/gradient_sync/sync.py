"""sync_gradients and GradientSync: average or add gradients over ranks, in steps with several backward passes.

Dense gradients are reduced in buckets. Sparse ones (COO, from nn.Embedding(sparse=True)) are gathered: only touched rows are
sent.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather
from unisono.collectives.functional.reduce import GradReduce
from unisono.collectives.groups import GroupRanks, as_group, process_group, resolve_group, sharded_over
from unisono.dataparallel.gradient_sync.buckets import Bucket, BucketLauncher, Buffers, GradientSpec, make_buckets
from unisono.dataparallel.gradient_sync.presence import (
    GlobalGradients,
    LocalGradients,
    Survey,
    device_error,
    find_local_gradients,
    parameter_signature,
    shard_error,
    validate_parameters,
)
from unisono.dataparallel.weights import raise_if_weights_differ

BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 3  # buckets at a time, outside overlap(): one is filled while others are reduced


def sync_gradients(
    parameters: Tensor | Iterable[Tensor],
    *,
    reduce: GradReduce = "mean",
    group: Group = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace every `p.grad` by its mean (or sum) over the ranks: what DDP does in backward, at the time you choose.

    Call it on all ranks after the last backward pass and before the optimizer's step; in a GAN once for each network.
    `parameters`: a tensor or an iterable, as for clip_grad_norm_; those that require no gradient are skipped. A parameter
    without a gradient on this rank counts as zeros and gets a gradient if any rank has one; if no rank has one, it keeps
    None. Each p.grad stays the same tensor. Sparse gradients stay sparse, unless some rank has a dense one for the same
    parameter.

    reduce="mean" divides by the number of ranks first, as DDP does; use it with losses of grad_reduce="mean", and "sum" with
    grad_reduce="sum". Gradients are sent in their own dtype, in buckets of about `bucket_bytes`, as DDP does. On CPUs,
    gradients from 4 MiB on are sent from where they are.

    Raises the same error on all ranks, before any gradient is touched, if the ranks have different parameters or if one
    gradient cannot be synced: one small message compares them first. DTensors and the sharded tables of unisono.embedding
    raise TypeError: they are different rows on each rank, not copies to average. Leave them out.

    The weights are not compared: ranks that start from different ones stay different. Call broadcast_parameters(module) before
    the first step, or use GradientSync, whose first call compares them. It also reuses the memory of the buckets from step to
    step and can overlap with backward.

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
    GradientSync(parameters, reduce=reduce, group=group, bucket_bytes=bucket_bytes, compare_weights=False)()


class GradientSync:
    """sync_gradients that reuses its memory: make it once, call it in every step.

    The arguments are those of sync_gradients. All ranks validate them together in every call; parameters may be frozen,
    unfrozen, moved or converted between calls.

    The first call also compares the weights, by a checksum of each parameter: equal gradients keep ranks equal only if they
    start so. If a parameter differs, all ranks raise an error that names it; broadcast_parameters(module) makes them equal.
    compare_weights=False leaves this out, for ranks whose weights differ by design. Later calls compare nothing. Buffers are
    never compared.

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
        compare_weights: bool = True,
    ) -> None:
        self.reduce = reduce
        self.group = group
        self.bucket_bytes = bucket_bytes
        self._given, self._problem = validate_parameters(parameters)
        self._shards = {place: p for place, p in enumerate(self._given) if sharded_over(p)}
        if reduce not in ("mean", "sum"):
            self._problem = f"reduce must be 'mean' or 'sum', got {reduce!r}"
        if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            self._problem = f"bucket_bytes must be a positive int, got {bucket_bytes!r}"
        self._trainable: list[bool] = []  # of each given parameter, in the last call
        self._parameters: list[Tensor] = []  # those that required a gradient
        self._specs: list[GradientSpec] = []
        self._devices: set[torch.device] = set()
        self._signature = ""
        self._expected: tuple[int, ...] = ()  # the dense gradients of the last call; the same on all ranks
        self._expected_text = "()"
        self._is_first = True
        self._plans: dict[tuple[int | None, bool], tuple[tuple[int, ...], list[Bucket]]] = {}
        self._buffers = Buffers()
        self._overlapping = False
        self._compare_next = compare_weights
        self._abandoned = 0  # buckets that were sent before a block raised: if ranks differ in it, their buckets do not match

    def __call__(self) -> None:
        """Do what sync_gradients does."""
        ranks = self._begin()
        local = find_local_gradients(self._parameters, self._specs)
        if local.problem and self._refresh():
            local = find_local_gradients(self._parameters, self._specs)
        survey = self._start_survey("sync", local, ranks)
        filled = self._fill_ahead(local, ranks)
        found = survey.result()
        self._compare_weights(ranks)
        if ranks.size > 1:
            with self._communicating(ranks):
                self._reduce_sparse(local.grads, found.sparse, ranks)
                self._reduce_dense(local.grads, found.dense, ranks, filled)
        self._finish(found)

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Send gradients while the backward in the block runs; after the block, all of them are synced.

        Put the last backward pass of a step in the block, and nothing else; gradients that earlier passes have accumulated
        are included. A gradient that changes after its bucket was sent (by a second pass in the block) is synced again at
        the end of the block: the result is right, but it is sent twice. The previous sync tells which gradients to expect,
        so the first block does not overlap yet. If the backward itself communicates (SyncBatchNorm, gathered losses) and
        ranks may use different parameters, give the GradientSync a group of its own, `group=dist.new_group()`: within one
        group, all ranks must communicate in the same order.

        Memory: the buckets of all gradients stay allocated between steps, as in DDP: as much again as the gradients themselves.
        A call outside of overlap() needs three buckets only.

        The ranks validate the call in one small message on entering, which must have arrived when the first bucket is ready.
        If the ranks disagree, the first block raises on entering and later ones on leaving; no gradient is touched. On CPUs
        the last bucket is sent on leaving; it says whether some rank has other gradients than expected, and only then a second
        message follows. On accelerators, where the host would have to wait for it, that message is always sent, beside the last
        buckets. If the block raises on one rank, the error propagates there at once, and the gradients are as its own backward
        left them. The other ranks wait for its buckets, and raise when its process ends or the group's timeout has passed.
        """
        ranks = self._begin()
        self._refresh()
        entry = self._start_survey(f"overlap, expecting {self._expected_text}", LocalGradients([], [], ""), ranks)
        if self._is_first or ranks.size == 1:
            entry.result()
            self._compare_weights(ranks)
        buckets = self._buckets(self._expected, None, has_flag=True) if ranks.size > 1 else []
        launcher = BucketLauncher(self._parameters, self._specs, buckets, self._scale(ranks), ranks, entry.agrees)
        self._overlapping = True
        try:
            with launcher.sending_during_backward():
                yield
        except BaseException:
            self._abandoned += launcher.launched
            self._forget_memory()
            with suppress(RuntimeError):
                entry.agrees()  # or the next call would take its message for an own one
            raise
        finally:
            self._overlapping = False
        with self._communicating(ranks):
            launcher.launch_rest()
            entry.result()  # raises on all ranks if no bucket was sent because they disagree
            found = self._receive(launcher, ranks)
        self._finish(found)

    def __repr__(self) -> str:
        return f"GradientSync({len(self._given)} parameters, reduce={self.reduce!r}, bucket_bytes={self.bucket_bytes})"

    def _begin(self) -> GroupRanks:
        if self._overlapping:
            raise RuntimeError("GradientSync: called inside its own overlap() block, which syncs when it is left")
        trainable = [p.requires_grad for p in self._given]
        if trainable != self._trainable:
            self._trainable = trainable
            self._parameters = list(compress(self._given, trainable))
            self._refresh()
        return resolve_group(self.group)

    def _refresh(self) -> bool:
        """Return whether parameters are others than last time, or were moved or converted; then start over."""
        found = [(p.shape, p.dtype, p.device) for p in self._parameters]
        if found == self._specs:
            return False
        self._specs = [GradientSpec(*spec) for spec in found]
        self._signature = parameter_signature(self._specs)
        self._devices = {spec.device for spec in self._specs}
        self._expect(())
        self._plans = {}
        return True

    def _expect(self, dense: tuple[int, ...]) -> None:
        if dense != self._expected:
            self._expected = dense
            self._expected_text = str(dense)

    def _start_survey(self, step: str, local: LocalGradients, ranks: GroupRanks) -> Survey:
        options = f"reduce={self.reduce!r}, bucket_bytes={self.bucket_bytes}"
        problem = self._problem or local.problem or device_error(self._devices, ranks)
        problem = problem or shard_error(self._shards, ranks)
        if self._abandoned:
            step = f"{step}, after blocks that raised when {self._abandoned} buckets had been sent"
        if self._compare_next:
            step = f"first {step}"
        with torch.inference_mode(False):
            return Survey(self._specs, local._replace(problem=problem), (step, options, self._signature), ranks)

    def _finish(self, found: GlobalGradients) -> None:
        self._is_first = False
        self._expect(found.dense)

    def _compare_weights(self, ranks: GroupRanks) -> None:
        """Do it in the first call. Frozen parameters count, too: all ranks compute with them."""
        if self._compare_next:
            named = {f"parameters[{place}]": p for place, p in enumerate(self._given)}
            advice = "Call broadcast_parameters(module) before the first step, or pass compare_weights=False if this is meant."
            raise_if_weights_differ("GradientSync", named, ranks, advice)
            self._compare_next = False

    def _scale(self, ranks: GroupRanks) -> float:
        return 1 / ranks.size if self.reduce == "mean" else 1.0

    def _buckets(self, members: tuple[int, ...], slots: int | None, *, has_flag: bool = False) -> list[Bucket]:
        known, buckets = self._plans.get((slots, has_flag), (None, []))
        if known != members:
            buckets = make_buckets(self._specs, members, self.bucket_bytes, self._buffers, slots, has_flag=has_flag)
            self._plans[slots, has_flag] = members, buckets
        return buckets

    def _receive(self, launcher: BucketLauncher, ranks: GroupRanks) -> GlobalGradients:
        """Write what the buckets of a block bring into the gradients, and sync those that were not in them.

        A flag in the last bucket says if there are such on some rank; otherwise a second survey is spared. On accelerators,
        where the host would wait for the flag, there is none, and the survey is on its way while the buckets are.
        """
        has_flag = any(bucket.has_flag for bucket in launcher.buckets)

        def start_survey() -> tuple[LocalGradients, Survey]:
            local = find_local_gradients(self._parameters, self._specs, late=launcher.late())
            return local, self._start_survey("end of overlap", local, ranks)

        started = None if has_flag else start_survey()
        for bucket in launcher.buckets:
            bucket.wait()
        if has_flag and not launcher.buckets[-1].flag_is_up():
            grads = [p.grad for p in self._parameters]
            for bucket in launcher.buckets:
                self._write_back(bucket, grads)
            return GlobalGradients(self._expected, {}, frozenset())
        local, survey = started or start_survey()
        found = survey.result()
        if ranks.size > 1:
            arrived = (set(found.dense) & set(self._expected)) - found.late
            for bucket in launcher.buckets:
                self._write_back(bucket, local.grads, arrived)
            self._reduce_sparse(local.grads, found.sparse, ranks)
            self._reduce_dense(local.grads, tuple(place for place in found.dense if place not in arrived), ranks)
        return found

    def _plan(self, grads: Sequence[Tensor | None], members: tuple[int, ...]) -> tuple[list[Bucket], bool]:
        """Return the buckets, and whether gradients share memory: then none may be written before all have been read."""
        buckets = self._buckets(members, _IN_FLIGHT)
        alone = any(len(bucket.members) == 1 for bucket in buckets)
        if (alone or len(buckets) > _IN_FLIGHT) and _share_memory(grads):
            return self._buckets(members, None), True
        return buckets, False

    @torch.no_grad()
    @torch.inference_mode(False)
    def _fill_ahead(self, local: LocalGradients, ranks: GroupRanks) -> set[Bucket]:
        """Fill the first buckets while the survey is on its way, for the gradients of the last call; return those filled.

        Nothing is sent, and no gradient is written: the ranks may disagree. If they have other gradients than in the last
        call, their buckets are others, and these are not used.
        """
        if ranks.size == 1 or local.problem:
            return set()
        filled = set()
        for bucket in self._plan(local.grads, self._expected)[0][:_IN_FLIGHT]:
            dense = _dense(bucket, local.grads)
            if not bucket.needs_no_copy(dense):
                bucket.fill(dense, self._scale(ranks), in_place=False)
                filled.add(bucket)
        return filled

    @torch.no_grad()
    def _reduce_dense(
        self,
        grads: Sequence[Tensor | None],
        members: tuple[int, ...],
        ranks: GroupRanks,
        filled: Collection[Bucket] = (),
    ) -> None:
        """Reduce bucket after bucket: one is filled while others are reduced. Those in `filled` are sent as they are."""
        pg = process_group(ranks)
        buckets, shared = self._plan(grads, members)
        pending: deque[Bucket] = deque()

        def finish() -> None:
            bucket = pending.popleft()
            bucket.wait()
            self._write_back(bucket, grads)

        for bucket in buckets:
            if len(pending) == _IN_FLIGHT and not shared:
                finish()
            if bucket not in filled:
                bucket.fill(_dense(bucket, grads), self._scale(ranks), in_place=not shared)
            bucket.start(pg)
            pending.append(bucket)
        while pending:
            finish()

    @torch.no_grad()
    def _reduce_sparse(self, grads: Sequence[Tensor | None], members: dict[int, int], ranks: GroupRanks) -> None:
        if not members:
            return
        own = [grads[member] for member in members]
        specs = [self._specs[member] for member in members]
        totals = sum_sparse_gradients(own, specs, [*members.values()], self._scale(ranks), ranks)
        for member, total in zip(members, totals, strict=True):
            grad = grads[member]
            if grad is None:
                self._parameters[member].grad = total
            else:
                grad.copy_(total)

    @torch.no_grad()
    def _write_back(self, bucket: Bucket, grads: Sequence[Tensor | None], only: Collection[int] | None = None) -> None:
        """Copy the sums into the gradients; make a new one where none exists that can hold the sum."""
        if bucket.in_place:
            bucket.views = []  # the bucket must not hold the gradient any longer
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
            elif not bucket.exchange(grad):
                targets.append(grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _forget_memory(self) -> None:
        """Drop the buffers: they may still be in use by a reduction."""
        self._plans = {}
        self._buffers = Buffers()

    @contextmanager
    def _communicating(self, ranks: GroupRanks) -> Iterator[None]:
        try:
            with torch.inference_mode(False):  # new gradients outlive the caller's mode
                yield
        except RuntimeError as error:
            self._forget_memory()
            raise RuntimeError(
                f"sync_gradients: the communication failed on rank {ranks.rank} of {ranks.size}; some gradients are synced, "
                "some are not, some may be neither: set them to None before another backward"
            ) from error
        except BaseException:  # an interrupt: messages may still be on their way
            self._forget_memory()
            raise


def sum_sparse_gradients(
    grads: Sequence[Tensor | None], specs: Sequence[GradientSpec], sparse_dims: Sequence[int], scale: float, ranks: GroupRanks
) -> list[Tensor]:
    """Return for each parameter `scale` times the sum over ranks, coalesced, the same on every rank.

    `sparse_dims`: the number of sparse dimensions of each gradient, the same on all ranks. A rank without a gradient adds
    nothing. All gradients of a device travel in one all_gather.
    """
    results: dict[int, Tensor] = {}
    for device in dict.fromkeys(spec.device for spec in specs):
        places = [place for place, spec in enumerate(specs) if spec.device == device]
        parts = [_indices_and_values(grads[place], specs[place], sparse_dims[place], scale) for place in places]
        gathered = all_gather(parts, group=as_group(ranks))
        for place, (indices, values) in zip(places, gathered, strict=True):
            size = specs[place].shape
            total = torch.sparse_coo_tensor(indices.t(), values, size, check_invariants=False, is_coalesced=False)
            results[place] = total.coalesce()
    return [results[place] for place in range(len(specs))]


def _indices_and_values(grad: Tensor | None, spec: GradientSpec, sparse_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of a gradient, no index twice."""
    if grad is None:
        indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=spec.device)
        return indices, torch.empty(0, *spec.shape[sparse_dim:], dtype=spec.dtype, device=spec.device)
    grad = grad.detach().coalesce()
    values = grad.values()
    return grad.indices().t().contiguous(), values * scale if scale != 1 else values


def _dense(bucket: Bucket, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    mine = (grads[member] for member in bucket.members)
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in mine]


def _share_memory(grads: Sequence[Tensor | None]) -> bool:
    storages = [grad.untyped_storage()._cdata for grad in grads if grad is not None and not grad.is_sparse]
    return len(set(storages)) < len(storages)
