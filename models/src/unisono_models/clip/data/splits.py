"""A part of the pairs kept for evaluation, with no concept on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.pairs import CaptionedPairs, PairBatch
from unisono_models.clip.data.records import check_indices
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.randomness import uniform

_CHUNK = 1 << 16  # rows whose captions are in memory at a time


@dataclass(frozen=True, eq=False)
class SomePairs:
    """Some rows of other pairs. The `index` of what is read stays the place in the whole."""

    whole: CaptionedPairs
    rows: NDArray[np.int64]

    @property
    def notes(self) -> tuple[str, ...]:
        return self.whole.notes

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        return self.whole.read(self.places(indices), size)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return self.whole.captions(self.places(indices))

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self.whole.concepts(self.places(indices))

    def places(self, indices: Sequence[int]) -> list[int]:
        """Where in the whole the rows at `indices` are."""
        return [int(row) for row in self.rows[check_indices(indices, len(self))]]


def split_pairs(pairs: CaptionedPairs, fraction: float, seed: int) -> tuple[SomePairs, SomePairs]:
    """The pairs in two: the larger part to train on, and about `fraction` of the concepts, with all their pairs, held out.

    Which side a concept falls on depends on it and the seed alone: not on the number of ranks, nor on the other pairs, so a
    data set may grow and what was held out stays so. Pairs with the same picture but different captions are not noticed.

    For all ranks together: each reads the captions of a share.

    Raises: ValueError if either side would be empty.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"split_pairs: fraction={fraction} must lie between 0 and 1")
    ranks = resolve_group(None)
    first, last = (len(pairs) * r // ranks.size for r in (ranks.rank, ranks.rank + 1))
    held = torch.empty(last - first, dtype=torch.uint8)
    with raise_together("split_pairs: reading the captions"):
        for start in range(first, last, _CHUNK):
            stop = min(start + _CHUNK, last)
            concepts = torch.from_numpy(pairs.concepts(range(start, stop)))
            held[start - first : stop - first] = uniform(seed, "split", 0, concepts) < fraction
    everyones = all_gather(held).numpy().astype(bool)
    parts = SomePairs(pairs, np.flatnonzero(~everyones)), SomePairs(pairs, np.flatnonzero(everyones))
    if not all(map(len, parts)):
        raise ValueError(
            f"split_pairs: fraction={fraction}, seed={seed}: of {len(pairs)} pairs {len(parts[1])} would be held out. "
            "There are too few concepts: choose another fraction or seed, or bring data for evaluation of its own"
        )
    return parts
