"""TableOptimizer: what `collection.optimizer` is. Its param groups have the learning rates; step() applies sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unisono.embedding.lookup.lookup import apply_gradients

if TYPE_CHECKING:
    from unisono.embedding.lookup.storage import ShardStorage


class TableOptimizer(torch.optim.Optimizer):
    """The optimizer of a collection that was made with `optimizer=`: SGD, RowwiseAdagrad, Adagrad or Adam, by table.

    Without `sparse=True` the steps happen in the backward, one for each look-up that it passes, and `step()` does nothing. With
    it the backward leaves sparse gradients, and `step()` changes the rows that were looked up since `zero_grad()`, each once:
    several backwards make one step (gradient accumulation), and what torch's optimizers allow between backward and step works:
    `unisono.embedding.clip_grad_norm_`, `unisono.embedding.GradScaler`. That takes more time and memory, since the gradients of
    these rows are stored. For one backward and one look-up both ways do the same, bit for bit;
    but 16-bit tables on a GPU only up to one rounding, since their gradients are stored with 16 bits.

    `param_groups`: one for each different rule, with "lr" and "weight_decay", which torch's schedulers change, and "tables".

    The state of the rules is a part of `collection.state_dict()` and loads on any number of ranks; `state_dict()` of this
    optimizer has learning rates only. All ranks call `step()`.

    Example:
        >>> from unisono.embedding import Adam, EmbeddingCollection, RowwiseAdagrad, Table
        >>> rules = {"user": RowwiseAdagrad(lr=0.1), "word": Adam(lr=0.01)}
        >>> collection = EmbeddingCollection([Table("user", 100, 8), Table("word", 50, 4)], optimizer=rules, sparse=True)
        >>> for batch in [[1, 2], [2, 3]]:  # two backwards, one step
        ...     found = collection({"user": torch.tensor(batch), "word": torch.tensor(batch)})
        ...     (found["user"].sum() + found["word"].sum()).backward()
        >>> collection.optimizer.step()
    """

    def __init__(self, storage: ShardStorage) -> None:
        self._storage = storage
        groups = []
        for number, rule in enumerate(storage.rules):
            own = [module for k, module in enumerate(storage.modules) if storage.rule_numbers[k] == number]
            groups.append(
                {
                    "params": [module.weight for module in own],
                    "tables": [module.table.name for module in own],
                    "lr": rule.lr,
                    "weight_decay": rule.weight_decay,
                }
            )
        super().__init__(groups, {})
        for module in storage.modules:  # torch's checkpoint tools make a step with dense gradients if there is no state at all
            self.state[module.weight] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._storage.options.sparse:
            apply_gradients(self._storage)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_storage": self._storage}
