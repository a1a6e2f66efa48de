"""A batch: some rows of the data, as models take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.features import Feature

Ids: TypeAlias = Tensor | Ragged


@dataclass(frozen=True)
class Batch:
    """Rows in the order asked for. Bad ones are left out, so there may be fewer than asked for, or none."""

    ids: dict[str, Ids]
    """By feature: int64 (rows,) of kind "id", bags of kind "ids"."""
    numbers: Tensor
    """float32 (rows, features of kind "number"), in the order of the features."""
    labels: Tensor
    """float32 (rows,), 0 or 1."""
    index: Tensor
    """int64 (rows,): the place in the whole data, which randomness goes by."""
    skipped: tuple[SkippedSample, ...] = ()
    """Those left out."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """On `device`, with numbers and labels of `dtype`."""
        ids = {name: move_ids(x, device) for name, x in self.ids.items()}
        numbers, labels = (x.to(device, dtype, non_blocking=True) for x in (self.numbers, self.labels))
        return Batch(ids, numbers, labels, self.index.to(device, non_blocking=True), self.skipped)

    @staticmethod
    def join(parts: Sequence[Batch]) -> Batch:
        """One after the other. At least one, all of the same features."""
        ids = {name: join_ids([part.ids[name] for part in parts]) for name in parts[0].ids}
        numbers, labels, index = (torch.cat([getattr(p, name) for p in parts]) for name in ("numbers", "labels", "index"))
        return Batch(ids, numbers, labels, index, tuple(skip for part in parts for skip in part.skipped))


@overload
def move_ids(ids: Tensor, device: torch.device) -> Tensor: ...
@overload
def move_ids(ids: Ragged, device: torch.device) -> Ragged: ...
def move_ids(ids: Ids, device: torch.device) -> Ids:
    if isinstance(ids, Ragged):
        values, offsets = (x.to(device, non_blocking=True) for x in (ids.values, ids.offsets))
        return ids._replace(values=values, offsets=offsets)
    return ids.to(device, non_blocking=True)


def join_ids(parts: Sequence[Ids]) -> Ids:
    """The ids of several batches, one after the other."""
    if not isinstance(parts[0], Ragged):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    bags = [part for part in parts if isinstance(part, Ragged)]
    return Ragged.from_lengths(torch.cat([bag.values for bag in bags]), torch.cat([bag.lengths() for bag in bags]))


def take_ids(ids: Ids, rows: Tensor) -> Ids:
    """The ids of some rows, in the order asked for.

    Example:
        >>> take_ids(Ragged.from_lists([[7, 8], [], [9]]), torch.tensor([2, 0]))
        Ragged(values=tensor([9, 7, 8]), offsets=tensor([0, 1, 3]), weights=None)
    """
    if not isinstance(ids, Ragged):
        return ids[rows]
    lengths = ids.lengths()[rows]
    taken = Ragged.from_lengths(ids.values[:0], lengths)
    ends = taken.offsets[1:]
    shift = (ids.offsets[rows] - (ends - lengths)).repeat_interleave(lengths)
    return taken._replace(values=ids.values[shift + torch.arange(len(shift), device=shift.device)])


def empty_batch(features: Sequence[Feature], *, skipped: Sequence[SkippedSample] = ()) -> Batch:
    """No rows, of these features.

    Example:
        >>> empty_batch([Feature("I1", "number"), Feature("C1")]).numbers.shape
        torch.Size([0, 1])
    """
    none = torch.empty(0, dtype=torch.int64)
    columns = sum(feature.kind == "number" for feature in features)
    return Batch(
        {f.name: Ragged.from_lengths(none, none) if f.kind == "ids" else none for f in features if f.kind != "number"},
        numbers=torch.empty(0, columns),
        labels=torch.empty(0),
        index=none,
        skipped=tuple(skipped),
    )
