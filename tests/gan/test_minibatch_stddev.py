"""Standard deviations within groups of the global batch: values, derivatives, traffic and errors."""

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import MismatchError, checked, count_bytes
from unisono.collectives.testing import gradcheck, gradgradcheck
from unisono_models.gan.model.minibatch_stddev import MinibatchStddev, minibatch_stddev

SPLITS = [(12,), (6, 6), (7, 5), (11, 1), (12, 0), (5, 2, 5), (3, 1, 1, 7), (0, 5, 0, 7)]
GROUPS = [1, 2, 3, 4, 5, 50]


def plain(x, group_size):
    """One process, group by group."""
    found = []
    for rows in x.split(group_size):
        deviation = ((rows - rows.mean(0)).square().mean(0) + 1e-8).sqrt().mean()
        found.append(deviation.expand(len(rows)))
    return torch.cat(found)


def whole(rows=12):
    return torch.randn(rows, 2, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1000.0


def first_and_second(y, x, weights):
    """Gradients of a sum over all rows, and of a sum of its gradient's squares, both weighted: plain ones hide faults."""
    (first,) = torch.autograd.grad((weights * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first.square() * weights.view(-1, 1, 1, 1)).sum(), x)
    return first.detach(), second


def matches_one_process(sizes, members=None):
    """On the ranks `members`, or all: the value and both derivatives, with sizes told and asked for."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return
    place = dist.get_rank(group)
    rows = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
    for group_size in GROUPS:
        x = whole().requires_grad_()
        weights = torch.arange(1.0, 13, dtype=torch.float64)
        expected = plain(x, group_size)
        derivatives = first_and_second(expected, x, weights)
        for told in (sizes, None):
            mine = whole()[rows].requires_grad_()
            found = MinibatchStddev(group_size, group=group)(mine, sizes=told)
            torch.testing.assert_close(found[:, :2], mine, rtol=0, atol=0)
            assert found.shape[1] == 3 and torch.equal(found[:, 2, 0, 0], found[:, 2, 2, 0])
            found = found[:, 2, 0, 0]
            torch.testing.assert_close(found, expected[rows], rtol=1e-12, atol=1e-12)
            for got, want in zip(first_and_second(found, mine, weights[rows]), derivatives, strict=True):
                torch.testing.assert_close(got, want[rows], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_matches_one_process(ranks, sizes):
    ranks(matches_one_process, sizes, world_size=len(sizes))


def test_of_a_group_of_ranks_matches_one_process(ranks):
    ranks(matches_one_process, (5, 7), [1, 3], world_size=4)


@pytest.mark.parametrize("group_size", GROUPS)
def test_without_a_process_group(group_size):
    torch.testing.assert_close(minibatch_stddev(whole(), group_size=group_size), plain(whole(), group_size), rtol=1e-12, atol=0)


def check_derivatives(sizes):
    rank = dist.get_rank()
    x = whole(5)[sum(sizes[:rank]) : sum(sizes[: rank + 1]), :, :1].clone() - 1000
    gradcheck(lambda x: minibatch_stddev(x, group_size=3, sizes=sizes), x.requires_grad_())
    gradgradcheck(lambda x: minibatch_stddev(x, group_size=3, sizes=sizes), x, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 0, 4)], ids=str)
def test_gradcheck_and_gradgradcheck(ranks, sizes):
    ranks(check_derivatives, sizes, world_size=len(sizes))


def traffic_of(sizes, group_size):
    """Collectives and bytes of forward, backward, and the backward of a gradient's square."""
    x = torch.randn(sizes[dist.get_rank()], 2, 3, 5, dtype=torch.float64, requires_grad=True)
    with count_bytes() as forward:
        found = minibatch_stddev(x, group_size=group_size, sizes=sizes)
    with count_bytes() as backward:
        (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    with count_bytes() as second:
        gradient.square().sum().backward()
    return [(*traffic.by_op, traffic.calls, traffic.sent) for traffic in (forward, backward, second)]


@pytest.mark.parametrize(
    ("sizes", "group_size"),
    [((8, 4), 4), ((8, 4), 1), ((4, 8), 2), ((12, 0), 5), ((8, 3), 4), ((0, 7), 3), ((6, 0, 3), 3)],
    ids=str,
)
def test_groups_on_one_rank_need_no_communication(ranks, sizes, group_size):
    assert ranks(traffic_of, sizes, group_size, world_size=len(sizes)) == [[(0, 0)] * 3] * len(sizes)


@pytest.mark.parametrize(
    ("sizes", "group_size", "straddling"), [((6, 6), 4, 1), ((41, 43), 7, 1), ((5, 7), 100, 1), ((1, 9, 2), 4, 2)], ids=str
)
def test_groups_that_straddle_cost_their_moments(ranks, sizes, group_size, straddling):
    row = 2 * 3 * 5 * 8
    size = len(sizes)
    moments = 2 * (2 * straddling * row * (size - 1) // size)  # means and squares, each by an all_reduce
    for forward, backward, second in ranks(traffic_of, sizes, group_size, world_size=size):
        assert forward == backward == ("all_reduce", 2, moments)
        assert second[1] <= 4


def test_rejects_empty_groups():
    for call in (lambda: MinibatchStddev(0), lambda: minibatch_stddev(whole(), group_size=0)):
        with pytest.raises(ValueError, match="minibatch_stddev: group_size=0: a group has at least 1 row"):
            call()


def test_rejects_sizes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"minibatch_stddev: sizes=\(7,\) promises 7 along dim 0, but x has shape \(12, 2, 3, 1\)"
    ):
        minibatch_stddev(whole(), group_size=4, sizes=(7,))
    with pytest.raises(ValueError, match=r"minibatch_stddev: sizes=\(6, 6\) must have one length for each of 1 rank"):
        minibatch_stddev(whole(), group_size=4, sizes=(6, 6))


def disagree():
    rank = dist.get_rank()
    with pytest.raises(MismatchError, match=r"(?s)group_size=2.*group_size=3"):
        minibatch_stddev(whole(), group_size=2 + rank)
    with pytest.raises(MismatchError, match=r"float64\[12, 2, 3, 1\]"):
        minibatch_stddev(whole() if rank else whole().flatten(1), group_size=5)
    with (
        checked(),
        pytest.raises(MismatchError, match=r"rank 1: sizes=\(12, 12\) promises 12 along dim 0, but x has shape \(11,"),
    ):
        minibatch_stddev(whole(12 - rank), group_size=5, sizes=(12, 12))
    with checked(), pytest.raises(MismatchError, match=r"(?s)sizes=\(12, 12\).*sizes=\(11, 12\)"):
        minibatch_stddev(whole(), group_size=5, sizes=(12, 12) if rank == 0 else (11, 12))


def test_all_ranks_raise_if_they_disagree(ranks):
    ranks(disagree, world_size=2)


def with_gradient_on_one_rank():
    """Ranks that do not know of each other's gradients run a backward all the same, or the one that needs it would wait."""
    x = whole()[:5].requires_grad_(dist.get_rank() == 1)
    found = minibatch_stddev(x, group_size=3)
    found.sum().backward()
    assert (x.grad is not None) == (dist.get_rank() == 1)


def test_a_gradient_on_one_rank_does_not_hang(ranks):
    ranks(with_gradient_on_one_rank, world_size=2)
