"""What others do to minibatch stddev breaks the law, and the tests of the law see it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gan.small_game import play_once, played_by_one, worst_error
from unisono.collectives import all_gather


class GatheredStddev(nn.Module):
    """Standard deviations over strided groups of 4, as in StyleGAN2, of the rows of all ranks."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def forward(self, x, *, sizes):
        first = sum(sizes[: dist.get_rank()]) if len(sizes) > 1 else 0
        return append(x, strided(all_gather(x, sizes=sizes, grad=self.gradient))[first : first + len(x)])


class StddevOfEachRank(nn.Module):
    """The same of this rank's rows alone: what StyleGAN2 and its successors do."""

    def forward(self, x, *, sizes):
        return append(x, strided(x))


def strided(x):
    return (x.unflatten(0, (4, -1)).var(0, correction=0) + 1e-8).sqrt().flatten(1).mean(1).repeat(4)


def append(x, found):
    return torch.cat([x, found[:, None, None, None].expand(-1, 1, *x.shape[2:])], 1)


def use(layer, game):
    game.discriminator.stddev = layer


TRUE, SLICE, EACH = (partial(use, layer) for layer in (GatheredStddev("sum"), GatheredStddev("slice"), StddevOfEachRank()))


def errors(ranks, change, sizes, gamma=None):
    """Of the gradients of both networks, against one process."""
    _, expected = played_by_one("paired", TRUE, gamma)
    _, found = ranks(play_once, "paired", sizes, change, gamma, world_size=len(sizes))[0]
    return [worst_error(found, expected, network) for network in ("discriminator", "generator")]


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24), (63, 1)], ids=str)
def test_a_gather_whose_backward_keeps_the_own_slice_breaks_the_law(ranks, sizes):
    assert max(errors(ranks, TRUE, sizes)) < 1e-12, "the same layer with the true adjoint keeps it"
    assert min(errors(ranks, SLICE, sizes)) > 1e-3


def test_it_ruins_the_penalties(ranks):
    alone = 1e9  # times the penalties: all else is rounding
    assert errors(ranks, TRUE, (32, 32), alone)[0] < 1e-12
    assert errors(ranks, SLICE, (32, 32), alone)[0] > 0.5


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24)], ids=str)
def test_stddev_of_each_rank_breaks_the_law(ranks, sizes):
    assert min(errors(ranks, EACH, sizes)) > 1e-3
