"""IdMap gives ids that are not known beforehand a row of an embedding table; IdMapCollection does so for many tables at once.

Ids travel to the ranks that store them, and rows travel back: see `_exchange`. id_slots.py has what a rank stores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from unisono.collectives import Group, all_gather, all_to_all_single
from unisono.collectives.autograd import disable_compile
from unisono.collectives.checks import describe
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata
from unisono.embedding.id_slots import MOST_SLOTS, DistinctIds, Eviction, IdSlots, MapOptions, distinct_ids
from unisono.embedding.ragged import Ragged

_ROWS_PER_SHARD = 64  # at least, unless the user wants more shards
_MOST_SHARDS = 64


class IdMap(nn.Module):
    """Gives each id a row of its own as ids turn up: a vocabulary that grows with the data.

    `rows = id_map(ids)` takes ids of any integer dtype and shape, and returns rows of that shape, int64 in [0, capacity).
    **All unknown ids share row 0.** All ranks call together. In training mode ids are counted and admitted; in eval mode they
    are looked up and nothing changes. The result depends neither on the number of ranks nor on how the batch is split.

    Args:
        capacity: The number of rows, row 0 included. `grow` changes it.
        threshold: An id is admitted in the call in which its count, over all calls and ranks, reaches this number.
        eviction: Which id loses its row if none is free. None: no id, and new ids stay unknown. "least_recent": the id of the
            same shard that was last seen the most calls ago. "least_frequent": the one with the lowest count; of several, the
            least recent one. Among equals the lower row goes first. An id of the present call keeps its row. An evicted id
            starts again from count 0.
        candidates: How many ids below the threshold are remembered with their counts; by default as many as there are rows.
            A new candidate replaces the one that was seen least recently, which starts again from 0.
        shards: Ids are divided over this many shards by their hash, and each rank stores a range of shards; by default one for
            64 rows, at most 64. All shards take free rows from one pool, so none is full while there are free rows. (A shard
            has memory for its share and eight standard deviations more than that.) In a call the shards get rows in their
            order; within a shard the id with the highest count comes first (of several, the smallest id). If the rows
            run out, the shards that have the fewest get them. More ranks than shards: some store nothing.

    `id_map.reassigned`: the rows that went from an old id to a new one in the last call, sorted, the same on all ranks. Reset
    them with `collection.reset_rows`.

    state_dict() does not depend on the number of ranks, so it loads on any other number, and into a map of a larger capacity
    with as many shards. On several ranks it has DTensors, for torch.distributed.checkpoint; it loads whole tensors, too. A
    torch.save of one rank would have that rank's share only.

    Memory: 56 bytes for each row and candidate, over all ranks. Communication: one exchange of sizes, one of each rank's
    different ids, one of rows; in training one of the number of new ids; if ids may be evicted, one of the reassigned rows.
    Several maps share these exchanges in an IdMapCollection.

    Backward: none; rows are integers.

    Example, with the ids of any number of ranks:
        >>> id_map = IdMap(capacity=100, threshold=2)
        >>> id_map(torch.tensor([[-7, 10**18], [-7, 5]]))
        tensor([[1, 0],
                [1, 0]])
        >>> id_map(torch.tensor([5, 6]))
        tensor([2, 0])
    """

    def __init__(
        self,
        capacity: int,
        *,
        threshold: int = 1,
        eviction: Eviction | None = None,
        candidates: int | None = None,
        shards: int | None = None,
        group: Group = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        at_least = (("capacity", capacity, 2), ("threshold", threshold, 1), ("shards", 1 if shards is None else shards, 1))
        for name, value, least in at_least:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"IdMap: {name}={value!r} must be an integer, {least} or more")
        if eviction not in (None, "least_recent", "least_frequent"):
            raise ValueError(f"IdMap: eviction={eviction!r} is not one of None, 'least_recent', 'least_frequent'")
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1 or threshold == 1):
            raise ValueError(f"IdMap: {candidates=} must be a positive integer, and {threshold=} more than 1")
        self.group = group
        self.reassigned = torch.empty(0, dtype=torch.int64, device=device)
        if shards is None:
            shards = max(1, min(_MOST_SHARDS, (capacity - 1) // _ROWS_PER_SHARD))
        remembered = 0 if threshold == 1 else candidates or capacity - 1
        options = MapOptions(capacity, threshold, eviction, remembered, min(shards, capacity - 1))
        _validate_size(options)
        self._all_candidates = threshold > 1 and candidates is None  # as many as rows
        # Not buffers: DDP would overwrite every rank's share with that of rank 0.
        self._slots = IdSlots([options], self.reassigned.device)  # of all maps of a collection
        self._number = 0  # of this map among them

    @property
    def options(self) -> MapOptions:
        """The arguments: capacity, threshold, eviction, candidates, shards."""
        return self._slots.maps[self._number]

    @property
    def capacity(self) -> int:
        return self.options.capacity

    @disable_compile
    def forward(self, ids: Tensor) -> Tensor:
        (rows,) = _map_ids("IdMap", {"": self}, [("", ids)])
        return rows

    def count(self) -> int:
        """Count the ids that have a row, over all ranks."""
        return int(self._slots.taken_by(self._number).sum())

    def known_ids(self) -> tuple[Tensor, Tensor]:
        """Gather the ids that have a row, and these rows, on every rank. All ranks call."""
        self._hold_shards_or_raise()
        stored = self._slots.stored(self._number)
        has_row = stored["rows"] > 0
        ids, rows = all_gather(torch.stack((stored["ids"][has_row], stored["rows"][has_row]), 1), group=self.group).unbind(1)
        return ids, rows

    def grow(self, capacity: int) -> None:
        """Give the map more rows: `capacity` in all. Ids keep their rows. All ranks call, and need larger tables, too.

        Example:
            >>> id_map = IdMap(2)
            >>> id_map(torch.tensor([7, 8]))
            tensor([1, 0])
            >>> id_map.grow(3)
            >>> id_map(torch.tensor([7, 8]))
            tensor([1, 2])
        """
        if not isinstance(capacity, int) or capacity < self.capacity:
            raise ValueError(f"IdMap.grow: capacity={capacity!r} must be an integer, {self.capacity} or more, as it is now")
        candidates = capacity - 1 if self._all_candidates else self.options.candidates
        options = self.options._replace(capacity=capacity, candidates=candidates)
        _validate_size(options)
        self._slots.grow(self._number, options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options._asdict().items())

    def get_extra_state(self) -> dict[str, Tensor]:
        """For state_dict: what all slots hold, as tensors of shape (shards, slots). Nothing is communicated."""
        ranks = self._hold_shards_or_raise()
        slots, number = self._slots, self._number
        state = dict(slots.stored(number))
        if ranks.size > 1:
            mesh = DeviceMesh.from_group(process_group(ranks), state["ids"].device.type)
            shape = torch.Size((self.options.shards, self.options.width))
            for name, x in state.items():
                state[name] = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        numbers = {"call": torch.tensor(slots.calls[number]), "capacity": torch.tensor(self.capacity)}
        return state | {"taken": slots.taken_by(number).cpu()} | {name: x.cpu() for name, x in numbers.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """For load_state_dict: `state` has what all slots hold, or this rank's share of it as DTensors."""
        ranks = self._hold_shards_or_raise()
        slots, number = self._slots, self._number
        names = [*slots.stored(number), "taken", "call", "capacity"]
        function = "IdMap.load_state_dict"
        if set(state) != set(names):
            raise ValueError(f"{function}: expected {names}, got {list(state)}")
        capacity = int(state["capacity"])
        if capacity > self.capacity:
            raise ValueError(f"{function}: saved with {capacity=}, but this is {self}")
        # A saved map of smaller capacity may have had fewer candidates
        saved = self.options._replace(capacity=capacity)
        candidate_slots = state["ids"].shape[-1] - saved.row_slots
        saved = saved._replace(candidates=candidate_slots * saved.shards)
        fits = 0 <= candidate_slots <= self.options.width - self.options.row_slots
        fits = fits and (capacity < self.capacity or candidate_slots == self.options.width - self.options.row_slots)
        shape = (self.options.shards, saved.width if fits else self.options.width)
        for name in slots.stored(number):
            if tuple(state[name].shape) != shape or state[name].dtype != torch.int64:
                raise ValueError(f"{function}: {name}: expected int64{list(shape)} for {self}, got {describe(state[name])}")
        run = slots.runs[number]
        slots.fill(number, {name: _take_shards(state[name], run, ranks) for name in slots.stored(number)}, saved)
        slots.taken_by(number).copy_(state["taken"])
        slots.calls[number] = int(state["call"])

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        memo[id(self.group)] = self.group  # the same ranks; a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IdMap:
        """Move the slots with .to() and similar calls, as if they were buffers."""
        self._slots.apply(fn)
        self.reassigned = fn(self.reassigned)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _hold_shards_or_raise(self) -> GroupRanks:
        ranks = resolve_group(self.group)
        if error := self._slots.hold(ranks):
            raise ValueError(f"IdMap: {error}")
        return ranks


