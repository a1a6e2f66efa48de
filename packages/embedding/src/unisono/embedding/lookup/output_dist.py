"""Step 3 of a look-up: rows and sums travel back in one all_to_all, and each rank pools them into its features.

One autograd Function serves all table groups, so the backward is one exchange too, in the same order on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.collectives import start_all_to_all_single
from unisono.collectives.groups import as_group
from unisono.embedding.lookup.input_dist import FeatureIds, IncomingRequest, OutgoingRequest
from unisono.embedding.lookup.kernels import sum_bags, sum_duplicates
from unisono.embedding.lookup.reached import Reached, list_features, place_responses
from unisono.embedding.lookup.storage import ShardStorage

_ARGUMENTS = 6  # of PoolFunction, before the weights
_NO_GRADIENTS = (None,) * (_ARGUMENTS - 1)
_BLOCK = 16384  # ids whose rows are held at once for the gradient of their weights


@dataclass
class Pooling:
    """How the responses to one request become features."""

    request: OutgoingRequest
    index: Tensor  # for each pooled id of request.by_rows, its row among the responses
    lengths: Tensor | None  # of the bags of request.by_rows; None if nothing is pooled
    divisors: Tensor | None  # of the sum of each bag of request.by_rows, if any of them is a mean
    bags: Tensor | None  # the bag of each id; for ids that are not pooled, one beyond the last

    @property
    def offsets(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths.cumsum(0) - self.lengths

    def output_rows(self, x: FeatureIds) -> int:
        """How many rows a feature of request.by_rows has in the end."""
        return (x.ids if self.lengths is None else x.lengths).numel()

    @property
    def drops_ids(self) -> bool:
        return any(x.keep is not None for x in self.request.by_rows)


def plan_pooling(request: OutgoingRequest) -> Pooling:
    """Prepare what can be known before the rows are there."""
    by_rows = request.by_rows
    index = request.dedup.inverse()
    sums_before = [0, *accumulate(sum(x.lengths.numel() for x in bags) for bags in request.by_bags)]
    if sums_before[-1]:  # sums of bags stand between the rows of one group shard and those of the next
        row_counts = torch.tensor(request.cuts, device=index.device).diff()
        shifts = torch.tensor(sums_before[:-1], device=index.device).repeat_interleave(row_counts)
        index = index + shifts.index_select(0, index)
    if request.group.key.pooling is None:
        return Pooling(request, index, None, None, None)
    lengths = torch.cat([x.lengths for x in by_rows]) if by_rows else index.new_empty(0)
    bags = torch.arange(lengths.numel(), device=index.device).repeat_interleave(lengths)
    if any(x.keep is not None for x in by_rows):
        keep = torch.cat([torch.ones_like(x.ids, dtype=torch.bool) if x.keep is None else x.keep for x in by_rows])
        bags = torch.full_like(index, lengths.numel()).masked_scatter_(keep, bags)
        index = index[keep]
    divisors = None
    if any(x.is_mean for x in by_rows):
        counts = [x.lengths if x.is_mean else torch.ones_like(x.lengths) for x in by_rows]
        divisors = torch.cat(counts).clamp(min=1)
    return Pooling(request, index, lengths, divisors, bags)


def output_dist(
    storage: ShardStorage,
    flat: Tensor,
    incoming: Sequence[IncomingRequest],
    poolings: list[Pooling],
    reached: Reached,
    stack: Sequence[str] = (),
) -> list[Tensor]:
    """Send the rows that `lookup` read to the ranks that requested them, and pool what arrives: a tensor for each feature.

    The features have the order of reached.list_features. `reached`: filled by the backward. `stack`: return one tensor
    (bags, features, dim) instead, with the features in this order.
    """
    received = _exchange_responses(storage, flat, incoming, poolings)
    outgoing = [pooling.request for pooling in poolings]
    weights = [_join_weights(request, received) for request in outgoing]
    find_reached = partial(reached.find, storage, outgoing, incoming)
    names = [x.feature for request in outgoing for x in list_features(request)]
    order = [names.index(name) for name in stack]
    ranks = storage.ranks
    return list(PoolFunction.apply(received, ranks.rank, ranks.size, poolings, find_reached, order, *weights))


def _exchange_responses(
    storage: ShardStorage, flat: Tensor, incoming: Sequence[IncomingRequest], poolings: list[Pooling]
) -> Tensor:
    ranks = storage.ranks
    if ranks.size == 1:
        return flat
    send = [0] * ranks.size
    for request in incoming:
        width = 0 if request.shard is None else request.shard.weight.shape[1]
        send = [size + count * width for size, count in zip(send, request.response_counts, strict=True)]
    receive = [0] * ranks.size
    for pooling in poolings:
        group = pooling.request.group
        for shard_number in range(len(group.shards)):
            for column, width in enumerate(group.key.widths):
                owner = group.owner(shard_number, column, ranks.rank)
                receive[owner] += pooling.request.response_count(shard_number) * width
    wire_dtype = storage.options.wire_dtype
    wire = flat if wire_dtype is None else flat.to(wire_dtype)
    pending = start_all_to_all_single(wire, send_sizes=send, receive_sizes=receive, group=as_group(ranks))
    if flat.requires_grad:  # what the backward needs beside the gradients is computed while the rows travel
        for request in incoming:
            if request.shard is not None and not request.group.is_replicated:
                _ = request.dedup, request.bags
    return pending.wait().to(flat.dtype)


def _join_weights(request: OutgoingRequest, like: Tensor) -> Tensor | None:
    """The weights of all ids that are pooled here, in the dtype of the rows."""
    if all(x.weights is None for x in request.by_rows):
        return None
    return torch.cat(
        [like.new_ones(int(x.lengths.sum())) if x.weights is None else x.weights.to(like.dtype) for x in request.by_rows]
    )


class PoolFunction(torch.autograd.Function):
    """Make the features of all table groups from the responses of all ranks.

    forward(flat, rank, world_size, poolings, find_reached, order, *weights): `flat` has, from each rank in turn, for each table
    group, the rows and sums of its shard; `find_reached` is told in the backward which features have a gradient; `weights`: the
    joined weights of request.by_rows of each pooling, or None. Returns the features of all poolings: those pooled here, then
    those that their owners summed, group shard by group shard; or, if `order` has their numbers, one stack of them.

    Backward: each response gets the sum of the gradients of the bags it is in, scaled as it was; a weight gets the product of
    its row and its bag's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        rank: int,
        world_size: int,
        poolings: list[Pooling],
        find_reached: Callable[[list[bool]], None],
        order: list[int],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.rank, ctx.poolings, ctx.find_reached, ctx.order, ctx.dtype = rank, poolings, find_reached, order, flat.dtype
        ctx.set_materialize_grads(False)  # a feature outside the loss has None
        outputs: list[Tensor] = []
        saved_columns: list[list[Tensor]] = []
        all_maxima: list[Tensor | None] = []
        columns_of_all = _unpack(flat, poolings, rank, world_size)
        for k, (pooling, columns, own_weights) in enumerate(zip(poolings, columns_of_all, weights, strict=True)):
            pieces = [_pool(responses, pooling, own_weights) for responses in columns]
            all_maxima += [maxima for _, maxima in pieces]
            pooled = _join_columns([out for out, _ in pieces])
            sizes = [pooling.output_rows(x) for x in pooling.request.by_rows]
            outputs += pooled.split_with_sizes(sizes) if sizes else []
            outputs += _read_sums(columns, pooling.request)
            saved_columns.append(columns if ctx.needs_input_grad[_ARGUMENTS + k] else [])  # for the gradient of the weights
        saved = [*weights, *(x for columns in saved_columns for x in columns), *all_maxima]
        ctx.save_for_backward(flat.new_empty(0), *saved)  # never nothing: a second backward shall raise as torch's do
        ctx.column_counts = [len(columns) for columns in saved_columns]
        if order:
            return (torch.stack([outputs[k] for k in order], 1),)
        # Detached: autograd must not take a view of the input for one that in-place changes of a caller have to follow.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.order:
            stacked = dict(zip(ctx.order, (None,) * len(ctx.order) if grads[0] is None else grads[0].unbind(1), strict=True))
            grads = tuple(stacked[k] for k in range(len(ctx.order)))
        if ctx.needs_input_grad[0]:
            ctx.find_reached([grad is not None for grad in grads])
        remaining, saved = iter(grads), iter(ctx.saved_tensors[1:])
        all_weights = [next(saved) for _ in ctx.poolings]
        all_columns = [[next(saved) for _ in range(count)] for count in ctx.column_counts]
        all_maxima = [[next(saved) for _ in range(pooling.request.group.columns)] for pooling in ctx.poolings]
        weight_grads: list[Tensor | None] = []
        parts: dict[tuple[int, int], list[Tensor]] = {}  # by owner and table group
        for k, pooling in enumerate(ctx.poolings):
            request: OutgoingRequest = pooling.request
            edges = [0, *accumulate(request.group.key.widths)]
            no_grads = torch.zeros((0, edges[-1]), dtype=ctx.dtype, device=request.dedup.unique.device)
            pooled_grads = [_or_zeros(next(remaining), pooling.output_rows(x), no_grads) for x in request.by_rows]
            sum_grads = [
                [_divide_mean(_or_zeros(next(remaining), x.lengths.numel(), no_grads), x) for x in bags]
                for bags in request.by_bags
            ]
            joined = torch.cat(pooled_grads) if pooled_grads else no_grads
            if pooling.divisors is not None:
                joined = joined / pooling.divisors[:, None]
            weight_grads.append(_weight_gradient(all_columns[k], joined, pooling, edges) if all_columns[k] else None)
            for j in range(request.group.columns):
                columns = slice(edges[j], edges[j + 1])
                rows = _row_gradients(joined[:, columns], pooling, all_weights[k], all_maxima[k][j])
                if len(ctx.poolings) == 1 and request.is_rows_only:
                    return rows.reshape(-1), *_NO_GRADIENTS, *weight_grads
                sums = [[grad[:, columns] for grad in shard_grads] for shard_grads in sum_grads]
                place_responses(parts, k, request, j, ctx.rank, rows, sums)
        ordered = [part for place in sorted(parts) for part in parts[place]]
        if len({part.shape[1] for part in ordered}) > 1:
            ordered = [part.reshape(-1) for part in ordered]  # copies parts of a stack or of columns once more
        return torch.cat(ordered).view(-1) if ordered else None, *_NO_GRADIENTS, *weight_grads


