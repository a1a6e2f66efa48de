"""torch.nn.Embedding and torch.nn.EmbeddingBag with the table spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.collectives.agreement import agree
from unisono.embedding.engine import Engine, GradReduce, Options
from unisono.embedding.layouts import Layout, as_layout
from unisono.embedding.optimizers import FusedOptimizer, Rule
from unisono.embedding.ragged import Ragged
from unisono.embedding.sharded_table import ShardedTable
from unisono.embedding.tables import Initialize, Mode, Table, draw_normal

_NAME = "weight"


class _OneTable(ShardedTable):
    """What both modules have in common."""

    def __init__(self, table: Table, plan: str | Layout, options: dict[str, Any], optimizer: Rule | None, group: Group) -> None:
        function = type(self).__name__
        device = torch.device(options.pop("device") or torch.get_default_device())
        dtype = options.pop("dtype") or torch.get_default_dtype()
        if options["sparse"] and optimizer is not None:
            raise ValueError(f"{function}: sparse=True is about gradients, which a fused optimizer leaves none of")
        engine = Engine(
            [table], [as_layout(plan, function)], Options(function, dtype=dtype, device=device, **options), optimizer, group
        )
        super().__init__(table, engine.layouts[0], engine.ranks, plain=options["sparse"])
        self.engine = engine
        engine.attach([self])
        self.reset_parameters()

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The handle of a fused optimizer, for schedulers."""
        return self.engine.optimizer

    @property
    def num_embeddings(self) -> int:
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        return self.table.dim

    def reset_parameters(self, seed: int | None = None) -> None:
        """First weights, the same for every layout and number of ranks. All ranks call."""
        self.engine.reset(seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.engine.convert(fn)
        return self

    def _take(self, module: nn.Embedding | nn.EmbeddingBag, function: str) -> None:
        weight = module.weight.detach()
        agree(
            function,
            self.ranks,
            same=(tuple(weight.shape), weight.sum(dtype=torch.float64).item() if not weight.is_meta else 0.0),
            numbers=(),
            words=lambda: (
                f"{function}(a table of {tuple(weight.shape)} whose sum is {float(weight.sum(dtype=torch.float64))!r})"
            ),
            device=weight.device,
            rule="Every rank takes its shard of its own copy: all copies must be the same.",
        )
        self.set_weight(weight)
        self.weight.requires_grad_(module.weight.requires_grad)

    def extra_repr(self) -> str:
        options = [f"{self.table.rows}, {self.table.dim}, plan={str(self.layout)!r}"]
        options += [f"mode={self.table.mode!r}"] if self.table.mode else []
        for name in ("padding_idx", "max_norm"):
            if getattr(self.table, name) is not None:
                options.append(f"{name}={getattr(self.table, name)}")
        return ", ".join(options)


class ShardedEmbedding(_OneTable):
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
            _NAME,
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
        problem = "" if isinstance(input, Tensor) else f"input: expected a Tensor, got {type(input).__name__}"
        flat = input.reshape(-1) if isinstance(input, Tensor) else torch.empty(0)
        offsets = torch.zeros(2, dtype=torch.int64, device=flat.device)
        offsets[1] = flat.numel()
        rows = self.engine.look_up({_NAME: Ragged(flat, offsets)}, problem)[_NAME]
        return rows.view(*input.shape, self.table.dim)

    @classmethod
    def from_dense(cls, module: nn.Embedding, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """The same table, spread. Every rank has a copy of `module`. `options`: optimizer, grad_reduce, wire_dtype."""
        options = {"sparse": module.sparse and options.get("optimizer") is None, **options}
        made = cls(
            module.num_embeddings,
            module.embedding_dim,
            plan=plan,
            padding_idx=module.padding_idx,
            max_norm=module.max_norm,
            norm_type=module.norm_type,
            scale_grad_by_freq=module.scale_grad_by_freq,
            device=module.weight.device,
            dtype=module.weight.dtype,
            initialize=_leave,
            group=group,
            **options,
        )
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


class ShardedEmbeddingBag(_OneTable):
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
            _NAME,
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
        return self.engine.look_up({_NAME: bags}, problem)[_NAME]

    @classmethod
    def from_dense(cls, module: nn.EmbeddingBag, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """The same table, spread. Every rank has a copy of `module`. `options`: optimizer, grad_reduce, wire_dtype."""
        options = {"sparse": module.sparse and options.get("optimizer") is None, **options}
        made = cls(
            module.num_embeddings,
            module.embedding_dim,
            mode=module.mode,  # type: ignore[arg-type]
            plan=plan,
            padding_idx=module.padding_idx,
            include_last_offset=module.include_last_offset,
            max_norm=module.max_norm,
            norm_type=module.norm_type,
            scale_grad_by_freq=module.scale_grad_by_freq,
            device=module.weight.device,
            dtype=module.weight.dtype,
            initialize=_leave,
            group=group,
            **options,
        )
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
    if not isinstance(input, Tensor):
        return f"input: expected a Tensor, got {type(input).__name__}", nothing
    if input.ndim == 2:
        if offsets is not None:
            return "offsets must be None if input is 2-D: its rows are the bags", nothing
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


def _leave(rows: Tensor, draw: torch.Generator) -> None:
    """The weights are there already."""
