"""ClickModel: predicts the probability that a user likes an item, from the features of both."""

import torch
from torch import Tensor, nn

from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.heads import HEADS, HeadInputs, HeadShape
from unisono_models.recommender.model.tables import EmbeddingTables


def table_width(config: ModelConfig) -> int:
    """The width of the tables: one row holds the linear weight of an id, or its vector, or both, for one look-up."""
    head = HEADS[config.kind]
    return config.dim * head.vectors + head.linear


class ClickModel(nn.Module):
    """Embedding tables and a head. forward: a Batch to (rows,) logits.

    For most heads a number is a field like an id: its value times a learned vector.
    """

    def __init__(self, config: ModelConfig, features: tuple[Feature, ...], tables: EmbeddingTables) -> None:
        super().__init__()
        self.config, self.features, self.tables = config, features, tables
        head = HEADS[config.kind]
        numbers = sum(feature.kind == "number" for feature in features)
        self.numbers = None
        if numbers and head.number_fields:
            self.numbers = nn.Parameter(torch.randn(numbers, table_width(config)) * config.init)
        fields = len(features) if head.number_fields else len(features) - numbers
        self.head = head(HeadShape(fields, config.dim, numbers, config))
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, batch: Batch, *, frozen_tables: bool = False) -> Tensor:
        return self.score(self.embed(batch, frozen_tables=frozen_tables), batch.numbers)

    def embed(self, batch: Batch, *, frozen_tables: bool = False) -> Tensor:
        """Look up the ids, and multiply numbers with their vectors: (rows, fields, table_width)."""
        fields = self.tables.stack(self.look_ups(batch), frozen=frozen_tables)
        if self.numbers is not None:
            fields = torch.cat([fields, batch.numbers[:, :, None] * self.numbers], 1)
        return fields

    def score(self, fields: Tensor, numbers: Tensor) -> Tensor:
        """Turn the output of `embed` into logits."""
        linear = HEADS[self.config.kind].linear
        vectors = fields[..., 1:] if linear else fields
        weights = fields[..., 0] if linear else fields.new_zeros(fields.shape[:2])
        logits: Tensor = self.head(HeadInputs(self.dropout(vectors), weights, numbers))
        return logits

    def look_ups(self, batch: Batch) -> dict[str, Ids]:
        """The ids of a batch that are looked up in the tables."""
        return batch.ids