def _or_zeros(grad: Tensor | None, rows: int, like: Tensor) -> Tensor:
    return like.new_zeros((rows, like.shape[1])) if grad is None else grad


def _join_columns(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _unpack(flat: Tensor, poolings: list[Pooling], rank: int, world_size: int) -> list[list[Tensor]]:
    """For each pooling, the responses of each chunk of columns, group shard after group shard."""
    if len(poolings) == 1 and poolings[0].request.group.columns == 1:
        request = poolings[0].request
        count = sum(request.response_count(i) for i in range(len(request.group.shards)))
        return [[flat.view(count, request.group.key.widths[0])]]
    places, sizes = [], []
    for owner in range(world_size):
        for k, pooling in enumerate(poolings):
            group = pooling.request.group
            place = group.place(owner) if not group.is_replicated or owner == rank else None
            if place is not None:
                shard, column = place
                places.append((k, column, shard))
                sizes.append(pooling.request.response_count(shard) * group.key.widths[column])
    blocks = dict(zip(places, flat.split_with_sizes(sizes), strict=True))
    found = []
    for k, pooling in enumerate(poolings):
        counts = [pooling.request.response_count(i) for i in range(len(pooling.request.group.shards))]
        widths = pooling.request.group.key.widths
        found.append(
            [torch.cat([blocks[k, j, i].view(n, width) for i, n in enumerate(counts)]) for j, width in enumerate(widths)]
        )
    return found


def _pool(responses: Tensor, pooling: Pooling, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pool the features that came as rows; for maxima also return which response each came from."""
    if pooling.lengths is None:
        return responses.index_select(0, pooling.index), None
    if pooling.request.group.key.pooling == "max":
        if pooling.index.numel() == 0 or responses.shape[1] == 0:
            return responses.new_zeros((pooling.lengths.numel(), responses.shape[1])), None
        out, _, _, maxima = torch.embedding_bag(responses, pooling.index, pooling.offsets, False, 2)
        return out, maxima
    out = sum_bags(responses, pooling.index, pooling.offsets, weights)
    return (out if pooling.divisors is None else out.div_(pooling.divisors[:, None])), None


def _row_gradients(grads: Tensor, pooling: Pooling, weights: Tensor | None, maxima: Tensor | None) -> Tensor:
    """The gradient of each unique row, from the gradients of the bags."""
    dedup = pooling.request.dedup
    if pooling.request.group.key.pooling == "max":
        rows = grads.new_zeros((dedup.unique.numel(), grads.shape[1]))
        if maxima is None or pooling.lengths is None:
            return rows
        filled = pooling.lengths > 0
        return rows.scatter_add_(0, maxima[filled].to(torch.int64), grads[filled])
    if pooling.drops_ids:  # the bag of ids that were not pooled is a row of zeros at the end
        grads = torch.cat([grads, grads.new_zeros((1, grads.shape[1]))])
        if weights is not None:
            assert pooling.bags is not None
            pooled = pooling.bags < len(grads) - 1
            weights = weights.new_ones(len(pooled)).masked_scatter_(pooled, weights.detach())
    return sum_duplicates(grads.contiguous(), pooling.bags, dedup, None if weights is None else weights.detach())


def _weight_gradient(columns: list[Tensor], grads: Tensor, pooling: Pooling, edges: list[int]) -> Tensor:
    """For each weight, its row times its bag's gradient, some at a time, so that no row is copied for each id."""
    assert pooling.lengths is not None
    bags = torch.arange(pooling.lengths.numel(), device=grads.device).repeat_interleave(pooling.lengths)
    out = grads.new_zeros(pooling.index.numel())
    for j, rows in enumerate(columns):
        own = grads[:, edges[j] : edges[j + 1]]
        for start in range(0, out.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            out[part] += torch.linalg.vecdot(rows.index_select(0, pooling.index[part]), own.index_select(0, bags[part]))
    return out


def _read_sums(columns: list[Tensor], request: OutgoingRequest) -> list[Tensor]:
    """The features that came as sums, group shard by group shard."""
    found, start = [], 0
    for i, bags in enumerate(request.by_bags):
        start += request.row_count(i)
        for x in bags:
            end = start + x.lengths.numel()
            found.append(_divide_mean(_join_columns([responses[start:end] for responses in columns]), x))
            start = end
    return found


def _divide_mean(sums: Tensor, x: FeatureIds) -> Tensor:
    return sums / x.lengths.clamp(min=1)[:, None] if x.is_mean else sums
