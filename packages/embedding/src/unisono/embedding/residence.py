"""What a rank keeps of its tables: their stacks, the modules whose parameters are views of them, and their first weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.collectives import Group, broadcast
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group, process_group, resolve_group, small_message_device
from unisono.embedding.families import Address, address_of, form_families
from unisono.embedding.layouts import Layout
from unisono.embedding.memory import empty_rows
from unisono.embedding.optimizers import FusedOptimizer, Rule, make_states, wide
from unisono.embedding.sharded_table import ShardedTable
from unisono.embedding.stacks import Stack
from unisono.embedding.tables import Table, draw_weights, mix

GradReduce = Literal["mean", "sum"]


@dataclass(frozen=True)
class Options:
    """What the modules of this package have in common."""

    function: str
    grad_reduce: GradReduce = "mean"
    sparse: bool = False
    wire_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def complaint(self) -> str:
        if self.grad_reduce not in ("mean", "sum"):
            return f"grad_reduce={self.grad_reduce!r} is neither 'mean' nor 'sum'"
        if self.wire_dtype not in (None, torch.bfloat16, torch.float16):
            return f"wire_dtype={self.wire_dtype!r} is none of None, torch.bfloat16, torch.float16"
        return ""


class Residence:
    """Tables of one group of ranks, in their layouts."""

    def __init__(
        self, tables: Sequence[Table], layouts: Sequence[Layout], options: Options, rule: Rule | None, group: Group
    ) -> None:
        self.options, self.ranks, self.tables = options, resolve_group(group), list(tables)
        self.layouts = self._settle(layouts, rule)
        self.families = form_families(self.tables, self.layouts, self.ranks.size)
        self.addresses: list[Address] = [Address(1, (0,))] * len(self.tables)
        for family in self.families:
            for number in family.tables:
                self.addresses[number] = address_of(family, number, self.tables[number].rows)
        self.features = {name: k for k, table in enumerate(self.tables) for name in table.features}
        self.steps = torch.zeros((), dtype=torch.int64, device="cpu")  # of a fused optimizer; the same on all ranks
        self.stacks = [self._make_stack(k, rule) for k in range(len(self.families))]
        self.modules: list[ShardedTable] = []
        self.rule = rule
        self.optimizer: FusedOptimizer | None = None

    def _settle(self, layouts: Sequence[Layout], rule: Rule | None) -> list[Layout]:
        """Layouts with ranks, when all ranks want the same tables and none has a bad argument."""
        problem, settled, options = "", list(layouts), self.options
        try:
            settled = [layout.settle(self.ranks.size) for layout in layouts]
        except ValueError as error:
            problem = str(error)
        problem = problem or options.complaint()
        wants = (
            f"{self.tables}, {settled}, {options.grad_reduce}, {options.sparse}, {options.wire_dtype}, {options.dtype}, {rule}"
        )
        validate_across_ranks(
            options.function,
            self.ranks,
            same=wants,
            numbers=(),
            words=lambda: f"{options.function}({wants})",
            device=options.device,
            rule="All ranks must make the same tables with the same plan and options.",
            problem=problem,
        )
        return settled

    def _make_stack(self, number: int, rule: Rule | None) -> Stack | None:
        family = self.families[number]
        place = family.place(self.ranks.rank)
        if place is None:
            return None
        shape = (family.heights[place[0]], family.kin.widths[place[1]])
        weight = empty_rows(shape, dtype=self.options.dtype, device=self.options.device)
        return Stack(family, *place, weight, make_states(rule, weight, self.steps))

    def attach(self, modules: Sequence[ShardedTable]) -> None:
        """Give the modules their shards; for modules that have some, after the stacks have moved."""
        self.modules = list(modules)
        own = {
            shard.table: (stack.view(shard), {k: x if x.ndim == 0 else stack.view(shard, x) for k, x in stack.state.items()})
            for stack in self.stacks
            if stack is not None
            for shard in stack.shards
        }
        for number, module in enumerate(modules):
            shard, states = own.get(number, (None, {}))
            if shard is None:
                empty = torch.empty((0, module.table.dim), dtype=self.options.dtype, device=self.options.device)
                shard, states = empty, make_states(self.rule, empty, self.steps)
            module.attach(shard, states)
        if self.rule is not None and self.optimizer is None:
            self.optimizer = FusedOptimizer([module.weight for module in modules], self.rule)

    def convert(self, change: Callable[[Tensor], Tensor]) -> None:
        """Module.to and its kin: move the stacks whole, then let the parameters and their gradients follow."""
        probe = change(torch.empty(0, dtype=self.options.dtype, device=self.options.device))
        moved = [None if stack is None else change(stack.weight) for stack in self.stacks]
        kept = all(stack is None or stack.weight is weight for stack, weight in zip(self.stacks, moved, strict=True))
        if kept and (probe.dtype, probe.device) == (self.options.dtype, self.options.device):
            return
        grads = [_part(module.weight.grad) for module in self.modules]
        for stack, weight in zip(self.stacks, moved, strict=True):
            if stack is not None and weight is not None:
                stack.weight = weight
                stack.state = {name: _follow(x, weight) for name, x in stack.state.items()}
        self.options = replace(self.options, dtype=probe.dtype, device=probe.device)
        self.attach(self.modules)
        for module, grad in zip(self.modules, grads, strict=True):
            if grad is not None:
                module.weight.grad = module.shape_as(change(grad))

    @torch.no_grad()
    def repair(self) -> None:
        """Where a parameter has been given other memory (`.data =`, pickle, another Parameter), take over what it has."""
        loose = []
        for stack in self.stacks:
            for shard in () if stack is None else stack.shards:
                assert stack is not None
                weight, view = self.modules[shard.table].weight, stack.view(shard)
                local = _part(weight)
                if not isinstance(weight, nn.Parameter):
                    raise TypeError(
                        f"{self.options.function}: the weight of table {self.tables[shard.table].name!r} is no Parameter but a "
                        f"{type(weight).__name__}: torch.func.functional_call cannot replace a sharded table"
                    )
                if local is not None and view.numel() and local.data_ptr() != view.data_ptr():
                    if tuple(local.shape) != tuple(view.shape):
                        raise ValueError(
                            f"{self.options.function}: the weight of table {self.tables[shard.table].name!r} was replaced "
                            f"by one of shape {tuple(weight.shape)}"
                        )
                    loose.append((view, local))
        for view, local in loose:
            view.copy_(local)
        if loose:
            self.attach(self.modules)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> None:
        """First weights and states, from rank 0's default generator; the same for all layouts and numbers of ranks."""
        if seed is None:
            drawn = torch.randint(2**62, (1,), device="cpu")
            if self.ranks.size > 1:
                drawn = drawn.to(small_message_device(process_group(self.ranks), None))
                drawn = broadcast(drawn, root=0, group=as_group(self.ranks))
            seed = int(drawn)
        for module in self.modules:
            code = int.from_bytes(hashlib.blake2b(module.table.name.encode(), digest_size=7).digest(), "little")
            if not module.local.is_meta and module.local.numel():
                draw_weights(module.table, module.box, module.local, seed=mix(seed, code))
        self.steps.zero_()
        for stack in self.stacks:
            if stack is not None and self.rule is not None and len(stack.weight) and not stack.weight.is_meta:
                for name, first in self.rule.states(stack.weight[:1]).items():
                    stack.state[name][:] = first


def _follow(state: Tensor, weight: Tensor) -> Tensor:
    """An optimizer's state where the weight has gone; as wide as it needs, whatever the weight was made."""
    if state.ndim == 0:
        return state
    if state.is_meta:
        return torch.zeros_like(state, device=weight.device, dtype=wide(weight))
    return state.to(weight.device, wide(weight))


def _part(x: Tensor | None) -> Tensor | None:
    """This rank's part, without a look through autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x


_Module = TypeVar("_Module", bound=nn.Module)


def copy_with_engine(module: _Module, state: dict[str, Any], memo: dict[int, Any]) -> _Module:
    """copy.deepcopy of a module with an engine: its parameters are views of the copied stacks, not copies beside them."""
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    made.__dict__.update(copy.deepcopy(state, memo))
    residence: Residence = made.engine  # type: ignore[assignment]
    residence.attach(residence.modules)
    return made
