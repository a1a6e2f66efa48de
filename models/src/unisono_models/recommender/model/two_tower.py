"""TwoTower: embeds users and items as vectors of one space, in which users are near to the items that they like."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.model.heads import make_mlp
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.training.errors import UserError


class TwoTower(nn.Module):
    """A tower for users and one for items: the sum of the embeddings of their features, and an MLP if `hidden` has layers.

    forward: a Batch to the vectors of its users and of its items, (rows, dim) each. All features are looked up together.
    """

    def __init__(self, config: ModelConfig, tables: EmbeddingTables) -> None:
        super().__init__()
        self.config, self.tables = config, tables
        known = {feature.name for feature in tables.features}
        for side, names in (("users", config.users), ("items", config.items)):
            if not names:
                raise UserError(f"--model.{side}: a tower needs at least one feature")
            if unknown := set(names) - known:
                missing = ", ".join(sorted(unknown))
                raise UserError(f"--model.{side}: {missing}: not among the features of ids (--data.features)")
        self.user = self._make_tower()
        self.item = self._make_tower()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def _make_tower(self) -> nn.Module:
        config = self.config
        if not config.hidden:
            return nn.Identity()
        return make_mlp(config.dim, config.hidden, dropout=config.dropout, input_dropout=config.input_dropout, out=config.dim)

    def forward(self, batch: Batch, *, frozen_tables: bool = False) -> tuple[Tensor, Tensor]:
        found = self.tables(self.look_ups(batch), frozen=frozen_tables)
        users = self._apply_tower(self.user, self.config.users, found)
        return users, self._apply_tower(self.item, self.config.items, found)

    def look_ups(self, batch: Batch) -> dict[str, Ids]:
        """The ids of a batch that are looked up in the tables."""
        return {name: batch.ids[name] for name in (*self.config.users, *self.config.items)}

    def encode_users(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed users by their features: (rows, dim). All ranks call."""
        names = self.config.users
        return self._apply_tower(self.user, names, self.tables({name: ids[name] for name in names}))

    def encode_items(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed items by their features: (rows, dim). All ranks call."""
        names = self.config.items
        return self._apply_tower(self.item, names, self.tables({name: ids[name] for name in names}))

    def _apply_tower(self, tower: nn.Module, names: Sequence[str], found: Mapping[str, Tensor]) -> Tensor:
        vectors = torch.stack([found[name] for name in names]).sum(0)
        vectors = tower(self.dropout(vectors))
        return F.normalize(vectors, dim=1) if self.config.cosine else vectors
