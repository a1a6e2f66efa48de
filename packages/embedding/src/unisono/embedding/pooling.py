"""The asking rank's side of a step, when the answers are there: rows become bags, and in the backward bags become rows.

One autograd Function for all families, so that the backward of a step is one exchange too, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.embedding.grouping import sum_bags, sum_groups
from unisono.embedding.requests import Asking, Request

_BLOCK = 16384  # ids whose rows are held at once for the gradient of their weights


@dataclass
class Pooling:
    """How the answers to one request become what was asked for."""

    request: Request
    index: Tensor  # for each pooled id of request.rows, its row among the answers
    lengths: Tensor | None  # of the bags of request.rows; None where nothing is pooled
    sizes: Tensor | None  # what the sum of each bag of request.rows is divided by, if any is a mean
    bags: Tensor | None  # the bag of each id; of those not pooled, one beyond the last

    @property
    def offsets(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths.cumsum(0) - self.lengths

    @property
    def drops(self) -> bool:
        return any(asking.keep is not None for asking in self.request.rows)


def plan_pooling(request: Request, modes: Sequence[str | None]) -> Pooling:
    """`modes`: of each table."""
    groups, rows = request.groups, request.rows
    index = groups.places()
    before = [0, *accumulate(sum(a.lengths.numel() for a in bags) for bags in request.bags)]
    if before[-1]:  # sums of bags stand between the rows of one stack and those of the next
        counts = torch.tensor(request.cuts, device=index.device).diff()
        shifts = torch.tensor(before[:-1], device=index.device).repeat_interleave(counts)
        index = index + shifts.index_select(0, index)
    if request.family.kin.pooled is None:
        return Pooling(request, index, None, None, None)
    lengths = torch.cat([a.lengths for a in rows]) if rows else index.new_empty(0)
    bags = torch.arange(lengths.numel(), device=index.device).repeat_interleave(lengths)
    if any(a.keep is not None for a in rows):
        keep = torch.cat([torch.ones_like(a.ids, dtype=torch.bool) if a.keep is None else a.keep for a in rows])
        bags = torch.full_like(index, lengths.numel()).masked_scatter_(keep, bags)
        index = index[keep]
    sizes = None
    if any(modes[a.table] == "mean" for a in rows):
        sizes = torch.cat([a.lengths if modes[a.table] == "mean" else torch.ones_like(a.lengths) for a in rows]).clamp(min=1)
    return Pooling(request, index, lengths, sizes, bags)


class Pool(torch.autograd.Function):
    """From the answers of all stacks to the features of all families.

    forward(answers, modes, rank, size, poolings, *weights): `answers` is flat: of each rank in turn, for each family, the rows
    and sums of its stack; `weights`: the joined weights of request.rows of each pooling, or None. Returns the features of
    all poolings: those pooled here, then those summed by their owners, stack by stack.

    Backward: each answer gets the sum of the gradients of the bags it is in, scaled as it was; a weight gets the product of
    its row and its bag's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        modes: Sequence[str | None],
        rank: int,
        size: int,
        poolings: list[Pooling],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.modes, ctx.rank, ctx.poolings = modes, rank, poolings
        ctx.dtype = flat.dtype
        blocks = _unpack(flat, poolings, rank, size)
        outputs: list[Tensor] = []
        kept: list[list[Tensor]] = []
        tops: list[list[Tensor | None]] = []
        for pooling, columns, own_weights in zip(poolings, blocks, weights, strict=True):
            pieces = [_pool(answers, pooling, own_weights) for answers in columns]
            tops.append([top for _, top in pieces])
            pooled = [out for out, _ in pieces]
            whole = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
            sizes = [(a.ids if pooling.lengths is None else a.lengths).numel() for a in pooling.request.rows]
            outputs += whole.split_with_sizes(sizes) if sizes else []
            outputs += _summed(columns, pooling.request, modes)
            kept.append(columns if ctx.needs_input_grad[5 + len(kept)] else [])  # for the gradient of the weights
        saved = [*weights, *(x for columns in kept for x in columns), *(x for top in tops for x in top)]
        ctx.save_for_backward(flat.new_empty(0), *saved)  # never nothing: a second backward shall raise as torch's do
        ctx.counts = [len(columns) for columns in kept]
        # detached: a view of what came in must not be taken for one that in-place changes of a caller would have to follow
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        remaining, saved = list(grads), iter(ctx.saved_tensors[1:])
        all_weights = [next(saved) for _ in ctx.poolings]
        all_columns = [[next(saved) for _ in range(count)] for count in ctx.counts]
        tops = [[next(saved) for _ in range(pooling.request.family.columns)] for pooling in ctx.poolings]
        weight_grads: list[Tensor | None] = []
        parts: dict[tuple[int, int], list[Tensor]] = {}
        for k, (pooling, weights) in enumerate(zip(ctx.poolings, all_weights, strict=True)):
            request: Request = pooling.request
            own = [remaining.pop(0) for _ in request.rows]
            summed = [[_scaled(remaining.pop(0), a, ctx.modes) for a in stack] for stack in request.bags]
            joined = torch.cat(own) if own else _no_rows(ctx, request)
            if pooling.sizes is not None:
                joined = joined / pooling.sizes[:, None]
            edges = [0, *accumulate(request.family.kin.widths)]
            weight_grads.append(_weight_gradient(all_columns[k], joined, pooling, edges) if all_columns[k] else None)
            for j in range(request.family.columns):
                columns = slice(edges[j], edges[j + 1])
                rows = _spread(joined[:, columns], pooling, weights, tops[k][j])
                if len(ctx.poolings) == 1 and request.plain:
                    return rows.reshape(-1), None, None, None, None, *weight_grads
                for i, stack in enumerate(summed):
                    owner = request.family.owner(i, j, ctx.rank)
                    cut = rows[request.cuts[i] : request.cuts[i + 1]]
                    parts.setdefault((owner, k), []).extend([cut, *(grad[:, columns] for grad in stack)])
        ordered = [part.reshape(-1) for place in sorted(parts) for part in parts[place]]
        return torch.cat(ordered) if ordered else None, None, None, None, None, *weight_grads


