"""torch.nn.Embedding and torch.nn.EmbeddingBag with the table sharded over the ranks."""

from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.collectives.checks import validate_across_ranks
from unisono.embedding.lookup.engine import EngineModule, LookupEngine
from unisono.embedding.lookup.storage import GradReduce, LookupOptions
from unisono.embedding.optimizers import Rule
from unisono.embedding.parameters import ShardedTable
from unisono.embedding.ragged import Ragged
from unisono.embedding.sharding.layouts import Layout, as_layout
from unisono.embedding.table import Initialize, Mode, Table, draw_normal

_NAME = "weight"  # of the only table, and of its feature
_SHARED_WITH_TORCH = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_Dense = TypeVar("_Dense", nn.Embedding, nn.EmbeddingBag)


class _OneTableModule(EngineModule, ShardedTable):
    """A table that is a module by itself, with an engine of its own."""

    def __init__(self, table: Table, plan: str | Layout, options: dict[str, Any], optimizer: Rule | None, group: Group) -> None:
        function = type(self).__name__
        device = torch.empty(0, device=options.pop("device")).device  # with its index
        dtype = options.pop("dtype") or torch.get_default_dtype()
        shared = LookupOptions(function, dtype=dtype, device=device, **options)
        engine = LookupEngine([table], [as_layout(plan, function)], shared, optimizer, group)
        ShardedTable.__init__(self, table, engine.storage.layouts[0], engine.storage.ranks, plain=options["sparse"])
        self.engine = engine
        engine.attach([self])
        self.reset_parameters()

    @property
    def num_embeddings(self) -> int:
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        return self.table.dim

    def _load_dense(self, module: nn.Embedding | nn.EmbeddingBag) -> Self:
        """Copy this rank's shard from `module`, of which every rank has the same copy."""
        function = f"{type(self).__name__}.from_dense"
        weight = module.weight.detach()
        total = 0.0 if weight.is_meta else float(weight.sum(dtype=torch.float64))
        same = f"a table of {tuple(weight.shape)} whose sum is {total!r}"
        rule = "Every rank takes its shard from its own copy: all copies must be the same."
        validate_across_ranks(
            function, self.ranks, same=same, numbers=(), words=lambda: f"{function}({same})", device=weight.device, rule=rule
        )
        self.set_weight(weight)
        self.table = replace(self.table, initialize=draw_normal)  # what reset_parameters would draw
        self.weight.requires_grad_(module.weight.requires_grad)
        return self

    def _make_dense(self, kind: type[_Dense], **options: Any) -> _Dense:
        arguments = {name: getattr(self.table, name) for name in _SHARED_WITH_TORCH}
        sparse = self.engine.storage.options.sparse
        module = kind(self.table.rows, self.table.dim, sparse=sparse, _weight=self.full_weight(), **arguments, **options)
        module.weight.requires_grad_(self.weight.requires_grad)
        return module

    def extra_repr(self) -> str:
        options = [f"{self.table.rows}, {self.table.dim}, plan={str(self.layout)!r}"]
        options += [f"mode={self.table.mode!r}"] if self.table.mode else []
        for name in ("padding_idx", "max_norm"):
            if getattr(self.table, name) is not None:
                options.append(f"{name}={getattr(self.table, name)}")
        return ", ".join(options)


