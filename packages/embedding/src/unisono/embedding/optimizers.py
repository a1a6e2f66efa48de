"""Optimizers that change only the rows that were looked up, during the backward: no gradient of a whole table ever exists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.embedding.stacks import Stack, split_by_shard


@dataclass(frozen=True)
class SGD:
    """weight -= lr * gradient. Weight decay adds weight_decay * weight to the gradient of the rows that were looked up.

    Example:
        >>> SGD(lr=0.1)
        SGD(lr=0.1, weight_decay=0.0)
    """

    lr: float
    weight_decay: float = 0.0

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        _add_rows(weight, rows, grads, -lr)


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one number for each row: the sum over steps of the mean of the squares of the row's gradient.

    weight -= lr * gradient / (sqrt(sum) + eps). A row cut into columns has one number too: its columns share their squares.
    Weight decay as in SGD.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": weight.new_full((weight.shape[0],), self.initial_accumulator_value, dtype=wide(weight))}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        sums = state["sum"].index_select(0, rows).add_(squares)
        state["sum"].index_copy_(0, rows, sums)
        scales = sums.sqrt_().add_(self.eps).reciprocal_().mul_(-lr)
        _add_rows(weight, rows, grads.mul_(scales[:, None]), 1)


@dataclass(frozen=True)
class Adagrad:
    """torch.optim.Adagrad on the rows that were looked up. Without weight decay this is the same as on all rows."""

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.full_like(weight, self.initial_accumulator_value, dtype=wide(weight))}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        sums = state["sum"].index_select(0, rows).addcmul_(grads, grads)
        state["sum"].index_copy_(0, rows, sums)
        _add_rows(weight, rows, grads.div_(sums.sqrt_().add_(self.eps)), -lr)


@dataclass(frozen=True)
class Adam:
    """Adam, lazily: moments and weights change only for rows that were looked up, as in torch.optim.SparseAdam.

    The moments of other rows do not decay in the meantime; the bias correction counts all steps of the table.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(weight, dtype=wide(weight))
        return {"mean": zeros, "square": zeros.clone()}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        beta1, beta2 = self.betas
        mean = state["mean"].index_select(0, rows).lerp_(grads, 1 - beta1)
        square = state["square"].index_select(0, rows).mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        state["mean"].index_copy_(0, rows, mean)
        state["square"].index_copy_(0, rows, square)
        steps = int(state["step"])
        rate = lr * (1 - beta2**steps) ** 0.5 / (1 - beta1**steps)
        _add_rows(weight, rows, mean.div_(square.sqrt_().add_(self.eps)), -rate)


Rule = SGD | RowwiseAdagrad | Adagrad | Adam


class FusedOptimizer(torch.optim.Optimizer):
    """The handle of a fused rule: torch's schedulers set its learning rate.

    The steps happen in the backward, one for each look-up that it passes. The state_dict of the collection holds the state,
    that of this handle the learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], rule: Rule) -> None:
        super().__init__(parameters, {"lr": rule.lr, "weight_decay": rule.weight_decay})
        self.rule = rule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing is left to do."""
        return None if closure is None else closure()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is there to be cleared."""


class FusedSink:
    """Applies gradients to the stacks as they come. `frozen`: tables that stay as they are."""

    def __init__(self, optimizer: FusedOptimizer, steps: Tensor, frozen: Collection[int]) -> None:
        self.optimizer, self.steps, self.frozen = optimizer, steps, frozen

    def begin(self) -> None:
        self.steps += 1
        self.optimizer.step()  # does nothing, but schedulers ask whether it was called

    def needs_square_sums(self) -> bool:
        return isinstance(self.optimizer.rule, RowwiseAdagrad)

    def decay(self, stack: Stack, rows: Tensor, grads: Tensor) -> Tensor:
        factor = float(self.optimizer.param_groups[0]["weight_decay"])
        return grads.add(stack.weight.index_select(0, rows), alpha=factor) if factor else grads

    @torch.no_grad()
    def take(self, stack: Stack, rows: Tensor, grads: Tensor, square_sums: Tensor | None) -> None:
        settings, rule = self.optimizer.param_groups[0], self.optimizer.rule
        if self.frozen:
            parts = split_by_shard(stack, rows, rows)
            keep = torch.cat(
                [torch.full_like(own, shard.table not in self.frozen, dtype=torch.bool) for shard, own, _ in parts]
            )
            rows, grads, square_sums = rows[keep], grads[keep], None if square_sums is None else square_sums[keep]
        rows = rows.to(torch.int64)
        grads = grads.to(wide(stack.weight))
        squares = grads
        if self.needs_square_sums():
            squares = torch.linalg.vector_norm(grads, dim=1).square_() if square_sums is None else square_sums.to(grads.dtype)
            squares = squares / sum(stack.family.kin.widths)
        rule.step(stack.weight, rows, grads, stack.state, float(settings["lr"]), squares)

    def results(self) -> Sequence[Tensor | None]:
        return (None,)


def make_states(rule: Rule | None, weight: Tensor, steps: Tensor) -> dict[str, Tensor]:
    """`steps`: the count that all tables share, for rules that need it."""
    if rule is None:
        return {}
    return rule.states(weight) | ({"step": steps} if isinstance(rule, Adam) else {})


def wide(weight: Tensor) -> torch.dtype:
    """16-bit weights have their sums and moments in float32."""
    return torch.promote_types(weight.dtype, torch.float32)


def _add_rows(weight: Tensor, rows: Tensor, changes: Tensor, factor: float) -> None:
    """weight[rows] += factor * changes, for different rows. Of torch's ways to write rows, this is the fastest on CPUs."""
    if rows.numel() == 0 or weight.shape[1] == 0:
        return
    if factor != 1:
        changes = changes.mul(factor)
    if weight.dtype == changes.dtype:
        weight.scatter_add_(0, rows[:, None].expand_as(changes), changes)
    else:  # round once
        weight.index_copy_(0, rows, (weight.index_select(0, rows).to(changes.dtype) + changes).to(weight.dtype))
