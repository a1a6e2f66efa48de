"""Bring the columns of all ranks to this rank: all at once (gather), or one rank's block after the other (ring).

`GatheredColumns` and `RingColumns` have one interface, and `exchange_columns` chooses one of them. Iterating gives pairs (start
of this rank's own columns in the block, or None; the tensors of the block). What this rank computes for columns of other ranks
returns to their owners: call `add` once per block and `total` after the last one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives import Group, Ring, all_gather, all_to_all_single, reduce_scatter
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import process_group, resolve_group

Exchange = Literal["auto", "gather", "ring"]
Combine: TypeAlias = Callable[[Tensor], Tensor]
"""Joins contributions that are stacked along a new first dimension."""

# The largest size of all ranks' columns plus their gradients for which exchange="auto" gathers. On CPUs the ring is as fast
# above it, because computing on a block takes longer than sending it. On accelerators each block costs launches, so the ring
# is for what does not fit: a share of the smallest memory of all ranks.
GATHER_BYTES = 48 * 2**20
GATHER_SHARE = 1 / 16
FAKE_MEMORY = 40 * 2**30  # of an accelerator that is simulated and has none
_budgets: WeakKeyDictionary[ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class GatheredColumns:
    """The columns of all ranks as one block: one collective, and memory that grows with the number of ranks.

    `gathered`: tensors that an earlier GatheredColumns has gathered already; only `tensors` are sent.
    """

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int], group: Group, gathered: Sequence[Tensor] = ()) -> None:
        self.sizes = tuple(sizes)
        self.group = group
        self.tensors = [*gathered, *(all_gather(x.detach(), sizes=sizes, group=group) for x in tensors)]
        self._partial: Tensor | None = None
        self._combine: Combine | None = None

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:
        yield sum(self.sizes[: resolve_group(self.group).rank]), self.tensors

    def add(self, partial: Tensor, combine: Combine | None = None) -> None:
        """Take the contribution to all columns, (columns, ...). None adds the contributions of the ranks up."""
        self._partial = partial
        self._combine = combine

    def total(self) -> Tensor:
        if self._partial is None:
            raise RuntimeError("GatheredColumns.total: call add() first")
        partial = self._partial
        self._partial = None
        if self._combine is None:
            return reduce_scatter(partial, sizes=self.sizes, group=self.group)
        ranks = resolve_group(self.group)
        own = self.sizes[ranks.rank]
        partials = all_to_all_single(partial, send_sizes=self.sizes, receive_sizes=(own,) * ranks.size, group=self.group)
        return self._combine(partials.view(ranks.size, own, *partials.shape[1:]))


class RingColumns(Ring):
    """The columns of one rank per block, while the next block is in flight: memory for two blocks on any number of ranks."""

    def __iter__(self) -> Iterator[tuple[int | None, list[Tensor]]]:  # type: ignore[override]
        for owner, tensors in super().__iter__():
            yield 0 if owner == self.ranks.rank else None, tensors

    def add(self, partial: Tensor, combine: Combine | None = None) -> None:  # type: ignore[override]
        if combine is None:
            super().add(partial)
        else:
            super().add(partial, lambda total, more: combine(torch.stack([total, more])))


Columns: TypeAlias = GatheredColumns | RingColumns


def exchange_columns(
    tensors: Sequence[Tensor], exchange: Exchange, sizes: Sequence[int], itemsize: int, group: Group
) -> Columns:
    """Start to bring the `tensors` of all ranks. "auto" decides by the size of the first, from values that all ranks share."""
    if exchange == "auto":
        features = tensors[0]
        gathered_bytes = 2 * sum(sizes) * features.shape[1] * itemsize
        exchange = "gather" if gathered_bytes <= gather_budget(features.device, group) else "ring"
    if exchange == "ring" or len(sizes) == 1:  # one rank sends nothing, and the ring makes no copy
        return RingColumns(tensors, sizes=sizes, group=group)
    return GatheredColumns(tensors, sizes, group)


def gather_budget(device: torch.device, group: Group) -> int:
    """The number of bytes up to which exchange="auto" gathers: the same on all ranks, which agree once for each group."""
    ranks = resolve_group(group)
    if device.type == "cpu" or ranks.size == 1:
        return GATHER_BYTES
    known = _budgets.setdefault(process_group(ranks), {})
    if device.type not in known:
        memory = _total_memory(device)
        table = validate_across_ranks(
            "exchange='auto'",
            ranks,
            same=device.type,
            numbers=[memory],
            words=lambda: f"features on {device.type}",
            device=device,
            rule="All ranks must have features on the same type of device.",
        )
        known[device.type] = int(min(row[0] for row in table) * GATHER_SHARE)
    return known[device.type]


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.device_count():
        return torch.cuda.get_device_properties(device).total_memory
    return FAKE_MEMORY
