"""The features of a batch, joined: one tensor of rows and one of lengths, so that no later step has a loop over features.

Features of one table group that are requested alike form a Block. The blocks stand one after the other in the joined tensors.
On a GPU the ids become rows by a fixed number of operations, whatever the number of features (weights and max_norm beside
padding take some for each). The host reads the numbers that tell whether the ids are valid (`checks`) together with others
that it needs. It waits once more for the number of ids of each feature where it needs it: to drop padding, and for a
KeyedRagged in several blocks, or in one whose owners sum the bags. On a CPU it knows at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.embedding.lookup import compiled
from unisono.embedding.lookup.feature_errors import Batch, number_error
from unisono.embedding.lookup.kernels import is_on_host, number_bags, to_device
from unisono.embedding.lookup.storage import ShardStorage
from unisono.embedding.ragged import KeyedRagged, Ragged, lengths_error

_ORDERS = 16  # that are kept


class Feature(NamedTuple):
    name: str
    table: int
    shard: int  # of the table group: the first that has rows of the table
    is_mean: bool


class Place(NamedTuple):
    """Where the features of a block are looked up: in a table group, and whether the owners of the rows sum the bags."""

    group: int
    by_bags: bool


@dataclass(eq=False)
class Block:
    """Features that are requested alike, feature after feature, bag after bag. If owners sum the bags: shard after shard."""

    features: tuple[Feature, ...]
    rows: Tensor  # of the ids, in the numbering of their table group, without the padding that is not looked up
    lengths: Tensor  # of the bags, in the dtype of `rows`
    bag_counts: list[int]  # of each feature
    id_counts: list[int] | None = None  # of each feature; None: the host does not know them
    weights: Tensor | None = None  # of the ids that are pooled, float32 or float64
    keep: Tensor | None = None  # which of `rows` are pooled; None: all
    given_bags: Tensor | None = None  # `bags`, once something has computed them

    @property
    def bags(self) -> Tensor:
        """The bag of each of `rows`. Those that are not pooled are in a bag beyond the last."""
        if self.given_bags is None:
            self.given_bags = number_bags(self.lengths, self.rows.numel())
        return self.given_bags

    def divisors(self) -> Tensor | None:
        """Of the sum of each bag; None: no feature is a mean."""
        means = [x.is_mean for x in self.features]
        if not any(means):
            return None
        lengths = self.lengths if all(means) else torch.where(self.each_bag(means), self.lengths, 1)
        return lengths.clamp(min=1)

    def each_bag(self, flags: Sequence[bool]) -> Tensor:
        """For each bag the flag of its feature."""
        return _repeat(to_device(flags, self.lengths.device), self.bag_counts)

    def output_sizes(self, *, pooled: bool) -> list[int]:
        """How many rows each feature has in the end."""
        return self.bag_counts if pooled else self.known_id_counts()

    def shard_cuts(self, counts: Sequence[int], shards: int) -> list[int]:
        """Where the ids or bags of each group shard begin and end. `counts`: those of each feature."""
        found = [0] * (shards + 1)
        for feature, count in zip(self.features, counts, strict=True):
            found[feature.shard + 1] += count
        return [*accumulate(found)]

    def known_id_counts(self) -> list[int]:
        if self.id_counts is None:  # on a GPU the host waits for them
            self.id_counts = _count_ids(self.lengths, self.bag_counts).tolist()
        return self.id_counts


class JoinedFeatures(NamedTuple):
    blocks: dict[Place, Block]
    row_dtype: torch.dtype
    # Empty: the numbers are valid. Otherwise: whether an id is out of range, the least length, and edges.
    checks: Sequence[Tensor] = ()
    expected_edges: tuple[int, ...] = ()

    def are_valid(self, checks: Sequence[int]) -> bool:
        """`checks`: the numbers of those tensors."""
        is_out_of_range, shortest, *edges = checks
        return not is_out_of_range and shortest >= 0 and tuple(edges) == self.expected_edges


class FeatureOrder:
    """In which order the features of a batch are joined, and the numbers that make rows of their ids.

    Within a block the features have the order of the batch, or, if owners sum the bags, of the shards.
    """

    def __init__(self, storage: ShardStorage, names: tuple[str, ...], owner_pools: tuple[bool, ...]) -> None:
        group_of = {number: k for k, group in enumerate(storage.groups) for number in group.tables}
        found: dict[Place, list[int]] = {}
        features = []
        for k, (name, pools) in enumerate(zip(names, owner_pools, strict=True)):
            number = storage.table_of_feature[name]
            shard, _ = storage.groups[group_of[number]].starts[number][0]
            features.append(Feature(name, number, shard, storage.tables[number].mode == "mean"))
            found.setdefault(Place(group_of[number], pools), []).append(k)
        for place in sorted(found):
            if place.by_bags:
                found[place].sort(key=lambda k: features[k].shard)
        self.permutation = [k for place in sorted(found) for k in found[place]]  # of the names
        self.features = {place: tuple(features[k] for k in found[place]) for place in sorted(found)}
        numbers = [features[k].table for k in self.permutation]
        tables = self.tables = [storage.tables[number] for number in numbers]
        self.numberings = [storage.row_numberings[number] for number in numbers]
        self.dtype = torch.int32 if all(group.bases[-1] < 2**31 for group in storage.groups) else torch.int64
        self.last_ids = [table.rows - 1 for table in tables]
        # Padding is not looked up, or, if a look-up renormalises rows, it is looked up, but not pooled. -1: there is none.
        padding = [-1 if table.mode is None or table.padding_idx is None else table.padding_idx for table in tables]
        self.dropped = [p if table.max_norm is None else -1 for p, table in zip(padding, tables, strict=True)]
        self.not_pooled = [-1 if table.max_norm is None else p for p, table in zip(padding, tables, strict=True)]
        self.has_padding = any(x >= 0 for x in (*self.dropped, *self.not_pooled))
        self._on_device: tuple[torch.device, DeviceNumbers] | None = None

    def spans(self) -> Iterator[tuple[Place, slice]]:
        """The place of each block, and which of the ordered features are in it."""
        start = 0
        for place, features in self.features.items():
            yield place, slice(start, start + len(features))
            start += len(features)

    def on(self, device: torch.device) -> "DeviceNumbers":
        if self._on_device is None or self._on_device[0] != device:
            firsts = [0, *accumulate(len(x.shifts) for x in self.numberings)][:-1]
            chunk_sizes = [x.chunk_size for x in self.numberings]
            columns = [self.last_ids, chunk_sizes, firsts]
            if self.has_padding:
                columns += [self.dropped, self.not_pooled]
            shifts = [shift for x in self.numberings for shift in x.shifts]
            made = (to_device(numbers, device) for numbers in ([*zip(*columns, strict=True)], shifts, 0))
            self._on_device = device, DeviceNumbers(*made)
        return self._on_device[1]


class DeviceNumbers(NamedTuple):
    # For each feature: its last id, the rows of a chunk, the place of its first shift; if any has padding: dropped, not pooled.
    of_features: Tensor
    shifts: Tensor  # of the chunks of all features: row = id + shift
    zero: Tensor


@torch.enable_grad()  # of weights, whose gradient may be wanted though the batch was prefetched without
def join_features(storage: ShardStorage, batch: Batch) -> JoinedFeatures | None:
    """Join features whose forms are valid. None: their numbers are not valid."""
    if isinstance(batch, KeyedRagged):
        names, weights = batch.names, [batch.weights] * len(batch.names)
    else:  # the order of a dict does not matter
        names = tuple(storage.table_of_feature)
        weights = [batch[name].weights for name in names]
    owner_pools = tuple(storage.owner_pools(storage.table_of_feature[name], x) for name, x in zip(names, weights, strict=True))
    order = storage.feature_orders.get((names, owner_pools))
    if order is None:
        if len(storage.feature_orders) >= _ORDERS:
            storage.feature_orders.clear()
        order = storage.feature_orders[names, owner_pools] = FeatureOrder(storage, names, owner_pools)
    if not names:
        return JoinedFeatures({}, order.dtype)
    dtype = torch.float64 if storage.options.dtype == torch.float64 else torch.float32  # of weights
    on_host = is_on_host(storage.options.device)
    if isinstance(batch, KeyedRagged):
        if not on_host:
            return _join_on_device(order, _reorder(batch, order), dtype)
        if lengths_error(batch):
            return None
        batch = batch.to_dict()
    bags = [batch[names[k]] for k in order.permutation]
    return _join_on_host(order, bags, dtype) if on_host else _join_on_device(order, _flatten(bags, dtype), dtype)


def _cut(order: FeatureOrder, whole: Block, has_weights: Sequence[bool]) -> dict[Place, Block] | None:
    """Cut the joined features into blocks; None if their numbers cannot be valid. `has_weights`: of each feature."""
    if len(order.features) == 1:
        ((place, whole.features),) = order.features.items()
        return {place: whole}
    id_counts, blocks = whole.known_id_counts(), {}
    if min(id_counts, default=0) < 0 or sum(id_counts) != whole.rows.numel():
        return None
    id_edges, bag_edges = [0, *accumulate(id_counts)], [0, *accumulate(whole.bag_counts)]
    for place, own in order.spans():
        ids = slice(id_edges[own.start], id_edges[own.stop])
        first_bag = bag_edges[own.start]
        blocks[place] = Block(
            order.features[place],
            whole.rows[ids],
            whole.lengths[first_bag : bag_edges[own.stop]],
            whole.bag_counts[own],
            id_counts[own],
            whole.weights[ids] if whole.weights is not None and any(has_weights[own]) else None,
            None if whole.keep is None else whole.keep[ids],
            None if whole.given_bags is None or place.by_bags else whole.given_bags[ids] - first_bag,
        )
    return blocks


def _finish(
    order: FeatureOrder,
    whole: Block,
    has_weights: Sequence[bool],
    checks: Sequence[Tensor] = (),
    expected_edges: tuple[int, ...] = (),
) -> JoinedFeatures | None:
    blocks = _cut(order, whole, has_weights)
    if blocks is None:
        return None
    for place, own in order.spans():
        if any(x >= 0 for x in order.not_pooled[own]):
            _leave_out(blocks[place])
        else:
            blocks[place].keep = None
    return JoinedFeatures(blocks, order.dtype, checks, expected_edges)


def _leave_out(block: Block) -> None:
    """Take the ids that are not to be kept out of the bags, but not out of the rows."""
    assert block.keep is not None
    block.known_id_counts()  # while they can be seen from the lengths
    kept_before = torch.nn.functional.pad(block.keep.cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(block.lengths.cumsum(0), (1, 0))
    block.given_bags = torch.where(block.keep, block.bags, block.lengths.numel())
    block.lengths = kept_before.index_select(0, ends.clamp_(0, block.rows.numel())).diff().to(block.lengths.dtype)
    block.weights = None if block.weights is None else block.weights[block.keep]


# On a CPU


def _join_on_host(order: FeatureOrder, bags: list[Ragged], weight_dtype: torch.dtype) -> JoinedFeatures | None:
    if compiled.handles(*(x for ragged in bags for x in ragged[:2])):
        joined = compiled.join(bags, order.last_ids, order.numberings, order.dropped, order.dtype)
        if joined is None:
            return None
    elif number_error(order.tables, {str(k): x for k, x in enumerate(bags)}):
        return None
    else:
        joined = _join_by_torch(order, bags)
    rows, lengths, id_counts = joined
    whole = Block((), rows, lengths, [x.offsets.numel() - 1 for x in bags], id_counts)
    whole.weights = _join_weights(bags, order.dropped, id_counts, weight_dtype)
    if any(x >= 0 for x in order.not_pooled):
        whole.keep = torch.cat(
            [
                x.values != padding if padding >= 0 else x.values.new_ones(count, dtype=torch.bool)
                for x, padding, count in zip(bags, order.not_pooled, id_counts, strict=True)
            ]
        )
    return _finish(order, whole, [x.weights is not None for x in bags])


def _join_by_torch(order: FeatureOrder, bags: list[Ragged]) -> tuple[Tensor, Tensor, list[int]]:
    rows, lengths = [], []
    for x, numbering, dropped in zip(bags, order.numberings, order.dropped, strict=True):
        ids, own = x.values, x.lengths()
        if dropped >= 0 and not bool((keep := ids != dropped).all()):
            ids, own = ids[keep], torch.nn.functional.pad(keep.cumsum(0), (1, 0)).index_select(0, x.offsets).diff()
        rows.append(numbering.to_group_rows(ids, order.dtype))
        lengths.append(own.to(order.dtype))
    return torch.cat(rows), torch.cat(lengths), [x.numel() for x in rows]


def _join_weights(
    bags: Sequence[Ragged], dropped: Sequence[int], id_counts: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """The weights of the ids that were not dropped; 1 for a feature without weights; None if no feature has any."""
    if all(x.weights is None for x in bags):
        return None
    found = []
    for x, padding, count in zip(bags, dropped, id_counts, strict=True):
        if x.weights is None:
            found.append(x.values.new_ones(count, dtype=dtype))
        else:
            weights = x.weights if count == x.values.numel() else x.weights[x.values != padding]
            found.append(weights.to(dtype))
    return torch.cat(found)


# On a GPU


class _Flat(NamedTuple):
    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    has_weights: Sequence[bool]  # of each feature
    bag_counts: list[int]
    id_counts: list[int] | None  # None: the host does not know them
    edges: Sequence[Tensor]  # what the host has to compare with expected_edges
    expected_edges: tuple[int, ...]


def _flatten(bags: list[Ragged], weight_dtype: torch.dtype) -> _Flat:
    id_counts = [x.values.numel() for x in bags]
    offset_counts = [x.offsets.numel() for x in bags]
    offsets = torch.cat([x.offsets for x in bags]).to(torch.int64)  # differences of 32 bits could wrap
    if len(set(offset_counts)) == 1:
        each = offsets.view(len(bags), -1)
        lengths, firsts, lasts = each.diff().view(-1), each[:, 0], each[:, -1]
    else:
        starts = [0, *accumulate(offset_counts)]
        parts, differences = list(pairwise(starts)), offsets.diff()
        lengths = torch.cat([differences[start : end - 1] for start, end in parts])
        firsts = torch.cat([offsets[start : start + 1] for start, _ in parts])
        lasts = torch.cat([offsets[end - 1 : end] for _, end in parts])
    weights = _join_weights(bags, [-1] * len(bags), id_counts, weight_dtype)
    has_weights = [x.weights is not None for x in bags]
    expected = *[0] * len(bags), *id_counts
    bag_counts, ids = [count - 1 for count in offset_counts], torch.cat([x.values for x in bags])
    return _Flat(ids, lengths, weights, has_weights, bag_counts, id_counts, (firsts, lasts), expected)


def _reorder(batch: KeyedRagged, order: FeatureOrder) -> _Flat:
    """Bring the features into the order; without a copy if they have it."""
    names, ids, lengths, weights = batch
    id_counts = None
    if order.permutation != sorted(order.permutation):
        each = lengths.view(len(names), -1)
        counts: list[int] = each.sum(1).tolist()
        if min(counts) >= 0 and sum(counts) == ids.numel():  # otherwise the order does not matter: an error will be found
            id_counts = [counts[k] for k in order.permutation]
            lengths = torch.cat([each[k] for k in order.permutation])
            ids, weights = (_permute(x, counts, order.permutation) for x in (ids, weights))
    bag_counts = [batch.bag_count] * len(names)
    has_weights = [weights is not None] * len(names)
    return _Flat(ids, lengths, weights, has_weights, bag_counts, id_counts, (lengths.sum(0, keepdim=True),), (ids.numel(),))


def _permute(x: Tensor | None, sizes: list[int], permutation: Sequence[int]) -> Any:
    if x is None:
        return None
    parts = x.split_with_sizes(sizes)
    return torch.cat([parts[k] for k in permutation])


def _join_on_device(order: FeatureOrder, flat: _Flat, weight_dtype: torch.dtype) -> JoinedFeatures | None:
    ids, lengths = flat.ids, flat.lengths.to(order.dtype)
    numbers = order.on(ids.device)
    count, bag_count = ids.numel(), lengths.numel()
    # If the numbers are bad, these are bags and ids all the same: nothing reads beyond the memory until the host knows.
    positions = torch.arange(count, device=ids.device)
    bags = torch.searchsorted(lengths.cumsum(0)[:-1], positions, right=True)
    features = bags // max(flat.bag_counts[0], 1)
    if len(set(flat.bag_counts)) > 1:
        every = torch.arange(len(flat.bag_counts), device=ids.device)
        features = _repeat(every, flat.bag_counts).index_select(0, bags)
    of_ids = numbers.of_features.index_select(0, features)
    last_id, chunk_size, first_shift, *padding = of_ids.unbind(1)
    valid_ids = torch.clamp(ids, numbers.zero, last_id)
    if any(len(x.shifts) > 1 for x in order.numberings):
        first_shift = torch.div(valid_ids, chunk_size, rounding_mode="floor").add_(first_shift)
    if min(order.last_ids) < 0:  # a table without rows has no valid id
        first_shift = first_shift.clamp(min=0)
    shifts = numbers.shifts.index_select(0, first_shift)
    rows = torch.add(shifts, valid_ids, out=torch.empty(count, dtype=order.dtype, device=ids.device))
    shortest = flat.lengths.min() if bag_count else numbers.zero
    is_out_of_range = (valid_ids != ids).any()
    checks = [is_out_of_range.view(1), shortest.view(1), *flat.edges]
    weights = None if flat.weights is None else flat.weights.to(weight_dtype)
    whole = Block((), rows, lengths, flat.bag_counts, flat.id_counts, weights, None, bags)
    if any(x >= 0 for x in order.not_pooled):
        whole.keep = ids != padding[1]
    if any(x >= 0 for x in order.dropped):
        _drop(whole, ids != padding[0])
    return _finish(order, whole, flat.has_weights, checks, flat.expected_edges)


def _drop(whole: Block, kept: Tensor) -> None:
    """Take out ids. The host waits once, for how many each feature keeps."""
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(whole.lengths.cumsum(0), (1, 0)).clamp_(0, kept.numel())
    whole.lengths = before.index_select(0, ends).diff().to(whole.lengths.dtype)
    *whole.id_counts, total = torch.cat([_count_ids(whole.lengths, whole.bag_counts), before[-1:]]).tolist()
    if total == kept.numel():
        return
    places = torch.where(kept, before[:-1], total)  # what is taken out goes to one place beyond the others

    def pack(x: Tensor) -> Tensor:
        return x.new_zeros(total + 1).scatter(0, places, x)[:total]

    whole.rows, whole.given_bags = pack(whole.rows), pack(whole.bags)
    whole.keep = None if whole.keep is None else pack(whole.keep)
    whole.weights = None if whole.weights is None else pack(whole.weights)


def _count_ids(lengths: Tensor, bag_counts: Sequence[int]) -> Tensor:
    """How many ids each feature has."""
    if len(set(bag_counts)) == 1:
        return lengths.view(len(bag_counts), -1).sum(1)
    edges = to_device([0, *accumulate(bag_counts)], lengths.device)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).index_select(0, edges).diff()


def _repeat(of_features: Tensor, bag_counts: Sequence[int]) -> Tensor:
    """For each bag the number of its feature."""
    if len(set(bag_counts)) == 1:
        return of_features[:, None].expand(-1, bag_counts[0]).reshape(-1)
    counts = to_device(bag_counts, of_features.device)
    return of_features.repeat_interleave(counts, output_size=sum(bag_counts))
