"""torch.nn.Embedding with the table spread over the ranks."""

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
from unisono.embedding.tables import Initialize, Table, draw_normal


class ShardedEmbedding(OneTable):
    """torch.nn.Embedding with its table spread over ranks: each rank looks up its own ids, and gets what one process would.

    Args:
        plan: "row", "column", "table", "grid", "replicated", or a Layout, which also says on which ranks.
        padding_idx, max_norm, norm_type, scale_grad_by_freq: As in torch.nn.Embedding; frequencies are those of all ranks.
        sparse: The gradient is sparse, for torch.optim.SparseAdam and SGD; `weight` is then this rank's shard.
        optimizer: SGD, RowwiseAdagrad, Adagrad or Adam of this package, applied during the backward.
        grad_reduce: "mean" divides the gradient by the number of ranks, right beside DDP and FSDP; "sum" does not.
        wire_dtype: torch.bfloat16 or torch.float16 to halve what travels.
        initialize: Fills first rows in place, given a generator.

    Backward: each row gets the sum over all ranks of the gradients of its look-ups (of their mean: see grad_reduce). All
    ranks must run it.

    Example:
        >>> table = ShardedEmbedding(10, 3, plan="row", padding_idx=0)
        >>> table(torch.tensor([[1, 2], [0, 9]])).shape
        torch.Size([2, 2, 3])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        plan: str | Layout = "row",
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
        table = Table(
            NAME,
            num_embeddings,
            embedding_dim,
            mode=None,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            initialize=initialize,
        )
        options = {"grad_reduce": grad_reduce, "sparse": sparse, "wire_dtype": wire_dtype, "device": device, "dtype": dtype}
        super().__init__(table, plan, options, optimizer, group)

    def forward(self, input: Tensor) -> Tensor:
        fine = isinstance(input, Tensor) and input.layout == torch.strided and not input.is_nested
        problem = "" if fine else f"input: expected a strided Tensor, got {getattr(input, 'layout', type(input).__name__)}"
        flat = input.reshape(-1) if fine else torch.empty(0)
        offsets = torch.zeros(2, dtype=torch.int64, device=flat.device)
        offsets[1] = flat.numel()
        rows = self.engine.look_up({NAME: Ragged(flat, offsets)}, problem)[NAME]
        return rows.view(*input.shape, self.table.dim)

    @classmethod
    def from_dense(cls, module: nn.Embedding, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """The same table, spread. Every rank has a copy of `module`. `options`: optimizer, grad_reduce, wire_dtype."""
        made = cls(module.num_embeddings, module.embedding_dim, plan=plan, group=group, **dense_options(module, options))
        made._take(module, f"{cls.__name__}.from_dense")
        return made

    def to_dense(self) -> nn.Embedding:
        """The whole table as a torch.nn.Embedding, on every rank. All ranks call."""
        t = self.table
        module = nn.Embedding(
            t.rows,
            t.dim,
            t.padding_idx,
            t.max_norm,
            t.norm_type,
            t.scale_grad_by_freq,
            self.engine.options.sparse,
            _weight=self.full_weight(),
        )
        module.weight.requires_grad_(self.weight.requires_grad)
        return module
