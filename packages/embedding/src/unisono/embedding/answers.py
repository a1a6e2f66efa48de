"""The owner's side of a step: rows or sums for all who asked; in the backward, the gradient of each row, used at once.

One autograd Function for all families. What becomes of a gradient is the business of a sink: a fused optimizer applies it,
so that no dense gradient ever exists; otherwise it becomes the gradient of the tables' parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.collectives.groups import GroupRanks
from unisono.embedding.families import Family
from unisono.embedding.grouping import Groups, group, sum_bags, sum_groups, sum_groups_in_blocks
from unisono.embedding.messages import Asked
from unisono.embedding.stacks import Stack, gather_copies, sum_columns


class Sink(Protocol):
    """Takes the gradients of a backward."""

    def begin(self) -> None: ...

    def needs_square_sums(self) -> bool:
        """Whether `take` wants the sum of squares of each whole row."""

    def decay(self, stack: Stack, rows: Tensor, grads: Tensor) -> Tensor:
        """The gradients with what weight decay adds to them."""

    def take(self, stack: Stack, rows: Tensor, grads: Tensor, square_sums: Tensor | None) -> None:
        """Different rows of the stack in ascending order, and their gradients; perhaps a part of them at a time."""

    def results(self) -> Sequence[Tensor | None]:
        """The gradients of the parameters that were given to Answer."""


@dataclass
class Question:
    """All that is asked of this rank in one family."""

    family: Family
    stack: Stack | None
    asked: Asked


class Answer(torch.autograd.Function):
    """forward(questions, ranks, factor, sink, like, *parameters): the answers to all ranks, flat, rank after rank, family
    after family. `parameters` only tie the answers into the graph; `like` gives dtype and device.

    Backward: the gradient of each row that was asked for, summed over all ranks and times `factor`, goes to the sink.
    """

    @staticmethod
    def forward(
        ctx: Any, questions: list[Question], ranks: GroupRanks, factor: float, sink: Sink, like: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.questions, ctx.ranks, ctx.factor, ctx.sink, ctx.parameters = questions, ranks, factor, sink, len(parameters)
        ctx.save_for_backward(*(question.asked.rows for question in questions))
        found = [_answer(question) for question in questions if question.stack is not None]
        held = [question for question in questions if question.stack is not None]
        if len(found) == 1:
            return found[0].reshape(-1)
        if not found:
            return like.new_empty(0)
        blocks = [rows.split_with_sizes(question.asked.answers) for rows, question in zip(found, held, strict=True)]
        return torch.cat([block[rank].reshape(-1) for rank in range(ranks.size) for block in blocks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises in a second backward, as torch's own functions do
        held = [question for question in ctx.questions if question.stack is not None]
        widths = [question.stack.weight.shape[1] for question in held]
        sizes = [
            n * width
            for rank in range(ctx.ranks.size)
            for question, width in zip(held, widths, strict=True)
            for n in (question.asked.answers[rank],)
        ]
        if len(held) == 1:
            grads = [grad.reshape(sum(held[0].asked.answers), widths[0])]
        else:
            blocks = grad.split_with_sizes(sizes)
            grads = [
                torch.cat(blocks[k :: len(held)]).view(sum(question.asked.answers), widths[k])
                for k, question in enumerate(held)
            ]
        ctx.sink.begin()
        remaining = iter(grads)
        for question in ctx.questions:  # in the same order on all ranks: some of it communicates
            own = next(remaining) if question.stack is not None else None
            _give_back(question, grad.new_empty((0, 0)) if own is None else own, ctx.factor, ctx.sink, ctx.ranks)
        return None, None, None, None, None, *ctx.sink.results()


def _answer(question: Question) -> Tensor:
    assert question.stack is not None
    weight, asked = question.stack.weight, question.asked
    if asked.lengths is None:
        return weight.index_select(0, asked.rows)
    return sum_bags(weight, asked.rows, asked.lengths.cumsum(0) - asked.lengths, asked.weights)


def _give_back(question: Question, grads: Tensor, factor: float, sink: Sink, ranks: GroupRanks) -> None:
    """`grads`: of the answers; empty, but of their dtype and device, where this rank has no stack."""
    family, stack, asked = question.family, question.stack, question.asked
    rows, bags, weights = asked.rows, asked.bags(), asked.weights
    if family.replicated and ranks.size > 1:  # first the sums of this rank, then those of all
        groups = group(rows)
        sums = sum_groups(grads, bags, groups, weights)
        frequencies = None if asked.frequencies is None else _sum_numbers(asked.frequencies, groups)
        if frequencies is not None:
            frequencies, _ = gather_copies(frequencies, None, ranks)
        rows, every = gather_copies(groups.unique, sums, ranks)
        assert every is not None
        grads, bags, weights = every, None, None
    else:
        frequencies = asked.frequencies
    groups = _without_paddings(group(rows), stack)
    divisors = None if frequencies is None else _sum_numbers(frequencies, groups)
    together = family.columns > 1 and sink.needs_square_sums()
    if together:
        sums = grads
        if stack is not None:
            sums = _finish(sum_groups(grads, bags, groups, weights), divisors, factor)
            sums = sink.decay(stack, groups.unique, sums)
        squares = sum_columns(sums.to(torch.promote_types(sums.dtype, torch.float32)).square().sum(1), family, ranks)
        if stack is not None:
            sink.take(stack, groups.unique, sums, squares)
    elif stack is not None:
        for part, sums in sum_groups_in_blocks(grads, bags, groups, weights):
            sums = _finish(sums, None if divisors is None else divisors[part], factor)
            sink.take(stack, groups.unique[part], sink.decay(stack, groups.unique[part], sums), None)


def _finish(sums: Tensor, divisors: Tensor | None, factor: float) -> Tensor:
    """In place: the sums are nobody else's."""
    if divisors is not None:
        sums.div_(divisors[:, None])
    return sums if factor == 1 else sums.mul_(factor)


def _sum_numbers(numbers: Tensor, groups: Groups) -> Tensor:
    index = torch.arange(len(groups.unique), device=numbers.device).repeat_interleave(groups.counts)
    return torch.zeros_like(groups.unique).index_add_(0, index, numbers.index_select(0, groups.order))


def _without_paddings(groups: Groups, stack: Stack | None) -> Groups:
    """Rows that get no gradient taken out."""
    paddings = None if stack is None else stack.paddings()
    if paddings is None:
        return groups
    keep = torch.isin(groups.unique, paddings, invert=True)
    if bool(keep.all()):
        return groups
    order = groups.order[keep.repeat_interleave(groups.counts)]
    counts = groups.counts[keep]
    return Groups(groups.unique[keep], order, counts.cumsum(0) - counts, counts)
