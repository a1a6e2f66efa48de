"""Step 1 of a look-up: each rank requests rows from their owners.

A rank deduplicates the ids of all its features with one sort for each table group, so it requests each row once. Then the
ranks exchange how much each requests (and raise together if any of them has a bad input), and then the row numbers, in one
all_to_all. A message has, for each table group of which the receiver holds a shard: the requested rows (and how often each
was looked up, if gradients are scaled by frequency), then the bags that the owner shall sum: their ids, their lengths, and
the bits of their weights, if any feature has weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import MismatchError, all_to_all_single
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import GroupRanks, as_group, is_fake_group, process_group, small_message_device
from unisono.embedding.lookup.kernels import Deduplicated, are_valid, deduplicate
from unisono.embedding.lookup.storage import GroupShard, ShardStorage
from unisono.embedding.ragged import Ragged, ragged_error
from unisono.embedding.sharding.table_groups import RowNumbering, TableGroup
from unisono.embedding.table import Table

_FEW = 12  # ranks up to which everybody receives all counts; beyond, each receives only its own


class IdOutOfRange(MismatchError, IndexError):  # noqa: N818 - users read it where they catch it
    """An id beyond the rows of its table, on some rank. All ranks raise the same error."""


class UnknownFeature(MismatchError, KeyError):  # noqa: N818 - users read it where they catch it
    """A feature that looks into no table, or one that is missing, on some rank. All ranks raise the same error."""

    __str__ = Exception.__str__  # that of KeyError shows the text with its line breaks escaped


class FeatureIds(NamedTuple):
    """One feature's ids, without the padding that is not looked up."""

    feature: str
    table: int
    ids: Tensor
    lengths: Tensor  # of the bags; not used without pooling
    weights: Tensor | None = None
    keep: Tensor | None = None  # which ids are pooled; None: all
    is_mean: bool = False
    owner_pools: bool = False  # the owner of the rows sums the bags


@dataclass
class OutgoingRequest:
    """What this rank requests from one table group."""

    group: TableGroup
    by_rows: list[FeatureIds]  # features that come back as rows, each row once, and are pooled here
    by_bags: list[list[FeatureIds]]  # for each group shard, features that come back as the sums of their bags
    dedup: Deduplicated  # of the group rows of all ids of `by_rows`
    cuts: list[int]  # unique group rows of group shard i: from cuts[i] to cuts[i + 1]

    def row_count(self, shard: int) -> int:
        return self.cuts[shard + 1] - self.cuts[shard]

    def response_count(self, shard: int) -> int:
        """How many rows and sums come back from a group shard."""
        return self.row_count(shard) + self._bag_counts[shard][1]

    def counts(self, shard: int) -> tuple[int, int, int]:
        """The numbers of rows, of ids in bags, and of bags that are requested from a group shard."""
        return self.row_count(shard), *self._bag_counts[shard]

    @cached_property
    def _bag_counts(self) -> list[tuple[int, int]]:
        """For each group shard, the numbers of ids in bags and of bags."""
        return [(sum(x.ids.numel() for x in bags), sum(x.lengths.numel() for x in bags)) for bags in self.by_bags]

    def shard_rows(self) -> Tensor:
        """The unique group rows, numbered within their group shards."""
        unique = self.dedup.unique
        if len(self.cuts) == 2:
            return unique
        bases = torch.tensor(self.group.bases[:-1], dtype=unique.dtype, device=unique.device)
        return unique - bases.repeat_interleave(torch.tensor(self.cuts, device=bases.device).diff())

    @property
    def is_rows_only(self) -> bool:
        """Whether nothing but whole rows is requested, from one group shard on each rank, in the order of the ranks."""
        group = self.group
        return group.columns == 1 and not (group.is_replicated or group.key.scale_grad_by_freq or any(self.by_bags))

    @cached_property
    def has_bag_weights(self) -> bool:
        return any(x.weights is not None for bags in self.by_bags for x in bags)


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
        return deduplicate(self.rows)

    @cached_property
    def bags(self) -> Tensor | None:
        """The bag of each of `rows`."""
        if self.lengths is None:
            return None
        return torch.arange(self.lengths.numel(), device=self.rows.device).repeat_interleave(self.lengths)


