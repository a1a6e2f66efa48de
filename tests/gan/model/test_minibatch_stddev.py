"""The minibatch standard deviation of the global batch: values, derivatives, traffic and errors."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gan.small_gan import losses_and_gradients, one_process, worst_error
from unisono.collectives import MismatchError, all_gather, checked, count_bytes
from unisono.collectives.testing import gradcheck, gradgradcheck
from unisono_models.gan.model.minibatch_stddev import MinibatchStddev, minibatch_stddev

SPLITS = [(12,), (6, 6), (7, 5), (11, 1), (12, 0), (5, 2, 5), (3, 1, 1, 7), (0, 5, 0, 7)]


GROUPS = [1, 2, 3, 4, 5, 50]


def plain(x, group_size):
    """Compute it in one process, group by group."""
    found = []
    for rows in x.split(group_size):
        deviation = ((rows - rows.mean(0)).square().mean(0) + 1e-8).sqrt().mean()
        found.append(deviation.expand(len(rows)))
    return torch.cat(found)


def whole(rows=12):
    return torch.randn(rows, 2, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1000.0


def first_and_second(y, x, weights):
    """Return the gradient of a weighted sum of `y`, and that of a weighted sum of its squares."""
    (first,) = torch.autograd.grad((weights * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first.square() * weights.view(-1, 1, 1, 1)).sum(), x)
    return first.detach(), second


def matches_one_process(sizes, members=None):
    """Check the value and both derivatives on the ranks `members`, or on all, with and without `sizes`."""
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
    """Return the collectives and bytes of forward, backward and second backward."""
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
    moments = 2 * (2 * straddling * row * (size - 1) // size)  # one all_reduce for the means, one for the squares
    for forward, backward, second in ranks(traffic_of, sizes, group_size, world_size=size):
        assert forward == backward == ("all_reduce", 2, moments)
        assert second[1] <= 4


def test_rejects_empty_groups():
    for call in (lambda: MinibatchStddev(0), lambda: minibatch_stddev(whole(), group_size=0)):
        with pytest.raises(ValueError, match="minibatch_stddev: group_size=0: must be at least 1"):
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
    """Ranks whose input needs no gradient run the backward, too: the rank that needs it would wait for them."""
    x = whole()[:5].requires_grad_(dist.get_rank() == 1)
    found = minibatch_stddev(x, group_size=3)
    found.sum().backward()
    assert (x.grad is not None) == (dist.get_rank() == 1)


def test_a_gradient_on_one_rank_does_not_hang(ranks):
    ranks(with_gradient_on_one_rank, world_size=2)


class GatheredStddev(nn.Module):
    """The stddev of strided groups of 4, as in StyleGAN2, over the gathered rows of all ranks."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def forward(self, x, *, sizes):
        first = sum(sizes[: dist.get_rank()]) if len(sizes) > 1 else 0
        return append(x, strided(all_gather(x, sizes=sizes, grad=self.gradient))[first : first + len(x)])


class StddevOfEachRank(nn.Module):
    """The stddev of strided groups of this rank's rows alone, as in StyleGAN2 and its successors."""

    def forward(self, x, *, sizes):
        return append(x, strided(x))


def strided(x):
    return (x.unflatten(0, (4, -1)).var(0, correction=0) + 1e-8).sqrt().flatten(1).mean(1).repeat(4)


def append(x, found):
    return torch.cat([x, found[:, None, None, None].expand(-1, 1, *x.shape[2:])], 1)


def use(layer, gan):
    gan.discriminator.stddev = layer


TRUE, SLICE, EACH = (partial(use, layer) for layer in (GatheredStddev("sum"), GatheredStddev("slice"), StddevOfEachRank()))


def errors(ranks, change, sizes, gamma=None):
    """Return the errors of the gradients of both networks against one process."""
    _, expected = one_process("paired", TRUE, gamma)
    _, found = ranks(losses_and_gradients, "paired", sizes, change, gamma, world_size=len(sizes))[0]
    return [worst_error(found, expected, network) for network in ("discriminator", "generator")]


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24), (63, 1)], ids=str)
def test_gather_with_slice_gradient_does_not_match_one_process(ranks, sizes):
    """A gather whose backward keeps the rank's own slice, as in many copies of distributed.py, gives wrong gradients."""
    assert max(errors(ranks, TRUE, sizes)) < 1e-12, "with the true adjoint the same layer matches"
    assert min(errors(ranks, SLICE, sizes)) > 1e-3


def test_gather_with_slice_gradient_breaks_the_penalties(ranks):
    """R1 and R2 differentiate twice through the gather: their gradients are off by more than half."""
    gamma = 1e9  # makes all other terms negligible
    assert errors(ranks, TRUE, (32, 32), gamma)[0] < 1e-12
    assert errors(ranks, SLICE, (32, 32), gamma)[0] > 0.5


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24)], ids=str)
def test_stddev_per_rank_does_not_match_one_process(ranks, sizes):
    """StyleGAN2's layer sees the rows of one rank: results change with the number of ranks."""
    assert min(errors(ranks, EACH, sizes)) > 1e-3
