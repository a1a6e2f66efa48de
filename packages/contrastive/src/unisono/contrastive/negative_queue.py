"""NegativeQueue: keys of earlier batches as more negatives, one queue for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_gather, all_to_all_single
from unisono.collectives.checking import describe
from unisono.collectives.groups import Ranks, process_group, resolve
from unisono.collectives.options import one_of
from unisono.collectives.sizes import balanced, exchange, lengths_of

Placement = Literal["sharded", "replicated"]


class NegativeQueue(nn.Module):
    """The `size` most recent keys of the global batches, first in, first out (MoCo, He et al. 2020).

    What it holds is what a queue in one process would hold that sees the whole batches, however they are split over ranks.
    placement="sharded": every rank stores about size / W keys. "replicated": every rank stores all of them.

    state_dict() depends neither on the number of ranks nor on the placement, and loads into a queue with others. Where the
    queue is sharded over several ranks it has DTensors, for torch.distributed.checkpoint; it loads whole tensors as well. A
    torch.save of one rank would have that rank's share only: take placement="replicated" for that.

    Backward: none; keys are constants.

    Example, with the keys of any number of ranks:
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
        one_of("NegativeQueue", "placement", placement, ("sharded", "replicated"))
        for name, value in (("size", size), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"NegativeQueue: {name}={value!r} must be a positive integer")
        self.size, self.width, self.placement, self.with_ids, self.group = size, width, placement, with_ids, group
        self._count = 0  # of keys ever; the n-th is in slot n % size
        self._slots = range(0)  # which this rank stores
        # Not buffers: DDP would overwrite every rank's share with that of rank 0.
        self._stored = {"keys": torch.empty(0, width, dtype=dtype)}
        if with_ids:
            self._stored["ids"] = torch.empty(0, dtype=torch.int64)

    def enqueue(self, keys: Tensor, ids: Tensor | None = None) -> None:
        """Add the global batch of `keys`, (rows, width), in rank order; the oldest go. All ranks call it, also without rows.

        ids: of the keys, if the queue is `with_ids`.
        """
        ranks = resolve(self.group)
        problem = self._complaint(keys, ids) or self._hold(ranks)
        facts = f"{self.extra_repr()}, {self._count} so far"
        sizes = lengths_of(exchange("NegativeQueue.enqueue", keys, 0, ranks, same=facts, problem=problem))
        dropped = max(0, sum(sizes) - self.size)  # the first keys of a batch larger than the queue would not stay
        kept = [min(max(end - dropped, 0), rows) for rows, end in zip(sizes, accumulate(sizes), strict=True)]
        slots = (self._count + dropped + torch.arange(sum(kept), device="cpu")) % self.size
        own = slots[(slots >= self._slots.start) & (slots < self._slots.stop)] - self._slots.start
        with torch.no_grad():
            for stored, x in zip(self._stored.values(), [keys] if ids is None else [keys, ids], strict=True):
                stored[own] = self._deliver(x[x.shape[0] - kept[ranks.rank] :].to(stored.dtype), slots, kept, ranks)
        self._count += sum(sizes)

    def negatives(self) -> Tensor:
        """A copy of this rank's share of the keys, (any number, width): those of all ranks are the queue's."""
        return self._share("keys")

    def negative_ids(self) -> Tensor:
        """Their ids, (the same number,)."""
        if not self.with_ids:
            raise ValueError("NegativeQueue.negative_ids: the queue was made with with_ids=False")
        return self._share("ids")

    def __len__(self) -> int:
        """The number of keys on all ranks together."""
        return min(self._count, self.size)

    def __bool__(self) -> bool:
        return True  # a module, also while it is empty

    def extra_repr(self) -> str:
        return f"size={self.size}, width={self.width}, placement={self.placement!r}, with_ids={self.with_ids}"

    def get_extra_state(self) -> dict[str, Tensor]:
        """For state_dict: all slots, and how many keys there have ever been. Nothing is communicated."""
        ranks, state = self._settle(), dict(self._stored)
        if self.placement == "sharded" and ranks.size > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard  # here: it takes seconds

            mesh = DeviceMesh.from_group(process_group(ranks), state["keys"].device.type)
            for name, x in state.items():
                shape = torch.Size((self.size, *x.shape[1:]))
                state[name] = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=x.stride())
        return state | {"count": torch.tensor(self._count, device="cpu")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """For load_state_dict: all slots, or this rank's share of them as a DTensor."""
        self._settle()
        call, shares = "NegativeQueue.load_state_dict", {}
        if set(state) != {*self._stored, "count"}:
            raise ValueError(f"{call}: expected {[*self._stored, 'count']}, got {list(state)}")
        for name, stored in self._stored.items():
            x, shape = state[name], (self.size, *stored.shape[1:])
            if tuple(x.shape) != shape:
                raise ValueError(f"{call}: {name}: expected shape {list(shape)}, got {describe(x)}")
            shares[name] = x.to_local() if hasattr(x, "to_local") else x[self._slots.start : self._slots.stop]
            if shares[name].shape != stored.shape:
                raise ValueError(f"{call}: {name} was sharded over other ranks: load it by torch.distributed.checkpoint")
        for name, share in shares.items():
            self._stored[name].copy_(share)
        self._count = int(state["count"])

    def __deepcopy__(self, memo: dict[int, Any]) -> NegativeQueue:
        memo[id(self.group)] = self.group  # the same ranks; a process group cannot be copied
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NegativeQueue:
        """For .to() and its kin, as if they were buffers."""
        self._stored = {name: fn(x) for name, x in self._stored.items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _complaint(self, keys: object, ids: object) -> str:
        if not isinstance(keys, Tensor) or keys.ndim != 2 or keys.shape[1] != self.width or not keys.is_floating_point():
            return f"keys: expected floating point keys of shape (rows, {self.width}), got {describe(keys)}"
        if self.with_ids and not (isinstance(ids, Tensor) and ids.shape == keys.shape[:1] and not ids.is_floating_point()):
            return f"ids: expected {keys.shape[0]} integers, one for each key (with_ids=True), got {describe(ids)}"
        if not self.with_ids and ids is not None:
            return f"ids: got {describe(ids)}, but the queue was made with with_ids=False"
        homes = {str(x.device) for x in (keys, ids, *self._stored.values()) if isinstance(x, Tensor)}
        return f"keys, ids and the queue are on {sorted(homes)}; move the queue by .to()" if len(homes) > 1 else ""

    def _step(self, ranks: Ranks) -> int:
        """Slots of each rank where they are sharded; the last ranks may have fewer, as in a DTensor."""
        return -(-self.size // ranks.size)

    def _hold(self, ranks: Ranks) -> str:
        """Have this rank's slots stored, now that the ranks are known; or say what is wrong."""
        slots = range(self.size)
        if self.placement == "sharded":
            slots = slots[ranks.rank * self._step(ranks) :][: self._step(ranks)]
        if slots == self._slots:
            return ""
        if self._count and self._slots != range(self.size):
            return f"it was filled on another number of ranks than {ranks.size}; make a new one and load its state_dict"
        with torch.inference_mode(False):  # made inside, it could not be changed outside
            for name, x in self._stored.items():
                part = x[slots.start : slots.stop] if self._count else x.new_zeros(len(slots), *x.shape[1:])
                self._stored[name] = part.clone()
        self._slots = slots
        return ""

    def _settle(self) -> Ranks:
        ranks = resolve(self.group)
        if problem := self._hold(ranks):
            raise ValueError(f"NegativeQueue: {problem}")
        return ranks

    def _share(self, name: str) -> Tensor:
        ranks = self._settle()
        filled = self._stored[name][: max(0, len(self) - self._slots.start)]
        if self.placement == "replicated":
            filled = filled.split_with_sizes(balanced(len(self), ranks.size))[ranks.rank]
        return filled.clone()

    def _deliver(self, x: Tensor, slots: Tensor, sizes: Sequence[int], ranks: Ranks) -> Tensor:
        """The rows of all ranks' `x` that this rank stores, in their order. `slots`: of all rows; `sizes`: each rank's."""
        if self.placement == "replicated":
            return all_gather(x, sizes=sizes, group=self.group)
        owners = slots // self._step(ranks)
        mine = owners.split_with_sizes(list(sizes))[ranks.rank]
        sources = torch.arange(ranks.size, device="cpu").repeat_interleave(torch.tensor(sizes, device="cpu"))
        send = mine.bincount(minlength=ranks.size).tolist()
        receive = sources[owners == ranks.rank].bincount(minlength=ranks.size).tolist()
        return all_to_all_single(x[mine.argsort(stable=True)], send_sizes=send, receive_sizes=receive, group=self.group)
