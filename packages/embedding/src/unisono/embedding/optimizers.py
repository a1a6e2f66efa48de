"""Optimizers that change only the rows that were looked up, during the backward: no gradient of a whole table ever exists.

To add an optimizer, copy a dataclass such as Adagrad and add it to Rule. The backward of a look-up hands its gradients to a
GradientConsumer: FusedUpdate applies such a rule; ParameterGradients collects gradients for torch's optimizers instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.embedding.lookup.compiled import Step

if TYPE_CHECKING:
    from unisono.embedding.lookup.kernels import RowGradients
    from unisono.embedding.lookup.storage import GroupShard
    from unisono.embedding.parameters import ShardedTable


@dataclass(frozen=True)
class SGD:
    """weight -= lr * gradient. Weight decay adds weight_decay * weight to the gradient of the rows that were looked up.

    Example:
        >>> SGD(lr=0.1)
        SGD(lr=0.1, weight_decay=0.0)
    """

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate_numbers(self)

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        _add_rows(weight, rows, grads, -lr)


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one number for each row: the sum over steps of the mean of the squares of the row's gradient.

    weight -= lr * gradient / (sqrt(sum) + eps). A row that is cut into columns has one number too, since the ranks that hold
    its columns exchange their squares. Weight decay is that of SGD.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        _validate_numbers(self)

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": weight.new_full((weight.shape[0],), self.initial_accumulator_value, dtype=state_dtype(weight))}

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

    def __post_init__(self) -> None:
        _validate_numbers(self)

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.full_like(weight, self.initial_accumulator_value, dtype=state_dtype(weight))}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        sums = state["sum"].index_select(0, rows).addcmul_(grads, grads)
        state["sum"].index_copy_(0, rows, sums)
        _add_rows(weight, rows, grads.div_(sums.sqrt_().add_(self.eps)), -lr)


@dataclass(frozen=True)
class Adam:
    """Lazy Adam: moments and weights change only for rows that were looked up, as in torch.optim.SparseAdam.

    The moments of other rows do not decay in the meantime. The bias correction counts all steps of the table.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate_numbers(self)

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(weight, dtype=state_dtype(weight))
        return {"mean": zeros, "square": zeros.clone()}

    def step(self, weight: Tensor, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> None:
        beta1, beta2 = self.betas
        mean = state["mean"].index_select(0, rows).lerp_(grads, 1 - beta1)
        square = state["square"].index_select(0, rows).mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        state["mean"].index_copy_(0, rows, mean)
        state["square"].index_copy_(0, rows, square)
        _add_rows(weight, rows, mean.div_(square.sqrt_().add_(self.eps)), -self.rate(lr, int(state["step"])))

    def rate(self, lr: float, steps: int) -> float:
        """The learning rate with the correction of both moments' bias."""
        beta1, beta2 = self.betas
        return lr * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)


def _validate_numbers(rule: Any) -> None:
    """Raise ValueError if a number of the rule is negative, infinite or NaN, or a beta is not below 1."""
    for field in fields(rule):
        given = getattr(rule, field.name)
        for number in given if isinstance(given, tuple) else [given]:
            if not isinstance(number, int | float) or not 0 <= number < (1 if field.name == "betas" else math.inf):
                limit = "from 0 to below 1" if field.name == "betas" else "not negative and finite"
                raise ValueError(f"{type(rule).__name__}: {field.name}={given!r} must be {limit}")


Rule = SGD | RowwiseAdagrad | Adagrad | Adam
_COMPILED_RULES: list[type[Rule]] = [SGD, RowwiseAdagrad, Adagrad, Adam]  # in the order of lookup/compiled.cpp


class FusedOptimizer(torch.optim.Optimizer):
    """The handle of a fused optimizer: torch's schedulers set its learning rate.

    The steps happen in the backward, one for each look-up that it passes. The state_dict of the collection holds the state;
    the state_dict of this handle holds the learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], rule: Rule) -> None:
        super().__init__(parameters, {"lr": rule.lr, "weight_decay": rule.weight_decay})
        self.rule = rule

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        return float(self.param_groups[0]["weight_decay"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing: the backward has made the step."""
        return None if closure is None else closure()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule}


