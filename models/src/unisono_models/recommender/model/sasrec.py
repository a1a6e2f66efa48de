"""SASRec: predicts the next item of a user from the items before it, by causal self-attention (Kang and McAuley 2018)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unisono.embedding import Ragged
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.batch import Ids
from unisono_models.recommender.model.tables import EmbeddingTables


class SASRec(nn.Module):
    """A transformer over the items of a user, in order of time. Its outputs lie in the space of the items' embeddings.

    forward: (rows, `config.length`, dim), the embeddings of items, to as many vectors for what comes next after each. They
    depend on the items before, so padding belongs at the end of a row.

    A layer for each width in `config.hidden`, that of its feed-forward part. One table serves inputs and outputs: the score
    of an item is the dot product of its embedding with the output. `config.items[0]` is the feature of the items.
    """

    def __init__(self, config: ModelConfig, tables: EmbeddingTables) -> None:
        super().__init__()
        self.config, self.tables = config, tables
        self.positions = nn.Parameter(torch.randn(config.length, config.dim) * config.init)
        self.input_norm = nn.LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(_make_layer(config, width) for width in config.hidden)

    def forward(self, vectors: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.input_norm(vectors + self.positions))
        mask = nn.Transformer.generate_square_subsequent_mask(self.config.length, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x

    def encode(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Compute the outputs after each item of sequences that stand end to end: (ids, dim), as the embeddings `vectors`.

        lengths: int64 (sequences,), at most `config.length` each.
        """
        length = self.config.length
        shift = torch.arange(len(lengths), device=lengths.device) * length - (lengths.cumsum(0) - lengths)
        places = shift.repeat_interleave(lengths, output_size=len(vectors))
        places = places + torch.arange(len(vectors), device=lengths.device)
        padded = vectors.new_zeros(len(lengths) * length, vectors.shape[1]).index_copy(0, places, vectors)
        outputs: Tensor = self(padded.view(len(lengths), length, vectors.shape[1]))
        return outputs.flatten(0, 1).index_select(0, places)

    def encode_users(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed users by their items so far, in order of time: (rows, dim). Only the last `config.length` items count.

        A user without items has a vector of zeros. All ranks call.
        """
        name, length = self.config.items[0], self.config.length
        items = ids[name]
        assert isinstance(items, Ragged)
        lengths = items.lengths().clamp(max=length)
        place = torch.arange(length, device=lengths.device)
        with_padding = torch.cat([items.values.new_zeros(1), items.values])
        taken = (items.offsets[1:] - lengths)[:, None] + 1 + place
        taken = torch.where(place < lengths[:, None], taken, 0)
        vectors = self.encode_items({name: with_padding[taken].flatten()}).unflatten(0, taken.shape)
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, self.config.dim)
        outputs: Tensor = self(vectors).gather(1, last).squeeze(1)
        return outputs * (lengths > 0)[:, None]

    def encode_items(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed items by their ids: (rows, dim). All ranks call."""
        name = self.config.items[0]
        vectors: Tensor = self.tables({name: ids[name]})[name]
        return vectors


def _make_layer(config: ModelConfig, width: int) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(config.dim, config.heads, width, config.dropout, activation="gelu", batch_first=True)
    layer.self_attn.dropout = 0.0  # no layer but a number, whose masks would depend on the rank: see replace_dropout
    return layer
