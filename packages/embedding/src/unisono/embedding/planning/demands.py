"""What a rank's batch asks of each table: counted in a sample, or expected from the number of ids in a bag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group, process_group, resolve_group, small_message_device
from unisono.embedding.ragged import Ragged, complain
from unisono.embedding.tables import Table


class Demand(NamedTuple):
    """Of one rank, of one table, in one step, over all features of the table."""

    ids: int
    bags: int
    unique: int  # different ids
    weighted: bool = False  # ids have weights
    learned: bool = False  # and the weights get gradients


def expect_demand(table: Table, batch_size: int) -> Demand:
    """With ids drawn evenly from all rows: no other distribution has as many different ones."""
    bags = batch_size * len(table.features)
    ids = bags * table.ids_per_bag
    return Demand(round(ids), bags, round(expect_unique(ids, table.rows)))


def expect_unique(ids: float, rows: int) -> float:
    """How many rows are hit by `ids` even draws from `rows`."""
    if rows <= 1:
        return min(rows, ids)
    return -rows * math.expm1(ids * math.log1p(-1 / rows))


def count_demands(
    tables: Sequence[Table], sample: Mapping[str, Ragged], *, batch_size: int, world_size: int, same: str, group: Group
) -> list[Demand] | None:
    """The mean over ranks of what their samples ask for, in a batch of `batch_size`; None: all samples are empty.

    The ranks of the group consult if there are `world_size` of them; otherwise this rank's sample stands for all.
    """
    ranks = resolve_group(group)
    together = ranks.size == world_size > 1
    problem = _complaint(tables, sample)
    if problem and not together:
        raise ValueError(f"plan_tables: {problem}")
    if together:
        rule = "All ranks must ask for a plan of the same tables with the same options; samples may differ."
        validate_across_ranks(
            "plan_tables",
            ranks,
            same=("plan_tables", same),
            numbers=(),
            words=lambda: f"plan_tables({same})",
            device=None,
            rule=rule,
            problem=problem,
        )
    numbers = _count(tables, sample, batch_size)
    if together:
        where = small_message_device(process_group(ranks), None)
        sums = all_reduce(torch.tensor(numbers, dtype=torch.int64, device=where), group=as_group(ranks))
        numbers = sums.tolist()
    counted, *rest = numbers
    if not counted:
        return None
    found = []
    for k in range(0, len(rest), 5):
        ids, bags, unique = ((2 * n + counted) // (2 * counted) for n in rest[k : k + 3])
        found.append(Demand(ids, bags, unique, bool(rest[k + 3]), bool(rest[k + 4])))
    return found


def _complaint(tables: Sequence[Table], sample: Mapping[str, Ragged]) -> str:
    for feature in (name for table in tables for name in table.features):
        if feature not in sample:
            return f"sample has no feature {feature!r}; it has {', '.join(sample) or 'none'}"
        if problem := complain(f"feature {feature!r} of the sample", sample[feature]):
            return problem
    return ""


def _count(tables: Sequence[Table], sample: Mapping[str, Ragged], batch_size: int) -> list[int]:
    """Whether there is anything to count, and five numbers for each table. A batch has as many bags as its longest feature."""
    longest = max((sample[name].offsets.numel() - 1 for table in tables for name in table.features), default=0)
    numbers = [int(longest > 0)]
    for table in tables:
        features = [sample[name] for name in table.features]
        scale = batch_size / max(longest, 1)
        ids = torch.cat([_wanted(table, bags.values) for bags in features])
        counts = torch.unique(ids, return_counts=True)[1].to("cpu", torch.float64)
        numbers += [
            round(ids.numel() * scale),
            round(sum(bags.offsets.numel() - 1 for bags in features) * scale),
            round(scale_unique(counts, scale, table.rows)),
            int(any(bags.weights is not None for bags in features)),
            int(any(bags.weights is not None and bags.weights.requires_grad for bags in features)),
        ]
    return numbers


def _wanted(table: Table, ids: Tensor) -> Tensor:
    """Padding is not looked up, unless it has to be renormalised or is an output of its own."""
    if table.padding_idx is None or table.mode is None or table.max_norm is not None:
        return ids.to(torch.int64)
    return ids[ids != table.padding_idx].to(torch.int64)


def scale_unique(counts: Tensor, scale: float, rows: int) -> float:
    """How many different ids a batch has that is `scale` times a sample in which they occur `counts` times.

    A smaller batch: the mean over all parts of the sample of that size. A larger one goes on growing as the sample did from
    its half to its whole (Heaps' law, which holds for frequencies by Zipf's), but never faster than the ids do.
    """
    unique, total = counts.numel(), float(counts.sum())
    if scale <= 1 or unique == 0:
        return _thin(counts, scale)
    exponent = math.log2(unique / _thin(counts, 0.5))
    grown: float = unique * scale**exponent
    return min(grown, unique + total * (scale - 1), max(rows, unique))


def _thin(counts: Tensor, share: float) -> float:
    """How many of the ids are left, on average, if only this share of all look-ups is."""
    return float((1 - (1 - share) ** counts).sum())
