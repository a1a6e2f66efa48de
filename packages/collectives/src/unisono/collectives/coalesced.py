"""Several collectives of one kind as one: the leaves of a tree travel together.

On gloo they are packed into one message. On other backends each leaf has a fused collective of its own, straight into its
result, and torch merges the calls into one launch: no kernel packs, unpacks or adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives import wire
from unisono.collectives.autograd import KINDS, LinearMap, apply, apply_batched, run
from unisono.collectives.checks import validate_linear_map
from unisono.collectives.groups import backend_for, process_group
from unisono.collectives.profiling import profiled

_LARGE = 1 << 18  # bytes: on gloo, copies into a common message cost more than a message of its own


def apply_coalesced(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """Run plan k on the rows of `xs[k]`, differentiably. All plans have the same kind and the same ranks.

    A leaf that requires a gradient must do so on all ranks.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return [apply(x, plan) for x, plan in zip(xs, plans, strict=True)]  # bytes cannot be traced
    if any(map(torch._C._functorch.is_legacy_batchedtensor, xs)):
        return apply_batched(xs, plans)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in xs):
        return run_coalesced(xs, plans)
    return list(_Coalesced.apply(tuple(plans), *xs))


class _Coalesced(torch.autograd.Function):
    """Backward: the adjoints of the leaves that require a gradient, together."""

    @staticmethod
    def forward(ctx: Any, plans: tuple[LinearMap, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.plans = plans
        # In backward needs_input_grad says which leaves the caller asks for. The ranks may ask for different ones.
        ctx.needs_grad = ctx.needs_input_grad[1:]
        ys = tuple(run_coalesced(xs, plans))
        ctx.mark_non_differentiable(*(y for y, needed in zip(ys, ctx.needs_grad, strict=True) if not needed))
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        incoming = [grad for grad, needed in zip(grads, ctx.needs_grad, strict=True) if needed]
        adjoints = [plan.adjoint() for plan, needed in zip(ctx.plans, ctx.needs_grad, strict=True) if needed]
        results = iter(apply_coalesced(incoming, adjoints))
        return None, *(next(results) if needed else None for needed in ctx.needs_grad)


def run_coalesced(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """apply_coalesced without autograd. The results are new tensors; `xs` do not change."""
    first = plans[0] if plans else None
    if first is None or len(plans) == 1 or first.ranks.size == 1 or wire.is_traced_by_make_fx():
        return [run(x, plan) for x, plan in zip(xs, plans, strict=True)]
    if not KINDS[first.kind].communicates:
        return [run(x, plan) for x, plan in zip(xs, plans, strict=True)]
    xs = [x.resolve_conj().resolve_neg().contiguous() for x in xs]
    pg = process_group(first.ranks)
    form = first.kind.removesuffix("_own")  # a named gradient changes the backward, not what is sent now
    if backend_for(xs[0].device, pg) == "gloo":
        return _PACKED[form](xs, plans)
    return profiled(first.call, _run_fused, xs, plans, pg)


def _run_fused(xs: Sequence[Tensor], plans: Sequence[LinearMap], pg: ProcessGroup) -> list[Tensor]:
    """Run the plans as fused collectives in one launch, those of uneven sizes one by one: torch cannot merge them."""
    start = KINDS[plans[0].kind].start
    assert start is not None  # as all kinds that are coalesced
    together = [k for k, plan in enumerate(plans) if max(len(set(plan.send)), len(set(plan.receive))) <= 1]
    for k in together:
        if plans[k].site:
            validate_linear_map(xs[k], plans[k])
    results = dict(zip(together, wire.coalesce(lambda: [start(xs[k], plans[k], pg) for k in together], pg), strict=True))
    return [results[k] if k in results else run(xs[k], plan) for k, plan in enumerate(plans)]


def _gather_packed(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """Gather the bytes of all leaves in one message for each rank."""
    ranks = plans[0].ranks
    counts = _byte_counts(xs, [plan.receive for plan in plans])
    totals = tuple(map(sum, counts))
    plan = replace(plans[0], kind="all_gather", send=(totals[ranks.rank],), receive=totals)
    arrived = run(torch.cat([_flat(x) for x in xs]), plan)
    by_rank = [part.split(count) for part, count in zip(arrived.split(totals), counts, strict=True)]
    return [
        torch.cat([parts[leaf] for parts in by_rank]).view(x.dtype).view(sum(plans[leaf].receive), *x.shape[1:])
        for leaf, x in enumerate(xs)
    ]


def _reduce_scatter_packed(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """Send each rank its shares of all leaves in one message, and add what arrives, in rank order."""
    size, rank = plans[0].ranks.size, plans[0].ranks.rank
    counts = _byte_counts(xs, [plan.send for plan in plans])
    shares = [[_flat(share) for share in x.split(plan.send)] for x, plan in zip(xs, plans, strict=True)]
    own = sum(counts[rank])
    exchange = replace(plans[0], kind="all_to_all", send=tuple(map(sum, counts)), receive=(own,) * size)
    arrived = run(torch.cat([leaf[r] for r in range(size) for leaf in shares]), exchange)
    columns = arrived.view(size, own).split(counts[rank], dim=1)
    sums = []
    for column, x, plan in zip(columns, xs, plans, strict=True):
        blocks = column.reshape(-1).clone().view(x.dtype).view(size, plan.send[rank], *x.shape[1:])
        sums.append(wire.sum_in_order(blocks.unbind(), wire.sum_dtype(x, plan.reduce_dtype)))
    return sums


def _all_reduce_flat(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """Add up the small leaves of each dtype in one message; a large one is faster alone."""
    results: dict[int, Tensor] = {}
    small: dict[torch.dtype, list[int]] = {}
    for k, x in enumerate(xs):
        if x.numel() * x.element_size() >= _LARGE:
            results[k] = run(x, plans[k])
        else:
            small.setdefault(x.dtype, []).append(k)
    for places in small.values():
        total = run(torch.cat([xs[k].view(-1) for k in places]), plans[places[0]])
        parts = total.split([xs[k].numel() for k in places])
        # Copies: as views they would not allow changes in place, and each would keep the memory of all.
        results |= {k: part.clone().view(xs[k].shape) for k, part in zip(places, parts, strict=True)}
    return [results[k] for k in range(len(xs))]


_PACKED: dict[str, Callable[[Sequence[Tensor], Sequence[LinearMap]], list[Tensor]]] = {
    "all_gather": _gather_packed,
    "reduce_scatter": _reduce_scatter_packed,
    "all_reduce": _all_reduce_flat,
}


def _byte_counts(xs: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for every rank the bytes of each leaf, which has `sizes[leaf][rank]` rows there."""
    widths = [x.dtype.itemsize * x.shape[1:].numel() for x in xs]
    ranks = range(len(sizes[0]))
    return [[rows[r] * width for rows, width in zip(sizes, widths, strict=True)] for r in ranks]


def _flat(rows: Tensor) -> Tensor:
    return wire.as_bytes(rows.contiguous()).view(-1)
