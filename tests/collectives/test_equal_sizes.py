"""sizes="equal": no exchange, checked() finds a broken promise. Values and derivatives: one_process.CASES has these calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import (
    MismatchError,
    Ring,
    all_gather,
    all_to_all_single,
    checked,
    count_bytes,
    gather,
    reduce_scatter,
    scatter,
    shift,
    split,
    start_all_gather,
    start_all_to_all_single,
    start_reduce_scatter,
)
from unisono.collectives.testing import run_ranks

# Each takes x, whose length may be divided by the ranks, and arguments instead of sizes="equal".
CALLS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, sizes="equal": all_gather(x, sizes=sizes),
    "all_gather of a tree": lambda x, sizes="equal": all_gather({"a": x, "b": [x[:2]]}, sizes=sizes),
    "gather": lambda x, sizes="equal": gather(x, sizes=sizes),
    "shift": lambda x, sizes="equal": shift(x, sizes=sizes),
    "Ring": lambda x, sizes="equal": [block for _, (block,) in Ring([x], sizes=sizes)],
    "reduce_scatter": lambda x, sizes="equal": reduce_scatter(x, sizes=sizes),
    "all_to_all_single": lambda x, sizes="equal": all_to_all_single(x, send_sizes=sizes, receive_sizes=sizes),
    "start_all_gather": lambda x, sizes="equal": start_all_gather(x, sizes=sizes).wait(),
    "start_reduce_scatter": lambda x, sizes="equal": start_reduce_scatter(x, sizes=sizes).wait(),
    "start_all_to_all_single": lambda x, sizes="equal": start_all_to_all_single(
        x, send_sizes=sizes, receive_sizes=sizes
    ).wait(),
}


def exchanges_nothing(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(2.0 * size).view(-1, 1) + 10 * rank
    with count_bytes() as equal:
        y = CALLS[name](x)
    with count_bytes() as exchanged:
        expected = CALLS[name](x, None)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert equal.calls < exchanged.calls, (name, equal, exchanged)
    with checked():
        torch.testing.assert_close(CALLS[name](x), expected, rtol=0, atol=0)
        with pytest.raises(MismatchError):
            CALLS[name](torch.ones(size * (2 + rank), 1))
    assert all_gather(torch.tensor([rank])).tolist() == list(range(size)), "the ranks are still together"


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_exchanged_and_the_promise_is_checked(name):
    run_ranks(exchanges_nothing, name, world_size=3)


def leaves_of_other_lengths() -> None:
    rank = dist.get_rank()
    tree = {"a": torch.full((2, 3), float(rank)), "b": torch.full((4,), rank), "c": torch.tensor(rank)}
    gathered = all_gather(tree, sizes="equal")
    assert gathered["a"][:, 0].tolist() == [0, 0, 1, 1] and gathered["b"].tolist() == [0] * 4 + [1] * 4
    assert gathered["c"].tolist() == [0, 1]


def test_each_leaf_of_a_tree_has_its_own_length():
    run_ranks(leaves_of_other_lengths, world_size=2)


def parts_are_equal() -> None:
    whole = torch.arange(6.0)
    part = whole.tensor_split(2)[dist.get_rank()]
    assert torch.equal(split(whole, sizes="equal"), part)
    assert torch.equal(scatter(None if dist.get_rank() else whole, sizes="equal"), part)
    for call in (split, reduce_scatter, start_reduce_scatter):
        with pytest.raises(
            ValueError, match=r"sizes='equal': 2 ranks cannot have equal parts along dim 0 of x of shape \(3,\)"
        ):
            call(torch.ones(3), sizes="equal")
    with pytest.raises(MismatchError, match="rank 0: sizes='equal': 2 ranks cannot have equal parts"):
        scatter(None if dist.get_rank() else torch.ones(3), sizes="equal")


def test_a_length_that_cannot_be_divided_is_refused():
    run_ranks(parts_are_equal, world_size=2)


def test_another_word_is_refused():
    for call in (all_gather, gather, shift, reduce_scatter, split, scatter, lambda x, sizes: Ring([x], sizes=sizes)):
        with pytest.raises(ValueError, match="sizes='even' must be a sequence of lengths, one for each rank, or 'equal'"):
            call(torch.ones(2), sizes="even")
