"""The files that users bring: which reader they need, and which pairs are held out for evaluation."""

import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import numpy as np
import torch

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.csv_pairs import CsvPairs
from unisono_models.clip.data.dataset import ClipDataset, Datasets, GalleryImages, GalleryItem, RetrievalTest
from unisono_models.clip.data.pairs import CaptionedPairs, SubsetPairs
from unisono_models.clip.data.parquet_pairs import ParquetPairs
from unisono_models.clip.data.tar_pairs import open_tars
from unisono_models.datasets import file_patterns
from unisono_models.datasets.file_patterns import Spec, check_same_files
from unisono_models.training.distributed.launch import Ranks, shard_range
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.randomness import uniform

TOKENIZER_CAPTIONS = 200_000  # enough to train a tokenizer on
_KINDS = {".tar": "tar", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")
_CHUNK = 1 << 16  # rows whose captions are in memory at a time


class FileDataset(ClipDataset):
    """The files at the path `config.source`, of which some concepts are held out for a test."""

    def build_datasets(self, *, size: int, seed: int, ranks: Ranks) -> Datasets:
        train, held_out = split_pairs(self._open(), self.config.held_out, seed)
        captions = SampledCaptions(train, TOKENIZER_CAPTIONS)
        return Datasets(
            train=train,
            captions=captions,
            captions_complete=len(captions) == len(train),
            tests={"held_out": RetrievalTest(held_out)},
            notes=train.notes,
        )

    def gallery(self, *, size: int, limit: int = 20_000) -> GalleryImages:
        stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in find_pair_files(self.config.source)[1]]
        columns = [self.config.image, self.config.caption, self.config.concept]
        return sample_gallery(self._open(), limit=limit, key=repr([columns, stamps]))

    def _open(self) -> CaptionedPairs:
        config = self.config
        return open_pairs(config.source, image=config.image, caption=config.caption, concept=config.concept)


def open_pairs(
    source: Spec,
    *,
    image: str | None = None,
    caption: str | None = None,
    concept: str | None = None,
    root: Path | None = None,
    cache: Path | None = None,
) -> CaptionedPairs:
    """Open webdataset tars, Hugging Face parquet, or CSV/TSV files of paths and captions. All ranks call it together.

    source: a file, a folder, a pattern (data/*.tar, data/{00000..00123}.tar, data/{a,b}.csv), or a list of these. If a folder
        has several kinds of files, tars are taken before parquet, and parquet before CSV: img2dataset puts tables without
        images next to its tars.
    image, caption, concept: names of columns, or of fields of the tars' .json. None: the usual names, and pairs with equal
        captions have the same concept.
    root, cache: see CsvPairs and open_tars.

    All ranks must see the same files. Damage is listed in `notes`, and in a warning on rank 0.

    Raises: ValueError that says what is wrong with the source; RanksError if it is wrong on some ranks only.

    Example:
        pairs = open_pairs("/data/cc3m/{00000..00331}.tar")
        train, held_out = split_pairs(pairs, 0.01, seed=0)
    """
    with raise_together("open_pairs"):
        kind, paths = find_pair_files(source)
    check_same_files(paths, source=source, what="open_pairs")
    pairs: CaptionedPairs
    if kind == "tar":
        pairs = open_tars(paths, caption=caption, concept=concept, cache=cache)
    else:
        reader = ParquetPairs if kind == "parquet" else CsvPairs
        with raise_together("open_pairs"):
            pairs = reader(paths, image=image, caption=caption, concept=concept, root=root)
    if pairs.notes and resolve_group(None).rank == 0:
        more = f"\n  and {len(pairs.notes) - 5} more" if len(pairs.notes) > 5 else ""
        warnings.warn(f"open_pairs: {source}:\n  " + "\n  ".join(pairs.notes[:5]) + more, stacklevel=2)
    return pairs


def find_pair_files(source: Spec) -> tuple[Literal["tar", "parquet", "csv"], list[Path]]:
    """Find the files of `source` and their kind. The files are sorted within each pattern.

    Raises: ValueError if there are none, or files of several kinds, or of several splits.
    """
    kind, paths = file_patterns.find_files(source, kinds=_KINDS, what="open_pairs")
    splits = {match[1] for path in paths if (match := _SPLIT.fullmatch(path.name))}
    if len(splits) > 1:
        raise ValueError(
            f"open_pairs: {source}: files of several splits ({', '.join(sorted(splits))}) would become one dataset: "
            f"choose one by a pattern, such as {paths[0].parent / min(splits)}-*.parquet"
        )
    return kind, paths  # type: ignore[return-value]


def split_pairs(pairs: CaptionedPairs, fraction: float, seed: int) -> tuple[SubsetPairs, SubsetPairs]:
    """Split the pairs into a part to train on, and about `fraction` of the concepts, with all their pairs, to hold out.

    The side of a concept depends on the concept and the seed alone: not on the number of ranks, nor on the other pairs. So
    when a dataset grows, what was held out stays held out. Equal images with different captions are not detected.

    All ranks call it together: each reads the captions of a share.

    Raises: ValueError if either part would be empty.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"split_pairs: fraction={fraction} must be between 0 and 1")
    ranks = resolve_group(None)
    share = shard_range(len(pairs), ranks.rank, ranks.size)
    held_out = torch.empty(len(share), dtype=torch.uint8)
    with raise_together("split_pairs: reading the captions"):
        for start in share[::_CHUNK]:
            stop = min(start + _CHUNK, share.stop)
            concepts = torch.from_numpy(pairs.concepts(range(start, stop)))
            held_out[start - share.start : stop - share.start] = uniform(seed, "split", 0, concepts) < fraction
    all_held_out = all_gather(held_out).numpy().astype(bool)
    parts = SubsetPairs(pairs, np.flatnonzero(~all_held_out)), SubsetPairs(pairs, np.flatnonzero(all_held_out))
    if not all(map(len, parts)):
        raise ValueError(
            f"split_pairs: fraction={fraction}, seed={seed}: {len(parts[1])} of {len(pairs)} pairs would be held out. "
            "There are too few concepts: choose another fraction or seed, or evaluate on data of its own"
        )
    return parts


def sample_gallery(pairs: CaptionedPairs, *, limit: int, key: str) -> GalleryImages:
    """Sample at most `limit` of the pairs evenly. Each pair is one item, named by its caption. `key`: see GalleryImages.

    Raises: ValueError if `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"sample_gallery: limit={limit} must be at least 1")
    indices = np.unique(np.linspace(0, len(pairs) - 1, min(limit, len(pairs))).astype(np.int64))

    def items(sampled: Sequence[int]) -> list[GalleryItem]:
        captions = pairs.captions([int(i) for i in indices[list(sampled)]])
        return [GalleryItem(caption, group) for group, caption in enumerate(captions)]

    return GalleryImages(SubsetPairs(pairs, indices), f"{key}, {len(pairs)} pairs, {limit}", items)


class SampledCaptions(Sequence[str]):
    """The captions of at most `most` pairs, evenly sampled: data often comes sorted, and its first pairs are alike.

    They are read at the first access, and kept. Only the rank that trains a tokenizer needs them, unless the text tower is
    frozen; if the run has a tokenizer already, no rank does.
    """

    def __init__(self, pairs: CaptionedPairs, most: int) -> None:
        self._pairs = pairs
        self._count = min(len(pairs), most)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._captions[index]

    @cached_property
    def _captions(self) -> list[str]:
        return self._pairs.captions([len(self._pairs) * i // self._count for i in range(self._count)])