def _no_rows(ctx: Any, request: Request) -> Tensor:
    device = request.groups.unique.device
    return torch.zeros((0, sum(request.family.kin.widths)), dtype=ctx.dtype, device=device)


def _unpack(flat: Tensor, poolings: list[Pooling], rank: int, size: int) -> list[list[Tensor]]:
    """The answers of each pooling's columns, stack after stack."""
    if len(poolings) == 1 and poolings[0].request.family.columns == 1:
        family = poolings[0].request.family
        count = sum(poolings[0].request.answers(i) for i in range(len(family.stacks)))
        return [[flat.view(count, family.kin.widths[0])]]
    places, sizes = [], []
    for owner in range(size):
        for k, pooling in enumerate(poolings):
            family = pooling.request.family
            place = family.place(owner) if not family.replicated or owner == rank else None
            if place is not None:
                places.append((k, place[1], place[0]))
                sizes.append(pooling.request.answers(place[0]) * family.kin.widths[place[1]])
    blocks = dict(zip(places, flat.split_with_sizes(sizes), strict=True))
    found = []
    for k, pooling in enumerate(poolings):
        family = pooling.request.family
        found.append(
            [
                torch.cat([blocks[k, j, i].view(pooling.request.answers(i), width) for i in range(len(family.stacks))])
                for j, width in enumerate(family.kin.widths)
            ]
        )
    return found


def _pool(answers: Tensor, pooling: Pooling, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The features that are pooled here; of maxima also which answer each came from."""
    if pooling.lengths is None:
        return answers.index_select(0, pooling.index), None
    if pooling.request.family.kin.pooled == "max":
        return _largest(answers, pooling)
    out = sum_bags(answers, pooling.index, pooling.offsets, weights)
    return (out if pooling.sizes is None else out.div_(pooling.sizes[:, None])), None


def _largest(answers: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor | None]:
    assert pooling.lengths is not None
    if pooling.index.numel() == 0 or answers.shape[1] == 0:
        return answers.new_zeros((pooling.lengths.numel(), answers.shape[1])), None
    out, _, _, top = torch.embedding_bag(answers, pooling.index, pooling.offsets, False, 2)
    return out, top


def _spread(grads: Tensor, pooling: Pooling, weights: Tensor | None, top: Tensor | None) -> Tensor:
    """The gradient of each unique row, from those of the bags."""
    groups = pooling.request.groups
    if pooling.request.family.kin.pooled == "max":
        return _spread_largest(grads, pooling, top)
    if pooling.drops:  # ids that were not pooled: their bag is a row of zeros at the end
        grads = torch.cat([grads, grads.new_zeros((1, grads.shape[1]))])
        if weights is not None:
            assert pooling.bags is not None
            pooled = pooling.bags < len(grads) - 1
            weights = weights.new_ones(len(pooled)).masked_scatter_(pooled, weights.detach())
    return sum_groups(grads.contiguous(), pooling.bags, groups, None if weights is None else weights.detach())


def _spread_largest(grads: Tensor, pooling: Pooling, top: Tensor | None) -> Tensor:
    request = pooling.request
    rows = grads.new_zeros((request.groups.unique.numel(), grads.shape[1]))
    if top is None or pooling.lengths is None:
        return rows
    filled = pooling.lengths > 0
    return rows.scatter_add_(0, top[filled].to(torch.int64), grads[filled])


def _weight_gradient(columns: list[Tensor], grads: Tensor, pooling: Pooling, edges: list[int]) -> Tensor:
    """Of each weight: its row times its bag's gradient, some at a time, so that no row is copied for each id."""
    assert pooling.lengths is not None
    bags = torch.arange(pooling.lengths.numel(), device=grads.device).repeat_interleave(pooling.lengths)
    out = grads.new_zeros(pooling.index.numel())
    for j, rows in enumerate(columns):
        own = grads[:, edges[j] : edges[j + 1]]
        for start in range(0, out.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            out[part] += torch.linalg.vecdot(rows.index_select(0, pooling.index[part]), own.index_select(0, bags[part]))
    return out


def _summed(columns: list[Tensor], request: Request, modes: Sequence[str | None]) -> list[Tensor]:
    """The features that came as sums, stack by stack."""
    found, start = [], 0
    for i, stack in enumerate(request.bags):
        start += request.cuts[i + 1] - request.cuts[i]
        for asking in stack:
            end = start + asking.lengths.numel()
            pieces = [answers[start:end] for answers in columns]
            found.append(_scaled(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1), asking, modes))
            start = end
    return found


def _scaled(sums: Tensor, asking: Asking, modes: Sequence[str | None]) -> Tensor:
    if modes[asking.table] != "mean":
        return sums
    return sums / asking.lengths.clamp(min=1)[:, None]
