"""What the modules of one table, ShardedEmbedding and ShardedEmbeddingBag, have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.collectives.checks import validate_across_ranks
from unisono.embedding.engine import Engine
from unisono.embedding.layouts import Layout, as_layout
from unisono.embedding.optimizers import FusedOptimizer, Rule
from unisono.embedding.residence import Options, copy_with_engine
from unisono.embedding.sharded_table import ShardedTable
from unisono.embedding.tables import Table, draw_normal

NAME = "weight"


class OneTable(ShardedTable):
    """A table that is a module by itself, with an engine of its own."""

    def __init__(self, table: Table, plan: str | Layout, options: dict[str, Any], optimizer: Rule | None, group: Group) -> None:
        function = type(self).__name__
        device = torch.empty(0, device=options.pop("device")).device  # with its index
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy_with_engine(self, self.__dict__, memo)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.engine.convert(fn)
        return self

    def _take(self, module: nn.Embedding | nn.EmbeddingBag, function: str) -> None:
        weight = module.weight.detach()
        validate_across_ranks(
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
        self.table = replace(self.table, initialize=draw_normal)  # what reset_parameters would draw
        self.weight.requires_grad_(module.weight.requires_grad)

    def extra_repr(self) -> str:
        options = [f"{self.table.rows}, {self.table.dim}, plan={str(self.layout)!r}"]
        options += [f"mode={self.table.mode!r}"] if self.table.mode else []
        for name in ("padding_idx", "max_norm"):
            if getattr(self.table, name) is not None:
                options.append(f"{name}={getattr(self.table, name)}")
        return ", ".join(options)


def dense_options(module: nn.Embedding | nn.EmbeddingBag, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a spread table like `module`, but for its weights; `options` have the last word."""
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    found = {name: getattr(module, name) for name in names}
    sparse = module.sparse and options.get("optimizer") is None
    return {
        **found,
        "sparse": sparse,
        "device": module.weight.device,
        "dtype": module.weight.dtype,
        "initialize": _leave,
        **options,
    }


def _leave(rows: Tensor, draw: torch.Generator) -> None:
    """The weights are there already."""
