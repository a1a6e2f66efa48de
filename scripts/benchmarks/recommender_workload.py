"""What every contender of the benchmark of the recommender is given: rows of clicks, first weights, rates."""

from __future__ import annotations

from typing import Literal

import torch
from embedding_workload import BATCHES, DIM, POOLINGS, TABLES, Popularity, Setting, feature
from torch import Tensor

from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.heads import DLRM, HeadShape

Case = Literal["one id", "bags"]
CASES: dict[Case, tuple[int, ...]] = {"one id": (1,) * TABLES, "bags": POOLINGS}

NUMBERS = 13
CLICKS = 0.25  # of the rows
DENSE_LR = 1e-3
WIDTH = DIM - DLRM.linear  # of the vectors: a row of a table has the weight of a linear term besides, if the head has such
MODEL = ModelConfig(kind="dlrm", dim=WIDTH, bottom=(512, 256), hidden=(512, 256), dropout=0.0, input_dropout=0.0)
TINY = Setting(batch=16, divisor=1000)


class Workload:
    """The batches of some ranks, one after the other: `ids[step][table]`, and for each step `numbers` and `labels`.

    `setting` says what one rank is given; that of the workload, what all of these are.
    """

    def __init__(self, setting: Setting, ranks: range) -> None:
        self.setting = setting._replace(batch=setting.batch * len(ranks))
        self.ids: list[list[Tensor]] = [[] for _ in range(BATCHES)]
        for table in range(TABLES):
            draw = Popularity(setting, table)
            for step, tables in enumerate(self.ids):
                tables.append(torch.cat([draw.ids(step, rank) for rank in ranks]))
        self.numbers, self.labels = [], []
        for step in range(BATCHES):
            generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
            self.numbers.append(torch.cat([torch.randn(setting.batch, NUMBERS, generator=g) for g in generators]))
            self.labels.append(torch.cat([(torch.rand(setting.batch, generator=g) < CLICKS).float() for g in generators]))

    @property
    def has_bags(self) -> bool:
        return set(self.setting.poolings) != {1}

    def features(self) -> tuple[Feature, ...]:
        """As the recommender declares them."""
        ids = [Feature(feature(t), "ids" if self.has_bags else "id", rows) for t, rows in enumerate(self.setting.rows)]
        return (*ids, *(Feature(f"n{number}", "number") for number in range(NUMBERS)))

    def unique_ids(self) -> int:
        return round(sum(len(ids.unique()) for tables in self.ids for ids in tables) / BATCHES)


def make_head() -> DLRM:
    """The dense part: the same first weights on every rank and for every contender."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DLRM(HeadShape(TABLES, WIDTH, NUMBERS, MODEL))


def dense_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=DENSE_LR, weight_decay=0.0)
