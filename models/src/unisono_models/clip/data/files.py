"""The files that users bring: which reader they need, and which pairs are held out for evaluation."""

import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.csv_pairs import CsvPairs
from unisono_models.clip.data.dataset import ClipDataset, Datasets, GalleryImages, GalleryItem, RetrievalTest
from unisono_models.clip.data.folder_pairs import FolderPairs, list_images
from unisono_models.clip.data.pairs import CaptionedPairs, SubsetPairs
from unisono_models.clip.data.parquet_pairs import ParquetPairs
from unisono_models.clip.data.tar_pairs import open_tars
from unisono_models.datasets import file_patterns
from unisono_models.datasets.file_patterns import Spec, check_same_files
from unisono_models.training.distributed.launch import Ranks, shard_range
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import uniform

TOKENIZER_CAPTIONS = 200_000  # enough to train a tokenizer on
_KINDS = {".tar": "tar", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")
_CHUNK = 1 << 16  # rows whose captions are in memory at a time


class FileDataset(ClipDataset):
    """The files at the path `config.source`, of which some concepts are held out for a test."""

    def build_datasets(self, *, size: int, seed: int, ranks: Ranks) -> Datasets:
        pairs = self._open()
        chosen, whole_concepts = _choose_held_out(pairs, self.config.held_out, seed)
        train, held_out = _divide(pairs, chosen)
        self._held_out = held_out
        captions = SampledCaptions(train, TOKENIZER_CAPTIONS)
        share = f"{len(held_out):,} of the {len(pairs):,} pairs of {self.config.source}"
        about = "none of their captions was" if whole_concepts else "there are few different captions, so theirs were"
        return Datasets(
            train=train,
            captions=captions,
            captions_complete=len(captions) == len(train),
            tests={"held_out": RetrievalTest(held_out, description=f"{share}; {about} trained on")},
            notes=train.notes,
        )

    def choose_example_queries(self) -> tuple[str, ...]:
        """Choose captions that were not trained on."""
        with raise_together("FileDataset"):
            return choose_queries(self._held_out, 7)

    def gallery(self, *, size: int, limit: int = 20_000) -> GalleryImages:
        pairs = self._open()
        stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in find_pair_files(self.config.source)[1]]
        columns = [self.config.image, self.config.caption, self.config.concept]
        return sample_gallery(pairs, limit=limit, key=repr([columns, stamps]))

    def _open(self) -> CaptionedPairs:
        config = self.config
        if not config.source:
            raise UserError(
                "--data.source: say where your images and captions are: a folder, a CSV file, tars or parquet files"
            )
        root = None if config.root is None else Path(config.root).expanduser()
        return open_pairs(config.source, image=config.image, caption=config.caption, concept=config.concept, root=root)


def open_pairs(
    source: Spec,
    *,
    image: str | None = None,
    caption: str | None = None,
    concept: str | None = None,
    root: Path | None = None,
    cache: Path | None = None,
) -> CaptionedPairs:
    """Open webdataset tars, Hugging Face parquet, CSV/TSV files of paths and captions, or a folder of images.

    All ranks call it together.

    source: a file, a folder, a pattern (data/*.tar, data/{00000..00123}.tar, data/{a,b}.csv), or a list of these. If a folder
        has several kinds of files, tars are taken before parquet, and parquet before CSV: img2dataset puts tables without
        images next to its tars. A folder without these is a folder of images: see FolderPairs.
    image, caption, concept: names of columns, or of fields of the tars' .json. None: the usual names, and pairs with equal
        captions have the same concept.
    root, cache: see CsvPairs and open_tars.

    All ranks must see the same files. Damage is listed in `notes`, and in a warning on rank 0.

    Raises: UserError that says what is wrong with the source, and on which ranks.

    Example:
        pairs = open_pairs("/data/cc3m/{00000..00331}.tar")
        train, held_out = split_pairs(pairs, 0.01, seed=0)
    """
    with raise_together("open_pairs"):
        kind, paths = find_pair_files(source)
    check_same_files(paths, source=source, what="--data.source")
    pairs: CaptionedPairs
    if kind == "tar":
        pairs = open_tars(paths, caption=caption, concept=concept, cache=cache)
    elif kind == "images":
        with raise_together("open_pairs"):
            pairs = FolderPairs(paths, folder=Path(str(source)).expanduser())
    else:
        reader = ParquetPairs if kind == "parquet" else CsvPairs
        with raise_together("open_pairs"):
            pairs = reader(paths, image=image, caption=caption, concept=concept, root=root)
    if pairs.notes and resolve_group(None).rank == 0:
        more = f"\n  and {len(pairs.notes) - 5} more" if len(pairs.notes) > 5 else ""
        warnings.warn(f"open_pairs: {source}:\n  " + "\n  ".join(pairs.notes[:5]) + more, stacklevel=2)
    return pairs