def input_dist(
    storage: ShardStorage, inputs: Mapping[str, Ragged], ranks: GroupRanks, error: str = ""
) -> tuple[list[OutgoingRequest], list[IncomingRequest]]:
    """Request the rows of `inputs` from their owners: for each table group, what goes out and what comes in.

    Args:
        ranks: Those of the storage, perhaps over another process group.
        error: What was wrong with the inputs of this rank before they came here. All ranks raise it.

    Raises IdOutOfRange or MismatchError on all ranks if the inputs of any rank are bad.
    """
    options = storage.options
    error = error or _input_error(storage, inputs)
    outgoing = [] if error else _make_requests(storage, inputs)
    calls = sorted(_describe(name, bags) for name, bags in inputs.items())
    differentiates = torch.is_grad_enabled() and storage.requires_grad()
    same = f"features {', '.join(calls)}; gradients: {differentiates}{storage.describe_training() if differentiates else ''}"
    counts = _exchange_counts(options.function, outgoing, ranks, same=same, error=error, device=options.device)
    return outgoing, _exchange_rows(storage, outgoing, counts, ranks)


# What to request


def _make_requests(storage: ShardStorage, inputs: Mapping[str, Ragged]) -> list[OutgoingRequest]:
    by_table: dict[int, list[FeatureIds]] = {}
    for name, bags in inputs.items():
        number = storage.table_of_feature[name]
        by_table.setdefault(number, []).append(_read_feature(storage, name, number, bags))
    return [
        make_request(group, [x for number in group.tables for x in by_table.get(number, ())], storage.row_numberings)
        for group in storage.groups
    ]


def _read_feature(storage: ShardStorage, name: str, number: int, ragged: Ragged) -> FeatureIds:
    """Take the padding out of the bags. With max_norm its row is still requested, since a look-up renormalises it."""
    table = storage.tables[number]
    ids, weights = ragged.values, ragged.weights
    owner_pools = storage.owner_pools(number, weights)
    found = FeatureIds(name, number, ids, ragged.lengths(), weights, None, table.mode == "mean", owner_pools)
    if table.padding_idx is None or table.mode is None:
        return found
    keep = ids != table.padding_idx
    if bool(keep.all()):
        return found
    kept_before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    lengths = kept_before.index_select(0, ragged.offsets).diff()
    found = found._replace(lengths=lengths, weights=None if weights is None else weights[keep])
    return found._replace(ids=ids[keep]) if table.max_norm is None else found._replace(keep=keep)


def make_request(group: TableGroup, features: Sequence[FeatureIds], numberings: Sequence[RowNumbering]) -> OutgoingRequest:
    """Deduplicate the ids. `features`: of the tables of the group. `numberings`: of all tables."""
    by_rows = [x for x in features if not x.owner_pools]
    by_bags: list[list[FeatureIds]] = [[] for _ in group.shards]
    for x in features:
        if x.owner_pools:
            by_bags[group.starts[x.table][0][0]].append(x)
    bases = group.bases
    dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
    group_rows = [numberings[x.table].to_group_rows(x.ids, dtype) for x in by_rows]
    device = features[0].ids.device if features else None
    dedup = deduplicate(torch.cat(group_rows) if group_rows else torch.empty(0, dtype=dtype, device=device))
    if len(bases) == 2:
        cuts = [0, dedup.unique.numel()]
    else:
        edges = torch.tensor(bases, dtype=dtype, device=dedup.unique.device)
        cuts = torch.searchsorted(dedup.unique, edges).tolist()
    return OutgoingRequest(group, by_rows, by_bags, dedup, cuts)


# What may be wrong


def _describe(name: str, bags: object) -> str:
    """A feature's name; a star if it has weights, a plus if they get a gradient. All ranks must agree on it."""
    weights = getattr(bags, "weights", None)
    learned = isinstance(weights, Tensor) and weights.requires_grad
    return f"{name}{'*' * (weights is not None)}{'+' * learned}"


def feature_name_error(given: Collection[str], known: Collection[str]) -> str:
    """Say which features are missing or unknown; "" if none is."""
    for name in given:
        if name not in known:
            return f"feature {name!r} looks into no table; the features are {', '.join(known)}"
    missing = [name for name in known if name not in given]
    return f"missing features: {', '.join(missing)}; the features are {', '.join(known)}" if missing else ""


