"""Step 1 of a look-up: each rank requests rows from their owners.

A rank deduplicates the ids of all its features with one sort for each table group, so it requests each row once. Then the
ranks exchange how much each requests (and raise together if any of them has a bad input), and then the row numbers, in one
all_to_all. A message has, for each table group of which the receiver holds a shard: the requested rows (and how often each
was looked up, if gradients are scaled by frequency), then the bags that the owner shall sum: their ids, their lengths, and
the bits of their weights, if any feature has weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import MismatchError, all_to_all_single
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import GroupRanks, as_group, is_fake_group, process_group, small_message_device
from unisono.embedding.lookup.feature_errors import Batch, form_error, number_error
from unisono.embedding.lookup.features import Block, Feature, Place, join_features
from unisono.embedding.lookup.kernels import Deduplicated, Deduplicating, deduplicate, number_bags
from unisono.embedding.lookup.storage import GroupShard, ShardStorage
from unisono.embedding.ragged import KeyedRagged
from unisono.embedding.sharding.table_groups import TableGroup

_FEW = 12  # ranks up to which everybody receives all counts; beyond, each receives only its own


class IdOutOfRange(MismatchError, IndexError):  # noqa: N818 - users read it where they catch it
    """An id beyond the rows of its table, on some rank. All ranks raise the same error."""


class UnknownFeature(MismatchError, KeyError):  # noqa: N818 - users read it where they catch it
    """A feature that looks into no table, or one that is missing, on some rank. All ranks raise the same error."""

    __str__ = Exception.__str__  # that of KeyError shows the text with its line breaks escaped


@dataclass
class OutgoingRequest:
    """What this rank requests from one table group."""

    group: TableGroup
    by_rows: Block | None  # features that come back as rows, each row once, and are pooled here
    by_bags: Block | None  # features that come back as the sums of their bags
    dedup: Deduplicated  # of the rows of `by_rows`
    cuts: list[int]  # group shard i: unique rows from cuts[i] to cuts[i + 1]
    id_cuts: list[int] = field(init=False)  # the same for the ids of `by_bags`
    bag_cuts: list[int] = field(init=False)  # and for its bags

    def __post_init__(self) -> None:
        block, shards = self.by_bags, len(self.group.shards)
        self.id_cuts = [0] * (shards + 1) if block is None else block.shard_cuts(block.known_id_counts(), shards)
        self.bag_cuts = [0] * (shards + 1) if block is None else block.shard_cuts(block.bag_counts, shards)

    def response_count(self, shard: int) -> int:
        """How many rows and sums come back from a group shard."""
        return self.cuts[shard + 1] - self.cuts[shard] + self.bag_cuts[shard + 1] - self.bag_cuts[shard]

    def counts(self, shard: int) -> tuple[int, ...]:
        """The numbers of rows, of ids in bags, and of bags that are requested from a group shard."""
        return tuple(cuts[shard + 1] - cuts[shard] for cuts in (self.cuts, self.id_cuts, self.bag_cuts))

    @property
    def features(self) -> list[Feature]:
        """In the order in which output_dist makes them."""
        return [x for block in (self.by_rows, self.by_bags) if block is not None for x in block.features]

    @property
    def is_rows_only(self) -> bool:
        """Whether nothing but whole rows is requested, from one group shard on each rank, in the order of the ranks."""
        group = self.group
        return group.columns == 1 and not (group.is_replicated or group.key.scale_grad_by_freq or self.by_bags)

    @property
    def has_bag_weights(self) -> bool:
        return self.by_bags is not None and self.by_bags.weights is not None


@dataclass
class IncomingRequest:
    """What all ranks request from this rank's shard of one table group, rank after rank: rows, then bags."""

    group: TableGroup
    shard: GroupShard | None  # None: this rank holds nothing of the group
    rows: Tensor  # of the group shard
    lengths: Tensor | None  # of the bags, where a single row is a bag of one; None: only single rows
    weights: Tensor | None  # one for each of `rows`
    frequencies: Tensor | None  # how often the requesting rank looked up each of `rows`
    response_counts: list[int]  # rows and sums that go back to each rank
    fetched: int | None = None  # the generation of the shard's cache that has the rows

    @cached_property
    def dedup(self) -> Deduplicated:
        """The rows without duplicates, for the backward. The forward finds them while it waits for other ranks."""
        return deduplicate(self.rows, may_pad=self.shard is None or self.shard.cache is None)

    @cached_property
    def bags(self) -> Tensor | None:
        """The bag of each of `rows`."""
        if self.lengths is None:
            return None
        return number_bags(self.lengths, self.rows.numel())