class IdMapCollection(nn.Module):
    """IdMaps that answer together, with one exchange for all of them: as many messages as one map needs.

    Args:
        maps: The maps by name. The collection takes over what they have stored; they remain usable one by one.
        features: From the name of each input to the name of its map, if several inputs share a map. By default each map has one
            input, which has its name. Inputs of one map count together, as if they were one batch.

    forward: takes a dict from feature to ids (a Tensor of any shape, or a Ragged) and returns a dict of rows in the same form,
    for an EmbeddingCollection. Some features may be missing, the same ones on all ranks. Each map gives the rows that it would
    give alone. In training mode maps admit ids; to freeze one map, call `collection.maps[name].eval()`.

    `reassigned`: for each map the rows that went from an old id to a new one in the last call, if it had ids there.

    Backward: none; rows are integers.

    Example:
        >>> maps = IdMapCollection({"user": IdMap(100), "word": IdMap(50)}, features={"user": "user", "title": "word"})
        >>> rows = maps({"user": torch.tensor([7, 10**18]), "title": Ragged.from_lists([[3, 4], [3]])})
        >>> rows["user"], rows["title"].values
        (tensor([1, 2]), tensor([1, 2, 1]))
    """

    def __init__(self, maps: Mapping[str, IdMap], features: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.features = {name: name for name in maps} if features is None else dict(features)
        _validate_maps(maps, self.features)
        self.maps = nn.ModuleDict(maps)
        if not maps:
            return
        given = list(maps.values())
        states = [m.get_extra_state() if m._slots.calls[0] else None for m in given]
        slots = IdSlots([m.options for m in given], given[0].reassigned.device)
        for number, (id_map, state) in enumerate(zip(given, states, strict=True)):
            id_map._slots, id_map._number = slots, number
            if state is not None:
                id_map.set_extra_state(state)

    @property
    def reassigned(self) -> dict[str, Tensor]:
        return {name: id_map.reassigned for name, id_map in self._maps().items()}

    @disable_compile
    def forward(self, features: Mapping[str, Ragged | Tensor]) -> dict[str, Ragged | Tensor]:
        maps = self._maps()
        error, known = "", {}
        if not isinstance(features, Mapping):
            error = f"features: expected a dict from feature to ids, got {type(features).__name__}"
        elif unknown := [name for name in features if name not in self.features]:
            error = f"features: {unknown[0]!r} is not one of {list(self.features)}"
        else:
            known = {name: features[name] for name in self.features if name in features}
        inputs = [(self.features[name], x.values if isinstance(x, Ragged) else x) for name, x in known.items()]
        rows = dict(zip(known, _map_ids(type(self).__name__, maps, inputs, error), strict=True))
        return {name: x._replace(values=rows[name]) if isinstance(x, Ragged) else rows[name] for name, x in features.items()}

    def _maps(self) -> dict[str, IdMap]:
        return {name: m for name, m in self.maps.items() if isinstance(m, IdMap)}


def _validate_size(options: MapOptions) -> None:
    if options.shards * options.width > MOST_SLOTS:
        sizes = f"capacity={options.capacity} with candidates={options.candidates}"
        raise ValueError(f"IdMap: {sizes} is more than {MOST_SLOTS} together")


def _validate_maps(maps: Mapping[str, IdMap], features: Mapping[str, str]) -> None:
    function = IdMapCollection.__name__
    if wrong := [name for name, m in maps.items() if not isinstance(m, IdMap)]:
        raise TypeError(f"{function}: maps[{wrong[0]!r}]: expected an IdMap, got {type(maps[wrong[0]]).__name__}")
    if taken := [name for name in maps if not name or "." in name or hasattr(nn.ModuleDict, name)]:
        raise ValueError(f"{function}: a map cannot be called {taken[0]!r}, since it is a key of a torch.nn.ModuleDict")
    if wrong := [name for name, m in maps.items() if len(m._slots.maps) > 1]:
        raise ValueError(f"{function}: maps[{wrong[0]!r}] is in a collection already")
    if len({id(m) for m in maps.values()}) < len(maps):
        raise ValueError(f"{function}: an IdMap is there twice; for several inputs of one map, use `features`")
    if len({(id(m.group), m.reassigned.device) for m in maps.values()}) > 1:
        raise ValueError(f"{function}: all maps must have the same group and device")
    if unknown := [name for name in features.values() if name not in maps]:
        raise ValueError(f"{function}: features: {unknown[0]!r} is not one of the maps {list(maps)}")


def _map_ids(function: str, maps: Mapping[str, IdMap], inputs: Sequence[tuple[str, Tensor]], error: str = "") -> list[Tensor]:
    """Return the rows of each input, given the name of its map. The maps share their slots. All ranks call."""
    first = next(iter(maps.values()))
    slots, ranks, device = first._slots, resolve_group(first.group), first.reassigned.device
    error = error or next((e for _, ids in inputs if (e := _input_error(ids, device))), "") or slots.hold(ranks)
    inputs = [] if error else inputs
    order = sorted(range(len(inputs)), key=lambda i: maps[inputs[i][0]]._number)
    used = {name: maps[name] for name in dict.fromkeys(inputs[i][0] for i in order)}
    flat = [inputs[i][1].reshape(-1) for i in order]
    lengths = [0] * len(slots.maps)
    for i, ids in zip(order, flat, strict=True):
        lengths[maps[inputs[i][0]]._number] += ids.numel()
    training = [False] * len(slots.maps)
    same = []
    for name, id_map in used.items():
        training[id_map._number] = id_map.training
        words = f"{id_map.extra_repr()}, training={id_map.training}, call {slots.calls[id_map._number]}"
        same.append(f"{name}: {words}" if name else words)
    together = torch.cat([ids.to(torch.int64) for ids in flat]) if flat else torch.empty(0, dtype=torch.int64, device=device)
    rows, reassigned = _exchange(function, slots, together, lengths, training, first.group, same="; ".join(same), problem=error)
    for id_map in maps.values():  # those without ids, too: what they reassigned in an earlier call is no longer news
        id_map.reassigned = reassigned[id_map._number]
    found = dict(zip(order, rows.split([ids.numel() for ids in flat]), strict=True))
    return [found[i].view(ids.shape) for i, (_, ids) in enumerate(inputs)]


def _input_error(ids: object, device: torch.device) -> str:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return f"ids: expected a Tensor of integers, got {describe(ids)}"
    return "" if ids.device == device else f"ids are on {ids.device}, the map on {device}; move one of them by .to()"


def _exchange(
    function: str,
    slots: IdSlots,
    ids: Tensor,
    lengths: Sequence[int],
    training: Sequence[bool],
    group: Group,
    *,
    same: str,
    problem: str,
) -> tuple[Tensor, list[Tensor]]:
    """Return the row of each id, and for each map the reassigned rows.

    `lengths`: how many of the ids belong to each map. `training`: which maps count and admit ids.
    """
    ranks = resolve_group(group)
    mine = distinct_ids(ids, lengths)
    parcels = _pack(slots, mine, ranks.size, with_counts=any(training))
    table = all_gather_metadata(function, mine.ids, 0, ranks, extra=parcels.sizes, same=same, problem=problem)
    theirs, order = mine, parcels.order
    if ranks.size > 1:
        receive = [row[2 + ranks.rank] for row in table]
        arrived = all_to_all_single(parcels.content, send_sizes=parcels.sizes, receive_sizes=receive, group=group)
        theirs, order, receive_ids = _unpack(arrived, receive, len(slots.maps))
    if any(training):
        slots.calls = [call + trains for call, trains in zip(slots.calls, training, strict=True)]
        sizes = slots.gathered_sizes
        rows, changed, maps, any_changed = slots.admit(theirs, training, lambda x: all_gather(x, sizes=sizes, group=group))
        if ranks.size > 1 and any_changed:
            changed, maps = all_gather(torch.stack((changed, maps), 1), group=group).unbind(1)
        reassigned = [changed[maps == number].sort().values for number in range(len(lengths))]
    else:
        rows = slots.look_up(theirs)
        reassigned = [rows.new_empty(0) for _ in lengths]
    if ranks.size > 1:
        rows = torch.empty_like(order).scatter_(0, order, rows.index_select(0, theirs.inverse))
        rows = all_to_all_single(rows, send_sizes=receive_ids, receive_sizes=parcels.ids, group=group)
        rows = torch.empty_like(rows).scatter_(0, parcels.order, rows)
    return rows.index_select(0, mine.inverse), reassigned


class _Parcels(NamedTuple):
    """What a rank sends: to each rank lines that say how many ids of each map follow, then lines of ids and their counts."""

    content: Tensor
    sizes: list[int]  # lines for each rank
    ids: list[int]  # ids for each rank
    order: Tensor  # which ids, in the order in which they are sent


def _pack(slots: IdSlots, mine: DistinctIds, world_size: int, *, with_counts: bool) -> _Parcels:
    maps, device = len(slots.maps), mine.ids.device
    if world_size == 1:
        return _Parcels(mine.ids, [mine.ids.numel()], [mine.ids.numel()], mine.ids)
    counts = (mine.maps * world_size + slots.owners(mine, world_size)).bincount(minlength=maps * world_size)
    counts = counts.view(maps, world_size)
    order = _transpose_parts(counts)
    content = mine.ids.index_select(0, order).unsqueeze(1)
    if with_counts:
        content = torch.stack((content.squeeze(1), mine.counts.index_select(0, order)), 1)
    head = -(-maps // content.shape[1])
    sent = counts.sum(0).tolist()
    heads = torch.zeros((world_size, head * content.shape[1]), dtype=torch.int64, device=device)
    heads[:, :maps] = counts.T
    pieces = zip(heads.view(world_size, head, -1).unbind(), content.split(sent), strict=True)
    return _Parcels(torch.cat([x for piece in pieces for x in piece]), [n + head for n in sent], sent, order)


def _unpack(arrived: Tensor, sizes: Sequence[int], maps: int) -> tuple[DistinctIds, Tensor, list[int]]:
    """Return the different ids that have arrived, in which order they are map by map, and how many came from each rank."""
    head = -(-maps // arrived.shape[1])
    parcels = arrived.split(list(sizes))
    counts = torch.stack([parcel[:head].reshape(-1)[:maps] for parcel in parcels])
    content = torch.cat([parcel[head:] for parcel in parcels])
    order = _transpose_parts(counts)
    content = content.index_select(0, order)
    how_often = content[:, 1] if content.shape[1] > 1 else None
    return distinct_ids(content[:, 0], counts.sum(0).tolist(), how_often), order, [size - head for size in sizes]


def _transpose_parts(lengths: Tensor) -> Tensor:
    """Say how to reorder the parts [a][b] of a tensor, which have these lengths, to [b][a].

    Example:
        >>> _transpose_parts(torch.tensor([[1, 2], [1, 0]]))
        tensor([0, 3, 1, 2])
    """
    ends = lengths.reshape(-1).cumsum(0).view(lengths.shape)
    starts, lengths = (ends - lengths).T.reshape(-1), lengths.T.reshape(-1)
    shift = starts - (lengths.cumsum(0) - lengths)
    moved = shift.repeat_interleave(lengths)
    return moved + torch.arange(moved.numel(), device=moved.device)


def _take_shards(x: Any, run: range, ranks: GroupRanks) -> Tensor:
    """The shards `run` of a whole tensor or a DTensor, which is gathered if it is divided in another way."""
    if isinstance(x, DTensor):
        if x.device_mesh.size() == ranks.size and tuple(x.placements) == (Shard(0),):
            return x.to_local()
        x = x.full_tensor()
    return x[run.start : run.stop]  # type: ignore[no-any-return]