def _input_error(storage: ShardStorage, inputs: Mapping[str, Ragged]) -> str:
    """Say what is wrong with the inputs; "" if nothing is."""
    features, device = storage.table_of_feature, storage.options.device
    if error := feature_name_error(inputs, features):
        return error
    for name, bags in inputs.items():
        if error := ragged_error(f"feature {name!r}", bags):
            return error
        if away := [x for x in bags if x is not None and x.device.type != device.type]:
            return f"feature {name!r} is on {away[0].device}, its table on {device}"
        mode = storage.tables[features[name]].mode
        if bags.weights is not None and mode != "sum":
            return f"feature {name!r}: weights go with mode='sum' only, not with {mode!r}"
    return number_error([(name, storage.tables[features[name]], bags) for name, bags in inputs.items()])


def number_error(inputs: Sequence[tuple[str, Table, Ragged]]) -> str:
    """Say what is wrong with ids and offsets. The numbers of all features are read at once: a GPU's host waits once."""
    if are_valid([(ids, offsets, table.rows) for _, table, (ids, offsets, _) in inputs]) or not inputs:
        return ""
    limits = [
        x for _, _, (ids, _, _) in inputs for x in (ids.aminmax() if ids.numel() else (ids.new_tensor(0), ids.new_tensor(-1)))
    ]
    edges = [x for _, _, (_, offsets, _) in inputs for x in (offsets[0], offsets[-1])]
    any_falls = torch.cat([bags.lengths() for _, _, bags in inputs]).lt(0).any()
    numbers: list[int] = torch.stack([x.to(torch.int64) for x in (*limits, *edges, any_falls)]).tolist()
    pairs = list(zip(numbers[0:-1:2], numbers[1::2], strict=True))
    for k, (feature, table, (ids, offsets, _)) in enumerate(inputs):
        low, high = pairs[k]
        first, last = pairs[len(inputs) + k]
        falls = bool(numbers[-1]) and bool((offsets.diff() < 0).any())
        if first != 0 or last != ids.numel() or falls:
            return (
                f"feature {feature!r}: offsets must rise from 0 to the number of ids, {ids.numel()}; "
                f"they go from {first} to {last}{' and fall between' if falls else ''}"
            )
        if low < 0 or high >= table.rows:
            bad = low if low < 0 else high
            position = int((ids == bad).nonzero()[0])
            return (
                f"id {bad} at position {position} of feature {feature!r} is out of range: "
                f"table {table.name!r} has {table.rows} rows, 0 to {table.rows - 1}"
            )
    return ""


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


def _exchange_rows(
    storage: ShardStorage, outgoing: Sequence[OutgoingRequest], counts: Sequence[Sequence[int]], ranks: GroupRanks
) -> list[IncomingRequest]:
    """Send every rank what is requested from it. `counts`: of _exchange_counts."""
    weight_dtype = torch.float64 if storage.options.dtype == torch.float64 else torch.float32
    dtype = torch.int32 if all(max(request.group.heights) < 2**31 for request in outgoing) else torch.int64
    rows = [request.shard_rows().to(dtype) for request in outgoing]
    rows_only = len(outgoing) == 1 and outgoing[0].is_rows_only  # a message is the rows alone: no loop over ranks
    if rows_only:
        flat = rows[0]
        send = [end - start for start, end in pairwise(outgoing[0].cuts)]
        receive = [row[0] for row in counts]
    else:
        messages = [
            [x for request, own in zip(outgoing, rows, strict=True) for x in _message(request, own, rank, ranks, weight_dtype)]
            for rank in range(ranks.size)
        ]
        parts = [part for message in messages for part in message]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=storage.options.device)
        send = [sum(part.numel() for part in message) for message in messages]
        sizes = [[_part_sizes(x, row[3 * k : 3 * k + 3], weight_dtype) for k, x in enumerate(outgoing)] for row in counts]
        receive = [sum(map(sum, row)) for row in sizes]
    if ranks.size > 1:
        flat = all_to_all_single(flat, send_sizes=send, receive_sizes=receive, group=as_group(ranks))
    is_fake = ranks.size > 1 and is_fake_group(process_group(ranks))
    if is_fake:  # it moves nothing
        own = [(x, _message(x, y, ranks.rank, ranks, weight_dtype)) for x, y in zip(outgoing, rows, strict=True)]
        parts = [part for rank in range(ranks.size) for x, message in own if _has_copy(x, rank, ranks) for part in message]
        flat = torch.cat(parts) if parts else flat
    if rows_only:
        incoming = [IncomingRequest(outgoing[0].group, storage.shards[0], flat, None, None, None, receive)]
        return _spread_over_rows(incoming, ranks) if is_fake else incoming
    pieces = iter(flat.split_with_sizes([size for row in sizes for group_sizes in row for size in group_sizes]))
    received = [[[next(pieces) for _ in range(5)] for _ in outgoing] for _ in counts]
    incoming = [
        _read_messages([row[k] for row in received], x, storage.shards[k], weight_dtype) for k, x in enumerate(outgoing)
    ]
    return _spread_over_rows(incoming, ranks) if is_fake else incoming


