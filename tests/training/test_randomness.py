"""Random numbers, order and dropout belong to samples: ranks, rows and restarts do not change them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono_models.training.randomness import (
    SampleDropout,
    derive_seed,
    dropout_keys,
    make_generator,
    normal,
    replace_dropout,
    uniform,
    use_dropout_keys,
)
from unisono_models.training.sampler import StepSampler


def test_rows_depend_on_their_sample_alone():
    index = torch.tensor([7, 2**40 + 3, 0, 5])
    whole = uniform(3, "noise", 11, index, (4, 2))
    for row in range(4):
        assert torch.equal(uniform(3, "noise", 11, index[row : row + 1], (4, 2))[0], whole[row])
    assert torch.equal(uniform(3, "noise", 11, index, (2, 2)), whole[:, :2])  # a shorter caption loses the end, not the start


@pytest.mark.parametrize("change", [{"seed": 4}, {"stream": "other"}, {"step": 12}])
def test_every_part_of_the_key_matters(change):
    given = {"seed": 3, "stream": "noise", "step": 11}
    index = torch.arange(200)
    one, other = uniform(**given, index=index, shape=(8,)), uniform(**(given | change), index=index, shape=(8,))
    assert (one == other).float().mean() < 0.01
    assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.1


def test_numbers_are_spread_as_they_should():
    draws = uniform(0, "spread", 0, torch.arange(1000), (100,))
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, 20, 0, 1)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    neighbours = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.015
    bell = normal(0, "spread", 0, torch.arange(1000), (100,))
    assert abs(bell.mean()) < 0.02 and abs(bell.std() - 1) < 0.02 and bell.isfinite().all()


def test_numbers_are_the_same_on_every_machine():
    assert derive_seed(0, "order", 3) == 10972076058678547974
    assert uniform(0, "noise", 0, torch.tensor([5]), (2,)).tolist() == [[0.3713074326515198, 0.42515093088150024]]
    assert torch.equal(torch.rand(3, generator=make_generator(1, "a")), torch.rand(3, generator=make_generator(1, "a")))


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(1, 60), batch=st.integers(1, 25), size=st.integers(1, 5), seed=st.integers(0, 9))
def test_shares_make_up_each_epoch_once(samples, batch, size, seed):
    order = StepSampler(samples, batch, seed)
    steps = -(-samples // batch)
    for epoch in range(2):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            shares = [order.share(step, rank, size) for rank in range(size)]
            assert torch.equal(torch.cat(shares), order.at(step)) and order.epoch_of(step) == epoch
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            seen += order.at(step).tolist()
        assert sorted(seen) == list(range(samples))  # the last, uneven batch included


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(StepSampler(50, 50, seed).at(step).tolist()) for seed in range(3) for step in range(3)}
    assert len(orders) == 9


def test_weights_are_how_often_a_sample_comes():
    order = StepSampler(40, 5, 0, weights=[1.0] * 20 + [0.25] * 20)
    assert order.per_epoch == 25 and StepSampler(40, 7, 0, weights=order.weights).per_epoch == 28
    counts = torch.zeros(40)
    for step in range(5 * 200):  # 200 epochs of five steps
        assert len(order.at(step)) == 5
        counts += torch.bincount(order.at(step), minlength=40)
    torch.testing.assert_close(counts[:20] / 200, torch.ones(20), rtol=0, atol=0.1)
    torch.testing.assert_close(counts[20:] / 200, torch.full((20,), 0.25), rtol=0, atol=0.1)


@pytest.mark.parametrize("bad", [{"samples": 0}, {"batch": 0}, {"weights": [1.0]}, {"weights": [2.0] * 4}])
def test_order_rejects(bad):
    with pytest.raises(ValueError, match="StepSampler"):
        StepSampler(**({"samples": 4, "batch": 2, "seed": 0} | bad))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 6), nn.Dropout(0.0))

    def forward(self, x):
        return self.body(x)


def test_masks_belong_to_samples():
    torch.manual_seed(0)
    net, x, index = replace_dropout(Net()), torch.randn(5, 6), torch.tensor([4, 9, 1, 30, 2])
    with use_dropout_keys(dropout_keys(0, 3, index)):
        whole = net(x)
    with use_dropout_keys(dropout_keys(0, 3, index[[3, 1]])):
        assert torch.allclose(net(x[[3, 1]]), whole[[3, 1]], atol=1e-6)
    with use_dropout_keys(dropout_keys(0, 4, index)):
        assert not torch.allclose(net(x), whole)
    assert torch.equal(net.eval()(x), net(x))


def test_dropout_keeps_the_mean_and_the_gradient_follows_the_mask():
    layer, x = SampleDropout(0.3, "here"), torch.ones(400, 50, requires_grad=True)
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(400))):
        y = layer(x)
    y.sum().backward()
    assert abs(y.mean() - 1) < 0.02 and torch.equal(x.grad, y.detach())
    whole = SampleDropout(0.3, "path", whole=True)
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(400))):
        rows = whole(torch.ones(400, 5, 3)).flatten(1)
    assert ((rows == 0).all(1) | (rows != 0).all(1)).all() and 60 < (rows[:, 0] == 0).sum() < 180


def test_dropout_says_what_it_needs():
    layer = SampleDropout(0.3, "head")
    with pytest.raises(RuntimeError, match=r"'head'.*use_dropout_keys"):
        layer(torch.ones(2, 2))
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(3))), pytest.raises(ValueError, match="2 rows for 3 samples"):
        layer(torch.ones(2, 2))
    with pytest.raises(ValueError, match="rate"):
        SampleDropout(1.0, "all")
