"""What training and evaluation ask of a part of the data, wherever it lies; and one that lies in memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from unisono_models.datasets.file_patterns import check_same_files, find_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import Chunks, StreamingDataset
from unisono_models.recommender.data.criteo import CriteoChunks, index_lines
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.data.movielens import NOTE, PACKAGES, movielens_folder
from unisono_models.recommender.data.parquet import ParquetChunks
from unisono_models.recommender.data.ratings import Ratings, Vocabulary, find_atomic_files, in_intervals, read_ratings
from unisono_models.recommender.data.splits import check_parts, split_chunks, split_groups, split_rows
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.sampler import StepSampler


class RowDataset(Protocol):
    """Rows of one global order, of which each rank takes a share. The batch of a step depends on the seed alone."""

    @property
    def rows(self) -> int: ...

    def size_of(self, step: int) -> int:
        """The number of rows of a step of training, over all ranks, bad ones included."""
        ...

    def batch(self, step: int, rank: int, size: int) -> Batch:
        """The rows of a step of training that belong to `rank` of `size`."""
        ...

    def scan(self, rank: int, size: int, rows: int = 8192) -> Iterator[Batch]:
        """The rows of `rank` of `size`, in order, in as many batches on every rank: a model communicates in each."""
        ...


class InMemoryDataset:
    """Some of the rows of Ratings, by number."""

    def __init__(self, ratings: Ratings, numbers: Tensor, *, batch: int, seed: int) -> None:
        self.ratings, self.numbers = ratings, numbers
        self._order = StepSampler(len(numbers), batch, seed) if len(numbers) else None

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def size_of(self, step: int) -> int:
        return len(self._order.at(step)) if self._order else 0

    def batch(self, step: int, rank: int, size: int) -> Batch:
        if self._order is None:
            raise ValueError("MemoryPart: there are no rows to learn from")
        return self.ratings.batch(self.numbers[self._order.share(step, rank, size)])

    def scan(self, rank: int, size: int, rows: int = 8192) -> Iterator[Batch]:
        for share in split_for_rank(len(self.numbers), rank, size, rows):
            yield self.ratings.batch(self.numbers[share])


def split_for_rank(count: int, rank: int, size: int, rows: int) -> list[Tensor]:
    """The places, out of `count`, that belong to `rank` of `size`, in as many pieces on every rank, of about `rows` at most.

    Example:
        >>> [len(piece) for piece in shares(10, 1, 2, 3)], [len(piece) for piece in shares(1, 1, 2, 3)]
        ([3, 2], [0])
    """
    mine = torch.arange(count).tensor_split(size)[rank]
    longest = math.ceil(count / size)
    return list(mine.tensor_split(max(1, math.ceil(longest / rows))))


Item = TypeVar("Item")


def prefetch(read: Callable[[int], Item], first: int, last: int) -> Iterator[tuple[Item, Item | None]]:
    """read(first) to read(last - 1), each with the one that follows, if any. A thread reads the next two.

    What `read` raises is raised in place of the item before.

    Example:
        >>> list(read_ahead(lambda step: step * step, 1, 4))
        [(1, 4), (4, 9), (9, None)]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:
        waiting = [thread.submit(read, step) for step in range(first, min(first + 2, last))]
        for step in range(first, last):
            now = waiting.pop(0).result()
            if step + 2 < last:
                waiting.append(thread.submit(read, step + 2))
            yield now, waiting[0].result() if waiting else None


KINDS = {".inter": "atomic", ".parquet": "parquet"} | dict.fromkeys((".tsv", ".txt", ".csv", ""), "criteo")


@dataclass(frozen=True)
class Datasets:
    """What there is to learn from and to be tested on."""

    features: tuple[Feature, ...]
    train: RowDataset
    valid: RowDataset
    test: RowDataset
    mapped: bool = False
    """Whether ids have yet to get their rows, by a map that grows."""
    ratings: Ratings | None = None
    """All interactions, if they are in memory."""
    sample: Batch | None = None
    """Some rows for the planner of the tables to count in."""
    notes: tuple[str, ...] = ()
    """Licences, and what is odd about the files."""

    @property
    def fingerprint(self) -> str:
        """Stands for what rows mean: a checkpoint is of use with the same only."""
        words = {} if self.ratings is None else {name: x.values for name, x in sorted(self.ratings.vocabularies.items())}
        rows = [part.rows for part in (self.train, self.valid, self.test)]
        text = json.dumps([words, rows, [(x.name, x.kind, x.rows) for x in self.features]])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def rows_of(self, part: RowDataset) -> Tensor:
        """Which of the ratings a part has."""
        assert isinstance(part, InMemoryDataset)
        return part.numbers


