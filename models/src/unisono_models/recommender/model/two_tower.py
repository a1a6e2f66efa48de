"""TwoTower: users and items as vectors of one space, in which what is liked is near."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.model.heads import make_mlp
from unisono_models.recommender.model.tables import EmbeddingTables


class TwoTower(nn.Module):
    """A tower for users and one for items: the embeddings of their features added up, and a perceptron if there are layers.

    forward: a Batch to (rows, dim) of users and as much of items. All features are looked up together.
    """

    def __init__(self, config: ModelConfig, tables: EmbeddingTables) -> None:
        super().__init__()
        self.config, self.tables = config, tables
        for side, names in (("users", config.users), ("items", config.items)):
            if not names or (unknown := set(names) - {feature.name for feature in tables.features}):
                raise ValueError(f"model.{side}: {sorted(unknown) if names else 'none'}: not among the features of ids")
        self.user, self.item = (
            make_mlp(config.dim, config.hidden, dropout=config.dropout, input_dropout=config.input_dropout, out=config.dim)
            if config.hidden
            else nn.Identity()
            for _ in range(2)
        )
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, batch: Batch, *, frozen_tables: bool = False) -> tuple[Tensor, Tensor]:
        found = self.tables(self.look_ups(batch), frozen=frozen_tables)
        return self._finish(self.user, self.config.users, found), self._finish(self.item, self.config.items, found)

    def look_ups(self, batch: Batch) -> dict[str, Ids]:
        """What is looked up in the tables for a batch."""
        return {name: batch.ids[name] for name in (*self.config.users, *self.config.items)}

    def encode_users(self, ids: Mapping[str, Ids]) -> Tensor:
        """Vectors of users by their features. All ranks call."""
        return self._finish(self.user, self.config.users, self.tables({name: ids[name] for name in self.config.users}))

    def encode_items(self, ids: Mapping[str, Ids]) -> Tensor:
        return self._finish(self.item, self.config.items, self.tables({name: ids[name] for name in self.config.items}))

    def _finish(self, tower: nn.Module, names: Sequence[str], found: Mapping[str, Tensor]) -> Tensor:
        vectors = torch.stack([found[name] for name in names]).sum(0)
        vectors = tower(self.dropout(vectors))
        return F.normalize(vectors, dim=1) if self.config.cosine else vectors
