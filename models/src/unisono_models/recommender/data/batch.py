"""A batch of rows, as models take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.features import Feature
from unisono_models.training.to_device import to_device

Ids: TypeAlias = Tensor | Ragged


@dataclass(frozen=True)
class Batch:
    """Rows in the requested order. Bad rows are left out, so a batch may be shorter than requested, or empty."""

    ids: dict[str, Ids]
    """By feature: int64 (rows,) for the kind "id", bags for the kind "ids"."""
    numbers: Tensor
    """float32 (rows, features of kind "number"), in the order of the features."""
    labels: Tensor
    """float32 (rows,), 0 or 1."""
    index: Tensor
    """int64 (rows,): the position of each row in the whole data. Dropout is drawn by it."""
    skipped: tuple[SkippedSample, ...] = ()
    """The bad rows that were left out."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """Move to `device`; convert numbers and labels to `dtype`."""
        return Batch(
            {name: move_ids(x, device) for name, x in self.ids.items()},
            to_device(self.numbers, device, dtype),
            to_device(self.labels, device, dtype),
            to_device(self.index, device),
            self.skipped,
        )

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """Concatenate at least one batch, all with the same features."""
        return Batch(
            {name: cat_ids([batch.ids[name] for batch in batches]) for name in batches[0].ids},
            torch.cat([batch.numbers for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat([batch.index for batch in batches]),
            tuple(skip for batch in batches for skip in batch.skipped),
        )


def empty_batch(features: Sequence[Feature], *, skipped: Sequence[SkippedSample] = ()) -> Batch:
    """Make a batch without rows.

    Example:
        >>> empty_batch([Feature("I1", "number"), Feature("C1")]).numbers.shape
        torch.Size([0, 1])
    """
    none = torch.empty(0, dtype=torch.int64)
    return Batch(
        {f.name: Ragged.from_lengths(none, none) if f.kind == "ids" else none for f in features if f.kind != "number"},
        numbers=torch.empty(0, sum(feature.kind == "number" for feature in features)),
        labels=torch.empty(0),
        index=none,
        skipped=tuple(skipped),
    )


@overload
def move_ids(ids: Tensor, device: torch.device) -> Tensor: ...
@overload
def move_ids(ids: Ragged, device: torch.device) -> Ragged: ...
def move_ids(ids: Ids, device: torch.device) -> Ids:
    if isinstance(ids, Ragged):
        values = to_device(ids.values, device)
        return ids._replace(values=values, offsets=to_device(ids.offsets, device))
    return to_device(ids, device)


def cat_ids(parts: Sequence[Ids]) -> Ids:
    if not isinstance(parts[0], Ragged):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    bags = [part for part in parts if isinstance(part, Ragged)]
    return Ragged.from_lengths(torch.cat([bag.values for bag in bags]), torch.cat([bag.lengths() for bag in bags]))


def take_ids(ids: Ids, rows: Tensor) -> Ids:
    """Select the ids of some rows, in the given order.

    Example:
        >>> take_ids(Ragged.from_lists([[7, 8], [], [9]]), torch.tensor([2, 0]))
        Ragged(values=tensor([9, 7, 8]), offsets=tensor([0, 1, 3]), weights=None)
    """
    if not isinstance(ids, Ragged):
        return ids[rows]
    return take_slices(ids, rows, torch.zeros_like(rows), ids.lengths()[rows])


def take_slices(bags: Ragged, rows: Tensor, starts: Tensor, lengths: Tensor) -> Ragged:
    """Select a slice of each of these bags: `lengths` ids from the place `starts` on.

    Example:
        >>> take_slices(Ragged.from_lists([[7, 8, 9], [6]]), torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([2, 1]))
        Ragged(values=tensor([8, 9, 6]), offsets=tensor([0, 2, 3]), weights=None)
    """
    taken = Ragged.from_lengths(bags.values[:0], lengths)
    shift = (bags.offsets[rows] + starts - taken.offsets[:-1]).repeat_interleave(lengths)
    return taken._replace(values=bags.values[shift + torch.arange(len(shift), device=shift.device)])
