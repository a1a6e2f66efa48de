"""EmbeddingCollection: many tables in one module. They share one exchange of row numbers and one of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from unisono.collectives import Group
from unisono.collectives.groups import resolve_group
from unisono.embedding.lookup.engine import EngineModule, LookupEngine, Prefetcher
from unisono.embedding.lookup.feature_errors import Batch, feature_name_error
from unisono.embedding.lookup.storage import GradReduce, LookupOptions
from unisono.embedding.optimizers import Rule, rules_error
from unisono.embedding.parameters import ShardedTable
from unisono.embedding.planner import Plan, plan_tables
from unisono.embedding.ragged import KeyedRagged, Ragged, as_dict, as_keyed, keyed_ragged_error
from unisono.embedding.sharding.layouts import Layout, as_layout
from unisono.embedding.table import Table

Features = Mapping[str, Ragged | Tensor] | KeyedRagged


class EmbeddingCollection(EngineModule):
    """Tables sharded over the ranks; a batch is a dict of features, or all features in one tensor.

    Args:
        tables: The tables, and which features look into each.
        plan: "auto" (see plan_tables), a layout for all tables, a Plan, or a dict from table to layout. A layout is a Layout or
            its name: "row", "column", "table" or "replicated".
        optimizer: SGD, RowwiseAdagrad, Adagrad or Adam of this package, or a dict with one for each table. It changes rows
            during the backward, so that no gradient of a table ever exists. None: the parameters get gradients.
        sparse: The parameters get sparse gradients. `collection.optimizer.step()` applies those of several backwards, after
            clipping; without `optimizer`, torch.optim.SparseAdam and SGD do.
        batch_size, sample, memory_per_rank, host_memory_per_rank: For plan="auto": bags of a rank in a step; a batch to count
            in; bytes on the device; bytes in host memory for tables that do not fit on the device (needs `optimizer` without
            `sparse`).
        grad_reduce: "mean" divides gradients by the number of ranks, right beside DDP and FSDP; "sum" does not.
        wire_dtype: torch.bfloat16 or torch.float16 halves the bytes that travel.
        stochastic_rounding: The steps of `optimizer` round rows of bfloat16 and float16 up or down at random, such that the
            mean is right: updates that are too small for the nearest number add up. The random bits depend on the table's
            seed, row, column and step alone, not on ranks or plan.

    forward: takes a dict of features and returns a dict from feature to (bags, dim), or to a Ragged of rows for a table
    without mode. A feature may be a Ragged, (bags, ids) or (bags,) with one id each. A KeyedRagged, or TorchRec's
    KeyedJaggedTensor, has all features in one tensor. Ranks may have different numbers of bags, or none. A feature of several
    tables gives one output for each, called "feature@table", as in TorchRec.
    stack=True returns one tensor (bags, features, dim) instead, with the features in the order of the dict; all need a mode,
    one width, and the same number of bags. It costs what torch.stack costs. All its features count as part of the loss.

    Backward: each row gets the sum over all ranks of the gradients of its look-ups, divided by the number of ranks if
    grad_reduce="mean". All ranks must run it.

    Example:
        >>> tables = [Table("user", 100, 8), Table("word", 50, 4, features=["title", "text"])]
        >>> batch = {"user": torch.tensor([3, 5]), "title": torch.tensor([[1], [3]]), "text": Ragged.from_lists([[], [7]])}
        >>> collection = EmbeddingCollection(tables, plan="row")
        >>> {name: tuple(x.shape) for name, x in collection(batch).items()}
        {'user': (2, 8), 'title': (2, 4), 'text': (2, 4)}
        >>> tables = [Table("user", 100, 8), Table("item", 50, 8)]
        >>> EmbeddingCollection(tables, plan="row")({"user": torch.arange(2), "item": torch.arange(2)}, stack=True).shape
        torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        plan: str | Layout | Plan | Mapping[str, str | Layout] = "auto",
        optimizer: Rule | Mapping[str, Rule] | None = None,
        sparse: bool = False,
        batch_size: int = 1024,
        sample: Features | None = None,
        memory_per_rank: int | None = None,
        host_memory_per_rank: int | None = None,
        grad_reduce: GradReduce = "mean",
        wire_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        function = type(self).__name__
        ranks = resolve_group(group)
        self._outputs = outputs_of(tables)
        outputs = [output for found in self._outputs.values() for output in found]
        if len({table.name for table in tables}) < len(tables) or len(set(outputs)) < len(outputs):
            names = [table.name for table in tables]
            raise ValueError(f"{function}: tables and outputs need different names: tables {names}, outputs {outputs}")
        if taken := [table.name for table in tables if hasattr(nn.ModuleDict, table.name)]:
            raise ValueError(
                f"{function}: tables cannot be called {taken}, since torch.nn.ModuleDict has attributes of these names"
            )
        dtype = dtype or torch.get_default_dtype()
        problem = ""
        if plan == "auto":
            problem = rules_error(optimizer, [table.name for table in tables])
            if host_memory_per_rank is not None and (optimizer is None or sparse):
                problem = problem or f"{host_memory_per_rank=} needs an optimizer without sparse=True: {optimizer=}, {sparse=}"
        if problem:
            plan = "row"  # the storage will say what is wrong, on all ranks; the planner could raise on this one alone
        elif plan == "auto":
            plan = plan_tables(
                tables,
                ranks.size,
                batch_size=batch_size,
                sample=None if sample is None else as_dict(sample),
                memory_per_rank=memory_per_rank,
                host_memory_per_rank=host_memory_per_rank,
                optimizer=optimizer,
                dtype=dtype,
                wire_dtype=wire_dtype,
                group=group,
            )
        self.plan = plan if isinstance(plan, Plan) else None
        layouts = _layouts_of(tables, plan, ranks.size)
        tables = [_name_outputs(table, self._outputs) for table in tables]
        device = torch.empty(0, device=device).device  # with its index
        options = LookupOptions(function, grad_reduce, sparse, wire_dtype, stochastic_rounding, dtype, device, problem)
        self.engine = LookupEngine(tables, layouts, options, optimizer, group)
        storage = self.engine.storage
        modules = [ShardedTable(t, x, ranks, plain=sparse) for t, x in zip(tables, storage.layouts, strict=True)]
        self.tables = nn.ModuleDict({table.name: module for table, module in zip(tables, modules, strict=True)})
        self.engine.attach(modules)
        self.reset_parameters()
        self._prefetcher: Prefetcher | None = None

    def weight(self, table: str) -> nn.Parameter:
        """The parameter of a table: a DTensor for row and column layouts."""
        return self._table("weight", table).weight

    def full_weight(self, table: str) -> Tensor:
        """Gather all rows of a table on every rank, whatever the layout. All ranks call."""
        return self._table("full_weight", table).full_weight()

    def _table(self, function: str, name: str) -> ShardedTable:
        module = dict(self.tables.items()).get(name)
        if not isinstance(module, ShardedTable):
            raise KeyError(f"{type(self).__name__}.{function}: there is no table {name!r}; the tables are {[*self.tables]}")
        return module

    @overload
    def forward(self, features: Features, *, stack: Literal[False] = ...) -> dict[str, Tensor | Ragged]: ...
    @overload
    def forward(self, features: Features, *, stack: Literal[True]) -> Tensor: ...
    def forward(self, features: Features, *, stack: bool = False) -> dict[str, Tensor | Ragged] | Tensor:
        inputs, error = self._read(features)
        if stack:
            error = error or stack_error(self.engine.storage.tables, inputs)
        started = None if self._prefetcher is None else self._prefetcher.take(features, inputs, error)
        if started is None:
            started = self.engine.start(inputs, self.engine.storage.ranks, error)
        names = [*inputs.names] if isinstance(inputs, KeyedRagged) else [*inputs]
        if stack:
            return self.engine.finish_stacked(started, names)
        found = self.engine.finish(started)
        storage = self.engine.storage
        unpooled = [name for name in names if storage.tables[storage.table_of_feature[name]].mode is None]
        bags = (inputs.to_dict() if isinstance(inputs, KeyedRagged) else inputs) if unpooled else {}
        return {name: Ragged(found[name], bags[name].offsets) if name in unpooled else found[name] for name in names}

    def prefetch(self, features: Features) -> None:
        """Start with the batch that the next call will look up: its row numbers travel while this rank computes.

        Results do not change, since that call fetches the rows, when the tables have their last values. All ranks call, in the
        same order. Give the same tensors to that call. If any rank calls with other tensors, or has changed them in place since
        then, all ranks drop what they started and look up anew. An error in the batch is raised by that call. The first
        prefetch makes a process group and a thread. An accelerator sorts and counts the ids on a stream of their own, so that
        call need not wait for the accelerator; but it sends the row numbers, since messages need one order on all ranks.
        """
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.engine)
        self._prefetcher.start(features, *self._read(features))

    def reset_rows(self, table: str, rows: Tensor) -> None:
        """Set rows of a table to zero and their optimizer state to its initial value, on whichever ranks they lie."""
        module = self._table("reset_rows", table)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < module.table.rows:
            raise IndexError(f"reset_rows: rows {int(rows.min())} to {int(rows.max())}: {table!r} has {module.table.rows}")
        box = module.box
        rows = rows.to(torch.int64)  # a box may begin beyond 2^31
        own = rows[(rows >= box.row) & (rows < box.row_end)] - box.row
        module.reset_rows(own)

    def copy_rows(self, smaller: "EmbeddingCollection") -> None:
        """Copy the rows of a collection whose tables have as many rows or fewer, with the state of its optimizer.

        So tables grow: make a larger collection and copy the rows. New rows keep their initial weights. All ranks call; tables
        are gathered one after the other.
        """
        pairs = []
        for name, table in smaller.tables.items():
            own = self._table("copy_rows", name)
            assert isinstance(table, ShardedTable)
            if own.table.dim != table.table.dim or own.table.rows < table.table.rows:
                shapes = [(x.table.rows, x.table.dim) for x in (table, own)]
                raise ValueError(
                    f"{type(self).__name__}.copy_rows: table {name!r} of shape {shapes[0]} does not fit in {shapes[1]}"
                )
            own.raise_for_other_states(table)
            pairs.append((own, table))
        for own, table in pairs:
            own.copy_rows(table)

    def _read(self, features: Features) -> tuple[Batch, str]:
        """The input of each output, and what is wrong with it: all ranks have to raise together."""
        try:
            if not isinstance(features, Mapping):
                keyed = as_keyed(features)
                if error := keyed_ragged_error(keyed) or feature_name_error(keyed.names, self._outputs):
                    return {}, error
                if all(len(self._outputs[name]) == 1 for name in keyed.names):
                    return keyed, ""
                features = keyed
            elif error := feature_name_error(features, self._outputs):
                return {}, error
            given = as_dict(features)
            return {output: bags for name, bags in given.items() for output in self._outputs[name]}, ""
        except TypeError as error:
            return {}, str(error)
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_prefetcher": None}  # a copy prefetches for itself


