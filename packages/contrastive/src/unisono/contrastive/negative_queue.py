"""NegativeQueue: keys of earlier batches as additional negatives, one queue for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_gather, all_to_all_single
from unisono.collectives.checks import describe, validate_choice
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.collectives.sizes import all_gather_metadata, even_sizes, metadata_lengths

Placement = Literal["sharded", "replicated"]


class NegativeQueue(nn.Module):
    """The `size` most recent keys of the global batches, first in, first out (MoCo, He et al. 2020).

    It holds the same keys as a queue in one process that sees the whole batches, for any split over ranks.
    placement="sharded" stores about size / W keys on each of the W ranks; "replicated" stores all keys on every rank.

    state_dict() depends neither on the number of ranks nor on the placement: it loads into a queue with other ranks or another
    placement. Over several ranks, a sharded queue saves DTensors, for torch.distributed.checkpoint; it also loads whole
    tensors. A torch.save on one rank would save that rank's share only: use placement="replicated" for that.

    Backward: none; keys are constants.

    Example, on any number of ranks:
        >>> import torch
        >>> from unisono.contrastive import NegativeQueue, clip_loss
        >>> queue, x = NegativeQueue(size=4, width=3), torch.eye(3)
        >>> for _ in range(2):
        ...     loss = clip_loss(x, x, 10.0, direction="x_to_y", negatives=queue.negatives())
        ...     queue.enqueue(x)
        >>> len(queue), loss
        (4, tensor(0.6932))
    """

    def __init__(
        self,
        size: int,
        width: int,
        *,
        placement: Placement = "sharded",
        with_ids: bool = False,
        dtype: torch.dtype = torch.float32,
        group: Group = None,
    ) -> None:
        super().__init__()
        validate_choice("NegativeQueue", "placement", placement, ("sharded", "replicated"))
        for name, value in (("size", size), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"NegativeQueue: {name}={value!r} must be a positive integer")
        self.size = size
        self.width = width
        self.placement = placement
        self.with_ids = with_ids
        self.group = group
        self._count = 0  # of all keys ever enqueued; key n is in slot n % size
        self._slots = range(0)  # the slots that this rank stores
        # These are no buffers, because DDP would overwrite every rank's share with that of rank 0.
        self._stored = {"keys": torch.empty(0, width, dtype=dtype)}
        if with_ids:
            self._stored["ids"] = torch.empty(0, dtype=torch.int64)

    def enqueue(self, keys: Tensor, ids: Tensor | None = None) -> None:
        """Add the `keys` of all ranks, (rows, width), in rank order; the oldest keys go. Ranks without rows must call it, too.

        ids: one integer per key; required if the queue was made with with_ids=True.
        """
        ranks = resolve_group(self.group)
        problem = self._inputs_error(keys, ids) or self._allocate(ranks)
        same = f"{self.extra_repr()}, {self._count} so far"
        sizes = metadata_lengths(all_gather_metadata("NegativeQueue.enqueue", keys, 0, ranks, same=same, problem=problem))
        dropped = max(0, sum(sizes) - self.size)  # the first keys of a batch that is larger than the queue
        kept = [min(max(end - dropped, 0), rows) for rows, end in zip(sizes, accumulate(sizes), strict=True)]
        slots = (self._count + dropped + torch.arange(sum(kept), device="cpu")) % self.size
        own = slots[(slots >= self._slots.start) & (slots < self._slots.stop)] - self._slots.start
        with torch.no_grad():
            batch = [keys] if ids is None else [keys, ids]
            for stored, x in zip(self._stored.values(), batch, strict=True):
                newest = x[x.shape[0] - kept[ranks.rank] :].to(stored.dtype)
                stored[own] = self._send_to_owners(newest, slots, kept, ranks)
        self._count += sum(sizes)

    def negatives(self) -> Tensor:
        """Return a copy of this rank's share of the keys, (any number, width). The shares of all ranks make up the queue."""
        return self._own_share("keys")

    def negative_ids(self) -> Tensor:
        """Return the ids of `negatives()`, (the same number,)."""
        if not self.with_ids:
            raise ValueError("NegativeQueue.negative_ids: the queue was made with with_ids=False")
        return self._own_share("ids")

    def __len__(self) -> int:
        """Return the number of keys on all ranks together."""
        return min(self._count, self.size)

    def __bool__(self) -> bool:
        return True  # an empty queue is still a module

    def extra_repr(self) -> str:
        return f"size={self.size}, width={self.width}, placement={self.placement!r}, with_ids={self.with_ids}"

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return all slots and the number of keys ever enqueued, for state_dict. Nothing is communicated."""
        ranks = self._resolve_ranks()
        state = dict(self._stored)
        if self.placement == "sharded" and ranks.size > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard  # imported here because it takes seconds

            mesh = DeviceMesh.from_group(process_group(ranks), state["keys"].device.type)
            for name, x in state.items():
                shape = torch.Size((self.size, *x.shape[1:]))
                state[name] = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=x.stride())
        return state | {"count": torch.tensor(self._count, device="cpu")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load all slots, or this rank's share of them as a DTensor, for load_state_dict."""
        self._resolve_ranks()
        call = "NegativeQueue.load_state_dict"
        shares = {}
        if set(state) != {*self._stored, "count"}:
            raise ValueError(f"{call}: expected {[*self._stored, 'count']}, got {list(state)}")
        for name, stored in self._stored.items():
            x = state[name]
            shape = (self.size, *stored.shape[1:])
            if tuple(x.shape) != shape:
                raise ValueError(f"{call}: {name}: expected shape {list(shape)}, got {describe(x)}")
            shares[name] = x.to_local() if hasattr(x, "to_local") else x[self._slots.start : self._slots.stop]
            if shares[name].shape != stored.shape:
                raise ValueError(f"{call}: {name} was sharded over other ranks: load it with torch.distributed.checkpoint")
        for name, share in shares.items():
            self._stored[name].copy_(share)
        self._count = int(state["count"])

    def __deepcopy__(self, memo: dict[int, Any]) -> NegativeQueue:
        memo[id(self.group)] = self.group  # a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NegativeQueue:
        """Move the keys and ids with .to() and similar methods, as if they were buffers."""
        self._stored = {name: fn(x) for name, x in self._stored.items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _inputs_error(self, keys: object, ids: object) -> str:
        if not isinstance(keys, Tensor) or keys.ndim != 2 or keys.shape[1] != self.width or not keys.is_floating_point():
            return f"keys: expected floating point keys of shape (rows, {self.width}), got {describe(keys)}"
        if self.with_ids and not (isinstance(ids, Tensor) and ids.shape == keys.shape[:1] and not ids.is_floating_point()):
            return f"ids: expected {keys.shape[0]} integers, one for each key (with_ids=True), got {describe(ids)}"
        if not self.with_ids and ids is not None:
            return f"ids: got {describe(ids)}, but the queue was made with with_ids=False"
        devices = {str(x.device) for x in (keys, ids, *self._stored.values()) if isinstance(x, Tensor)}
        return f"keys, ids and the queue are on {sorted(devices)}; move the queue with .to()" if len(devices) > 1 else ""

    def _slots_per_rank(self, ranks: GroupRanks) -> int:
        """The number of slots of each rank of a sharded queue; the last ranks may have fewer, as in a DTensor."""
        return -(-self.size // ranks.size)

    def _allocate(self, ranks: GroupRanks) -> str:
        """Allocate this rank's slots, now that the ranks are known. Return an error message, or ""."""
        slots = range(self.size)
        if self.placement == "sharded":
            slots = slots[ranks.rank * self._slots_per_rank(ranks) :][: self._slots_per_rank(ranks)]
        if slots == self._slots:
            return ""
        if self._count and self._slots != range(self.size):
            return f"the queue was filled on a number of ranks other than {ranks.size}; make a new one and load its state_dict"
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            for name, x in self._stored.items():
                part = x[slots.start : slots.stop] if self._count else x.new_zeros(len(slots), *x.shape[1:])
                self._stored[name] = part.clone()
        self._slots = slots
        return ""

    def _resolve_ranks(self) -> GroupRanks:
        ranks = resolve_group(self.group)
        if problem := self._allocate(ranks):
            raise ValueError(f"NegativeQueue: {problem}")
        return ranks

    def _own_share(self, name: str) -> Tensor:
        ranks = self._resolve_ranks()
        filled = self._stored[name][: max(0, len(self) - self._slots.start)]
        if self.placement == "replicated":
            filled = filled.split_with_sizes(even_sizes(len(self), ranks.size))[ranks.rank]
        return filled.clone()

    def _send_to_owners(self, x: Tensor, slots: Tensor, sizes: Sequence[int], ranks: GroupRanks) -> Tensor:
        """Return the rows of all ranks' `x` that this rank stores. `slots`: of all these rows; `sizes`: rows per rank."""
        if self.placement == "replicated":
            return all_gather(x, sizes=sizes, group=self.group)
        owners = slots // self._slots_per_rank(ranks)
        mine = owners.split_with_sizes(list(sizes))[ranks.rank]
        sources = torch.arange(ranks.size, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
        send = mine.bincount(minlength=ranks.size).tolist()
        receive = sources[owners == ranks.rank].bincount(minlength=ranks.size).tolist()
        return all_to_all_single(x[mine.argsort(stable=True)], send_sizes=send, receive_sizes=receive, group=self.group)
