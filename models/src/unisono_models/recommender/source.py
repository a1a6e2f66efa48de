"""The data of a run, as the config says: what is trained on, and what is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.intervals import inside
from unisono_models.recommender.data.movielens import NOTE, PACKAGES, movielens_folder
from unisono_models.recommender.data.parts import MemoryPart, Part
from unisono_models.recommender.data.ratings import Ratings, read_ratings
from unisono_models.recommender.data.splits import split_groups, split_rows
from unisono_models.recommender.features import Feature, parse_features
from unisono_models.training.file_patterns import find_files
from unisono_models.training.ranks import Ranks
from unisono_models.training.skipped import Skip
from unisono_models.training.talk import together

KINDS = {".inter": "atomic", ".parquet": "parquet"} | dict.fromkeys((".tsv", ".txt", ".csv", ""), "criteo")


@dataclass(frozen=True)
class Source:
    """What there is to learn from and to be tested on."""

    features: tuple[Feature, ...]
    train: Part
    valid: Part
    test: Part
    mapped: bool = False
    """Whether ids have yet to get their rows, by a map that grows."""
    ratings: Ratings | None = None
    """All interactions, if they are in memory."""
    sample: Batch | None = None
    """Some rows for the planner of the tables to count in."""
    skipped: tuple[Skip, ...] = ()
    """Of what was read at once."""
    notes: tuple[str, ...] = ()
    """Licences, for the report."""

    @property
    def train_rows(self) -> Tensor:
        """Which of the ratings are trained on."""
        assert isinstance(self.train, MemoryPart)
        return self.train.numbers

    def rows_of(self, part: Part) -> Tensor:
        assert isinstance(part, MemoryPart)
        return part.numbers

    def __len__(self) -> int:
        return len(self.ratings) if self.ratings is not None else self.train.rows + self.valid.rows + self.test.rows


def open_source(config: DataConfig, *, seed: int, ranks: Ranks) -> Source:
    """Open the data on all ranks together. What fails on one fails on all."""
    with together("open_source"):
        kind = format_of(config)
    if kind == "atomic":
        with together("open_source"):
            return _open_ratings(config, seed, ranks)
    from unisono_models.recommender.streams import open_streams  # needs pyarrow for parquet

    return open_streams(config, kind, seed=seed, ranks=ranks)


def format_of(config: DataConfig) -> str:
    """What the files are: as the config says, or by their names."""
    if config.source in PACKAGES:
        return "atomic"
    return config.format if config.format != "auto" else find_files(config.source, kinds=KINDS, what="data.source")[0]


def _open_ratings(config: DataConfig, seed: int, ranks: Ranks) -> Source:
    features = parse_features(config.features)
    known = config.source in PACKAGES
    folder = movielens_folder(config.source) if known else Path(config.source)
    columns = {"user": config.user, "item": config.item, "value": config.label}
    ratings = read_ratings(folder, features, **columns, threshold=config.threshold)
    read = ratings.skipped
    ratings = ratings.keep(inside(ratings.values, config.keep).nonzero().squeeze(1))
    if not len(ratings):
        raise ValueError(f"data.keep={config.keep!r}: no interaction of {folder} is left")
    if config.split == "rows":
        parts = split_rows(len(ratings), config.parts, seed=config.split_seed)
    else:
        parts = split_groups(ratings.users, config.parts, seed=config.split_seed)
    train, valid, test = (MemoryPart(ratings, rows, batch=config.batch, seed=seed) for rows in parts)
    notes = (NOTE.format(PACKAGES[config.source][1]),) if known else ()
    sample = ratings.batch(torch.arange(min(len(ratings), config.batch)).tensor_split(ranks.size)[ranks.rank])
    return Source(ratings.features, train, valid, test, False, ratings, sample, read, notes)