def build_datasets(
    config: DataConfig, *, seed: int, ranks: Ranks, vocabularies: Mapping[str, Vocabulary] | None = None
) -> Datasets:
    """Open the data on all ranks together. What fails on one fails on all.

    vocabularies: those of a trained model, whose rows the values of atomic files are to have.
    """
    with raise_together("open_source"):
        kind = format_of(config)
        features = parse_features(config.features)
        if config.label in {feature.name for feature in features}:
            raise ValueError(f"data.features: {config.label} is what is to be predicted (data.label)")
        if config.test and kind == "atomic":
            raise ValueError(
                f"data.test={config.test}: atomic files are split by data.parts; only streamed data has another test"
            )
    if kind == "atomic":
        return _open_ratings(config, features, seed, ranks, vocabularies)
    pass  # needs pyarrow for parquet

    return open_streams(config, kind, features, seed=seed, ranks=ranks)


def format_of(config: DataConfig) -> str:
    """What the files are: as the config says, or by their names."""
    if config.source in PACKAGES:
        return "atomic"
    return config.format if config.format != "auto" else find_files(config.source, kinds=KINDS, what="data.source")[0]


def _open_ratings(
    config: DataConfig,
    features: tuple[Feature, ...],
    seed: int,
    ranks: Ranks,
    vocabularies: Mapping[str, Vocabulary] | None,
) -> Datasets:
    paths: list[Path] = []
    with raise_together("open_source"):
        known = config.source in PACKAGES
        folder = movielens_folder(config.source) if known else Path(config.source)
        paths = list(find_atomic_files(folder).values())
    check_same_files(paths, source=config.source, what="data.source")
    with raise_together("open_source"):
        columns = {"user": config.user, "item": config.item, "value": config.label}
        ratings = read_ratings(folder, features, **columns, threshold=config.threshold, vocabularies=vocabularies)
        ratings = ratings.keep(in_intervals(ratings.values, config.keep).nonzero().squeeze(1))
        if not len(ratings):
            raise ValueError(f"data.keep={config.keep!r}: no interaction of {folder} is left")
        if config.split == "rows":
            parts = split_rows(len(ratings), config.parts, seed=config.split_seed)
        else:
            parts = split_groups(ratings.users, config.parts, seed=config.split_seed)
        train, valid, test = (InMemoryDataset(ratings, rows, batch=config.batch, seed=seed) for rows in parts)
    notes = (NOTE.format(PACKAGES[config.source][1]),) if known else ()
    sample = ratings.batch(torch.arange(min(len(ratings), config.batch)).tensor_split(ranks.size)[ranks.rank])
    return Datasets(ratings.features, train, valid, test, False, ratings, sample, notes)


FORMATS = {
    "parquet": {".parquet": "parquet"},
    "criteo": {".tsv": "text", ".txt": "text", ".csv": "text", "": "text"},
}


def open_streams(config: DataConfig, kind: str, features: Sequence[Feature], *, seed: int, ranks: Ranks) -> Datasets:
    """The data of a run whose rows stay on disk. All ranks call.

    Validation and test are blocks of rows held out at random; the test is `config.test` instead, if it is given.
    """
    features = tuple(f.settle("number" if kind == "criteo" and f.name.startswith("I") else "id") for f in features)
    with raise_together("open_source"):
        check_parts(config.parts)
        if config.parts[1] != config.parts[2] and not config.test:
            raise ValueError(f"data.parts={config.parts}: of streamed data, validation and test are parts of the same size")
    blocks = _open_blocks(config.source, kind, features, config, ranks)
    with raise_together("open_source"):
        train, valid, test = split_chunks(blocks, config.parts[1], config.split_seed)
    tested, chosen = blocks, (train, valid, test)
    if config.test:
        tested = _open_blocks(config.test, kind, features, config, ranks)
        chosen = (torch.cat([train, test]), valid, torch.arange(len(tested.sizes)))
    with raise_together("open_source"):
        parts = [
            StreamingDataset(x, which, features=features, ids=config.ids, batch=config.batch, seed=seed)
            for x, which in zip((blocks, blocks, tested), chosen, strict=True)
        ]
        mapped = config.ids == "mapped"
        sample = None if mapped else replace(parts[0].batch(0, ranks.rank, ranks.size), skipped=())
        notes = tuple(dict.fromkeys(note for x in (blocks, tested) for note in getattr(x, "notes", ())))
    return Datasets(features, parts[0], parts[1], parts[2], mapped=mapped, sample=sample, notes=notes)


def _open_blocks(source: str, kind: str, features: Sequence[Feature], config: DataConfig, ranks: Ranks) -> Chunks:
    paths: list[Path] = []
    with raise_together("open_source"):
        _, paths = find_files(source, kinds=FORMATS[kind], what="data.source")
    check_same_files(paths, source=source, what="data.source")
    if kind == "parquet":
        with raise_together("open_source"):
            return ParquetChunks(paths, features, label=config.label, rows_per_block=config.block)
    index = index_lines(paths, lines_per_block=config.block, ranks=ranks)
    with raise_together("open_source"):
        return CriteoChunks(paths, features, index=index)
