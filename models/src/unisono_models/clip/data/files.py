"""Which reader a data set needs: told from its files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.csv_pairs import TablePairs
from unisono_models.clip.data.pairs import CaptionedPairs, PairBatch, check_indices
from unisono_models.clip.data.parquet_pairs import ParquetPairs
from unisono_models.clip.data.tar_pairs import open_tars
from unisono_models.datasets import file_patterns
from unisono_models.datasets.file_patterns import Spec, check_same_files, expand_braces
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.randomness import uniform

__all__ = ["Spec", "expand_braces", "find_files", "open_pairs"]

_KINDS = {".tar": "tar", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")


def open_pairs(
    source: Spec,
    *,
    image: str | None = None,
    caption: str | None = None,
    concept: str | None = None,
    root: Path | None = None,
    cache: Path | None = None,
) -> CaptionedPairs:
    """The data set at `source`: webdataset tars, Hugging Face parquet, or CSV/TSV files of paths and captions.

    source: a file, a folder, a pattern (data/*.tar, data/{00000..00123}.tar, data/{a,b}.csv), or a list of such. In a folder
    tars count before parquet, and parquet before tables: img2dataset puts tables without pictures beside its tars.
    image, caption, concept: the columns, or the fields of the tars' .json. None: the usual names, and equal captions mean
    equal concepts.
    root, cache: see TablePairs and open_tars.

    For all ranks together. All of them must see the same files. What is damaged is said in `notes`, and in a warning on rank 0.

    Raises: ValueError (RanksError if not all ranks have it) that says what is wrong with the source.

    Example:
        pairs = open_pairs("/data/cc3m/{00000..00331}.tar")
        train, held_out = split_pairs(pairs, 0.01, seed=0)
    """
    with raise_together("open_pairs"):
        kind, paths = find_files(source)
    check_same_files(paths, source=source, what="open_pairs")
    pairs: CaptionedPairs
    if kind == "tar":
        pairs = open_tars(paths, caption=caption, concept=concept, cache=cache)
    else:
        reader = ParquetPairs if kind == "parquet" else TablePairs
        with raise_together("open_pairs"):
            pairs = reader(paths, image=image, caption=caption, concept=concept, root=root)
    if pairs.notes and resolve_group(None).rank == 0:
        more = f"\n  and {len(pairs.notes) - 5} more" if len(pairs.notes) > 5 else ""
        warnings.warn(f"open_pairs: {source}:\n  " + "\n  ".join(pairs.notes[:5]) + more, stacklevel=2)
    return pairs


def find_files(source: Spec) -> tuple[Literal["tar", "parquet", "csv"], list[Path]]:
    """What kind of data set `source` is, and its files, sorted within each pattern.

    Raises: ValueError if there are none, or of several kinds, or of several splits.
    """
    kind, paths = file_patterns.find_files(source, kinds=_KINDS, what="open_pairs")
    splits = {match[1] for path in paths if (match := _SPLIT.fullmatch(path.name))}
    if len(splits) > 1:
        raise ValueError(
            f"open_pairs: {source}: several splits ({', '.join(sorted(splits))}) would be one data set: "
            f"choose one by a pattern, such as {paths[0].parent / min(splits)}-*.parquet"
        )
    return kind, paths  # type: ignore[return-value]


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