class GradientConsumer(ABC):
    """Takes the gradients of rows during a backward."""

    @abstractmethod
    def needs_reached_tables(self) -> bool:
        """Whether a row whose gradient is zero is treated otherwise than a row without a gradient."""

    @abstractmethod
    def begin(self, tables: Collection[int]) -> None:
        """Start a backward, which has reached these tables."""

    def needs_square_sums(self) -> bool:
        """Whether `take` needs the sum of squares of each whole row."""
        return False

    def decay(self, shard: GroupShard, rows: Tensor, grads: Tensor) -> Tensor:
        """Return the gradients with what weight decay adds to them."""
        return grads

    @abstractmethod
    def take(self, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None = None) -> None:
        """Take the gradients of rows of the shard, which are in ascending order, before weight decay.

        `square_sums`: of each whole row, after weight decay, if the shard has not all columns and `needs_square_sums`.
        """

    @abstractmethod
    def results(self) -> Sequence[Tensor | None]:
        """The gradients of the parameters that were given to LookupFunction."""


class FusedUpdate(GradientConsumer):
    """Applies gradients to the shards as they come.

    `steps`: how many steps each table has made; the same on all ranks. Frozen tables do not change: as with torch's optimizers,
    a table is frozen if its parameter required no gradient in the forward, or requires none in the backward.
    """

    def __init__(
        self, optimizer: FusedOptimizer, steps: Sequence[Tensor], parameters: Sequence[Tensor], *, compiled: bool
    ) -> None:
        self.optimizer = optimizer
        self.is_compiled = compiled and type(optimizer.rule) in _COMPILED_RULES
        self.steps = steps
        self.parameters = {k: parameter for k, parameter in enumerate(parameters) if parameter.requires_grad}
        self.weight_decay = optimizer.weight_decay
        self.step_counts: dict[int, int] = {}  # of the tables that this backward changes

    def needs_reached_tables(self) -> bool:
        return counts_steps(self.optimizer.rule) or self.weight_decay != 0

    def begin(self, tables: Collection[int]) -> None:
        changing = [k for k, parameter in self.parameters.items() if k in tables and parameter.requires_grad]
        for k in changing:
            self.steps[k].add_(1)
        counts = counts_steps(self.optimizer.rule)
        self.step_counts = {k: int(self.steps[k]) if counts else 0 for k in changing}
        self.optimizer.step()  # does nothing, but schedulers check that it was called

    def needs_square_sums(self) -> bool:
        return isinstance(self.optimizer.rule, RowwiseAdagrad)

    def decay(self, shard: GroupShard, rows: Tensor, grads: Tensor) -> Tensor:
        return (
            grads.add(shard.weight.index_select(0, shard.places(rows)), alpha=self.weight_decay) if self.weight_decay else grads
        )

    @torch.no_grad()
    def take(self, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None = None) -> None:
        if self.is_compiled and self._take_compiled(shard, gradients, square_sums):
            return
        rule, lr = self.optimizer.rule, self.optimizer.lr
        for part, sums in gradients.blocks():
            rows = gradients.rows[part]
            grads = self.decay(shard, rows, sums).to(state_dtype(shard.weight))
            squares = grads
            if self.needs_square_sums():
                if square_sums is None:
                    squares = torch.linalg.vector_norm(grads, dim=1).square_()
                else:
                    squares = square_sums[part].to(grads.dtype)
                squares = squares / sum(shard.group.key.widths)
            for own, steps in self._split(shard, rows):
                state = shard.state | {"step": torch.tensor(steps, device="cpu")}
                rule.step(shard.weight, shard.places(rows[own]).to(torch.int64), grads[own], state, lr, squares[own])

    def _take_compiled(self, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None) -> bool:
        """Let a compiled kernel do all of it in one pass over each row, if it can; return whether."""
        rule = self.optimizer.rule
        step = Step(
            _COMPILED_RULES.index(type(rule)),
            self.optimizer.lr,
            self.weight_decay,
            getattr(rule, "eps", 0.0),
            getattr(rule, "betas", (0.0, 0.0)),
            sum(shard.group.key.widths),
        )
        states = list(shard.state.values())
        parts = self._split(shard, gradients.rows)
        gradients = replace(gradients, rows=shard.places(gradients.rows))
        for own, steps in parts:
            if isinstance(rule, Adam):
                step = step._replace(rate=rule.rate(self.optimizer.lr, steps))
            if not gradients.update(step, shard.weight, states, own, square_sums):
                return False
        return True

    def _split(self, shard: GroupShard, rows: Tensor) -> list[tuple[slice, int]]:
        """Which of the sorted rows change, and in which step of their table; those of all tables at once if it is the same."""
        counts = {self.step_counts.get(part.table) for part in shard.shards}
        steps = counts.pop() if len(counts) == 1 else None
        if steps is not None:
            return [(slice(0, len(rows)), steps)]
        return [(own, self.step_counts[part.table]) for part, own in shard.split(rows) if part.table in self.step_counts]

    def results(self) -> Sequence[Tensor | None]:
        return (None,)


