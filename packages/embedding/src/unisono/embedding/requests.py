"""The asking rank's side of a step, before anything travels: which rows it needs, each once, and of whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.families import Address, Family
from unisono.embedding.grouping import Groups, group
from unisono.embedding.ragged import Ragged
from unisono.embedding.tables import Table


class Asking(NamedTuple):
    """One feature's ids, ready to be looked up."""

    feature: str
    table: int
    ids: Tensor
    lengths: Tensor  # of the bags; without pooling, not used
    weights: Tensor | None
    keep: Tensor | None  # which ids are pooled; None: all


@dataclass
class Request:
    """What this rank asks of one family."""

    family: Family
    rows: list[Asking]  # features that are answered by rows, each once, and pooled here
    bags: list[list[Asking]]  # for each stack, features that are answered by the sums of their bags
    groups: Groups  # of the keys of all ids of `rows`
    cuts: list[int]  # unique keys of stack i: from cuts[i] to cuts[i + 1]

    def answers(self, stack: int) -> int:
        """How many rows and sums come back from a stack."""
        return self.cuts[stack + 1] - self.cuts[stack] + sum(asking.lengths.numel() for asking in self.bags[stack])

    def counts(self, stack: int) -> tuple[int, int, int]:
        """Rows, ids in bags, and bags asked of a stack."""
        bags = self.bags[stack]
        ids, lengths = sum(a.ids.numel() for a in bags), sum(a.lengths.numel() for a in bags)
        return self.cuts[stack + 1] - self.cuts[stack], ids, lengths

    def stack_rows(self) -> Tensor:
        """The unique keys as rows of their stacks."""
        if len(self.cuts) == 2:
            return self.groups.unique
        bases = torch.tensor(self.family.bases[:-1], dtype=self.groups.unique.dtype, device=self.groups.unique.device)
        return self.groups.unique - bases.repeat_interleave(torch.tensor(self.cuts, device=bases.device).diff())

    @property
    def plain(self) -> bool:
        """Nothing but rows is asked for, and every rank holds one stack of whole rows, in the order of the ranks."""
        family = self.family
        return family.columns == 1 and not (family.replicated or family.kin.by_frequency or any(self.bags))

    @property
    def weighted(self) -> bool:
        return any(asking.weights is not None for stack in self.bags for asking in stack)


def make_request(family: Family, askings: Sequence[tuple[Asking, bool]], addresses: Sequence[Address]) -> Request:
    """`askings`: each with whether it may be answered by bags."""
    rows = [asking for asking, by_bags in askings if not by_bags]
    bags: list[list[Asking]] = [[] for _ in family.stacks]
    for asking, by_bags in askings:
        if by_bags:
            bags[family.starts[asking.table][0][0]].append(asking)
    bases = family.bases
    dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
    keys = [addresses[asking.table].keys(asking.ids, dtype) for asking in rows]
    device = askings[0][0].ids.device if askings else None
    groups = group(torch.cat(keys) if keys else torch.empty(0, dtype=dtype, device=device))
    if len(bases) == 2:
        cuts = [0, groups.unique.numel()]
    else:
        edges = torch.tensor(bases, dtype=dtype, device=groups.unique.device)
        cuts = torch.searchsorted(groups.unique, edges).tolist()
    return Request(family, rows, bags, groups, cuts)


def prepare(feature: str, number: int, table: Table, ragged: Ragged) -> Asking:
    """Padding taken out of the bags. A row that is only renormalised because it was looked up is still asked for."""
    ids, lengths, weights = ragged.values, ragged.lengths(), ragged.weights
    if table.padding_idx is None or table.mode is None:
        return Asking(feature, number, ids, lengths, weights, None)
    keep = ids != table.padding_idx
    if bool(keep.all()):
        return Asking(feature, number, ids, lengths, weights, None)
    kept = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    lengths = kept.index_select(0, ragged.offsets).diff()
    weights = None if weights is None else weights[keep]
    if table.max_norm is not None:
        return Asking(feature, number, ids, lengths, weights, keep)
    return Asking(feature, number, ids[keep], lengths, weights, None)


def complain_about_numbers(inputs: Sequence[tuple[str, Table, Ragged]]) -> str:
    """What is wrong with ids and offsets, or nothing: one look at the numbers of all features."""
    if not inputs:
        return ""
    ends = [
        x for _, _, (ids, _, _) in inputs for x in (ids.aminmax() if ids.numel() else (ids.new_tensor(0), ids.new_tensor(-1)))
    ]
    edges = [x for _, _, (_, offsets, _) in inputs for x in (offsets[0], offsets[-1])]
    falls = torch.cat([lengths for _, _, bags in inputs for lengths in (bags.lengths(),)]).lt(0).any()
    numbers: list[int] = torch.stack([x.to(torch.int64) for x in (*ends, *edges, falls)]).tolist()  # one wait on a GPU
    count = len(inputs)
    for k, (feature, table, (ids, offsets, _)) in enumerate(inputs):
        low, high, first, last = *numbers[2 * k : 2 * k + 2], *numbers[2 * (count + k) : 2 * (count + k) + 2]
        fall = bool(numbers[-1]) and bool((offsets.diff() < 0).any())
        if first != 0 or last != ids.numel() or fall:
            return (
                f"feature {feature!r}: offsets must rise from 0 to the number of ids, {ids.numel()}; "
                f"they go from {first} to {last}{' and fall between' if fall else ''}"
            )
        if low < 0 or high >= table.rows:
            bad = low if low < 0 else high
            where = int((ids == bad).nonzero()[0])
            return (
                f"id {bad} at position {where} of feature {feature!r} is out of range: "
                f"table {table.name!r} has {table.rows} rows, 0 to {table.rows - 1}"
            )
    return ""
