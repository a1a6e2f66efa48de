"""Rules of optimizers that change only the rows that were looked up, so that no gradient of a whole table ever exists.

To add one, copy a dataclass such as Adagrad and add it to Rule. Its `step` updates the state of some rows and returns what is
added to them. The backward of a look-up hands its gradients to a GradientConsumer: RuleUpdate applies the rule of each table;
ParameterGradients collects gradients, for TableOptimizer.step or for torch's optimizers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.embedding.lookup.compiled import Step
from unisono.embedding.rounding import Round, round_stochastically, round_to_nearest

if TYPE_CHECKING:
    from unisono.embedding.lookup.kernels import RowGradients
    from unisono.embedding.lookup.storage import GroupShard, ShardStorage
    from unisono.embedding.parameters import ShardedTable
    from unisono.embedding.sharding.table_groups import TableGroup, TableShard


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

    def step(self, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> Tensor:
        return grads * -lr


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

    def step(self, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> Tensor:
        sums = state["sum"].index_select(0, rows).add_(squares)
        state["sum"].index_copy_(0, rows, sums)
        scales = sums.sqrt_().add_(self.eps).reciprocal_().mul_(-lr)
        return grads * scales[:, None]


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

    def step(self, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> Tensor:
        sums = state["sum"].index_select(0, rows).addcmul_(grads, grads)
        state["sum"].index_copy_(0, rows, sums)
        return (grads / sums.sqrt_().add_(self.eps)).mul_(-lr)


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

    def step(self, rows: Tensor, grads: Tensor, state: dict[str, Tensor], lr: float, squares: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        mean = state["mean"].index_select(0, rows).lerp_(grads, 1 - beta1)
        square = state["square"].index_select(0, rows).mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        state["mean"].index_copy_(0, rows, mean)
        state["square"].index_copy_(0, rows, square)
        return mean.div_(square.sqrt_().add_(self.eps)).mul_(-self.rate(lr, int(state["step"])))

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


class GradientConsumer(ABC):
    """Takes the gradients of rows during a backward."""

    @abstractmethod
    def needs_reached_tables(self) -> bool:
        """Whether a row whose gradient is zero is treated otherwise than a row without a gradient."""

    @abstractmethod
    def begin(self, tables: Collection[int]) -> None:
        """Start a backward, which has reached these tables."""

    def needs_square_sums(self, group: TableGroup) -> bool:
        """Whether `take` needs the sum of squares of each whole row of this table group."""
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


class RuleUpdate(GradientConsumer):
    """Makes a step of each table's rule with the gradients as they come.

    Frozen tables do not change: as with torch's optimizers, a table is frozen if its parameter required no gradient in the
    forward, or requires none in the backward.
    """

    def __init__(self, storage: ShardStorage) -> None:
        assert storage.optimizer is not None
        self.storage = storage
        self.optimizer = storage.optimizer
        self.parameters = {k: parameter for k, parameter in enumerate(storage.parameters()) if parameter.requires_grad}
        # Of each rule, as they are in the forward, where the ranks compare them.
        self.lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.weight_decays = [float(group["weight_decay"]) for group in self.optimizer.param_groups]
        self.step_counts: dict[int, int] = {}  # of the tables that change

    def needs_reached_tables(self) -> bool:
        return any(map(self.storage.counts_steps, range(len(self.storage.tables)))) or any(self.weight_decays)

    def begin(self, tables: Collection[int]) -> None:
        self.count_steps(k for k, parameter in self.parameters.items() if k in tables and parameter.requires_grad)
        self.optimizer.step()  # does nothing here, but schedulers check that it was called

    def count_steps(self, tables: Iterable[int]) -> None:
        """Begin a step of these tables: the same on all ranks."""
        for k in tables:
            steps = self.storage.steps[k].add_(1)
            self.step_counts[k] = int(steps) if self.storage.counts_steps(k) else 0

    def needs_square_sums(self, group: TableGroup) -> bool:
        return isinstance(self.storage.rules[group.key.rule], RowwiseAdagrad)

    def decay(self, shard: GroupShard, rows: Tensor, grads: Tensor) -> Tensor:
        weight_decay = self.weight_decays[shard.group.key.rule]
        return grads.add(shard.weight.index_select(0, shard.places(rows)), alpha=weight_decay) if weight_decay else grads

    @torch.no_grad()
    def take(self, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None = None) -> None:
        rule, lr = self.storage.rules[shard.group.key.rule], self.lrs[shard.group.key.rule]
        rounds = self.storage.options.stochastic_rounding and shard.weight.itemsize == 2
        if not rounds and self._take_compiled(rule, lr, shard, gradients, square_sums):
            return
        for block, sums in gradients.blocks():
            rows = gradients.rows[block]
            grads = self.decay(shard, rows, sums).to(state_dtype(shard.weight))
            squares = grads
            if self.needs_square_sums(shard.group):
                if square_sums is None:
                    squares = torch.linalg.vector_norm(grads, dim=1).square_()
                else:
                    squares = square_sums[block].to(grads.dtype)
                squares = squares / sum(shard.group.key.widths)
            for part, own, steps in self._split(shard, rows, by_table=rounds):
                places = shard.places(rows[own]).to(torch.int64)
                state = shard.state | {"step": torch.tensor(steps, device="cpu")}
                changes = rule.step(places, grads[own], state, lr, squares[own])
                rounding = self._rounding(shard, part, steps) if part and rounds else round_to_nearest
                _add_rows(shard.weight, places, changes, rounding, rows[own].to(torch.int64))  # row x dim exceeds int32

    def _rounding(self, shard: GroupShard, part: TableShard, steps: int) -> Round:
        """Round by random bits that depend on seed, step, row and column of the table alone: on no layout, on no other row."""
        seed = int(self.storage.seeds[part.table])
        dim = self.storage.tables[part.table].dim
        return partial(
            round_stochastically,
            seed=seed,
            step=steps,
            first_row=part.box.row - part.start,
            first_column=shard.first_column,
            dim=dim,
        )

    def _take_compiled(
        self, rule: Rule, lr: float, shard: GroupShard, gradients: RowGradients, square_sums: Tensor | None
    ) -> bool:
        """Let a compiled kernel do all of it in one pass over each row, if it can; return whether."""
        if type(rule) not in _COMPILED_RULES:
            return False
        step = Step(
            _COMPILED_RULES.index(type(rule)),
            lr,
            self.weight_decays[shard.group.key.rule],
            getattr(rule, "eps", 0.0),
            getattr(rule, "betas", (0.0, 0.0)),
            sum(shard.group.key.widths),
        )
        states = list(shard.state.values())
        parts = self._split(shard, gradients.rows)
        gradients = replace(gradients, rows=shard.places(gradients.rows))
        for _, own, steps in parts:
            if isinstance(rule, Adam):
                step = step._replace(rate=rule.rate(lr, steps))
            if not gradients.update(step, shard.weight, states, own, square_sums, has_library=self.storage.is_compiled):
                return False
        return True

    def _split(self, shard: GroupShard, rows: Tensor, *, by_table: bool = False) -> list[tuple[TableShard | None, slice, int]]:
        """Which of the sorted rows change, and in which step of their table.

        Unless `by_table`, those of all tables together if the step is the same.
        """
        counts = {self.step_counts.get(part.table) for part in shard.shards}
        steps = counts.pop() if len(counts) == 1 else None
        if steps is not None and not by_table:
            return [(None, slice(0, len(rows)), steps)]
        return [(part, own, self.step_counts[part.table]) for part, own in shard.split(rows) if part.table in self.step_counts]

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
        blocks: Iterable[tuple[slice, Tensor]] = gradients.blocks()
        if self.sparse:  # the sums are kept, so they are made where they stay
            blocks = [(slice(0, len(gradients.rows)), gradients.sums())]
        for block, sums in blocks:
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
            ((rows, sums, _),) = parts
            return torch.sparse_coo_tensor(rows[None], sums, shape, is_coalesced=True, check_invariants=False)
        dense = parts[0][1].new_zeros(shape)
        for rows, sums, _ in parts:
            dense.index_copy_(0, rows, sums)
        return self.modules[table].shape_as(dense)


def rules_by_table(optimizer: Rule | Mapping[str, Rule] | None, tables: Sequence[str]) -> list[Rule | None]:
    """The rule of each table, given one for all, a dict by table, or None. `rules_error` says what is wrong with it."""
    if isinstance(optimizer, Mapping):
        return [optimizer[name] for name in tables]
    return [optimizer] * len(tables)


def rules_error(optimizer: object, tables: Sequence[str]) -> str:
    """Say what is wrong with what a user gave as `optimizer`; "" if nothing is."""
    if not isinstance(optimizer, Mapping):
        return "" if optimizer is None else _rule_error(optimizer)
    if missing := [name for name in tables if name not in optimizer]:
        return f"optimizer has no rule for table {missing[0]!r}; it has {[*optimizer]}"
    if unknown := [name for name in optimizer if name not in tables]:
        return f"optimizer has a rule for {unknown[0]!r}, which is no table; the tables are {[*tables]}"
    errors = (f"table {name!r}: {error}" for name, rule in optimizer.items() if (error := _rule_error(rule)))
    return next(errors, "")


def _rule_error(rule: object) -> str:
    if hasattr(rule, "states") and not isinstance(rule, type):
        return ""
    given = rule.__name__ if isinstance(rule, type) else type(rule).__name__
    return f"optimizer={given}: expected one of unisono.embedding, such as RowwiseAdagrad(lr=0.1)"


def state_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of sums and moments: float32 if the weight has 16 bits."""
    return torch.promote_types(weight.dtype, torch.float32)


def _add_rows(weight: Tensor, places: Tensor, changes: Tensor, rounding: Round, rows: Tensor) -> None:
    """Do weight[places] += changes for different rows. Of torch's ways to write rows this is the fastest on CPUs.

    `rows`: which rows of a shard they are.
    """
    if rows.numel() == 0 or weight.shape[1] == 0:
        return
    if weight.dtype == changes.dtype:
        weight.scatter_add_(0, places[:, None].expand_as(changes), changes)
    else:  # round once
        wide = weight.index_select(0, places).to(changes.dtype) + changes
        weight.index_copy_(0, places, rounding(wide, weight.dtype, rows))
