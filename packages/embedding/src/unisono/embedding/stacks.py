"""A rank's memory of one family: the shards of its tables, one below the other, and the state of their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.collectives import all_gather, all_to_all_single
from unisono.collectives.groups import GroupRanks, as_group
from unisono.embedding.families import Family, Shard


@dataclass
class Stack:
    family: Family
    number: int  # of the family's stacks
    column: int
    weight: Tensor  # (rows, width)
    state: dict[str, Tensor] = field(default_factory=dict)  # of a fused optimizer

    @property
    def shards(self) -> list[Shard]:
        return self.family.stacks[self.number]

    def view(self, shard: Shard, of: Tensor | None = None) -> Tensor:
        """A shard's part of the weight, or of a tensor of state."""
        return (self.weight if of is None else of).narrow(0, shard.start, shard.box.shape[0])

    def paddings(self) -> Tensor | None:
        rows = self.family.paddings[self.number]
        return torch.tensor(rows, device=self.weight.device) if rows else None


def sum_columns(partial: Tensor, family: Family, ranks: GroupRanks, *, largest: bool = False) -> Tensor:
    """The sum (or the largest) over the columns of a stack, on the rank of each: the same bits everywhere. All ranks call.

    Columns of a stack are asked for the same rows, so their ranks hold equally many numbers here.
    """
    place = family.place(ranks.rank)
    peers = family.kin.ranks[place[0]] if place is not None else ()
    sizes = [len(partial) if rank in peers else 0 for rank in range(ranks.size)]
    copies = torch.cat([partial] * len(peers)) if peers else partial[:0]
    parts = all_to_all_single(copies, send_sizes=sizes, receive_sizes=sizes, group=as_group(ranks)).split_with_sizes(sizes)
    total = torch.zeros_like(partial)
    for rank in peers:
        total = torch.maximum(total, parts[rank]) if largest else total + parts[rank]
    return total


def gather_copies(rows: Tensor, sums: Tensor | None, ranks: GroupRanks) -> tuple[Tensor, Tensor | None]:
    """Where every rank has a copy: what all ranks have for it, in rank order. All ranks of the group call."""
    group = as_group(ranks)
    return all_gather(rows, group=group), None if sums is None else all_gather(sums, group=group)


def renormalise(stack: Stack | None, rows: Tensor, family: Family, ranks: GroupRanks, dtype: torch.dtype) -> None:
    """Shorten the rows that are looked up to max_norm, in place, as torch.embedding_renorm_ does; columns share one norm."""
    assert family.kin.max_norm is not None
    if family.replicated and ranks.size > 1:
        rows, _ = gather_copies(rows, None, ranks)
    unique = torch.unique(rows)
    power = family.kin.norm_type
    if family.columns == 1:
        if stack is None:
            return
        found = stack.weight.index_select(0, unique)
        norms = torch.linalg.vector_norm(found, power, dim=1)
    else:
        found = rows.new_empty((0, 0), dtype=dtype) if stack is None else stack.weight.index_select(0, unique)
        norms = _norm_over_columns(found, power, family, ranks)
        if stack is None:
            return
    norms = norms.to(found.dtype).double()  # in torch's own steps, to the last bit: a maximum may hang on it
    limits = torch.full_like(norms, family.kin.max_norm)
    scales = torch.where(norms > limits, limits / (norms + 1e-7), 1.0).to(found.dtype)
    stack.weight.index_copy_(0, unique.to(torch.int64), found * scales[:, None])


def _norm_over_columns(found: Tensor, power: float, family: Family, ranks: GroupRanks) -> Tensor:
    values = found.to(torch.promote_types(found.dtype, torch.float32)).abs()
    if power == float("inf"):
        largest = values.amax(1) if values.shape[1] else values.new_zeros(len(values))
        return sum_columns(largest, family, ranks, largest=True)
    return sum_columns(values.pow(power).sum(1), family, ranks).pow(1 / power)


def split_by_shard(stack: Stack, rows: Tensor, sums: Tensor) -> Sequence[tuple[Shard, Tensor, Tensor]]:
    """Sorted rows of the stack and what belongs to them, shard by shard, numbered within it."""
    starts = [shard.start for shard in stack.shards]
    cuts = [*torch.searchsorted(rows, torch.tensor(starts, device=rows.device, dtype=rows.dtype)).tolist(), len(rows)]
    return [
        (shard, rows[cuts[k] : cuts[k + 1]] - shard.start, sums[cuts[k] : cuts[k + 1]]) for k, shard in enumerate(stack.shards)
    ]
