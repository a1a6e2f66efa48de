"""Comparison: N ranks beside one process with the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives.law.fingerprint import WIDTH, distance
from unisono.collectives.law.record import ModuleCall, RankRecord, StepRecord
from unisono.collectives.testing.pool import RanksFailed

ASPECTS = ("data", "loss", "gradients", "parameters", "buffers", "metrics")


class Precision(NamedTuple):
    """How far from each other two values may be that are equal but for rounding."""

    tolerance: float  # relative
    floor: float  # tensors shorter than this part of all tensors are compared with that part

    @property
    def loose(self) -> float:
        """For quantities that are computed from deviations, such as factors."""
        return max(100 * self.tolerance, 1e-5)


FLOAT64 = Precision(1e-8, 1e-6)
FLOAT32 = Precision(1e-3, 1e-2)


@dataclass(frozen=True)
class Case:
    """A number of ranks and a split of the batch."""

    world_size: int
    split: str  # its name
    sizes: tuple[int, ...] | None  # rows of each rank; None: the user's own loader
    resumed_from: int | None = None  # the number of ranks that saved the state

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        sizes = f" {'+'.join(map(str, self.sizes))}" if self.sizes else ""
        return f"{ranks}, {self.split}{sizes}" + (f", resumed from {self.resumed_from}" if self.resumed_from else "")


class Difference(NamedTuple):
    """The first module whose outputs differ."""

    name: str
    call: ModuleCall  # of the reference
    deviation: float


class Comparison:
    """One case beside the reference. `ranks` is empty if the case failed."""

    def __init__(
        self,
        case: Case,
        reference: RankRecord,
        ranks: Sequence[RankRecord],
        precision: Precision,
        failure: RanksFailed | None = None,
    ) -> None:
        self.case = case
        self.reference = reference
        self.ranks = ranks
        self.precision = precision
        self.failure = failure

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @cached_property
    def deviations(self) -> dict[str, float]:
        """Return for each aspect the largest relative deviation; aspects that the step does not have are left out."""
        if self.failure is not None:
            return {}
        found = {
            "data": self._data_deviation(),
            "loss": max((self._loss_deviation(k) for k in range(self.step_count)), default=0.0),
            "gradients": max((self.gradient_deviation(k) for k in range(self.step_count)), default=0.0),
            "parameters": max(self.parameter_deviations.values(), default=0.0),
            "buffers": max(self.buffer_deviations.values(), default=0.0),
            "metrics": max(self.metric_deviations.values(), default=0.0),
        }
        if not self.reference.buffers:
            del found["buffers"]
        if not self.reference.steps or not self.reference.steps[0].metrics:
            del found["metrics"]
        return found

    @property
    def ok(self) -> bool:
        return self.failure is None and all(value <= self.precision.tolerance for value in self.deviations.values())

    @cached_property
    def step_count(self) -> int:
        return min(len(record.steps) for record in (self.reference, *self.ranks))

    @cached_property
    def first_step(self) -> int:
        """Return the first step whose loss or gradients deviate, or 0."""
        tolerance = self.precision.tolerance
        steps = range(self.step_count)
        return next((k for k in steps if max(self._loss_deviation(k), self.gradient_deviation(k)) > tolerance), 0)

    def of_reference(self) -> StepRecord:
        return self.reference.steps[self.first_step]

    def of_ranks(self) -> list[StepRecord]:
        return [record.steps[self.first_step] for record in self.ranks]

    @property
    def shares(self) -> list[float]:
        """Return which part of the rows each rank had."""
        rows = [len(step.data) for step in self.of_ranks()]
        return [n / max(sum(rows), 1) for n in rows]

    # data

    def data_counts(self) -> tuple[Counter[tuple[float, ...]], list[Counter[tuple[float, ...]]]]:
        """Return how often the reference, and each rank, had each sample in all steps together."""
        return self._count_samples(self.reference.steps), [self._count_samples(record.steps) for record in self.ranks]

    def has_same_samples(self, k: int) -> bool:
        """Return whether the ranks together had the samples of the reference in step `k`."""
        expected = self._count_samples([self.reference.steps[k]])
        return expected == self._count_samples([record.steps[k] for record in self.ranks])

    def _count_samples(self, steps: Iterable[StepRecord]) -> Counter[tuple[float, ...]]:
        return Counter(row for step in steps for row in _rounded_rows(self._samples(step), self._data_scale))

    def _samples(self, step: StepRecord) -> Tensor:
        """Return the fingerprints of the step's samples, without the tensors that are padded to different widths."""
        return step.data[:, self._data_columns] if step.data.shape[1] == len(self._data_columns) else step.data

    @cached_property
    def _data_columns(self) -> Tensor:
        steps = [step for record in (self.reference, *self.ranks) for step in record.steps]
        widths = [widths for step in steps for widths in step.widths]
        fixed = [len(set(found)) == 1 for found in zip(*widths, strict=False)]
        return torch.tensor(fixed, dtype=torch.bool).repeat_interleave(WIDTH)

    @cached_property
    def _data_scale(self) -> float:
        return max((float(step.data.abs().max()) for step in self.reference.steps if step.data.numel()), default=1.0)

    def _data_deviation(self) -> float:
        """Return the part of the samples that the ranks together have too often or not often enough."""
        expected, found = self.data_counts()
        together = sum(found, Counter())
        wrong = sum(((expected - together) + (together - expected)).values())
        return wrong / max(sum(expected.values()), 1)

    @cached_property
    def _orders(self) -> dict[int, Tensor]:
        """Return, by the number of rows, the places of the reference's rows among those of all ranks in rank order.

        Rows are recognized by what the ranks read, and by what the first called module gets: it may get several tensors of
        a batch one after the other.
        """
        pairs = [
            (self._samples(self.of_reference()), torch.cat([*map(self._samples, self.of_ranks())])),
            *self._entry_inputs()[:1],
        ]
        orders = {}
        for expected, found in pairs:
            if (order := _matching_order(expected, found)) is not None:
                orders[len(order)] = order
        return orders

    def _entry_inputs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs of the first called module: in one process, and on all ranks in rank order."""
        entry = next((call.name for call in self.of_reference().calls if call.is_entry), "")

        def inputs(step: StepRecord) -> list[Tensor]:
            return _joined([call.inputs for call in step.calls if call.name == entry])

        return list(zip(inputs(self.of_reference()), _joined([inputs(step) for step in self.of_ranks()]), strict=False))

    # loss and metrics

    def losses(self) -> tuple[float | None, list[float | None]]:
        return self.of_reference().loss, [step.loss for step in self.of_ranks()]

    def _loss_deviation(self, k: int) -> float:
        """Accept the whole loss on every rank, or losses whose mean, sum, or mean by rows is the whole loss."""
        expected, found = self.reference.steps[k].loss, [record.steps[k].loss for record in self.ranks]
        if expected is None or any(value is None for value in found):
            return 0.0
        values, target = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
        rows = torch.tensor([float(len(record.steps[k].data)) for record in self.ranks], dtype=torch.float64)
        present = rows > 0  # the mean of no rows is NaN
        by_rows = (values[present] * rows[present]).sum() / rows.sum().clamp(min=1)
        candidates = [values.mean(), values.sum(), by_rows]
        return min(distance(values, target.expand_as(values)), *(distance(value, target) for value in candidates))

    @cached_property
    def metric_deviations(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for k in range(self.step_count):
            for name, expected in self.reference.steps[k].metrics.items():
                values = torch.tensor([record.steps[k].metrics.get(name, float("nan")) for record in self.ranks])
                worst = distance(values, torch.full_like(values, expected))
                found[name] = max(found.get(name, 0.0), worst if worst > 1e-6 else 0.0)  # metrics are numbers of 32 bits
        return found

    # gradients, parameters, buffers

    def gradient_deviations(self, k: int) -> dict[str, float]:
        """Return the deviation of each parameter's gradient on the rank where it is largest."""
        expected = {name: value for name, value in self.reference.steps[k].final.items() if self._is_comparable(name)}
        scale = self.precision.floor * _length(expected.values())
        found = {}
        for name, value in expected.items():
            truth = torch.zeros(WIDTH, dtype=torch.float64) if value is None else value
            grads = [record.steps[k].final.get(name) for record in self.ranks]
            found[name] = max(distance(torch.zeros_like(truth) if g is None else g, truth, scale=scale) for g in grads)
        return found

    def gradient_deviation(self, k: int) -> float:
        return max(self.gradient_deviations(k).values(), default=0.0)

    @cached_property
    def parameter_deviations(self) -> dict[str, float]:
        """Return how far each parameter is from the reference, relative to how far it has moved."""
        found = {}
        gradients = [step.final for step in self.reference.steps]
        least = self.precision.floor * max((_length(final.values()) for final in gradients), default=0.0)
        for name, value in self.reference.parameters.items():
            moved = any((g := final.get(name)) is not None and float(g.norm()) > least for final in gradients)
            if not self._is_comparable(name) or not moved:  # an adaptive optimizer makes steps out of rounding errors
                continue
            update = float((value - self.reference.initial[name]).norm())
            scale = max(update, self.precision.floor * float(value.norm()))
            found[name] = max(_deviation(record.parameters[name], value, scale) for record in self.ranks)
        return found

    @cached_property
    def buffer_deviations(self) -> dict[str, float]:
        common = set(self.reference.buffers).intersection(*(record.buffers for record in self.ranks))
        return {
            name: max(distance(record.buffers[name], value) for record in self.ranks)
            for name, value in self.reference.buffers.items()
            if name in common
        }

    def _is_comparable(self, name: str) -> bool:
        """A parameter that has another shape on other numbers of ranks, such as a sharded table, cannot be compared."""
        return all(record.shapes.get(name) == self.reference.shapes[name] for record in self.ranks)

    def not_compared(self) -> list[str]:
        return [name for name in self.reference.shapes if not self._is_comparable(name)]

    # gradients as vectors: what each rank had before the sync, what it ended with, and what is right

    @cached_property
    def names(self) -> list[str]:
        return [name for name in self.of_reference().final if self._is_comparable(name)]

    def final_vectors(self) -> list[Tensor]:
        return [_vector(step.final, self.names) for step in self.of_ranks()]

    def local_vectors(self) -> list[Tensor]:
        return [_local_vector(step, self.names) for step in self.of_ranks()]

    def right_vector(self) -> Tensor:
        return _vector(self.of_reference().final, self.names)

    def right_local_vector(self) -> Tensor:
        """Return the gradient of one process before it was clipped or otherwise changed."""
        return _local_vector(self.of_reference(), self.names)

    def close(self, x: Tensor | float, y: Tensor | float) -> bool:
        a, b = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)
        return distance(a, b.expand_as(a)) <= self.precision.loose

    @cached_property
    def ranks_agree(self) -> bool:
        """Return whether all ranks end with the same gradients."""
        first, *others = self.final_vectors()
        return all(self.close(other, first) for other in others)

    @cached_property
    def factor(self) -> float | None:
        """Return k if every gradient is k times the right one, on all ranks, and k is not 1."""
        right, found = self.right_vector(), self.final_vectors()[0]
        k = float(found @ right / (right @ right)) if float(right.norm()) else 0.0
        return k if self.ranks_agree and k and not self.close(k, 1.0) and self.close(found, k * right) else None

    @cached_property
    def weights_used(self) -> Tensor | None:
        """Return the weight of each rank's own gradient in what the optimizer got, if there are such weights."""
        return self._weights(self.final_vectors()[0]) if self.ranks_agree else None

    @cached_property
    def right_weights(self) -> Tensor | None:
        """Return the weights of the ranks' own gradients that would have given the right gradient, if there are any."""
        return self._weights(self.right_local_vector())

    def _weights(self, target: Tensor) -> Tensor | None:
        local = self.local_vectors()
        present = [r for r, vector in enumerate(local) if float(vector.norm()) > 0]
        if not present or not all(bool(local[r].isfinite().all()) for r in present) or not float(target.norm()):
            return None
        matrix = torch.stack([local[r] for r in present], dim=1)
        scales = matrix.norm(dim=0)
        solution = torch.linalg.lstsq(matrix / scales, target[:, None], driver="gelsd").solution[:, 0] / scales
        if not self.close(matrix @ solution, target):
            return None
        weights = torch.full((len(local),), float("nan"), dtype=torch.float64)  # a rank without a gradient has no weight
        weights[present] = solution
        return weights

    # forward and backward, module by module

    def first_forward_difference(self) -> Difference | None:
        """Return the first module, in the order of computation, whose outputs differ; first of all one with equal inputs."""
        found = []
        for name, (inputs, outputs) in self._aligned_calls.items():
            worst = max((distance(*pair) for pair in outputs), default=0.0)
            if worst > self.precision.loose:
                same_inputs = all(distance(*pair) <= self.precision.loose for pair in inputs)
                found.append((not same_inputs, Difference(name, _first_call(self.of_reference(), name), worst)))
        return min(found, key=lambda entry: entry[0])[1] if found else None

    def first_backward_difference(self) -> str:
        """Return the last module, in the order of computation, whose output gradients are not those of one process."""
        for name in reversed(list(self._aligned_calls)):
            ratios = self.gradient_ratios(name)
            if ratios is None or (len(ratios) and not self.close(ratios, ratios.mean())):
                return name
        return ""

    def entry_rows(self) -> tuple[int, int, int]:
        """Return how many rows the first called module got in one process, and on all ranks, and how many they share."""
        pairs = self._entry_inputs()
        if not pairs:
            return 0, 0, 0
        expected, found = pairs[0]
        scale = float(expected.abs().max()) if len(expected) else 1.0
        mine, theirs = _rounded_rows(expected, scale), _rounded_rows(found, scale)
        return len(expected), len(found), sum((Counter(mine) & Counter(theirs)).values())

    def gradient_ratios(self, name: str) -> Tensor | None:
        """Return for each row the factor between the gradients of the module's output; None if they are not multiples."""
        expected = _gradient_rows(self.of_reference(), name)
        found = torch.cat([rows for step in self.of_ranks() if (rows := _gradient_rows(step, name)) is not None] or [])
        if expected is None or found.shape != expected.shape:
            return None
        found = self._in_order(found)
        lengths = (expected * expected).sum(1)
        used = lengths > lengths.max() * 1e-20 if len(lengths) else lengths > 0
        ratios = (found * expected).sum(1)[used] / lengths[used]
        return ratios if self.close(found[used], ratios[:, None] * expected[used]) else None

    @cached_property
    def _aligned_calls(self) -> dict[str, tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]]:
        """Return for each module the pairs (found, expected) of its inputs and outputs that can be compared."""
        aligned = {}
        for name in dict.fromkeys(call.name for call in self.of_reference().calls):
            expected = [call for call in self.of_reference().calls if call.name == name]
            found = [[call for call in step.calls if call.name == name] for step in self.of_ranks()]
            if all(found):
                pairs_in = self._align([c.inputs for c in expected], [[c.inputs for c in calls] for calls in found])
                same_width = all(c.widths == expected[0].widths or -1 in c.widths for calls in found for c in calls)
                outputs = [[c.outputs for c in calls] for calls in found]
                aligned[name] = (pairs_in, self._align([c.outputs for c in expected], outputs) if same_width else [])
        return aligned

    def _align(self, expected: list[list[Tensor]], found: list[list[list[Tensor]]]) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for leaf in range(min((len(tensors) for calls in (expected, *found) for tensors in calls), default=0)):
            whole = torch.cat([tensors[leaf] for tensors in expected])
            parts = [torch.cat([tensors[leaf] for tensors in calls]) for calls in found]
            joined = torch.cat(parts)
            if len(joined) == len(whole):
                pairs.append((self._in_order(joined), whole))
            elif all(len(part) == len(whole) for part in parts):  # every rank has all rows
                pairs += [(part, whole) for part in parts]
        return pairs

    def _in_order(self, rows: Tensor) -> Tensor:
        """Return rows of all ranks in the order of the reference."""
        order = self._orders.get(len(rows))
        return rows if order is None else rows[order]


