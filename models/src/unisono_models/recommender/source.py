"""The data of a run, as the config says: what is trained on, and what is tested on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unisono_models.datasets.file_patterns import check_same_files, find_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.intervals import inside
from unisono_models.recommender.data.movielens import NOTE, PACKAGES, movielens_folder
from unisono_models.recommender.data.parts import MemoryPart, Part
from unisono_models.recommender.data.rating_files import find_tables, read_ratings
from unisono_models.recommender.data.ratings import Ratings
from unisono_models.recommender.data.splits import split_groups, split_rows
from unisono_models.recommender.data.vocabulary import Vocabulary
from unisono_models.recommender.features import Feature, parse_features
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together

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
    notes: tuple[str, ...] = ()
    """Licences, and what is odd about the files."""

    @property
    def fingerprint(self) -> str:
        """Stands for what rows mean: a checkpoint is of use with the same only."""
        words = {} if self.ratings is None else {name: x.values for name, x in sorted(self.ratings.vocabularies.items())}
        rows = [part.rows for part in (self.train, self.valid, self.test)]
        text = json.dumps([words, rows, [(x.name, x.kind, x.rows) for x in self.features]])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def rows_of(self, part: Part) -> Tensor:
        """Which of the ratings a part has."""
        assert isinstance(part, MemoryPart)
        return part.numbers


def open_source(config: DataConfig, *, seed: int, ranks: Ranks, vocabularies: Mapping[str, Vocabulary] | None = None) -> Source:
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
    from unisono_models.recommender.streams import open_streams  # needs pyarrow for parquet

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
) -> Source:
    paths: list[Path] = []
    with raise_together("open_source"):
        known = config.source in PACKAGES
        folder = movielens_folder(config.source) if known else Path(config.source)
        paths = list(find_tables(folder).values())
    check_same_files(paths, source=config.source, what="data.source")
    with raise_together("open_source"):
        columns = {"user": config.user, "item": config.item, "value": config.label}
        ratings = read_ratings(folder, features, **columns, threshold=config.threshold, vocabularies=vocabularies)
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
    return Source(ratings.features, train, valid, test, False, ratings, sample, notes)