# The fake process group: the other ranks request what this rank requests from itself, but other rows of it


def _has_copy(request: OutgoingRequest, rank: int, ranks: GroupRanks) -> bool:
    return rank == ranks.rank or not request.group.is_replicated


def _counts_of_copy(request: OutgoingRequest, rank: int, ranks: GroupRanks) -> tuple[int, int, int]:
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


def _message(
    request: OutgoingRequest, shard_rows: Tensor, rank: int, ranks: GroupRanks, weight_dtype: torch.dtype
) -> list[Tensor]:
    """What goes to `rank`. `shard_rows`: of the request, in the dtype of all numbers of a message."""
    shard = _shard_on(request.group, rank, ranks)
    if shard is None:
        return []
    requested = slice(request.cuts[shard], request.cuts[shard + 1])
    dtype = shard_rows.dtype
    parts = [shard_rows[requested]]
    if request.group.key.scale_grad_by_freq:
        parts.append(request.dedup.counts[requested].to(dtype))
    bags = request.by_bags[shard]
    parts += [x.ids.to(dtype) + request.group.starts[x.table][0][1] for x in bags]
    parts += [x.lengths.to(dtype) for x in bags]
    if request.has_bag_weights:
        for x in bags:
            given = torch.ones_like(x.ids, dtype=weight_dtype) if x.weights is None else x.weights.detach().to(weight_dtype)
            parts.append(given.contiguous().view(torch.int32).to(dtype))
    return parts


def _part_sizes(request: OutgoingRequest, counts: Sequence[int], weight_dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """The lengths of the parts of a message: rows, frequencies, ids in bags, lengths of bags, bits of weights."""
    rows, ids, bags = counts
    words = weight_dtype.itemsize // torch.int32.itemsize
    return rows, rows * request.group.key.scale_grad_by_freq, ids, bags, ids * words * request.has_bag_weights


def _read_messages(
    messages: list[list[Tensor]], request: OutgoingRequest, shard: GroupShard | None, weight_dtype: torch.dtype
) -> IncomingRequest:
    """`messages`: from each rank, the five parts for the table group of `request`."""
    response_counts = [rows.numel() + lengths.numel() for rows, _, _, lengths, _ in messages]
    rows = torch.cat([part for single, _, ids, _, _ in messages for part in (single, ids)])
    frequencies = torch.cat([part for _, part, _, _, _ in messages]) if request.group.key.scale_grad_by_freq else None
    if not any(lengths.numel() for _, _, _, lengths, _ in messages):
        return IncomingRequest(request.group, shard, rows, None, None, frequencies, response_counts)
    lengths = torch.cat([part for single, _, _, bags, _ in messages for part in (torch.ones_like(single), bags)])
    weights = None
    if request.has_bag_weights:
        parts = []
        for single, _, _, _, bits in messages:
            parts += [torch.ones_like(single, dtype=weight_dtype), bits.to(torch.int32).clone().view(weight_dtype)]
        weights = torch.cat(parts)
    return IncomingRequest(request.group, shard, rows, lengths, weights, frequencies, response_counts)