def _matching_order(expected: Tensor, found: Tensor) -> Tensor | None:
    """Return the place in `found` of each row of `expected`; None if they do not have the same rows."""
    if expected.shape != found.shape:
        return None
    if distance(found, expected) < 1e-12:
        return torch.arange(len(found))
    order = torch.empty(len(found), dtype=torch.long)
    order[expected[:, 0].argsort(stable=True)] = found[:, 0].argsort(stable=True)
    return order if distance(found[order], expected) < 1e-12 else None


def _joined(calls: list[list[Tensor]]) -> list[Tensor]:
    """Return the tensors of several calls, or of several ranks, one after the other."""
    return [torch.cat(tensors) for tensors in zip(*calls, strict=False)]


def _rounded_rows(rows: Tensor, scale: float) -> list[tuple[float, ...]]:
    """A matrix product rounds a row differently among others, so the last digits do not count."""
    return [tuple(row) for row in (rows * (1e8 / max(scale, 1e-300))).round().tolist()]


def _deviation(found: Tensor, expected: Tensor, scale: float) -> float:
    error = float((found - expected).norm())
    value = error / scale if scale else float(error > 0)
    return value if value == value else float("inf")


def _length(vectors: Iterable[Tensor | None]) -> float:
    return float(sum(float(v.norm()) ** 2 for v in vectors if v is not None) ** 0.5)


def _vector(gradients: dict[str, Tensor | None], names: list[str]) -> Tensor:
    zeros = torch.zeros(WIDTH, dtype=torch.float64)
    values = [gradients.get(name) for name in names]
    return torch.cat([zeros if value is None else value for value in values] or [zeros])


def _local_vector(step: StepRecord, names: list[str]) -> Tensor:
    passes = [_vector(dict(gradients), names) for gradients in step.local]
    return torch.stack(passes).sum(0) if passes else torch.zeros(WIDTH * len(names), dtype=torch.float64)


def _first_call(step: StepRecord, name: str) -> ModuleCall:
    return next(call for call in step.calls if call.name == name)


def _gradient_rows(step: StepRecord, name: str) -> Tensor | None:
    rows = [call.gradients[0] for call in step.calls if call.name == name and 0 in call.gradients]
    return torch.cat(rows) if rows else None
