"""The game in one process against formulas written out, what a step touches, what it sends, and what is refused."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from tests.gan.small_game import CASES, CLASSES, ROWS, SMALL, make_batch, make_game, share_of
from unisono.collectives import count_bytes
from unisono_models.gan.config import LossConfig, ModelConfig
from unisono_models.gan.loss import GAN, frozen, mismatched
from unisono_models.gan.model.discriminator import Discriminator
from unisono_models.gan.model.generator import Generator


def scores_of(game, batch):
    with torch.no_grad():
        fakes = game.generator(batch.noise, batch.condition)
        real, fake = (game.discriminator(x, batch.condition) for x in (batch.images, fakes))
    return fakes, real, fake


def mean(values):
    return float(torch.stack(list(values)).mean())


def test_losses_are_the_formulas():
    batch = make_batch("class")
    pairs = [(i, i) for i in range(ROWS)]
    every = [(i, j) for i in range(ROWS) for j in range(ROWS)]
    for case, discriminator, generator in (
        (
            "paired",
            lambda r, f: (softplus(f[j] - r[i]) for i, j in pairs),
            lambda r, f: (softplus(r[i] - f[j]) for i, j in pairs),
        ),
        (
            "all pairs, groups of 3",
            lambda r, f: (softplus(f[j] - r[i]) for i, j in every),
            lambda r, f: (softplus(r[i] - f[j]) for i, j in every),
        ),
        (
            "non-saturating, r1, groups of 25",
            lambda r, f: (-r[i].sigmoid().log() - (1 - f[i].sigmoid()).log() for i, _ in pairs),
            lambda r, f: (-f[i].sigmoid().log() for i, _ in pairs),
        ),
        (
            "hinge, r2, one group",
            lambda r, f: ((1 - r[i]).clamp(min=0) + (1 + f[i]).clamp(min=0) for i, _ in pairs),
            lambda r, f: (-f[i] for i, _ in pairs),
        ),
    ):
        game = make_game(case)
        fakes, real, fake = scores_of(game, batch)
        losses = game.discriminator_step(batch, fakes)
        assert float(losses["play"]) == pytest.approx(mean(discriminator(real, fake)), rel=1e-12)
        assert torch.equal(losses["loss"].detach(), losses["play"]), "without gamma there is no penalty"
        assert [name for name, value in losses.items() if value.requires_grad] == ["loss"], "what is shown keeps no graph"
        assert float(losses["real score"]) == pytest.approx(float(real.mean()), rel=1e-12)
        assert float(game.generator_step(batch, fakes)["play"]) == pytest.approx(mean(generator(real, fake)), rel=1e-12)


def test_penalties_are_squared_slopes():
    batch = make_batch("class")
    for case in ("non-saturating, r1, groups of 25", "hinge, r2, one group", "paired"):
        game, penalty = make_game(case), LossConfig(**CASES[case][1]).penalty
        fakes = scores_of(game, batch)[0]
        losses = game.discriminator_step(batch, fakes, gamma=3.0)
        expected = squared_slopes(game, batch, fakes, penalty).mean() / 2
        assert float(losses["penalty"]) == pytest.approx(float(expected), rel=1e-12)
        assert float(losses["loss"].detach()) == pytest.approx(float(losses["play"] + 3 * expected), rel=1e-12)


def squared_slopes(game, batch, fakes, penalty):
    found = torch.zeros(ROWS, dtype=torch.float64)
    for pictures in [x for name, x in (("r1", batch.images), ("r2", fakes)) if name in penalty]:
        x = pictures.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(game.discriminator(x, batch.condition).sum(), x)
        found += gradient.square().flatten(1).sum(1)
    return found


def test_matching_counts_other_conditions_only():
    game, batch = make_game("labels that do not match"), make_batch("class")
    fakes, real, _ = scores_of(game, batch)
    wrong = batch.condition.roll(-batch.shift)
    with torch.no_grad():
        under_wrong = game.discriminator(batch.images, wrong)
    terms = torch.where(wrong != batch.condition, softplus(under_wrong - real), 0.0)
    assert 0 < (terms == 0).sum() < ROWS
    losses = game.discriminator_step(batch, fakes)
    assert float(losses["matching"]) == pytest.approx(float(terms.mean()), rel=1e-12)
    assert float(losses["loss"].detach()) == pytest.approx(float(losses["play"] + 0.7 * terms.mean()), rel=1e-12)


def test_a_step_touches_one_network_and_no_input():
    for case in ("paired", "all terms", "all terms, vectors"):
        game = make_game(case)
        batch = make_batch(game.generator.config.condition)
        before = batch.images.clone()
        fakes = game.generator(batch.noise, batch.condition)
        game.discriminator_step(batch, fakes, gamma=1.0)["loss"].backward()
        assert all(p.grad is None for p in game.generator.parameters())
        assert all(p.grad is not None for p in game.discriminator.parameters())
        grads = [p.grad.clone() for p in game.discriminator.parameters()]
        game.generator_step(batch, fakes)["loss"].backward()
        assert all(p.grad is not None for p in game.generator.parameters())
        assert all(torch.equal(p.grad, g) for p, g in zip(game.discriminator.parameters(), grads, strict=True))
        assert not batch.images.requires_grad and torch.equal(batch.images, before)


def test_frozen_gives_back_what_required_a_gradient():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[0].bias.requires_grad_(False)
    with contextlib.suppress(KeyError), frozen(network):
        assert not any(p.requires_grad for p in network.parameters())
        raise KeyError
    assert [p.requires_grad for p in network.parameters()] == [True, False, True, True]


def test_a_batch_of_one_has_no_contrast():
    game, batch = make_game("contrast of classes"), make_batch("class")
    one = replace(
        batch,
        images=batch.images[:1],
        condition=batch.condition[:1],
        ids=batch.ids[:1],
        noise=batch.noise[:1],
        sizes=(1,),
    )
    fakes = game.generator(one.noise, one.condition)
    for network, losses in (
        (game.discriminator, game.discriminator_step(one, fakes)),
        (game.generator, game.generator_step(one, fakes)),
    ):
        losses["loss"].backward()
        assert float(losses["contrast"]) == 0 and not losses["contrast"].requires_grad
        assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def traffic_of(case, sizes):
    """Collectives of the discriminator's losses, their backward, the generator's, and theirs."""
    game, gamma = make_game(case), CASES[case][2]
    batch = share_of(make_batch(game.generator.config.condition), sizes)
    fakes = game.generator(batch.noise, batch.condition)
    found = []
    for step in (lambda: game.discriminator_step(batch, fakes, gamma=gamma), lambda: game.generator_step(batch, fakes)):
        with count_bytes() as forward:
            loss = step()["loss"]
        with count_bytes() as backward:
            loss.backward()
        found += [{name: op.calls for name, op in traffic.by_op.items()} for traffic in (forward, backward)]
    return found


def test_steps_communicate_little(ranks):
    means = {"all_reduce": 1}
    aligned = ranks(traffic_of, "paired", (40, 24), world_size=2)
    assert aligned == [[means] * 4] * 2, "groups on one rank: nothing but the means"
    # Two passes with two sums each, in both; the slopes, another time back through them.
    straddling = ranks(traffic_of, "paired", (63, 1), world_size=2)
    assert straddling == [[{"all_reduce": 9}, {"all_reduce": 9}, {"all_reduce": 5}, {"all_reduce": 3}]] * 2


def test_rejects_what_does_not_fit():
    with pytest.raises(ValueError, match=r"matching=0.5, contrast=0.0: both need a condition, not 'none'"):
        GAN(ModelConfig(condition="none"), LossConfig(matching=0.5), size=16, channels=1)
    game = make_game("paired")
    for network, x in ((game.generator, torch.zeros(2, 8)), (game.discriminator, torch.zeros(2, 1, 8, 8))):
        with pytest.raises(ValueError, match="condition: None, but the network was made for condition='class'"):
            network(x.double())
    for network in (Generator, Discriminator):
        with pytest.raises(ValueError, match=r"data.size=10 with model.patch=2 and the channels.* multiple of 2 \* 2\*\*1 = 4"):
            network(ModelConfig(**SMALL), size=10, channels=1, conditions=CLASSES)
    with pytest.raises(ValueError, match=r"sizes=\(3,\) promises 3 along dim 0, but x has shape \(2,\)"):
        mismatched(torch.zeros(2), shift=1, sizes=(3,))