def find_pair_files(source: Spec) -> tuple[Literal["tar", "parquet", "csv", "images"], list[Path]]:
    """Find the files of `source` and their kind. The files are sorted within each pattern.

    Raises: UserError if there are none, or files of several kinds, or of several splits.
    """
    try:
        kind, paths = file_patterns.find_files(source, kinds=_KINDS, what="--data.source")
    except UserError:
        folder = Path(str(source)).expanduser()
        images = list_images(folder) if folder.is_dir() else []
        if not images:
            raise
        return "images", images
    splits = {match[1] for path in paths if (match := _SPLIT.fullmatch(path.name))}
    if len(splits) > 1:
        raise UserError(
            f"--data.source {source}: files of several splits ({', '.join(sorted(splits))}) would become one dataset: "
            f"choose one by a pattern, such as {paths[0].parent / min(splits)}-*.parquet"
        )
    return kind, paths  # type: ignore[return-value]


def split_pairs(pairs: CaptionedPairs, fraction: float, seed: int) -> tuple[SubsetPairs, SubsetPairs]:
    """Split the pairs into a part to train on, and about `fraction` of the concepts, with all their pairs, to hold out.

    The side of a concept depends on the concept and the seed alone: not on the number of ranks, nor on the other pairs. So
    when a dataset grows, what was held out stays held out. Equal images with different captions are not detected. If there are
    so few concepts that a part would be empty, about `fraction` of the pairs is held out instead, of any concept.

    All ranks call it together: each reads the captions of a share.

    Raises: UserError if either part would be empty.
    """
    return _divide(pairs, _choose_held_out(pairs, fraction, seed)[0])


def _choose_held_out(pairs: CaptionedPairs, fraction: float, seed: int) -> tuple[NDArray[np.bool_], bool]:
    """Return whether each pair is held out, and whether whole concepts are."""
    if not 0 < fraction < 1:
        raise UserError(f"--data.held-out {fraction} must be between 0 and 1")
    ranks = resolve_group(None)
    share = shard_range(len(pairs), ranks.rank, ranks.size)
    by_concept = torch.empty(len(share), dtype=torch.uint8)
    with raise_together("split_pairs: reading the captions"):
        for start in share[::_CHUNK]:
            stop = min(start + _CHUNK, share.stop)
            concepts = torch.from_numpy(pairs.concepts(range(start, stop)))
            by_concept[start - share.start : stop - share.start] = uniform(seed, "split", 0, concepts) < fraction
    held_out = all_gather(by_concept).numpy().astype(bool)
    whole_concepts = held_out.any() and not held_out.all()
    if not whole_concepts:
        held_out = (uniform(seed, "split pairs", 0, torch.arange(len(pairs))) < fraction).numpy()
    if held_out.all() or not held_out.any():
        raise UserError(
            f"--data.held-out {fraction}: {int(held_out.sum())} of {len(pairs)} pairs would be held out. There are too few "
            "pairs: choose another fraction or --run.seed"
        )
    return held_out, bool(whole_concepts)


def _divide(pairs: CaptionedPairs, held_out: NDArray[np.bool_]) -> tuple[SubsetPairs, SubsetPairs]:
    return SubsetPairs(pairs, np.flatnonzero(~held_out)), SubsetPairs(pairs, np.flatnonzero(held_out))


def choose_queries(pairs: CaptionedPairs, count: int) -> tuple[str, ...]:
    """Choose up to `count` different captions of the pairs, short ones first, as examples of what one may search for."""
    sampled = [len(pairs) * i // min(len(pairs), 200) for i in range(min(len(pairs), 200))]
    captions = {caption.casefold(): caption for caption in pairs.captions(sampled) if caption}
    short = [caption for caption in captions.values() if len(caption) <= 48]
    return tuple((short or sorted(captions.values(), key=len))[:count])


def sample_gallery(pairs: CaptionedPairs, *, limit: int, key: str) -> GalleryImages:
    """Sample at most `limit` of the pairs evenly. Each pair is one item, named by its caption. `key`: see GalleryImages.

    Raises: ValueError if `limit` is less than 1.
    """
    if limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    indices = np.unique(np.linspace(0, len(pairs) - 1, min(limit, len(pairs))).astype(np.int64))

    def items(sampled: Sequence[int]) -> list[GalleryItem]:
        captions = pairs.captions([int(i) for i in indices[list(sampled)]])
        return [GalleryItem(caption, group) for group, caption in enumerate(captions)]

    chosen = SubsetPairs(pairs, indices)
    return GalleryImages(chosen, f"{key}, {len(pairs)} pairs, {limit}", items, examples=choose_queries(chosen, 7))


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