def outputs_of(tables: Sequence[Table]) -> dict[str, tuple[str, ...]]:
    """The outputs of each feature: one of its name, or one for each table that it looks into, as TorchRec names them."""
    tables_of: dict[str, list[str]] = {}
    for table in tables:
        for feature in table.features:
            tables_of.setdefault(feature, []).append(table.name)
    return {
        feature: (feature,) if len(names) == 1 else tuple(f"{feature}@{name}" for name in names)
        for feature, names in tables_of.items()
    }


def stack_error(tables: Sequence[Table], inputs: Batch) -> str:
    """Say why the outputs of a look-up have no stack; "" if they have one."""
    if unpooled := [table.name for table in tables if table.mode is None]:
        return f"stack=True: table {unpooled[0]!r} has no mode, so its output has no row for each bag"
    if len(dims := {table.dim for table in tables}) > 1:
        return f"stack=True: the tables have different widths: {sorted(dims)}"
    bags = {} if isinstance(inputs, KeyedRagged) else {name: x.offsets.numel() - 1 for name, x in inputs.items()}
    return f"stack=True: the features have different numbers of bags: {bags}" if len(set(bags.values())) > 1 else ""


def _name_outputs(table: Table, outputs: Mapping[str, tuple[str, ...]]) -> Table:
    """The table with the names of its outputs as features, so that each looks into one table."""
    shared = {feature: f"{feature}@{table.name}" for feature in table.features if len(outputs[feature]) > 1}
    return replace(table, features=[shared.get(feature, feature) for feature in table.features])


def _layouts_of(tables: Sequence[Table], plan: object, world_size: int) -> list[Layout]:
    function = EmbeddingCollection.__name__
    if isinstance(plan, str):
        layout = as_layout(plan, function)
        return [layout.for_table_number(number, world_size) for number in range(len(tables))]
    if not isinstance(plan, Plan | Mapping):
        return [as_layout(plan, function)] * len(tables)
    layouts = plan.layouts if isinstance(plan, Plan) else plan
    names = [table.name for table in tables]
    if missing := [name for name in names if name not in layouts]:
        raise ValueError(f"{function}: plan has no layout for table {missing[0]!r}; it has {sorted(layouts)}")
    if unknown := [name for name in layouts if name not in names]:
        raise ValueError(f"{function}: plan has a layout for {unknown[0]!r}, which is no table; the tables are {names}")
    return [as_layout(layouts[table.name], function) for table in tables]
