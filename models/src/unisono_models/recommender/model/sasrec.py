"""SASRec: predicts the next item of a user from the items before it, by causal self-attention (Kang and McAuley 2018)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unisono.embedding import Ragged
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.batch import Ids, take_slices
from unisono_models.recommender.model.tables import EmbeddingTables


class SASRec(nn.Module):
    """A transformer over the items of a user, in order of time. Its outputs lie in the space of the items' embeddings.

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

    def encode(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Turn the embeddings of sequences into a vector for what comes next after each item: (ids, dim).

        Args:
            vectors: (ids, dim), one sequence after the other.
            lengths: int64 (sequences,), at most `config.length` each.
        """
        length, rows = self.config.length, max(len(lengths), 1)  # attention takes no empty batch: a row of zeros stands in
        starts = lengths.cumsum(0) - lengths
        shift = torch.arange(len(lengths), device=lengths.device) * length - starts
        places = torch.arange(len(vectors), device=vectors.device)
        places = places + shift.repeat_interleave(lengths, output_size=len(vectors))
        padded = vectors.new_zeros(rows * length, vectors.shape[1]).index_copy(0, places, vectors)
        x = self.dropout(self.input_norm(padded.view(rows, length, -1) + self.positions))
        # Padding stands at the end, where no item attends to it.
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        outputs: Tensor = x.flatten(0, 1).index_select(0, places)
        return outputs

    def encode_users(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed users by their items so far, in order of time: (rows, dim). Only the last `config.length` items count.

        A user without items has a vector of zeros. All ranks call.
        """
        items = ids[self.config.items[0]]
        assert isinstance(items, Ragged)
        left_out = (items.lengths() - self.config.length).clamp(min=0)
        lengths = items.lengths() - left_out
        recent = take_slices(items, torch.arange(len(lengths), device=lengths.device), left_out, lengths)
        outputs = self.encode(self.encode_items({self.config.items[0]: recent.values}), lengths)
        filled = (lengths > 0).nonzero().squeeze(1)
        return outputs.new_zeros(len(lengths), self.config.dim).index_copy(0, filled, outputs[recent.offsets[1:][filled] - 1])

    def encode_items(self, ids: Mapping[str, Ids]) -> Tensor:
        """Embed items by their ids: (rows, dim). All ranks call."""
        name = self.config.items[0]
        vectors: Tensor = self.tables({name: ids[name]})[name]
        return vectors


def _make_layer(config: ModelConfig, width: int) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(config.dim, config.heads, width, config.dropout, activation="gelu", batch_first=True)
    layer.self_attn.dropout = 0.0  # no layer but a number, whose masks would depend on the rank: see replace_dropout
    return layer
