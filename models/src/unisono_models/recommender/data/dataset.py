"""The datasets of a run: train, validation and test, as the config describes them."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from unisono_models.datasets.file_patterns import check_same_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data import movielens as movielens  # registers its datasets
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import Chunks, StreamingDataset
from unisono_models.recommender.data.columns import RatingColumns, find_label, find_rating_columns
from unisono_models.recommender.data.criteo import CriteoChunks, index_lines
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.data.files import DatasetFiles, find_dataset_files, find_source_files
from unisono_models.recommender.data.parquet import ParquetChunks
from unisono_models.recommender.data.rating_table import read_column_names, read_rating_table
from unisono_models.recommender.data.ratings import (
    UNKNOWN,
    Ratings,
    Vocabulary,
    find_atomic_files,
    in_intervals,
    k_core,
    read_atomic,
    read_ratings,
)
from unisono_models.recommender.data.splits import (
    SplitIndices,
    leave_one_out,
    split_by_time,
    split_chunks,
    split_groups,
    split_rows,
    validate_parts,
)
from unisono_models.training.distributed.launch import Ranks, shard_chunks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.errors import UserError
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
    config: DataConfig = field(default_factory=DataConfig)
    """The config with what only the data could tell: the format, the columns, the features, the threshold."""
    left_out: int = 0
    """The number of good ratings that --data.keep leaves out."""
    outside_core: int = 0
    """The number of further ratings that --data.k-core leaves out."""

    @property
    def fingerprint(self) -> str:
        """A hash of what the ids and rows mean. A checkpoint can only be resumed with the same fingerprint."""
        words = {} if self.ratings is None else {name: x.values for name, x in sorted(self.ratings.vocabularies.items())}
        rows = [dataset.rows for dataset in (self.train, self.valid, self.test)]
        text = json.dumps([words, rows, [(x.name, x.kind, x.rows) for x in self.features]])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @property
    def place(self) -> str:
        """The word for where a row stands in its file."""
        return "row" if self.ratings is not None and self.ratings.path.suffix.lower() == ".parquet" else "line"

    @property
    def items(self) -> Tensor:
        """The items that can be ranked, by their rows in the vocabulary, ascending: those that have an interaction."""
        assert self.ratings is not None
        items: Tensor = self.ratings.items[self.ratings.items > UNKNOWN].unique()
        return items

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
        files = find_dataset_files(config)
        features = parse_features(config.features)
        if config.test and files.format in ("atomic", "ratings"):
            raise UserError(
                f"--data.test {config.test}: only click logs can have another test set. Ratings are split by --data.split"
            )
    config = replace(config, format=files.format)
    if files.format in ("atomic", "ratings"):
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
    source, atomic = Path(files.source), files.format == "atomic"
    paths: list[Path] = []
    with raise_together("build_datasets"):
        paths = list(find_atomic_files(source).values()) if atomic else find_source_files(files.source, files.format)
    check_same_files(paths, source=config.source, what="--data.source")
    with raise_together("build_datasets"):
        columns = _find_columns(config, paths[0])
        _check_label(columns.label, features)
        features = features or (Feature(columns.user), Feature(columns.item))
        needed = columns if _needs_time(config, columns) else replace(columns, timestamp="")
        if atomic:
            ratings = read_ratings(
                source,
                features,
                user=columns.user,
                item=columns.item,
                value=columns.label,
                time=needed.timestamp,
                vocabularies=vocabularies,
            )
        else:
            ratings = read_rating_table(paths, features, columns=needed, vocabularies=vocabularies)
        good = len(ratings)
        ratings = select_kept(ratings, config)
        kept = len(ratings)
        ratings = select_core(ratings, config)
        threshold = guess_threshold(ratings.values) if config.threshold is None else config.threshold
        ratings = ratings.with_threshold(threshold)
        train, valid, test = (InMemoryDataset(ratings, rows, batch=config.batch, seed=seed) for rows in _split(config, ratings))
    share = ranks.shard(min(len(ratings), config.batch))
    resolved = replace(
        config,
        user=columns.user,
        item=columns.item,
        label=columns.label,
        timestamp=columns.timestamp,
        threshold=threshold,
        features=tuple(f"{feature.name}:{feature.kind}" for feature in ratings.features),
    )
    return Datasets(
        ratings.features,
        train,
        valid,
        test,
        ratings=ratings,
        sample=ratings.batch(torch.arange(share.start, share.stop)),
        notes=files.notes,
        config=resolved,
        left_out=good - kept,
        outside_core=kept - len(ratings),
    )


def select_kept(ratings: Ratings, config: DataConfig) -> Ratings:
    """Keep the ratings that --data.keep names. Raises: UserError if there are none."""
    if not config.keep:
        return ratings
    rows = in_intervals(ratings.values, config.keep).nonzero().squeeze(1)
    if not len(rows):
        raise UserError(
            f"--data.keep {config.keep!r}: no interaction of {ratings.path} is left: all {len(ratings):,} are outside of it"
        )
    return ratings.select(rows)


def select_core(ratings: Ratings, config: DataConfig) -> Ratings:
    """Keep the ratings that --data.k-core leaves. Raises: UserError if there are none."""
    if not config.k_core:
        return ratings
    rows = k_core(ratings.users, ratings.items, config.k_core)
    if not len(rows):
        raise UserError(f"--data.k-core {config.k_core}: no user and no item of {ratings.path} has so many interactions")
    return ratings.select(rows)


def _find_columns(config: DataConfig, path: Path) -> RatingColumns:
    names = read_atomic(path, ()).names if config.format == "atomic" else read_column_names(path)
    return find_rating_columns(names, config, where=path.name)


def _check_label(label: str, features: Sequence[Feature]) -> None:
    if label in {feature.name for feature in features}:
        raise UserError(f"--data.features: {label} is the label that the model predicts (--data.label)")


def _needs_time(config: DataConfig, columns: RatingColumns) -> bool:
    if config.split == "time" and not columns.timestamp:
        raise UserError(
            "--data.split time: there is no column of times. Name it by --data.timestamp, or choose another --data.split"
        )
    return config.split in ("time", "leave_one_out")


def guess_threshold(values: Tensor) -> float:
    """The lowest rating above the mean of all ratings: 4 of MovieLens' 1 to 5, 1 of 0 and 1. If all are equal, that one.

    Example:
        >>> guess_threshold(torch.tensor([1.0, 3.0, 4.0, 5.0, 5.0]))
        4.0
    """
    distinct = values.unique()
    above = distinct[distinct > values.mean()]
    return float(above[0] if len(above) else distinct[-1])


def _split(config: DataConfig, ratings: Ratings) -> SplitIndices:
    if config.split == "time":
        assert ratings.times is not None
        return split_by_time(ratings.times, config.parts)
    if config.split == "leave_one_out":
        return leave_one_out(ratings.users, ratings.times, seed=config.split_seed)
    if config.split == "per_user":
        return split_groups(ratings.users, config.parts, seed=config.split_seed)
    return split_rows(len(ratings), config.parts, seed=config.split_seed)


def _build_streaming(config: DataConfig, files: DatasetFiles, features: Sequence[Feature], seed: int, ranks: Ranks) -> Datasets:
    """Hold out chunks at random for validation and test. `config.test`, if given, is the test set instead."""
    criteo = files.format == "criteo"
    features = tuple(f.with_default_kind("number" if criteo and f.name.startswith("I") else "id") for f in features)
    with raise_together("build_datasets"):
        validate_parts(config.parts)
        if config.parts[1] != config.parts[2] and not config.test:
            given = " ".join(f"{part:g}" for part in config.parts)
            raise UserError(f"--data.parts {given}: validation and test of click logs have to be of the same size")
    chunks, config = _open_chunks(files.source, features, config)
    test_chunks = chunks
    with raise_together("build_datasets"):
        train, valid, test = split_chunks(chunks, config.parts[1], config.split_seed)
    if config.test:
        test_chunks, _ = _open_chunks(config.test, features, config)
        train = torch.cat([train, test])
        test = torch.arange(len(test_chunks.sizes))

    def build(chunks: Chunks, chosen: Tensor) -> StreamingDataset:
        return StreamingDataset(chunks, chosen, features=features, ids=config.ids, batch=config.batch, seed=seed)

    with raise_together("build_datasets"):
        train_set, valid_set, test_set = build(chunks, train), build(chunks, valid), build(test_chunks, test)
        mapped = config.ids == "mapped"
        sample = None if mapped else replace(train_set.batch(0, ranks.rank, ranks.world_size), skipped=())
    notes = dict.fromkeys(note for x in (chunks, test_chunks) for note in getattr(x, "notes", ()))
    return Datasets(
        features, train_set, valid_set, test_set, mapped=mapped, sample=sample, notes=(*files.notes, *notes), config=config
    )


def _open_chunks(source: str, features: Sequence[Feature], config: DataConfig) -> tuple[Chunks, DataConfig]:
    """The chunks of click logs, and the config with the name of their label."""
    paths: list[Path] = []
    with raise_together("build_datasets"):
        paths = find_source_files(source, config.format)
    check_same_files(paths, source=source, what="--data.source")
    if config.format == "parquet":
        with raise_together("build_datasets"):
            config = replace(config, label=find_label(read_column_names(paths[0]), config, where=paths[0].name))
            _check_label(config.label, features)
            chunks = ParquetChunks(paths, features, label=config.label, rows_per_chunk=config.chunk_rows)
        return chunks, config
    index = index_lines(paths, lines_per_chunk=config.chunk_rows)
    with raise_together("build_datasets"):
        _check_label("label", features)
        return CriteoChunks(paths, features, index=index), config


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
