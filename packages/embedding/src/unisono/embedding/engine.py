"""A step of look-ups in many tables: ask, agree, swap row numbers, answer, swap rows, pool. Shared by all modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives import all_to_all_single
from unisono.collectives.autograd import disable_compile
from unisono.collectives.groups import GroupRanks, as_group
from unisono.embedding.answers import Answer, Question, Sink
from unisono.embedding.gradients import ParameterSink
from unisono.embedding.messages import Asked, consult, swap_requests
from unisono.embedding.optimizers import FusedSink
from unisono.embedding.pooling import Pool, Pooling, plan_pooling
from unisono.embedding.ragged import Ragged, complain
from unisono.embedding.requests import Asking, Request, complain_about_numbers, make_request, prepare
from unisono.embedding.residence import Residence
from unisono.embedding.stacks import renormalise


@dataclass
class Step:
    """A step whose row numbers have travelled; the rows have not."""

    requests: list[Request]
    asked: list[Asked]
    poolings: list[Pooling]


class Engine(Residence):
    """Looks up what lies in a residence."""

    def look_up(self, inputs: Mapping[str, Ragged], problem: str = "") -> dict[str, Tensor]:
        """For each feature its pooled rows, or, without mode, a row for each id."""
        return self.finish(self.start(inputs, self.ranks, problem))

    @disable_compile
    def start(self, inputs: Mapping[str, Ragged], ranks: GroupRanks, problem: str = "") -> Step:
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

    @disable_compile
    def finish(self, step: Step) -> dict[str, Tensor]:
        self.repair()
        questions = [Question(r.family, s, a) for r, s, a in zip(step.requests, self.stacks, step.asked, strict=True)]
        for question in questions:
            if question.family.kin.max_norm is not None:
                with torch.no_grad():
                    renormalise(question.stack, question.asked.rows, question.family, self.ranks, self.options.dtype)
        like = torch.empty(0, dtype=self.options.dtype, device=self.options.device)
        factor = 1 / self.ranks.size if self.options.grad_reduce == "mean" else 1.0
        sink, parameters = self._sink()
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
        moved = all_to_all_single(wire, send_sizes=send, receive_sizes=receive, group=as_group(self.ranks))
        return moved.to(flat.dtype)

    def _requests(self, inputs: Mapping[str, Ragged]) -> list[Request]:
        askings = {
            name: prepare(name, self.features[name], self.tables[self.features[name]], bags) for name, bags in inputs.items()
        }
        by_table: dict[int, list[tuple[Asking, bool]]] = {}
        for asking in askings.values():
            by_table.setdefault(asking.table, []).append((asking, self._by_bags(asking.table, asking.weights)))
        return [
            make_request(family, [pair for number in family.tables for pair in by_table.get(number, ())], self.addresses)
            for family in self.families
        ]

    def _by_bags(self, number: int, weights: Tensor | None) -> bool:
        """Whether the owner sums the bags. The gradient of a weight needs its row, and so does a maximum."""
        table, layout = self.tables[number], self.layouts[number]
        if weights is not None and weights.requires_grad:
            return False
        return table.summable and layout.kind in ("table", "column") and layout.answers != "rows"

    def _sink(self) -> tuple[Sink, list[Tensor]]:
        parameters: list[Tensor] = [module.weight for module in self.modules]
        if self.optimizer is not None:
            frozen = {k for k, parameter in enumerate(parameters) if not parameter.requires_grad}
            tie = torch.zeros((), requires_grad=len(frozen) < len(parameters))
            return FusedSink(self.optimizer, self.steps, frozen), [tie]
        return ParameterSink(parameters, lambda k, x: self.modules[k].shape_as(x), self.options.sparse), parameters

    def _tied(self) -> bool:
        return any(module.weight.requires_grad for module in self.modules)

    @staticmethod
    def _learns(bags: object) -> bool:
        weights = getattr(bags, "weights", None)
        return isinstance(weights, Tensor) and weights.requires_grad

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
