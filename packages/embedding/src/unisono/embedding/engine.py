"""A step of look-ups in many tables: ask, agree, swap row numbers, answer, swap rows, pool. Shared by all modules."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from unisono.collectives import Group, all_to_all_single, broadcast
from unisono.collectives.agreement import agree
from unisono.collectives.groups import Ranks, group_of, process_group, resolve, small_message_device
from unisono.collectives.tracing import untraced
from unisono.embedding.answers import Answer, Question, Sink
from unisono.embedding.families import Address, address_of, form_families
from unisono.embedding.gradients import ParameterSink
from unisono.embedding.layouts import Layout
from unisono.embedding.memory import empty_rows
from unisono.embedding.messages import Asked, consult, swap_requests
from unisono.embedding.optimizers import FusedOptimizer, FusedSink, Rule, make_states, wide
from unisono.embedding.pooling import Pool, Pooling, plan_pooling
from unisono.embedding.ragged import Ragged, complain
from unisono.embedding.requests import Request, complain_about_numbers, make_request, prepare
from unisono.embedding.sharded_table import ShardedTable
from unisono.embedding.stacks import Stack, renormalise
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


@dataclass
class Step:
    """A step whose row numbers have travelled; the rows have not."""

    requests: list[Request]
    asked: list[Asked]
    poolings: list[Pooling]


class Engine:
    def __init__(
        self, tables: Sequence[Table], layouts: Sequence[Layout], options: Options, rule: Rule | None, group: Group
    ) -> None:
        self.options, self.ranks, self.tables = options, resolve(group), list(tables)
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
        if options.grad_reduce not in ("mean", "sum"):
            problem = f"grad_reduce={options.grad_reduce!r} is neither 'mean' nor 'sum'"
        wants = (
            f"{self.tables}, {settled}, {options.grad_reduce}, {options.sparse}, {options.wire_dtype}, {options.dtype}, {rule}"
        )
        agree(
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
        return Stack(family, *place, self.ranks, weight, make_states(rule, weight, self.steps))

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
        """Module.to and its kin: move the stacks whole, then let the parameters follow."""
        for stack in self.stacks:
            if stack is not None:
                stack.weight = change(stack.weight)
                stack.state = {name: _follow(x, stack.weight) for name, x in stack.state.items()}
        probe = change(torch.empty(0, dtype=self.options.dtype, device=self.options.device))
        self.options = Options(**{**self.options.__dict__, "dtype": probe.dtype, "device": probe.device})
        self.attach(self.modules)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> None:
        """First weights and states, from rank 0's default generator; the same for all layouts and numbers of ranks."""
        if seed is None:
            drawn = torch.randint(2**62, (1,), device="cpu")
            if self.ranks.size > 1:
                drawn = drawn.to(small_message_device(process_group(self.ranks), None))
                drawn = broadcast(drawn, root=0, group=group_of(self.ranks))
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

    def look_up(self, inputs: Mapping[str, Ragged], problem: str = "") -> dict[str, Tensor]:
        """For each feature its pooled rows, or, without mode, a row for each id."""
        return self.finish(self.start(inputs, self.ranks, problem))

    @untraced
    def start(self, inputs: Mapping[str, Ragged], ranks: Ranks, problem: str = "") -> Step:
        """All that can be done before the tables have their last values. `ranks` may be of another group of the same ranks."""
        function = self.options.function
        problem = problem or self._complaint(inputs)
        numbered = [] if problem else [(name, self.features[name], bags) for name, bags in inputs.items()]
        problem = problem or complain_about_numbers([(name, self.tables[k], bags) for name, k, bags in numbered])
        requests = [] if problem else self._requests(inputs)
        differentiate = torch.is_grad_enabled()
        marks = [
            f"{name}{'*' * (getattr(bags, 'weights', None) is not None)}{'+' * self._learns(bags)}"
            for name, bags in inputs.items()
        ]
        same = f"features {', '.join(sorted(marks))}; gradients: {differentiate and self._tied()}"
        counts = consult(function, requests, ranks, same=same, words=same, problem=problem, device=self.options.device)
        exact = torch.float64 if self.options.dtype == torch.float64 else torch.float32
        asked = swap_requests(requests, counts, ranks, exact=exact, device=self.options.device)
        modes = [table.mode for table in self.tables]
        return Step(requests, asked, [plan_pooling(request, modes) for request in requests])

    @untraced
    def finish(self, step: Step) -> dict[str, Tensor]:
        questions = [Question(r.family, s, a) for r, s, a in zip(step.requests, self.stacks, step.asked, strict=True)]
        for question in questions:
            if question.family.kin.max_norm is not None:
                with torch.no_grad():
                    renormalise(question.stack, question.asked.rows, question.family, self.ranks, self.options.dtype)
        like = torch.empty(0, dtype=self.options.dtype, device=self.options.device)
        factor = 1 / self.ranks.size if self.options.grad_reduce == "mean" else 1.0
        sink, parameters = self._sink(like)
        flat = Answer.apply(questions, self.ranks, factor, sink, like, *parameters)
        flat = self._swap_answers(flat, questions, step.requests)
        modes = [table.mode for table in self.tables]
        weights = [self._join_weights(request, like) for request in step.requests]
        outputs = Pool.apply(flat, modes, self.ranks.rank, self.ranks.size, step.poolings, *weights)
        names = [
            asking.feature
            for request in step.requests
            for asking in (*request.rows, *(asking for stack in request.bags for asking in stack))
        ]
        return dict(zip(names, outputs, strict=True))

    def _swap_answers(self, flat: Tensor, questions: list[Question], requests: list[Request]) -> Tensor:
        if self.ranks.size == 1:
            return flat
        held = [(q.asked.answers, q.stack.weight.shape[1]) for q in questions if q.stack is not None]
        send = [sum(answers[rank] * width for answers, width in held) for rank in range(self.ranks.size)]
        receive = [0] * self.ranks.size
        for request in requests:
            family = request.family
            for i in range(len(family.stacks)):
                for j, width in enumerate(family.kin.widths):
                    receive[family.owner(i, j, self.ranks.rank)] += request.answers(i) * width
        wire = flat if self.options.wire_dtype is None else flat.to(self.options.wire_dtype)
        moved = all_to_all_single(wire, send_sizes=send, receive_sizes=receive, group=group_of(self.ranks))
        return moved.to(flat.dtype)

    def _requests(self, inputs: Mapping[str, Ragged]) -> list[Request]:
        askings = {
            name: prepare(name, self.features[name], self.tables[self.features[name]], bags) for name, bags in inputs.items()
        }
        found = []
        for family in self.families:
            own = [a for number in family.tables for a in askings.values() if a.table == number]
            found.append(make_request(family, [(a, self._by_bags(a.table, a.weights)) for a in own], self.addresses))
        return found

    def _by_bags(self, number: int, weights: Tensor | None) -> bool:
        """Whether the owner sums the bags. The gradient of a weight needs its row, and so does a maximum."""
        table, layout = self.tables[number], self.layouts[number]
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return False
        return table.summable and layout.kind in ("table", "column") and layout.answers != "rows"

    def _sink(self, like: Tensor) -> tuple[Sink, list[Tensor]]:
        parameters: list[Tensor] = [module.weight for module in self.modules]
        if self.optimizer is not None:
            frozen = {k for k, parameter in enumerate(parameters) if not parameter.requires_grad}
            tie = torch.zeros((), requires_grad=len(frozen) < len(parameters))
            return FusedSink(self.optimizer, self.steps, frozen), [tie]
        return ParameterSink(range(len(parameters)), lambda k, x: self.modules[k].shape_as(x), self.options.sparse), parameters

    def _tied(self) -> bool:
        return any(module.weight.requires_grad for module in self.modules)

    @staticmethod
    def _learns(bags: object) -> bool:
        weights = getattr(bags, "weights", None)
        return isinstance(weights, Tensor) and weights.requires_grad and torch.is_grad_enabled()

    def _join_weights(self, request: Request, like: Tensor) -> Tensor | None:
        if all(asking.weights is None for asking in request.rows):
            return None
        return torch.cat(
            [like.new_ones(int(a.lengths.sum())) if a.weights is None else a.weights.to(like.dtype) for a in request.rows]
        )

    def _complaint(self, inputs: Mapping[str, Ragged]) -> str:
        for name, bags in inputs.items():
            if name not in self.features:
                return f"feature {name!r} looks into no table; the features are {', '.join(self.features)}"
            if problem := complain(f"feature {name!r}", bags):
                return problem
            if away := [x for x in bags if x is not None and x.device.type != self.options.device.type]:
                return f"feature {name!r} is on {away[0].device}, its table on {self.options.device}"
            if bags.weights is not None and self.tables[self.features[name]].mode != "sum":
                return f"feature {name!r}: weights go with mode='sum' only, not with {self.tables[self.features[name]].mode!r}"
        if missing := [name for name in self.features if name not in inputs]:
            return f"missing features: {', '.join(missing)}"
        return ""


def _follow(state: Tensor, weight: Tensor) -> Tensor:
    """An optimizer's state where the weight has gone; as wide as it needs, whatever the weight was made."""
    if state.ndim == 0:
        return state
    if state.is_meta:
        return torch.zeros_like(state, device=weight.device, dtype=wide(weight))
    return state.to(weight.device, wide(weight))


_Module = TypeVar("_Module", bound=nn.Module)


def copy_with_engine(module: _Module, state: dict[str, Any], memo: dict[int, Any]) -> _Module:
    """copy.deepcopy of a module with an engine: its parameters are views of the copied stacks, not copies beside them."""
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    made.__dict__.update(copy.deepcopy(state, memo))
    engine: Engine = made.engine  # type: ignore[assignment]
    engine.attach(engine.modules)
    return made
