"""The datasets of a run: train, validation and test, as the config describes them."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from unisono_models.datasets.file_patterns import check_same_files, find_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data import movielens as movielens  # registers its datasets
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import Chunks, StreamingDataset
from unisono_models.recommender.data.criteo import CriteoChunks, index_lines
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.data.files import SUFFIXES, DatasetFiles, find_dataset_files
from unisono_models.recommender.data.parquet import ParquetChunks
from unisono_models.recommender.data.ratings import Ratings, Vocabulary, find_atomic_files, in_intervals, read_ratings
from unisono_models.recommender.data.splits import split_chunks, split_groups, split_rows, validate_parts
from unisono_models.training.distributed.launch import Ranks, shard_chunks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.sampler import StepSampler

Item = TypeVar("Item")


class RowDataset(Protocol):
    """Rows in one global order, of which each rank takes a share. The rows of a step depend on the seed alone."""

    @property
    def rows(self) -> int:
        """The rows of all ranks, bad ones included."""

    def size_of(self, step: int) -> int:
        """The number of rows of a training step, over all ranks, bad ones included."""

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Read the rows of a training step that belong to `rank`; there may be none.

        Raises: ValueError if the dataset has no rows at all.
        """

    def scan(self, rank: int, world_size: int, rows: int = 8192) -> Iterator[Batch]:
        """Read all rows of `rank` in order, `rows` at a time.

        Every rank gets the same number of batches, at least one, though some may be empty: models communicate in each.
        """


class InMemoryDataset:
    """A RowDataset of some rows of Ratings."""

    def __init__(self, ratings: Ratings, numbers: Tensor, *, batch: int, seed: int) -> None:
        self.ratings, self.numbers = ratings, numbers
        self._sampler = StepSampler(len(numbers), batch, seed) if len(numbers) else None

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def size_of(self, step: int) -> int:
        return len(self._sampler.at(step)) if self._sampler else 0

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        if self._sampler is None:
            raise ValueError("InMemoryDataset: there are no rows to learn from")
        return self.ratings.batch(self.numbers[self._sampler.share(step, rank, world_size)])

    def scan(self, rank: int, world_size: int, rows: int = 8192) -> Iterator[Batch]:
        for indices in split_for_rank(len(self.numbers), rank, world_size, rows):
            yield self.ratings.batch(self.numbers[indices])


@dataclass(frozen=True)
class Datasets:
    """What a run trains on, validates with and tests with."""

    features: tuple[Feature, ...]
    train: RowDataset
    valid: RowDataset
    test: RowDataset
    mapped: bool = False
    """Whether an IdMap has to give the ids their rows."""
    ratings: Ratings | None = None
    """All interactions, if they are in memory."""
    sample: Batch | None = None
    """Some rows from which the planner of the tables counts ids."""
    notes: tuple[str, ...] = ()
    """Licences, and warnings about the files."""

    @property
    def fingerprint(self) -> str:
        """A hash of what the ids and rows mean. A checkpoint can only be resumed with the same fingerprint."""
        words = {} if self.ratings is None else {name: x.values for name, x in sorted(self.ratings.vocabularies.items())}
        rows = [dataset.rows for dataset in (self.train, self.valid, self.test)]
        text = json.dumps([words, rows, [(x.name, x.kind, x.rows) for x in self.features]])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def rows_of(self, dataset: RowDataset) -> Tensor:
        """The rows of the ratings that a dataset in memory has."""
        assert isinstance(dataset, InMemoryDataset)
        return dataset.numbers


def build_datasets(
    config: DataConfig, *, seed: int, ranks: Ranks, vocabularies: Mapping[str, Vocabulary] | None = None
) -> Datasets:
    """Open the data that the config describes. All ranks call; an error on one rank is raised on all.

    Args:
        seed: Decides the order of training. The splits depend on `config.split_seed`.
        vocabularies: Those of a trained model, so that the values of atomic files get its rows.
    """
    with raise_together("build_datasets"):
        files = find_dataset_files(config.source, config.format)
        features = parse_features(config.features)
        if config.label in {feature.name for feature in features}:
            raise ValueError(f"data.features: {config.label} is the label that the model predicts (data.label)")
        if config.test and files.format == "atomic":
            raise ValueError(
                f"data.test={config.test}: atomic files are split by data.parts; only streamed data can have another test set"
            )
    if files.format == "atomic":
        return _build_in_memory(config, files, features, seed, ranks, vocabularies)
    return _build_streaming(config, files, features, seed, ranks)