class AgreedRequests(NamedTuple):
    """What this rank requests from each table group, and how much all ranks request from this one: see _exchange_counts."""

    outgoing: list[OutgoingRequest]
    counts: list[list[int]]

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell torch that another stream will use the tensors."""
        for request in self.outgoing:
            blocks = [request.dedup, *(block for block in (request.by_rows, request.by_bags) if block is not None)]
            for x in (x for block in blocks for x in vars(block).values()):
                if isinstance(x, Tensor):
                    x.record_stream(stream)


def agree_on_requests(
    storage: ShardStorage, batch: Batch, ranks: GroupRanks, error: str = "", training: str | None = None
) -> AgreedRequests:
    """Find out which rows to request, and agree with the other ranks, without a message between accelerators.

    Args:
        ranks: Those of the storage, perhaps over another process group.
        error: What was wrong with the batch of this rank before it came here. All ranks raise it.
        training: What describe_training said when the look-up was started; None: it starts now.

    Raises IdOutOfRange or MismatchError on all ranks if the batch of any rank is bad.
    """
    options = storage.options
    error = error or form_error(storage, batch)
    outgoing = [] if error else _make_requests(storage, batch)
    if outgoing is None:
        names = batch.names if isinstance(batch, KeyedRagged) else batch
        error = number_error([storage.tables[storage.table_of_feature[name]] for name in names], batch)
        error, outgoing = error or "ids or offsets that changed while they were read", []
    calls = sorted(_describe(batch))
    same = f"features {', '.join(calls)}; {describe_training(storage) if training is None else training}"
    return AgreedRequests(
        outgoing, _exchange_counts(options.function, outgoing, ranks, same=same, error=error, device=options.device)
    )


def describe_training(storage: ShardStorage) -> str:
    """What the backward of a look-up that starts now will do: it must be the same on all ranks."""
    differentiates = torch.is_grad_enabled() and storage.requires_grad()
    return f"gradients: {differentiates}{storage.describe_training() if differentiates else ''}"


# What to request


def _make_requests(storage: ShardStorage, batch: Batch) -> list[OutgoingRequest] | None:
    """The request to each table group; None if numbers of the batch are not valid."""
    joined = join_features(storage, batch)
    if joined is None:
        return None
    sorting: dict[int, Deduplicating] = {}
    numbers = [*joined.checks]
    for k, group in enumerate(storage.groups):
        if (block := joined.blocks.get(Place(k, by_bags=False))) is not None:
            sorting[k] = Deduplicating(block.rows)
            numbers.append(sorting[k].cuts(group.bases))
    read: list[int] = torch.cat(numbers).tolist() if numbers else []
    if joined.checks:
        count = sum(x.numel() for x in joined.checks)
        if not joined.are_valid(read[:count]):
            return None
        read = read[count:]
    nothing = torch.empty(0, dtype=joined.row_dtype, device=storage.options.device)
    requests = []
    for k, group in enumerate(storage.groups):
        cuts, dedup = [0] * len(group.bases), Deduplicated(nothing, nothing, nothing)
        if k in sorting:
            cuts, read = read[: len(group.bases)], read[len(group.bases) :]
            dedup = sorting[k].finish(cuts[-1])
        by_rows, by_bags = (joined.blocks.get(Place(k, by_bags)) for by_bags in (False, True))
        requests.append(OutgoingRequest(group, by_rows, by_bags, dedup, cuts))
    return requests


def _describe(batch: Batch) -> list[str]:
    """The names of the features; a star if it has weights, a plus if they get a gradient. All ranks must agree on them."""
    given = dict.fromkeys(batch.names, batch) if isinstance(batch, KeyedRagged) else batch
    found = []
    for name, bags in given.items():
        weights = getattr(bags, "weights", None)
        learned = isinstance(weights, Tensor) and weights.requires_grad
        found.append(f"{name}{'*' * (weights is not None)}{'+' * learned}")
    return found


# The two exchanges


def _exchange_counts(
    function: str, outgoing: Sequence[OutgoingRequest], ranks: GroupRanks, *, same: str, error: str, device: torch.device
) -> list[list[int]]:
    """Return three counts for each rank and table group: what it requests here. All ranks raise if any has an error."""
    own = [] if error else [_counts_for(outgoing, rank, ranks) for rank in range(ranks.size)]
    width = 3 * len(outgoing)
    few = ranks.size <= _FEW
    numbers = [number for row in own for number in row] if few else []
    words = f"{function}({same})"
    rule = (
        "All ranks must look up the same features, with or without weights, all with gradients or all without, "
        "with the same frozen tables and the same learning rate."
    )
    try:
        table = validate_across_ranks(
            function, ranks, same=words, numbers=numbers, words=lambda: words, device=device, rule=rule, problem=error
        )
    except MismatchError as mismatch:
        text = str(mismatch)
        if "is out of range: table" in text:
            raise IdOutOfRange(text) from None
        if "looks into no table; the features are" in text or "missing features: " in text:
            raise UnknownFeature(text) from None
        raise
    if ranks.size == 1:
        return own
    if is_fake_group(process_group(ranks)):
        return [[n for x in outgoing for n in _counts_of_copy(x, rank, ranks)] for rank in range(ranks.size)]
    if few:
        return [row[ranks.rank * width : (ranks.rank + 1) * width] for row in table]
    counts = torch.tensor(own, device=small_message_device(process_group(ranks), device))
    each = (1,) * ranks.size
    received: list[list[int]] = all_to_all_single(counts, send_sizes=each, receive_sizes=each, group=as_group(ranks)).tolist()
    return received


def send_requests(storage: ShardStorage, requests: AgreedRequests, ranks: GroupRanks) -> list[IncomingRequest]:
    """Send every rank what is requested from it; return what is requested from this one."""
    outgoing, counts = requests
    weight_dtype = torch.float64 if storage.options.dtype == torch.float64 else torch.float32
    rows_only = len(outgoing) == 1 and outgoing[0].is_rows_only  # a message is the rows alone: no loop over ranks
    if rows_only:
        flat = outgoing[0].dedup.unique
        send = [end - start for start, end in pairwise(outgoing[0].cuts)]
        receive = [row[0] for row in counts]
    else:
        messages = [[x for request in outgoing for x in _message(request, rank, ranks)] for rank in range(ranks.size)]
        parts = [part for message in messages for part in message]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=storage.options.device)
        send = [sum(part.numel() for part in message) for message in messages]
        sizes = [[_part_sizes(x, row[3 * k : 3 * k + 3], weight_dtype) for k, x in enumerate(outgoing)] for row in counts]
        receive = [sum(map(sum, row)) for row in sizes]
    if ranks.size > 1:
        flat = all_to_all_single(flat, send_sizes=send, receive_sizes=receive, group=as_group(ranks))
    is_fake = ranks.size > 1 and is_fake_group(process_group(ranks))
    if is_fake:  # it moves nothing
        own = [(x, _message(x, ranks.rank, ranks)) for x in outgoing]
        parts = [part for rank in range(ranks.size) for x, message in own if _has_copy(x, rank, ranks) for part in message]
        flat = torch.cat(parts) if parts else flat
    if rows_only:
        shard = storage.shards[0]
        incoming = [IncomingRequest(outgoing[0].group, shard, _shard_rows(flat, shard), None, None, None, receive)]
    else:
        places = accumulate((size for row in sizes for parts in row for size in parts), initial=0)
        starts = [[_PartSizes(*(next(places) for _ in parts)) for parts in row] for row in sizes]
        incoming = [
            _read_messages(flat, x, shard, [row[k] for row in sizes], [row[k] for row in starts], weight_dtype)
            for k, (x, shard) in enumerate(zip(outgoing, storage.shards, strict=True))
        ]
    return _spread_over_rows(incoming, ranks) if is_fake else incoming


def _shard_rows(rows: Tensor, shard: GroupShard | None) -> Tensor:
    """Number rows of a table group within a shard of it."""
    base = 0 if shard is None else shard.group.bases[shard.number]
    return rows - base if base else rows


# The fake process group: the other ranks request what this rank requests from itself, but other rows of it


def _has_copy(request: OutgoingRequest, rank: int, ranks: GroupRanks) -> bool:
    return rank == ranks.rank or not request.group.is_replicated


def _counts_of_copy(request: OutgoingRequest, rank: int, ranks: GroupRanks) -> tuple[int, ...]:
    shard = _shard_on(request.group, ranks.rank, ranks)
    return (0, 0, 0) if shard is None or not _has_copy(request, rank, ranks) else request.counts(shard)


def _spread_over_rows(incoming: list[IncomingRequest], ranks: GroupRanks) -> list[IncomingRequest]:
    """Shift the rows that each rank requests, as if its ids were drawn independently: then the owner serves as many rows."""
    found = []
    for request in incoming:
        if request.shard is not None and request.rows.numel() and not request.group.is_replicated:
            height = request.group.heights[request.shard.number]
            shifts = torch.arange(ranks.size, dtype=request.rows.dtype, device=request.rows.device) * (height // ranks.size)
            request = replace(request, rows=(request.rows.view(ranks.size, -1) + shifts[:, None]).flatten() % height)
        found.append(request)
    return found


def _shard_on(group: TableGroup, rank: int, ranks: GroupRanks) -> int | None:
    """The group shard that this rank requests from `rank`. If every rank has a copy, it requests only from itself."""
    if group.is_replicated and rank != ranks.rank:
        return None
    place = group.place(rank)
    return None if place is None else place[0]


def _counts_for(outgoing: Sequence[OutgoingRequest], rank: int, ranks: GroupRanks) -> list[int]:
    """What this rank requests from `rank`: three counts for each table group."""
    found: list[int] = []
    for request in outgoing:
        shard = _shard_on(request.group, rank, ranks)
        found += (0, 0, 0) if shard is None else request.counts(shard)
    return found


def _message(request: OutgoingRequest, rank: int, ranks: GroupRanks) -> list[Tensor]:
    """What goes to `rank`: the parts of _PartSizes, except those that are empty."""
    shard = _shard_on(request.group, rank, ranks)
    if shard is None:
        return []
    requested = slice(request.cuts[shard], request.cuts[shard + 1])
    unique, block = request.dedup.unique, request.by_bags
    parts = [unique[requested]]
    if request.group.key.scale_grad_by_freq:
        parts.append(request.dedup.counts[requested].to(unique.dtype))
    if block is not None:
        ids = slice(request.id_cuts[shard], request.id_cuts[shard + 1])
        parts += [block.rows[ids], block.lengths[request.bag_cuts[shard] : request.bag_cuts[shard + 1]]]
        if block.weights is not None:
            parts.append(block.weights.detach()[ids].contiguous().view(torch.int32).to(unique.dtype))
    return [part for part in parts if part.numel()]


class _PartSizes(NamedTuple):
    """The lengths of the parts of a message: rows and their frequencies; then of bags: ids, lengths, bits of weights."""

    rows: int
    frequencies: int
    ids: int
    bags: int
    weights: int


def _part_sizes(request: OutgoingRequest, counts: Sequence[int], weight_dtype: torch.dtype) -> _PartSizes:
    rows, ids, bags = counts
    words = weight_dtype.itemsize // torch.int32.itemsize
    return _PartSizes(rows, rows * request.group.key.scale_grad_by_freq, ids, bags, ids * words * request.has_bag_weights)


def _read_messages(
    flat: Tensor,
    request: OutgoingRequest,
    shard: GroupShard | None,
    sizes: Sequence[_PartSizes],
    starts: Sequence[_PartSizes],
    weight_dtype: torch.dtype,
) -> IncomingRequest:
    """Read the parts for one table group. `sizes` and `starts`: of the parts of each rank's message in `flat`."""

    def parts(name: str) -> list[Tensor]:
        return [flat.narrow(0, getattr(start, name), getattr(n, name)) for start, n in zip(starts, sizes, strict=True)]

    singles = [n.rows for n in sizes]
    rows = torch.cat(
        [part for pair in zip(parts("rows"), parts("ids"), strict=True) for part in pair if part.numel()] or [flat[:0]]
    )
    lengths = weights = None
    if any(n.bags for n in sizes):
        lengths = _after_ones(singles, parts("bags"))
    if lengths is not None and request.has_bag_weights:
        bits = torch.cat(parts("weights")).to(torch.int32)
        weights = _after_ones(singles, bits.view(weight_dtype).split_with_sizes([n.ids for n in sizes]))
    return IncomingRequest(
        request.group,
        shard,
        _shard_rows(rows, shard),
        lengths,
        weights,
        torch.cat(parts("frequencies")) if request.group.key.scale_grad_by_freq else None,
        [n.rows + n.bags for n in sizes],
    )


def _after_ones(counts: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """For each rank as many ones as it requests single rows, then its part."""
    ones = parts[0].new_ones(max(counts))
    pairs = ((ones[:count], part) for count, part in zip(counts, parts, strict=True))
    return torch.cat([x for pair in pairs for x in pair if x.numel()] or [ones[:0]])
