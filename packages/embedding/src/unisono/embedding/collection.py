"""Many tables behind one module: all of them share one exchange for row numbers and one for rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.collectives.groups import resolve_group
from unisono.embedding.engine import Engine
from unisono.embedding.layouts import Layout, as_layout
from unisono.embedding.optimizers import FusedOptimizer, Rule
from unisono.embedding.planning.planner import Plan, plan_tables
from unisono.embedding.prefetching import Prefetcher
from unisono.embedding.ragged import Ragged
from unisono.embedding.residence import GradReduce, Options, copy_with_engine
from unisono.embedding.sharded_table import ShardedTable
from unisono.embedding.tables import Table

Features = Mapping[str, Ragged | Tensor]


class EmbeddingCollection(nn.Module):
    """Tables spread over the ranks; a batch is a dict of features.

    Args:
        tables: What tables there are, and which features look into them.
        plan: "auto" (see plan_tables), the name of a layout for all tables, a Plan, or a dict from table to layout.
        optimizer: SGD, RowwiseAdagrad, Adagrad or Adam of this package, applied during the backward, so that no gradient of
            a whole table ever exists; None: the parameters get gradients.
        sparse: Without optimizer: gradients are sparse, for torch.optim.SparseAdam and SGD.
        batch_size, sample, memory_per_rank: For plan="auto": bags a rank and step; a batch to count in; bytes.
        grad_reduce: "mean" divides gradients by the number of ranks, right beside DDP and FSDP; "sum" does not.
        wire_dtype: torch.bfloat16 or torch.float16 to halve what travels.

    forward: a dict from feature to (bags, dim), or to a Ragged of rows for a table without mode. A feature may be given as
    Ragged, as (bags, ids) or as (bags,) with one id each. Ranks may have different numbers of bags, or none.

    Backward: each row gets the sum over all ranks of the gradients of its look-ups, divided by the ranks for "mean". All
    ranks must run it.

    Example:
        >>> tables = [Table("user", 100, 8), Table("word", 50, 4, features=["title", "text"])]
        >>> batch = {"user": torch.tensor([3, 5]), "title": torch.tensor([[1], [3]]), "text": Ragged.from_lists([[], [7]])}
        >>> collection = EmbeddingCollection(tables, plan="row")
        >>> {name: tuple(x.shape) for name, x in collection(batch).items()}
        {'user': (2, 8), 'title': (2, 4), 'text': (2, 4)}
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        plan: str | Plan | Mapping[str, str | Layout] = "auto",
        optimizer: Rule | None = None,
        sparse: bool = False,
        batch_size: int = 1024,
        sample: Features | None = None,
        memory_per_rank: int | None = None,
        grad_reduce: GradReduce = "mean",
        wire_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        name, ranks = type(self).__name__, resolve_group(group)
        features = [feature for table in tables for feature in table.features]
        if len({table.name for table in tables}) < len(tables) or len(set(features)) < len(features):
            raise ValueError(f"{name}: tables and features need different names: {[t.name for t in tables]}, {features}")
        if taken := [table.name for table in tables if hasattr(nn.ModuleDict, table.name)]:
            raise ValueError(
                f"{name}: tables cannot be called {taken}, since torch.nn.ModuleDict has attributes of these names"
            )
        if sparse and optimizer is not None:
            raise ValueError(f"{name}: sparse=True is about gradients, which a fused optimizer leaves none of")
        dtype = dtype or torch.get_default_dtype()
        if plan == "auto":
            counted = None if sample is None else {key: as_ragged(x) for key, x in sample.items()}
            plan = plan_tables(
                tables,
                ranks.size,
                batch_size=batch_size,
                sample=counted,
                memory_per_rank=memory_per_rank,
                optimizer=optimizer,
                dtype=dtype,
                wire_dtype=wire_dtype,
                group=group,
            )
        self.plan = plan if isinstance(plan, Plan) else None
        layouts = [_layout_of(table, plan, number, ranks.size) for number, table in enumerate(tables)]
        device = torch.empty(0, device=device).device  # with its index
        options = Options(name, grad_reduce, sparse, wire_dtype, dtype, device)
        self.engine = Engine(tables, layouts, options, optimizer, group)
        modules = [ShardedTable(t, x, ranks, plain=sparse) for t, x in zip(tables, self.engine.layouts, strict=True)]
        self.tables = nn.ModuleDict({table.name: module for table, module in zip(tables, modules, strict=True)})
        self.engine.attach(modules)
        self.reset_parameters()
        self._prefetcher: Prefetcher | None = None

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The handle of a fused optimizer: give it to torch.optim.lr_scheduler."""
        return self.engine.optimizer

    def reset_parameters(self, seed: int | None = None) -> None:
        """First weights, the same for every plan and number of ranks. All ranks call."""
        self.engine.reset(seed)

    def weight(self, table: str) -> nn.Parameter:
        """The parameter of a table: a DTensor for row, column and grid layouts."""
        found: nn.Parameter = self.tables[table].weight  # type: ignore[assignment]
        return found

    def full_weight(self, table: str) -> Tensor:
        """All rows of a table, on every rank, whatever the layout. All ranks call."""
        module = self.tables[table]
        assert isinstance(module, ShardedTable)
        return module.full_weight()

    def forward(self, features: Features) -> dict[str, Tensor | Ragged]:
        step = None if self._prefetcher is None else self._prefetcher.take(features)
        found = self.engine.look_up(*self._read(features)) if step is None else self.engine.finish(step)
        modes = {feature: table.mode for table in self.engine.tables for feature in table.features}
        return {
            name: found[name] if modes[name] else Ragged(found[name], as_ragged(bags).offsets)
            for name, bags in features.items()
        }

    def prefetch(self, features: Features) -> None:
        """Begin with the batch that the next call will look up: its row numbers travel while this rank computes.

        Rows are fetched by that call, when the tables have their last values, so results do not change. All ranks call, in
        the same order; give the same tensors to the call, and leave them as they are until then. An error in the batch is
        raised by that call. If any rank's call has other features, what was begun is dropped on all of them. The first
        prefetch makes a process group and a thread of its own.
        """
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.engine)
        self._prefetcher.begin(features, *self._read(features))

    def reset_rows(self, table: str, rows: Tensor) -> None:
        """Give rows of a table their first state: weights of zero, and no past for their optimizer. Rows may lie anywhere."""
        module = self.tables[table]
        assert isinstance(module, ShardedTable)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < module.table.rows:
            raise IndexError(f"reset_rows: rows {int(rows.min())} to {int(rows.max())}: {table!r} has {module.table.rows}")
        box = module.box
        own = rows[(rows >= box.row) & (rows < box.row_end)].to(module.local.device) - box.row
        fresh = self.engine.rule.states(module.local[:1]) if self.engine.rule is not None and module.local.numel() else {}
        module.local[own] = 0
        for name, value in fresh.items():
            module.states[name][own] = value[:1]

    def _read(self, features: Features) -> tuple[dict[str, Ragged], str]:
        if not isinstance(features, Mapping):
            return {}, f"features: expected a dict from feature to Ragged or Tensor, got {type(features).__name__}"
        try:
            return {name: as_ragged(bags) for name, bags in features.items()}, ""
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            return {}, f"{type(error).__name__}: {error}" if not isinstance(error, TypeError) else str(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetcher": None}  # a copy prefetches for itself

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy_with_engine(self, self.__getstate__(), memo)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.engine.convert(fn)
        return self


def as_ragged(bags: Ragged | Tensor) -> Ragged:
    if isinstance(bags, Ragged):
        return bags
    if (
        not isinstance(bags, Tensor)
        or (bags.is_nested and bags.layout != torch.jagged)
        or (bags.layout != torch.jagged and (bags.layout != torch.strided or bags.ndim not in (1, 2)))
    ):
        got = f"{bags.layout} of shape {tuple(bags.shape)}" if isinstance(bags, Tensor) else type(bags).__name__
        raise TypeError(f"a feature must be a Ragged, a jagged tensor, or a tensor of one or two dimensions, got {got}")
    return Ragged.from_nested(bags) if bags.layout == torch.jagged else Ragged.from_dense(bags)


def _layout_of(table: Table, plan: str | Plan | Mapping[str, str | Layout], number: int, world_size: int) -> Layout:
    if isinstance(plan, Plan):
        return plan.layouts[table.name]
    if isinstance(plan, Mapping):
        if table.name not in plan:
            raise ValueError(f"EmbeddingCollection: plan has no layout for table {table.name!r}; it has {sorted(plan)}")
        return as_layout(plan[table.name], "EmbeddingCollection")
    if plan == "table":  # one after the other
        return Layout.table(number % world_size)
    return as_layout(plan, "EmbeddingCollection")
