"""Data that is streamed from disk: Criteo's click logs, and parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unisono_models.datasets.file_patterns import check_same_files, find_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.blocks import Blocks
from unisono_models.recommender.data.criteo import CriteoBlocks
from unisono_models.recommender.data.line_index import index_lines
from unisono_models.recommender.data.parquet import ParquetBlocks
from unisono_models.recommender.data.splits import check_parts
from unisono_models.recommender.data.stream import Stream, hold_out
from unisono_models.recommender.features import Feature
from unisono_models.recommender.source import Source
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together

FORMATS = {
    "parquet": {".parquet": "parquet"},
    "criteo": {".tsv": "text", ".txt": "text", ".csv": "text", "": "text"},
}


def open_streams(config: DataConfig, kind: str, features: Sequence[Feature], *, seed: int, ranks: Ranks) -> Source:
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
        train, valid, test = hold_out(blocks, config.parts[1], config.split_seed)
    tested, chosen = blocks, (train, valid, test)
    if config.test:
        tested = _open_blocks(config.test, kind, features, config, ranks)
        chosen = (torch.cat([train, test]), valid, torch.arange(len(tested.sizes)))
    with raise_together("open_source"):
        parts = [
            Stream(x, which, features=features, ids=config.ids, batch=config.batch, seed=seed)
            for x, which in zip((blocks, blocks, tested), chosen, strict=True)
        ]
        mapped = config.ids == "mapped"
        sample = None if mapped else replace(parts[0].batch(0, ranks.rank, ranks.size), skipped=())
        notes = tuple(dict.fromkeys(note for x in (blocks, tested) for note in getattr(x, "notes", ())))
    return Source(features, parts[0], parts[1], parts[2], mapped=mapped, sample=sample, notes=notes)


def _open_blocks(source: str, kind: str, features: Sequence[Feature], config: DataConfig, ranks: Ranks) -> Blocks:
    paths: list[Path] = []
    with raise_together("open_source"):
        _, paths = find_files(source, kinds=FORMATS[kind], what="data.source")
    check_same_files(paths, source=source, what="data.source")
    if kind == "parquet":
        with raise_together("open_source"):
            return ParquetBlocks(paths, features, label=config.label, rows_per_block=config.block)
    index = index_lines(paths, lines_per_block=config.block, ranks=ranks)
    with raise_together("open_source"):
        return CriteoBlocks(paths, features, index=index)
