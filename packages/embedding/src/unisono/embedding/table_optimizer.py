"""TableOptimizer: the rules of fused optimizers, applied in step() to gradients that were accumulated or clipped before."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.embedding.collection import EmbeddingCollection
from unisono.embedding.optimizers import RowwiseAdagrad, Rule, counts_steps, rule_error, state_dtype
from unisono.embedding.parameters import ShardedTable


class TableOptimizer(torch.optim.Optimizer):
    """SGD, RowwiseAdagrad, Adagrad or Adam of this package for the tables of a collection with `sparse=True`, by table.

    `step()` changes the rows that were looked up since `zero_grad()`, each once. So several backwards make one step (gradient
    accumulation), and what torch's optimizers allow between backward and step works: `unisono.embedding.clip_grad_norm_`,
    `unisono.embedding.GradScaler`. A fused optimizer (`EmbeddingCollection(optimizer=...)`) takes less time and memory, since
    it stores no gradients, but makes a step in each backward. For one backward and one look-up both do the same.

    Args:
        collection: Made with sparse=True, on its device.
        rules: One for all tables, or one for each table by name. Each has a param group of its own, with "lr" and
            "weight_decay", which torch's schedulers change, and "tables".

    The state of the rules is a part of `collection.state_dict()`, with the names that a fused optimizer gives it, and loads on
    any number of ranks; `state_dict()` of this optimizer has learning rates only. All ranks call `step()`.

    Example:
        >>> from unisono.embedding import Adam, Table
        >>> collection = EmbeddingCollection([Table("user", 100, 8), Table("word", 50, 4)], sparse=True)
        >>> optimizer = TableOptimizer(collection, {"user": RowwiseAdagrad(lr=0.1), "word": Adam(lr=0.01)})
        >>> for batch in [[1, 2], [2, 3]]:  # two backwards, one step
        ...     found = collection({"user": torch.tensor(batch), "word": torch.tensor(batch)})
        ...     (found["user"].sum() + found["word"].sum()).backward()
        >>> optimizer.step()
    """

    def __init__(self, collection: EmbeddingCollection, rules: Rule | Mapping[str, Rule]) -> None:
        tables = {name: module for name, module in collection.tables.items() if isinstance(module, ShardedTable)}
        by_table = dict(rules) if isinstance(rules, Mapping) else dict.fromkeys(tables, rules)
        if error := _rules_error(collection, tables, by_table):
            raise ValueError(f"TableOptimizer: {error}")
        self._tables = tables
        for name, module in tables.items():
            rule = module.rule = by_table[name]
            steps = {"step": torch.zeros((), dtype=torch.int64, device="cpu")} if counts_steps(rule) else {}
            module.states = rule.states(module.local) | steps
        self._states = {name: module.states for name, module in tables.items()}
        groups: dict[Rule, list[str]] = {}
        for name, rule in by_table.items():
            groups.setdefault(rule, []).append(name)
        super().__init__(
            [
                {
                    "params": [tables[name].weight for name in names],
                    "tables": names,
                    "lr": rule.lr,
                    "weight_decay": rule.weight_decay,
                }
                for rule, names in groups.items()
            ],
            {},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for name in group["tables"]:
                module = self._tables[name]
                if module.states is not self._states[name]:
                    raise RuntimeError(
                        f"TableOptimizer: the state of table {name!r} is gone: make the optimizer after collection.to(...)"
                    )
                if module.weight.grad is not None:
                    _update(module, module.weight.grad.detach(), float(group["lr"]), float(group["weight_decay"]))
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tables": self._tables, "_states": self._states}


def _update(module: ShardedTable, grad: Tensor, lr: float, weight_decay: float) -> None:
    weight, state, rule = module.local, module.states, module.rule
    assert rule is not None
    if "step" in state:
        state["step"].add_(1)
    sums = grad.coalesce()
    rows = sums.indices()[0]
    grads = sums.values().to(state_dtype(weight), copy=True)  # the rule changes them in place
    if weight_decay:
        grads.add_(weight.index_select(0, rows), alpha=weight_decay)
    squares = grads.square().mean(1) if isinstance(rule, RowwiseAdagrad) and grads.shape[1] else grads
    rule.step(weight, rows, grads, state, lr, squares)


def _rules_error(collection: EmbeddingCollection, tables: Mapping[str, ShardedTable], rules: Mapping[str, Rule]) -> str:
    if not collection.engine.storage.options.sparse:
        return "the collection must be made with sparse=True"
    if missing := [name for name in tables if name not in rules]:
        return f"rules has none for table {missing[0]!r}; the tables are {list(tables)}"
    if unknown := [name for name in rules if name not in tables]:
        return f"rules has one for {unknown[0]!r}, which is no table; the tables are {list(tables)}"
    for name, rule in rules.items():
        if rule is None or (error := rule_error(rule)):
            return f"rules[{name!r}]: {'expected a rule, got None' if rule is None else error}"
        if isinstance(rule, RowwiseAdagrad) and tables[name].layout.cut_dim == 1:
            return f"RowwiseAdagrad needs whole rows, but table {name!r} is cut into columns: choose another plan for it"
    return ""