def _build_in_memory(
    config: DataConfig,
    files: DatasetFiles,
    features: tuple[Feature, ...],
    seed: int,
    ranks: Ranks,
    vocabularies: Mapping[str, Vocabulary] | None,
) -> Datasets:
    source = Path(files.source)
    paths: list[Path] = []
    with raise_together("build_datasets"):
        paths = list(find_atomic_files(source).values())
    check_same_files(paths, source=config.source, what="data.source")
    with raise_together("build_datasets"):
        columns = {"user": config.user, "item": config.item, "value": config.label}
        ratings = read_ratings(source, features, **columns, threshold=config.threshold, vocabularies=vocabularies)
        ratings = ratings.select(in_intervals(ratings.values, config.keep).nonzero().squeeze(1))
        if not len(ratings):
            raise ValueError(f"data.keep={config.keep!r}: no interaction of {source} is left")
        if config.split == "rows":
            splits = split_rows(len(ratings), config.parts, seed=config.split_seed)
        else:
            splits = split_groups(ratings.users, config.parts, seed=config.split_seed)
        train, valid, test = (InMemoryDataset(ratings, rows, batch=config.batch, seed=seed) for rows in splits)
    share = ranks.shard(min(len(ratings), config.batch))
    sample = ratings.batch(torch.arange(share.start, share.stop))
    return Datasets(ratings.features, train, valid, test, ratings=ratings, sample=sample, notes=files.notes)


def _build_streaming(config: DataConfig, files: DatasetFiles, features: Sequence[Feature], seed: int, ranks: Ranks) -> Datasets:
    """Hold out chunks at random for validation and test. `config.test`, if given, is the test set instead."""
    criteo = files.format == "criteo"
    features = tuple(f.with_default_kind("number" if criteo and f.name.startswith("I") else "id") for f in features)
    with raise_together("build_datasets"):
        validate_parts(config.parts)
        if config.parts[1] != config.parts[2] and not config.test:
            raise ValueError(
                f"data.parts={config.parts}: validation and test have to be of the same size where data is streamed"
            )
    chunks = test_chunks = _open_chunks(files.source, files.format, features, config)
    with raise_together("build_datasets"):
        train, valid, test = split_chunks(chunks, config.parts[1], config.split_seed)
    if config.test:
        test_chunks = _open_chunks(config.test, files.format, features, config)
        train = torch.cat([train, test])
        test = torch.arange(len(test_chunks.sizes))

    def build(chunks: Chunks, chosen: Tensor) -> StreamingDataset:
        return StreamingDataset(chunks, chosen, features=features, ids=config.ids, batch=config.batch, seed=seed)

    with raise_together("build_datasets"):
        train_set, valid_set, test_set = build(chunks, train), build(chunks, valid), build(test_chunks, test)
        mapped = config.ids == "mapped"
        sample = None if mapped else replace(train_set.batch(0, ranks.rank, ranks.world_size), skipped=())
    notes = dict.fromkeys(note for x in (chunks, test_chunks) for note in getattr(x, "notes", ()))
    return Datasets(features, train_set, valid_set, test_set, mapped=mapped, sample=sample, notes=(*files.notes, *notes))


def _open_chunks(source: str, format: str, features: Sequence[Feature], config: DataConfig) -> Chunks:
    paths: list[Path] = []
    with raise_together("build_datasets"):
        _, paths = find_files(source, kinds=dict.fromkeys(SUFFIXES[format], format), what="data.source")
    check_same_files(paths, source=source, what="data.source")
    if format == "parquet":
        with raise_together("build_datasets"):
            return ParquetChunks(paths, features, label=config.label, rows_per_chunk=config.chunk_rows)
    index = index_lines(paths, lines_per_chunk=config.chunk_rows)
    with raise_together("build_datasets"):
        return CriteoChunks(paths, features, index=index)


def split_for_rank(count: int, rank: int, world_size: int, rows: int) -> list[Tensor]:
    """Divide `count` rows among ranks, and this rank's share into pieces of about `rows` at most: as many on every rank.

    Example:
        >>> [len(piece) for piece in split_for_rank(10, 1, 2, 3)], [len(piece) for piece in split_for_rank(1, 1, 2, 3)]
        ([3, 2], [0])
    """
    return [torch.arange(piece.start, piece.stop) for piece in shard_chunks(count, rank, world_size, rows)]


def prefetch(read: Callable[[int], Item], first: int, last: int) -> Generator[tuple[Item, Item | None], None, None]:
    """Yield read(first) to read(last - 1), each with its successor, if any. A thread reads the next two.

    An error of `read` is raised in place of the item before.

    Example:
        >>> list(prefetch(lambda step: step * step, 1, 4))
        [(1, 4), (4, 9), (9, None)]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        waiting = [thread.submit(read, step) for step in range(first, min(first + 2, last))]
        for step in range(first, last):
            now = waiting.pop(0).result()
            if step + 2 < last:
                waiting.append(thread.submit(read, step + 2))
            yield now, waiting[0].result() if waiting else None