class ShardedEmbedding(_OneTableModule):
    """torch.nn.Embedding with its table sharded over ranks: each rank looks up its own ids, and gets what one process would.

    Args:
        plan: "row", "column", "table", "replicated", or a Layout, which can also say on which ranks.
        padding_idx, max_norm, norm_type, scale_grad_by_freq: As in torch.nn.Embedding; frequencies count the ids of all ranks.
        sparse: The gradient is sparse, for `optimizer.step()`, torch.optim.SparseAdam and SGD; `weight` is this rank's shard.
        optimizer: SGD, RowwiseAdagrad, Adagrad or Adam of this package, applied during the backward, unless sparse=True.
        grad_reduce: "mean" divides the gradient by the number of ranks, right beside DDP and FSDP; "sum" does not.
        wire_dtype: torch.bfloat16 or torch.float16 halves the bytes that travel.
        stochastic_rounding: The optimizer's steps round 16-bit rows at random with the right mean: see EmbeddingCollection.
        initialize: Fills first rows in place, given the rows and a generator.

    Backward: each row gets the sum over all ranks of the gradients of its look-ups, divided by the number of ranks if
    grad_reduce="mean". All ranks must run it.

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
        stochastic_rounding: bool = False,
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
        options = {
            "grad_reduce": grad_reduce,
            "sparse": sparse,
            "wire_dtype": wire_dtype,
            "stochastic_rounding": stochastic_rounding,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(table, plan, options, optimizer, group)

    def forward(self, input: Tensor) -> Tensor:
        error = _input_type_error(input)
        flat = torch.empty(0) if error else input.reshape(-1)
        offsets = torch.zeros(2, dtype=torch.int64, device=flat.device)
        offsets[1] = flat.numel()
        rows = self.engine.look_up({_NAME: Ragged(flat, offsets)}, error)[_NAME]
        return rows.view(*input.shape, self.table.dim)

    @classmethod
    def from_dense(cls, module: nn.Embedding, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """Shard the table of `module`, of which every rank has a copy. `options`: optimizer, grad_reduce, wire_dtype."""
        options = _arguments_like(module, options)
        return cls(module.num_embeddings, module.embedding_dim, plan=plan, group=group, **options)._load_dense(module)

    def to_dense(self) -> nn.Embedding:
        """Gather the whole table into a torch.nn.Embedding, on every rank. All ranks call."""
        return self._make_dense(nn.Embedding)


class ShardedEmbeddingBag(_OneTableModule):
    """torch.nn.EmbeddingBag with its table sharded over ranks: each rank pools its own bags, and gets what one process would.

    The arguments are those of ShardedEmbedding, and `mode`, `include_last_offset` as in torch.nn.EmbeddingBag. If a rank holds
    all rows of the table (plans "table" and "column"), it forms sums and means for the others: one row travels for each bag.

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
        stochastic_rounding: bool = False,
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
        options = {
            "grad_reduce": grad_reduce,
            "sparse": sparse,
            "wire_dtype": wire_dtype,
            "stochastic_rounding": stochastic_rounding,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(table, plan, options, optimizer, group)
        self.include_last_offset = include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        error = _bag_error(input, offsets, per_sample_weights)
        if error:
            bags = Ragged(torch.empty(0), torch.empty(0))
        elif offsets is None:
            bags = Ragged.from_dense(input, per_sample_weights)
        else:
            last = offsets.new_full((1,), input.numel())
            bags = Ragged(input, offsets if self.include_last_offset else torch.cat([offsets, last]), per_sample_weights)
        return self.engine.look_up({_NAME: bags}, error)[_NAME]

    @classmethod
    def from_dense(cls, module: nn.EmbeddingBag, plan: str | Layout = "row", *, group: Group = None, **options: Any) -> Self:
        """Shard the table of `module`, of which every rank has a copy. `options`: optimizer, grad_reduce, wire_dtype."""
        options = {"mode": module.mode, "include_last_offset": module.include_last_offset, **options}
        options = _arguments_like(module, options)
        return cls(module.num_embeddings, module.embedding_dim, plan=plan, group=group, **options)._load_dense(module)

    def to_dense(self) -> nn.EmbeddingBag:
        """Gather the whole table into a torch.nn.EmbeddingBag, on every rank. All ranks call."""
        return self._make_dense(nn.EmbeddingBag, mode=self.table.mode, include_last_offset=self.include_last_offset)


def _input_type_error(input: object) -> str:
    if isinstance(input, Tensor) and input.layout == torch.strided and not input.is_nested:
        return ""
    return f"input: expected a strided Tensor, got {getattr(input, 'layout', type(input).__name__)}"


def _bag_error(input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> str:
    """Say what is wrong with the arguments of ShardedEmbeddingBag; "" if nothing is."""
    if error := _input_type_error(input):
        return error
    if input.ndim not in (1, 2):
        return f"input: expected 1 or 2 dimensions, got shape {tuple(input.shape)}"
    if input.ndim == 1:
        fine = isinstance(offsets, Tensor) and offsets.ndim == 1
        return "" if fine else "offsets must be a 1-D Tensor if input is 1-D"
    if offsets is not None:
        return "offsets must be None if input is 2-D: its rows are the bags"
    if weights is not None and not isinstance(weights, Tensor):
        return f"per_sample_weights: expected a Tensor, got {type(weights).__name__}"
    if weights is not None and weights.shape != input.shape:
        return f"per_sample_weights has shape {tuple(weights.shape)}, but input {tuple(input.shape)}"
    return ""


def _arguments_like(module: nn.Embedding | nn.EmbeddingBag, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a sharded table like `module`, but for its weights. `options` override them."""
    return {
        **{name: getattr(module, name) for name in _SHARED_WITH_TORCH},
        "sparse": module.sparse and options.get("optimizer") is None,
        "device": module.weight.device,
        "dtype": module.weight.dtype,
        "initialize": lambda rows, generator: None,  # the weights are copied afterwards
        **options,
    }
