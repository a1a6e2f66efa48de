"""Step 2 of a look-up: the owner reads the requested rows, or sums bags of them, for all ranks.

One autograd Function serves all table groups. In its backward the owner sums the gradient of each row over all ranks and hands
it to a GradientConsumer: the rule of the table changes the row at once, so that no gradient of a whole table exists; or it
becomes the gradient of the table's parameter, which `apply_gradients` or an optimizer of torch applies later.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.collectives import all_gather, all_to_all_single
from unisono.collectives.groups import GroupRanks, as_group
from unisono.embedding.lookup.input_dist import IncomingRequest
from unisono.embedding.lookup.kernels import Deduplicated, RowGradients, deduplicate, sum_bags, sum_duplicates
from unisono.embedding.lookup.reached import Reached
from unisono.embedding.lookup.storage import GroupShard, LookupOptions, ShardStorage
from unisono.embedding.optimizers import GradientConsumer, ParameterGradients, RuleUpdate
from unisono.embedding.sharding.table_groups import TableGroup


def lookup(storage: ShardStorage, incoming: Sequence[IncomingRequest], reached: Reached) -> Tensor:
    """Read what all ranks request from this one, flat: rank after rank, table group after table group.

    `reached`: the backward of output_dist says by it what the backward of this has to do.
    """
    storage.follow_parameters()
    if (storage.optimizer is None or storage.options.sparse) and torch.is_grad_enabled():
        storage.raise_for_gradients_in_host_memory()
    for request in incoming:
        _fetch(request, changes=request.group.key.max_norm is not None)
        if request.group.key.max_norm is not None:
            with torch.no_grad():
                _renormalise(request, storage.ranks, storage.options.dtype)
    parameters = storage.parameters()
    consumer: GradientConsumer
    if storage.optimizer is None or storage.options.sparse:
        consumer = ParameterGradients(storage.modules, storage.options.sparse)
    else:
        consumer = RuleUpdate(storage)
        parameters = [torch.zeros((), requires_grad=storage.requires_grad())]  # only ties the output into the graph
    reached.matters = consumer.needs_reached_tables()
    factor = 1 / storage.ranks.size if storage.options.grad_reduce == "mean" else 1.0
    like = torch.empty(0, dtype=storage.options.dtype, device=storage.options.device)
    flat: Tensor = LookupFunction.apply(incoming, storage.ranks, factor, consumer, reached, like, *parameters)
    return flat


class LookupFunction(torch.autograd.Function):
    """forward(incoming, ranks, factor, consumer, reached, like, *parameters): the responses to all ranks, flat, rank after
    rank, table group after table group. `parameters` only tie the output into the graph; `like` gives dtype and device.

    Backward: the gradient of each row that was requested, summed over all ranks and times `factor`, goes to the consumer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        incoming: Sequence[IncomingRequest],
        ranks: GroupRanks,
        factor: float,
        consumer: GradientConsumer,
        reached: Reached,
        like: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.incoming, ctx.ranks, ctx.factor, ctx.consumer, ctx.reached = incoming, ranks, factor, consumer, reached
        ctx.save_for_backward(*(request.rows for request in incoming))
        held = [request for request in incoming if request.shard is not None]
        found = [_read_rows(request) for request in held]
        if len(found) == 1:
            return found[0].reshape(-1)
        if not found:
            return like.new_empty(0)
        blocks = [rows.split_with_sizes(request.response_counts) for rows, request in zip(found, held, strict=True)]
        return torch.cat([block[rank].reshape(-1) for rank in range(ranks.size) for block in blocks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises in a second backward, as torch's own functions do
        held = [request for request in ctx.incoming if request.shard is not None]
        widths = [request.shard.weight.shape[1] for request in held]
        counts = [request.response_counts for request in held]
        grads = _split_by_request(grad, counts, widths)
        ctx.consumer.begin(ctx.reached.tables)
        remaining = iter(grads)
        marks = iter(() if ctx.reached.responses is None else _split_by_request(ctx.reached.responses, counts, [1] * len(held)))
        for request in ctx.incoming:  # in the same order on all ranks, since some of it communicates
            own = grad.new_empty((0, 0)) if request.shard is None else next(remaining)
            marked = None if request.shard is None else next(marks, None)
            _consume_gradients(request, own, marked, ctx.factor, ctx.consumer, ctx.ranks)
        return None, None, None, None, None, None, *ctx.consumer.results()


def _split_by_request(flat: Tensor, counts: Sequence[Sequence[int]], widths: Sequence[int]) -> list[Tensor]:
    """For each request of which this rank holds a shard, the (responses, width) of all ranks. `flat`: rank after rank."""
    if len(counts) == 1:
        return [flat.reshape(sum(counts[0]), widths[0])]
    by_rank = zip(*counts, strict=True)
    blocks = flat.split_with_sizes([n * width for row in by_rank for n, width in zip(row, widths, strict=True)])
    return [torch.cat(blocks[k :: len(counts)]).view(sum(counts[k]), widths[k]) for k in range(len(counts))]


def _fetch(request: IncomingRequest, *, changes: bool) -> None:
    """Bring the rows of a request into the cache, if its tables are in host memory and others have evicted them since then."""
    shard = request.shard
    if shard is None or shard.cache is None:
        return
    if request.fetched != shard.cache.generation:
        shard.fetch(request.dedup.unique)
        request.fetched = shard.cache.generation
    shard.cache.is_dirty |= changes


def _read_rows(request: IncomingRequest) -> Tensor:
    assert request.shard is not None
    weight, places = request.shard.weight, request.shard.places(request.rows)
    if request.lengths is None:
        return weight.index_select(0, places)
    return sum_bags(weight, places, request.lengths.cumsum(0) - request.lengths, request.weights)


def _consume_gradients(
    request: IncomingRequest,
    grads: Tensor,
    reached: Tensor | None,
    factor: float,
    consumer: GradientConsumer,
    ranks: GroupRanks,
) -> None:
    """`grads`: of the responses. If this rank has no shard they are empty, but have the right dtype and device.

    `reached`: for each response whether it has a gradient; None: all have.
    """
    group, shard = request.group, request.shard
    _fetch(request, changes=True)
    rows, bags, weights, frequencies = request.rows, request.bags, request.weights, request.frequencies
    if reached is not None:
        keep = reached[:, 0] if bags is None else reached[:, 0].index_select(0, bags)
        rows, bags = rows[keep], keep.nonzero()[:, 0] if bags is None else bags[keep]
        weights = None if weights is None else weights[keep]
        frequencies = None if frequencies is None else frequencies[keep]
    copied = group.is_replicated and ranks.size > 1
    if copied:  # first the sums of this rank, then those of all
        dedup = deduplicate(rows)
        sums = sum_duplicates(grads, bags, dedup, weights)
        if frequencies is not None:
            frequencies = all_gather(_sum_numbers(frequencies, dedup), group=as_group(ranks))
        rows = all_gather(dedup.unique, group=as_group(ranks))
        grads = all_gather(sums, group=as_group(ranks))
        bags, weights = None, None
    dedup = request.dedup if rows is request.rows else deduplicate(rows, may_pad=not copied)
    dedup = _without_padding_rows(dedup, shard)
    if (group.columns > 1 and consumer.needs_square_sums(group)) or (shard is not None and shard.cache is not None):
        dedup = dedup.without_padding()
    divisors = None if frequencies is None else _sum_numbers(frequencies, dedup)
    gradients = RowGradients(dedup.unique, grads, dedup, bags, weights, divisors, factor, copied)
    _hand_over(consumer, group, shard, gradients, ranks)


def _hand_over(
    consumer: GradientConsumer, group: TableGroup, shard: GroupShard | None, gradients: RowGradients, ranks: GroupRanks
) -> None:
    """Let the consumer take gradients of rows of a table group. All ranks call."""
    if group.columns > 1 and consumer.needs_square_sums(group):  # of whole rows, so the chunks of columns communicate
        sums = decayed = gradients.grads
        if shard is not None:
            sums = gradients.sums()
            decayed = consumer.decay(shard, gradients.rows, sums)
        squares = decayed.to(torch.promote_types(decayed.dtype, torch.float32)).square().sum(1)
        squares = _reduce_over_columns(squares, group, ranks)
        if shard is not None:
            consumer.take(shard, RowGradients(gradients.rows, sums), squares)
    elif shard is not None:
        consumer.take(shard, gradients)


@torch.no_grad()
def apply_gradients(storage: ShardStorage) -> None:
    """Make a step of each table's rule with the sparse gradient of its parameter, if it has one. All ranks call.

    For the gradients of one backward this does what a RuleUpdate in that backward would have done, bit for bit; of 16-bit
    tables on a GPU only up to the rounding of the gradients, whose sums Triton keeps in float32 there.
    """
    storage.follow_parameters()
    grads = {k: weight.grad.detach() for k, weight in enumerate(storage.parameters()) if weight.grad is not None}
    if dense := [storage.tables[k].name for k, grad in grads.items() if not grad.is_sparse]:
        raise TypeError(
            f"TableOptimizer.step: the gradient of table {dense[0]!r} is dense: only look-ups may change tables, not the "
            f"weights themselves in a loss"
        )
    update = RuleUpdate(storage)
    update.count_steps(grads)
    for group, shard in zip(storage.groups, storage.shards, strict=True):  # in one order, since some of it communicates
        if not any(k in grads for k in group.tables):
            continue
        parts = [] if shard is None else [(x.start, grads[x.table]) for x in shard.shards if x.table in grads]
        if group.columns > 1 and update.needs_square_sums(group):
            blocks = [parts]  # one message for all tables
        elif storage.options.device.type == "cpu":
            blocks = [[part] for part in parts]  # no copy
        else:
            blocks = [parts] if parts else []
        for block in blocks:
            gradients = _join_gradients(block, storage.options)
            gradients.copied = group.is_replicated and storage.ranks.size > 1
            _hand_over(update, group, shard, gradients, storage.ranks)


def _join_gradients(parts: Sequence[tuple[int, Tensor]], options: LookupOptions) -> RowGradients:
    """The sparse gradients of a group shard's tables as gradients of its rows. `parts`: the first row of each, ascending."""
    if not parts:
        empty = torch.empty((0, 0), dtype=options.dtype, device=options.device)
        return RowGradients(empty.new_empty(0, dtype=torch.int64), empty)
    rows = torch.cat([grad._indices()[0] + start for start, grad in parts])
    values = parts[0][1]._values() if len(parts) == 1 else torch.cat([grad._values() for _, grad in parts])
    if all(grad.is_coalesced() for _, grad in parts):
        return RowGradients(rows, values)
    dedup = deduplicate(rows)  # of several backwards
    return RowGradients(dedup.unique, values, dedup)


def _sum_numbers(numbers: Tensor, dedup: Deduplicated) -> Tensor:
    index = torch.repeat_interleave(dedup.counts, output_size=dedup.order.numel())
    return torch.zeros_like(dedup.unique).index_add_(0, index, numbers.index_select(0, dedup.order))


def _without_padding_rows(dedup: Deduplicated, shard: GroupShard | None) -> Deduplicated:
    """Take out the rows that get no gradient."""
    padding = None if shard is None else shard.padding_rows()
    if padding is None:
        return dedup
    dedup = dedup.without_padding()
    keep = torch.isin(dedup.unique, padding, invert=True)
    if bool(keep.all()):
        return dedup
    order = dedup.order[keep.repeat_interleave(dedup.counts)]
    counts = dedup.counts[keep]
    return Deduplicated(dedup.unique[keep], order, counts.cumsum(0) - counts, counts)


def _reduce_over_columns(values: Tensor, group: TableGroup, ranks: GroupRanks, *, largest: bool = False) -> Tensor:
    """Sum `values` (or take the largest) over the ranks that hold a chunk of columns: the same bits everywhere. All ranks call.

    All chunks of columns get requests for the same rows, so their ranks hold equally many values here.
    """
    peers = group.key.ranks if group.place(ranks.rank) is not None else ()
    sizes = [len(values) if rank in peers else 0 for rank in range(ranks.size)]
    copies = torch.cat([values] * len(peers)) if peers else values[:0]
    parts = all_to_all_single(copies, send_sizes=sizes, receive_sizes=sizes, group=as_group(ranks)).split_with_sizes(sizes)
    total = torch.zeros_like(values)
    for rank in peers:
        total = torch.maximum(total, parts[rank]) if largest else total + parts[rank]
    return total


def _renormalise(request: IncomingRequest, ranks: GroupRanks, dtype: torch.dtype) -> None:
    """Shorten the requested rows to max_norm, in place, as torch.embedding_renorm_ does; chunks of columns share one norm."""
    group, shard, rows = request.group, request.shard, request.rows
    assert group.key.max_norm is not None
    if group.is_replicated and ranks.size > 1:
        rows = all_gather(rows, group=as_group(ranks))
    if group.columns == 1 and shard is None:
        return
    unique = torch.unique(rows)
    places = unique if shard is None else shard.places(unique)
    found = rows.new_empty((0, 0), dtype=dtype) if shard is None else shard.weight.index_select(0, places)
    if group.columns == 1:
        norms = torch.linalg.vector_norm(found, group.key.norm_type, dim=1)
    else:
        norms = _norm_over_columns(found, group, ranks)
    if shard is None:
        return
    norms = norms.to(found.dtype).double()  # in torch's own steps, to the last bit: a maximum may depend on it
    limits = torch.full_like(norms, group.key.max_norm)
    scales = torch.where(norms > limits, limits / (norms + 1e-7), 1.0).to(found.dtype)
    shard.weight.index_copy_(0, places.to(torch.int64), found * scales[:, None])


def _norm_over_columns(found: Tensor, group: TableGroup, ranks: GroupRanks) -> Tensor:
    power = group.key.norm_type
    values = found.to(torch.promote_types(found.dtype, torch.float32)).abs()
    if power == float("inf"):
        largest = values.amax(1) if values.shape[1] else values.new_zeros(len(values))
        return _reduce_over_columns(largest, group, ranks, largest=True)
    return _reduce_over_columns(values.pow(power).sum(1), group, ranks).pow(1 / power)
