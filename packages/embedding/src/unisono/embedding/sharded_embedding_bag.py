"""torch.nn.EmbeddingBag with the table spread over the ranks."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.embedding.layouts import Layout
from unisono.embedding.one_table import NAME, OneTable, dense_options
from unisono.embedding.optimizers import Rule
from unisono.embedding.ragged import Ragged
from unisono.embedding.residence import GradReduce
from unisono.embedding.tables import Initialize, Mode, Table, draw_normal


class ShardedEmbeddingBag(OneTable):
    """torch.nn.EmbeddingBag with its table spread over ranks: each rank pools its own bags, and gets what one process would.

    Arguments as in ShardedEmbedding, and `mode`, `include_last_offset` as in torch.nn.EmbeddingBag. Where all rows of the table
    lie on a rank (plans "table" and "column"), sums and means are formed there, and one row a bag travels.

    Backward: as in ShardedEmbedding; per_sample_weights get a gradient if they require one. All ranks must run it.

    Example:
        >>> table = ShardedEmbeddingBag(10, 3, mode="sum", plan="row")
        >>> table(torch.tensor([1, 2, 4]), torch.tensor([0, 2])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: Mode = "mean",
        plan: str | Layout = "row",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        optimizer: Rule | None = None,
        grad_reduce: GradReduce = "mean",
        wire_dtype: torch.dtype | None = None,
        initialize: Initialize = draw_normal,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"ShardedEmbeddingBag: mode={mode!r} is not one of 'sum', 'mean', 'max'")
        table = Table(
            NAME,
            num_embeddings,
            embedding_dim,
            mode=mode,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            initialize=initialize,
        )
        options = {"grad_reduce": grad_reduce, "sparse": sparse, "wire_dtype": wire_dtype, "device": device, "dtype": dtype}
        super().__init__(table, plan, options, optimizer, group)
        self.include_last_offset = include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        problem, bags = _as_bags(input, offsets, per_sample_weights, self.include_last_offset)
        return self.engine.look_up({NAME: bags}, problem)[NAME]

    @classmethod
    def from_dense(cls, module: nn.EmbeddingBag, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """The same table, spread. Every rank has a copy of `module`. `options`: optimizer, grad_reduce, wire_dtype."""
        options = {"mode": module.mode, "include_last_offset": module.include_last_offset, **options}
        made = cls(module.num_embeddings, module.embedding_dim, plan=plan, group=group, **dense_options(module, options))
        made._take(module, f"{cls.__name__}.from_dense")
        return made

    def to_dense(self) -> nn.EmbeddingBag:
        """The whole table as a torch.nn.EmbeddingBag, on every rank. All ranks call."""
        t = self.table
        module = nn.EmbeddingBag(
            t.rows,
            t.dim,
            t.max_norm,
            t.norm_type,
            t.scale_grad_by_freq,
            str(t.mode),
            self.engine.options.sparse,
            _weight=self.full_weight(),
            include_last_offset=self.include_last_offset,
            padding_idx=t.padding_idx,
        )
        module.weight.requires_grad_(self.weight.requires_grad)
        return module


def _as_bags(input: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last: bool) -> tuple[str, Ragged]:
    """What is wrong with the arguments, and the bags if nothing is."""
    nothing = Ragged(torch.empty(0), torch.empty(0))
    if not isinstance(input, Tensor) or input.layout != torch.strided or input.is_nested:
        return f"input: expected a strided Tensor, got {getattr(input, 'layout', type(input).__name__)}", nothing
    if input.ndim == 2:
        if offsets is not None:
            return "offsets must be None if input is 2-D: its rows are the bags", nothing
        if weights is not None and not isinstance(weights, Tensor):
            return f"per_sample_weights: expected a Tensor, got {type(weights).__name__}", nothing
        if weights is not None and weights.shape != input.shape:
            return f"per_sample_weights has shape {tuple(weights.shape)}, but input {tuple(input.shape)}", nothing
        return "", Ragged.from_dense(input, weights)
    if input.ndim != 1:
        return f"input: expected 1 or 2 dimensions, got shape {tuple(input.shape)}", nothing
    if not isinstance(offsets, Tensor) or offsets.ndim != 1:
        return "offsets must be a 1-D Tensor if input is 1-D", nothing
    if not include_last:
        offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
    return "", Ragged(input, offsets, weights)
