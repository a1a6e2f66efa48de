"""Step 3 of a look-up: rows and sums travel back in one all_to_all, and each rank pools them into its features.

One autograd Function serves all table groups, so the backward is one exchange too, in the same order on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.collectives import start_all_to_all_single
from unisono.collectives.groups import as_group
from unisono.embedding.lookup.features import Block
from unisono.embedding.lookup.input_dist import IncomingRequest, OutgoingRequest
from unisono.embedding.lookup.kernels import sum_bags, sum_duplicates, to_device
from unisono.embedding.lookup.reached import Reached, place_responses
from unisono.embedding.lookup.storage import ShardStorage

_ARGUMENTS = 6  # of PoolFunction, before the weights
_NO_GRADIENTS = (None,) * (_ARGUMENTS - 1)
_BLOCK = 16384  # ids whose rows are held at once for the gradient of their weights


@dataclass
class Pooling:
    """How the responses to one request become features."""

    request: OutgoingRequest
    index: Tensor  # for each pooled id of request.by_rows, its row among the responses
    divisors: Tensor | None  # of the sum of each bag of request.by_rows, if any of them is a mean
    sum_divisors: Tensor | None  # the same for request.by_bags

    @property
    def is_pooled(self) -> bool:
        return self.request.group.key.pooling is not None

    @property
    def lengths(self) -> Tensor:
        """Of the bags of request.by_rows."""
        block = self.request.by_rows
        return self.index[:0] if block is None else block.lengths

    @property
    def offsets(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths


def plan_pooling(request: OutgoingRequest) -> Pooling:
    """Prepare what can be known before the rows are there."""
    block = request.by_rows
    index = request.dedup.order if block is None else request.dedup.inverse
    if block is not None and request.by_bags is not None:  # sums of bags stand after the rows of their group shard
        shifts = to_device(request.bag_cuts[:-1], index.device)
        row_counts = to_device([end - start for start, end in pairwise(request.cuts)], index.device)
        index = index + shifts.repeat_interleave(row_counts, output_size=request.cuts[-1]).index_select(0, index)
    if block is not None and block.keep is not None:
        index = index[block.keep]
    divisors = [None if x is None else x.divisors() for x in (block, request.by_bags)]
    return Pooling(request, index, *divisors)


def output_dist(
    storage: ShardStorage,
    flat: Tensor,
    incoming: Sequence[IncomingRequest],
    poolings: list[Pooling],
    reached: Reached,
    stack: Sequence[str] = (),
) -> list[Tensor]:
    """Send the rows that `lookup` read to the ranks that requested them, and pool what arrives: a tensor for each feature.

    The features have the order of their requests. `reached`: filled by the backward. `stack`: return one tensor
    (bags, features, dim) instead, with the features in this order.
    """
    received = _exchange_responses(storage, flat, incoming, poolings)
    outgoing = [pooling.request for pooling in poolings]
    blocks = [request.by_rows for request in outgoing]
    weights = [None if x is None or x.weights is None else x.weights.to(received.dtype) for x in blocks]
    find_reached = partial(reached.find, storage, outgoing, incoming)
    names = [x.name for request in outgoing for x in request.features]
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
            block = pooling.request.by_rows
            outputs += () if block is None else pooled.split_with_sizes(block.output_sizes(pooled=pooling.is_pooled))
            outputs += _read_sums(columns, pooling)
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
            joined = _divide(_join_gradients(remaining, request.by_rows, pooling.is_pooled, no_grads), pooling.divisors)
            sum_grads = _divide(_join_gradients(remaining, request.by_bags, True, no_grads), pooling.sum_divisors)
            weight_grads.append(_weight_gradient(all_columns[k], joined, pooling, edges) if all_columns[k] else None)
            for j in range(request.group.columns):
                columns = slice(edges[j], edges[j + 1])
                rows = _row_gradients(joined[:, columns], pooling, all_weights[k], all_maxima[k][j])
                if len(ctx.poolings) == 1 and request.group.columns == 1 and None in (request.by_rows, request.by_bags):
                    only = sum_grads if request.by_rows is None else rows  # in the order of the ranks
                    return only.reshape(-1), *_NO_GRADIENTS, *weight_grads
                place_responses(parts, k, request, j, ctx.rank, rows, sum_grads[:, columns])
        ordered = [part for place in sorted(parts) for part in parts[place]]
        if len({part.shape[1] for part in ordered}) > 1:
            ordered = [part.reshape(-1) for part in ordered]  # copies parts of a stack or of columns once more
        return torch.cat(ordered).view(-1) if ordered else None, *_NO_GRADIENTS, *weight_grads


def _join_gradients(remaining: Iterator[Tensor | None], block: Block | None, pooled: bool, like: Tensor) -> Tensor:
    """The gradients of a block's features, feature after feature; zeros for those outside the loss."""
    if block is None:
        return like
    sizes = block.output_sizes(pooled=pooled)
    grads = [next(remaining) for _ in sizes]
    parts = [like.new_zeros((size, like.shape[1])) if grad is None else grad for grad, size in zip(grads, sizes, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _divide(sums: Tensor, divisors: Tensor | None) -> Tensor:
    return sums if divisors is None else sums / divisors[:, None]


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
    if not pooling.is_pooled:
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
    dedup, block = pooling.request.dedup, pooling.request.by_rows
    if block is None:
        return grads
    if pooling.request.group.key.pooling == "max":
        rows = grads.new_zeros((dedup.unique.numel(), grads.shape[1]))
        if maxima is None:
            return rows
        filled = block.lengths > 0
        return rows.scatter_add_(0, maxima[filled].to(torch.int64), grads[filled])
    if block.keep is not None:  # the bag of ids that were not pooled is a row of zeros at the end
        grads = torch.cat([grads, grads.new_zeros((1, grads.shape[1]))])
        if weights is not None:
            weights = weights.new_ones(block.keep.numel()).masked_scatter_(block.keep, weights.detach())
    bags = block.bags if pooling.is_pooled else None
    return sum_duplicates(grads.contiguous(), bags, dedup, None if weights is None else weights.detach())


def _weight_gradient(columns: list[Tensor], grads: Tensor, pooling: Pooling, edges: list[int]) -> Tensor:
    """For each weight, its row times its bag's gradient, some at a time, so that no row is copied for each id."""
    block = pooling.request.by_rows
    assert block is not None
    bags = block.bags if block.keep is None else block.bags[block.keep]
    out = grads.new_zeros(pooling.index.numel())
    for j, rows in enumerate(columns):
        own = grads[:, edges[j] : edges[j + 1]]
        for start in range(0, out.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            out[part] += torch.linalg.vecdot(rows.index_select(0, pooling.index[part]), own.index_select(0, bags[part]))
    return out


def _read_sums(columns: list[Tensor], pooling: Pooling) -> list[Tensor]:
    """The features that came as sums, group shard by group shard."""
    request = pooling.request
    if request.by_bags is None:
        return []
    if request.by_rows is not None:  # they stand after the rows of their group shard
        places = [
            slice(row_end + start, row_end + end)
            for row_end, (start, end) in zip(request.cuts[1:], pairwise(request.bag_cuts), strict=True)
        ]
        columns = [torch.cat([responses[place] for place in places]) for responses in columns]
    return list(_divide(_join_columns(columns), pooling.sum_divisors).split_with_sizes(request.by_bags.bag_counts))
