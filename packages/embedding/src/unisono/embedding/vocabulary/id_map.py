"""IdMap: rows of an embedding table for ids that are not known beforehand, one map for all ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_gather, all_reduce, all_to_all_single
from unisono.collectives.autograd import disable_compile
from unisono.collectives.checks import describe
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata
from unisono.embedding.vocabulary.hash_table import MOST_SLOTS, distinct, divide
from unisono.embedding.vocabulary.slots import Eviction, Slots


def hash_strings(texts: Sequence[str]) -> Tensor:
    """An id for each text, int64 of shape (len(texts),): the same in every process, on every machine, for ever.

    It is the 8-byte BLAKE2b digest of the text in UTF-8, read as a signed little-endian number. Two texts have the same id
    with a probability of 2^-64; of 100 million texts, some two have with one of 0.03 %.

    Example:
        >>> from unisono.embedding.vocabulary.id_map import hash_strings
        >>> hash_strings(["user:17", "user:18"])
        tensor([ 575456571000080189, 1544471866406468602])
    """
    if isinstance(texts, str):
        raise TypeError(f"hash_strings: texts={texts!r} must be a sequence of texts, not a text")
    digests = [hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


class IdMap(nn.Module):
    """Gives each id a row of its own as ids turn up: a vocabulary that grows with the data.

    `rows = id_map(ids)`: ids of any integer dtype and shape, also none; rows of that shape, int64 in [0, capacity).
    **Row 0 is that of all unknown ids.** All ranks call together. In training mode the ids are counted and admitted; in
    eval mode they are looked up and nothing changes. What comes out depends neither on the number of ranks nor on how the
    batch is split over them.

    threshold: an id is admitted in the call in which its count, over all calls and ranks, reaches this.
    eviction: what happens when no row is free. None: new ids stay unknown. "least_recent": the id that was last seen the
    most calls ago makes room. "least_frequent": the id with the lowest count, of several the least recent. Ties go by row,
    the lower first. An id of the present call never makes room. One that has starts again from a count of 0.
    `id_map.reassigned`: the rows that went from an old id to a new one in the last call, sorted, the same on all ranks:
    reset them in the table and in the optimizer's state.
    candidates: how many ids that have not reached the threshold are remembered with their counts; by default as many as
    there are rows. For a new one the least recently seen is forgotten, and starts again from 0.
    shards: rows and candidates are divided over this many shards (at most one for each row), ids by their hash, and each
    rank stores a run of shards. Within a shard the id with the highest count is admitted first, of several the smallest,
    to the lowest free row. A shard may be full while others have room: with R rows each, some sqrt(R) of them may be left.
    So give a small map few shards. Ranks beyond their number take part but store nothing.

    state_dict() does not depend on the number of ranks either and loads on any other. On several ranks it has DTensors, for
    torch.distributed.checkpoint; it loads whole tensors as well. A torch.save of one rank would have that rank's share only.

    Memory: 48 bytes for each row and candidate, over all ranks. Communication: each rank's different ids once, in one
    exchange of sizes, one of ids and one of rows; with eviction, another of the reassigned rows.

    Example, with the ids of any number of ranks:
        >>> import torch
        >>> from unisono.embedding.vocabulary.id_map import IdMap
        >>> id_map = IdMap(capacity=100, shards=1, threshold=2)
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
        shards: int = 64,
        group: Group = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("capacity", capacity, 2), ("threshold", threshold, 1), ("shards", shards, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"IdMap: {name}={value!r} must be an integer, {least} or more")
        if eviction not in (None, "least_recent", "least_frequent"):
            raise ValueError(f"IdMap: eviction={eviction!r} is not one of None, 'least_recent', 'least_frequent'")
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1 or threshold == 1):
            raise ValueError(f"IdMap: {candidates=} must be a positive integer, and {threshold=} more than 1")
        self.capacity, self.threshold, self.eviction, self.group = capacity, threshold, eviction, group
        self.candidates = 0 if threshold == 1 else candidates or capacity - 1
        self.shards = min(shards, capacity - 1)
        self.reassigned = torch.empty(0, dtype=torch.int64, device=device)
        self._calls = 0  # in training mode
        # Not buffers: DDP would overwrite every rank's share with that of rank 0.
        self._slots = self._make_slots(range(0))
        if self.shards * self._slots.width > MOST_SLOTS:
            raise ValueError(f"IdMap: {capacity=} with candidates={self.candidates} is more than {MOST_SLOTS} together")

    @disable_compile
    def forward(self, ids: Tensor) -> Tensor:
        ranks = resolve_group(self.group)
        problem = self._complaint(ids) or self._hold(ranks)
        mine = distinct(torch.empty(0, dtype=torch.int64) if problem else ids.reshape(-1).to(torch.int64))
        owners = divide(mine.hashes, self.shards) // self._step(ranks)
        send = owners.bincount(minlength=ranks.size).tolist()
        facts = f"{self.extra_repr()}, training={self.training}, call {self._calls}"
        table = all_gather_metadata("IdMap", ids if problem else mine.ids, 0, ranks, extra=send, same=facts, problem=problem)
        receive = [row[2 + ranks.rank] for row in table]

        theirs = mine
        if ranks.size > 1:
            leaving = torch.stack((mine.ids, mine.counts), 1) if self.training else mine.ids.unsqueeze(1)
            arrived = all_to_all_single(leaving, send_sizes=send, receive_sizes=receive, group=self.group)
            theirs = distinct(arrived[:, 0], arrived[:, 1] if self.training else None)
        self.reassigned = mine.ids.new_empty(0)
        if self.training:
            self._calls += 1
            rows, self.reassigned = self._slots.admit(
                theirs, call=self._calls, threshold=self.threshold, eviction=self.eviction
            )
        else:
            rows = self._slots.look_up(theirs)
        if ranks.size > 1:
            rows = rows.index_select(0, theirs.inverse)
            rows = all_to_all_single(rows, send_sizes=receive, receive_sizes=send, group=self.group)
            if self.training and self.eviction:
                self.reassigned = all_gather(self.reassigned, group=self.group)
        return rows.index_select(0, mine.inverse).view(ids.shape)

    @disable_compile
    def count(self) -> int:
        """The number of ids that have a row, over all ranks. All of them call it, for it communicates."""
        self._settle()
        return int(all_reduce((self._slots.stored["counts"][:, : self._slots.in_rows] > 0).sum(), group=self.group))

    def extra_repr(self) -> str:
        return (
            f"capacity={self.capacity}, threshold={self.threshold}, eviction={self.eviction!r}, "
            f"candidates={self.candidates}, shards={self.shards}"
        )

    def get_extra_state(self) -> dict[str, Tensor]:
        """For state_dict: what is in all slots, (shards, slots) each. Nothing is communicated."""
        ranks, state = self._settle(), dict(self._slots.stored)
        if ranks.size > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard  # here: it takes seconds

            mesh = DeviceMesh.from_group(process_group(ranks), state["ids"].device.type)
            shape = torch.Size((self.shards, self._slots.width))
            for name, x in state.items():
                state[name] = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        return state | {"call": torch.tensor(self._calls, device="cpu"), "capacity": torch.tensor(self.capacity, device="cpu")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """For load_state_dict: what is in all slots, or this rank's share of it as a DTensor."""
        ranks, run, stored = self._settle(), self._slots.run, self._slots.stored
        call = "IdMap.load_state_dict"
        if set(state) != {*stored, "call", "capacity"}:
            raise ValueError(f"{call}: expected {[*stored, 'call', 'capacity']}, got {list(state)}")
        shape = (self.shards, self._slots.width)
        for name in stored:
            if tuple(state[name].shape) != shape or state[name].dtype != torch.int64:
                raise ValueError(f"{call}: {name}: expected int64{list(shape)} for {self}, got {describe(state[name])}")
        if int(state["capacity"]) != self.capacity:
            raise ValueError(f"{call}: saved with capacity={int(state['capacity'])}, but this is {self}")
        for name, x in stored.items():
            x.copy_(_share(state[name], run, ranks))
        self._calls = int(state["call"])
        self._slots.forget_index()

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        memo[id(self.group)] = self.group  # the same ranks; a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> IdMap:
        """For .to() and its kin, as if they were buffers."""
        self._slots.apply(fn)
        self.reassigned = fn(self.reassigned)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _complaint(self, ids: object) -> str:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            return f"ids: expected a Tensor of integers, got {describe(ids)}"
        home = self._slots.stored["ids"].device
        return "" if ids.device == home else f"ids are on {ids.device}, the map on {home}; move one of them by .to()"

    def _make_slots(self, run: range) -> Slots:
        device = self.reassigned.device
        return Slots(run, shards=self.shards, rows=self.capacity - 1, candidates=self.candidates, device=device)

    def _step(self, ranks: GroupRanks) -> int:
        """Shards of each rank; the last ranks may have fewer, as in a DTensor."""
        return -(-self.shards // ranks.size)

    def _hold(self, ranks: GroupRanks) -> str:
        """Have this rank's shards stored, now that the ranks are known; or say what is wrong."""
        run, before = range(self.shards)[ranks.rank * self._step(ranks) :][: self._step(ranks)], self._slots
        if run == before.run:
            return ""
        if self._calls and before.run != range(self.shards):
            return f"it was filled on another number of ranks than {ranks.size}; make a new one and load its state_dict"
        with torch.inference_mode(False):  # made inside, it could not be changed outside
            self._slots = self._make_slots(run)
            for name, x in self._slots.stored.items():
                if self._calls:
                    x.copy_(before.stored[name][run.start : run.stop])
        return ""

    def _settle(self) -> GroupRanks:
        ranks = resolve_group(self.group)
        if problem := self._hold(ranks):
            raise ValueError(f"IdMap: {problem}")
        return ranks


def _share(x: Any, run: range, ranks: GroupRanks) -> Tensor:
    """The shards `run` of a whole tensor or a DTensor, which is gathered where it is divided in another way."""
    if hasattr(x, "to_local"):
        from torch.distributed.tensor import Shard

        if x.device_mesh.size() == ranks.size and tuple(x.placements) == (Shard(0),):
            return x.to_local()  # type: ignore[no-any-return]
        x = x.full_tensor()
    return x[run.start : run.stop]  # type: ignore[no-any-return]