class ParameterGradients(GradientConsumer):
    """Collects the gradient of each table's parameter, dense or sparse. On a rank that holds nothing of a table it is empty."""

    def __init__(self, modules: Sequence[ShardedTable], sparse: bool) -> None:
        self.modules = modules
        self.wanted = [module.is_trained for module in modules]  # a frozen table costs nothing
        self.sparse = sparse
        self.reached: Collection[int] = ()
        self.parts: dict[int, list[tuple[Tensor, Tensor, torch.Size]]] = {}

    def needs_reached_tables(self) -> bool:
        return True

    def begin(self, tables: Collection[int]) -> None:
        self.reached = [k for k in tables if self.wanted[k]]
        self.parts = {}

    def take(self, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None = None) -> None:
        for block, sums in gradients.blocks():
            rows = gradients.rows[block]
            for part, own in shard.split(rows):
                if part.table in self.reached:
                    shape = torch.Size((part.box.shape[0], shard.weight.shape[1]))
                    own_rows = rows[own].to(torch.int64) - part.start
                    self.parts.setdefault(part.table, []).append((own_rows, sums[own], shape))

    def results(self) -> Sequence[Tensor | None]:
        parts, self.parts = self.parts, {}
        for k in self.reached:
            if k not in parts:
                empty = self.modules[k].local[:0]
                parts[k] = [(empty.new_empty(0, dtype=torch.int64), empty, empty.shape)]
        return [self._gradient(table, parts.get(table)) for table in range(len(self.wanted))]

    def _gradient(self, table: int, parts: list[tuple[Tensor, Tensor, torch.Size]] | None) -> Tensor | None:
        if parts is None:
            return None
        shape = parts[0][2]
        if self.sparse:
            rows = torch.cat([part[0] for part in parts])
            sums = torch.cat([part[1] for part in parts])
            return torch.sparse_coo_tensor(rows[None], sums, shape, is_coalesced=True, check_invariants=False)
        dense = parts[0][1].new_zeros(shape)
        for rows, sums, _ in parts:
            dense.index_copy_(0, rows, sums)
        return self.modules[table].shape_as(dense)


def rule_error(rule: object) -> str:
    """Say what is wrong with what a user gave as `optimizer`; "" if nothing is."""
    if rule is None or (hasattr(rule, "states") and not isinstance(rule, type)):
        return ""
    given = rule.__name__ if isinstance(rule, type) else type(rule).__name__
    return f"optimizer={given}: expected one of unisono.embedding, such as RowwiseAdagrad(lr=0.1)"


def counts_steps(rule: Rule | None) -> bool:
    """Whether the state of a table includes its number of steps."""
    return isinstance(rule, Adam)


def state_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of sums and moments: float32 if the weight has 16 bits."""
    return torch.promote_types(weight.dtype, torch.float32)


def _add_rows(weight: Tensor, rows: Tensor, changes: Tensor, factor: float) -> None:
    """Do weight[rows] += factor * changes for different rows. Of torch's ways to write rows this is the fastest on CPUs."""
    if rows.numel() == 0 or weight.shape[1] == 0:
        return
    if factor != 1:
        changes = changes.mul(factor)
    if weight.dtype == changes.dtype:
        weight.scatter_add_(0, rows[:, None].expand_as(changes), changes)
    else:  # round once
        weight.index_copy_(0, rows, (weight.index_select(0, rows).to(changes.dtype) + changes).to(weight.dtype))
