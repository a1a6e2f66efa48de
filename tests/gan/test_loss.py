"""The losses: N ranks against one process for any split, formulas, gradients, communication and errors."""

import contextlib
import re
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.optim import Adam

from tests.gan.small_gan import (
    CASES,
    CLASSES,
    ROWS,
    SMALL,
    losses_and_gradients,
    make_batch,
    make_gan,
    one_process,
    rows_of_rank,
    worst_error,
)
from unisono.collectives import count_bytes
from unisono.dataparallel import GradientSync
from unisono_models.gan.config import LossConfig, ModelConfig
from unisono_models.gan.loss import GAN, frozen, global_means, mismatched_conditions, squared_gradients
from unisono_models.gan.model.discriminator import Discriminator
from unisono_models.gan.model.generator import Generator, start_average, update_average

SPLITS = [(64,), (32, 32), (40, 24), (63, 1), (64, 0), (22, 21, 21), (30, 1, 33), (0, 21, 0, 43), (1, 0, 1)]


def all_cases(sizes):
    return {case: losses_and_gradients(case, sizes) for case in CASES}


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_term_matches_one_process(ranks, sizes):
    for results in ranks(all_cases, sizes, world_size=len(sizes)):
        for case, (values, gradients) in results.items():
            expected_values, expected_gradients = one_process(case, rows=sum(sizes))
            assert values == pytest.approx(expected_values, rel=1e-12, abs=1e-14), case
            for network in ("discriminator", "generator"):
                assert worst_error(gradients, expected_gradients, network) < 1e-12, (case, network)


def train(sizes):
    """Take twelve steps as train.py does; return the weights of both networks and the moving average, for two cases."""
    weights = {}
    for case in ("paired", "all terms"):
        gan = make_gan(case)
        average = start_average(gan.generator)
        seen = 0
        networks = {"discriminator": gan.discriminator, "generator": gan.generator}
        optimizers = {name: Adam(network.parameters(), lr=2e-3, betas=(0.0, 0.99)) for name, network in networks.items()}
        syncs = {name: GradientSync(network.parameters()) for name, network in networks.items()}

        def update(name, loss, syncs=syncs, optimizers=optimizers):
            loss.backward()
            syncs[name]()
            optimizers[name].step()
            optimizers[name].zero_grad()

        for step in range(12):
            batch = rows_of_rank(make_batch(gan.generator.config.condition, step), sizes)
            fakes = gan.generator(batch.noise, batch.condition)
            update("discriminator", gan.discriminator_loss(batch, fakes, gamma=0.0 if step % 2 else 1.0)["loss"])
            update("generator", gan.generator_loss(batch, fakes)["loss"])
            seen += sum(batch.sizes)
            update_average(average, gan.generator, batch=sum(batch.sizes), seen=seen, half_life=5000)
        for name, network in {**networks, "average": average}.items():
            weights |= {f"{case}: {name}.{key}": value.detach() for key, value in network.named_parameters()}
    return weights


@lru_cache
def trained_by_one_process():
    return train((ROWS,))


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24), (63, 1), (22, 21, 21)], ids=str)
def test_twelve_steps_match_one_process(ranks, sizes):
    expected = trained_by_one_process()
    for weights in ranks(train, sizes, world_size=len(sizes)):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=5e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_training_changes_every_weight():
    for name, value in trained_by_one_process().items():
        case, network, parameter = re.split(": |\\.", name, maxsplit=2)
        before = getattr(make_gan(case), network.replace("average", "generator")).get_parameter(parameter).detach()
        unseen = ("head.bias", "plain.bias")  # a constant in all scores cancels in a relativistic loss
        assert parameter in unseen or (value - before).abs().max() > 5e-3, name


def scores_of(gan, batch):
    with torch.no_grad():
        fakes = gan.generator(batch.noise, batch.condition)
        real, fake = (gan.discriminator(x, batch.condition) for x in (batch.images, fakes))
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
        gan = make_gan(case)
        fakes, real, fake = scores_of(gan, batch)
        losses = gan.discriminator_loss(batch, fakes)
        assert float(losses["adversarial"]) == pytest.approx(mean(discriminator(real, fake)), rel=1e-12)
        assert torch.equal(losses["loss"].detach(), losses["adversarial"]), "without gamma there is no penalty"
        assert [name for name, value in losses.items() if value.requires_grad] == ["loss"], "what is shown keeps no graph"
        assert float(losses["real score"]) == pytest.approx(float(real.mean()), rel=1e-12)
        assert float(gan.generator_loss(batch, fakes)["adversarial"]) == pytest.approx(mean(generator(real, fake)), rel=1e-12)


def test_penalties_are_squared_gradients_of_the_scores():
    batch = make_batch("class")
    for case in ("non-saturating, r1, groups of 25", "hinge, r2, one group", "paired"):
        gan, penalty = make_gan(case), LossConfig(**CASES[case][1]).penalty
        fakes = scores_of(gan, batch)[0]
        losses = gan.discriminator_loss(batch, fakes, gamma=3.0)
        expected = expected_penalties(gan, batch, fakes, penalty).mean() / 2
        assert float(losses["penalty"]) == pytest.approx(float(expected), rel=1e-12)
        assert float(losses["loss"].detach()) == pytest.approx(float(losses["adversarial"] + 3 * expected), rel=1e-12)


def expected_penalties(gan, batch, fakes, penalty):
    found = torch.zeros(ROWS, dtype=torch.float64)
    for images in [x for name, x in (("r1", batch.images), ("r2", fakes)) if name in penalty]:
        x = images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(gan.discriminator(x, batch.condition).sum(), x)
        found += gradient.square().flatten(1).sum(1)
    return found


def test_matching_loss_ignores_equal_conditions():
    gan, batch = make_gan("labels that do not match"), make_batch("class")
    fakes, real, _ = scores_of(gan, batch)
    wrong = batch.condition.roll(-batch.shift)
    with torch.no_grad():
        under_wrong = gan.discriminator(batch.images, wrong)
    terms = torch.where(wrong != batch.condition, softplus(under_wrong - real), 0.0)
    assert 0 < (terms == 0).sum() < ROWS
    losses = gan.discriminator_loss(batch, fakes)
    assert float(losses["matching"]) == pytest.approx(float(terms.mean()), rel=1e-12)
    assert float(losses["loss"].detach()) == pytest.approx(float(losses["adversarial"] + 0.7 * terms.mean()), rel=1e-12)


def test_each_loss_gives_gradients_to_one_network_and_no_input():
    for case in ("paired", "all terms", "all terms, vectors"):
        gan = make_gan(case)
        batch = make_batch(gan.generator.config.condition)
        before = batch.images.clone()
        fakes = gan.generator(batch.noise, batch.condition)
        gan.discriminator_loss(batch, fakes, gamma=1.0)["loss"].backward()
        assert all(p.grad is None for p in gan.generator.parameters())
        assert all(p.grad is not None for p in gan.discriminator.parameters())
        grads = [p.grad.clone() for p in gan.discriminator.parameters()]
        gan.generator_loss(batch, fakes)["loss"].backward()
        assert all(p.grad is not None for p in gan.generator.parameters())
        assert all(torch.equal(p.grad, g) for p, g in zip(gan.discriminator.parameters(), grads, strict=True))
        assert not batch.images.requires_grad and torch.equal(batch.images, before)


def test_frozen_restores_requires_grad():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[0].bias.requires_grad_(False)
    with contextlib.suppress(KeyError), frozen(network):
        assert not any(p.requires_grad for p in network.parameters())
        raise KeyError
    assert [p.requires_grad for p in network.parameters()] == [True, False, True, True]


def test_contrastive_loss_of_one_row_is_zero():
    gan, batch = make_gan("contrast of classes"), make_batch("class")
    one = replace(
        batch,
        images=batch.images[:1],
        condition=batch.condition[:1],
        ids=batch.ids[:1],
        noise=batch.noise[:1],
        sizes=(1,),
    )
    fakes = gan.generator(one.noise, one.condition)
    for network, losses in (
        (gan.discriminator, gan.discriminator_loss(one, fakes)),
        (gan.generator, gan.generator_loss(one, fakes)),
    ):
        losses["loss"].backward()
        assert float(losses["contrast"]) == 0 and not losses["contrast"].requires_grad
        assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def traffic_of(case, sizes):
    """Count the collectives in forward and backward of the discriminator's loss, then of the generator's."""
    gan, gamma = make_gan(case), CASES[case][2]
    batch = rows_of_rank(make_batch(gan.generator.config.condition), sizes)
    fakes = gan.generator(batch.noise, batch.condition)
    found = []
    for step in (lambda: gan.discriminator_loss(batch, fakes, gamma=gamma), lambda: gan.generator_loss(batch, fakes)):
        with count_bytes() as forward:
            loss = step()["loss"]
        with count_bytes() as backward:
            loss.backward()
        found += [{name: op.calls for name, op in traffic.by_op.items()} for traffic in (forward, backward)]
    return found


def test_losses_communicate_once_unless_groups_straddle(ranks):
    means = {"all_reduce": 1}
    aligned = ranks(traffic_of, "paired", (40, 24), world_size=2)
    assert aligned == [[means] * 4] * 2, "groups on one rank: nothing but the means"
    # Two passes of the stddev layer with two sums each; the penalties differentiate through them once more.
    straddling = ranks(traffic_of, "paired", (63, 1), world_size=2)
    assert straddling == [[{"all_reduce": 9}, {"all_reduce": 9}, {"all_reduce": 5}, {"all_reduce": 3}]] * 2


def penalties_of_a_loss(sizes):
    """Return the squared gradients of a loss that all ranks compute alike, and of the same loss divided by their number."""
    rank = dist.get_rank() if len(sizes) > 1 else 0
    rows = torch.arange(1.0, 7, dtype=torch.float64)[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    found = []
    for divisor in (1, len(sizes)):
        x = rows[:, None].clone().requires_grad_()
        loss = global_means({"loss": x[:, 0] ** 3})["loss"] / divisor
        found.append(squared_gradients([loss[None]], [x])[0].detach())
    return found


@pytest.mark.parametrize("sizes", [(4, 2), (3, 0, 3)], ids=str)
def test_penalty_of_a_loss_of_all_rows_needs_a_division_by_the_ranks(ranks, sizes):
    """As the README says: a loss that all ranks compute alike counts W times, so its squared gradients are W² too large."""
    _, expected = penalties_of_a_loss((6,))
    found = ranks(penalties_of_a_loss, sizes, world_size=len(sizes))
    plain, divided = (torch.cat(parts) for parts in zip(*found, strict=True))
    torch.testing.assert_close(divided, expected)
    torch.testing.assert_close(plain, len(sizes) ** 2 * expected)


def test_rejects_wrong_conditions_and_sizes():
    with pytest.raises(ValueError, match=r"matching=0.5, contrast=0.0: both need a condition, not 'none'"):
        GAN(ModelConfig(condition="none"), LossConfig(matching=0.5), size=16, channels=1)
    gan = make_gan("paired")
    for network, x in ((gan.generator, torch.zeros(2, 8)), (gan.discriminator, torch.zeros(2, 1, 8, 8))):
        with pytest.raises(ValueError, match="condition is None, but the network was built for condition='class'"):
            network(x.double())
    for network in (Generator, Discriminator):
        with pytest.raises(
            ValueError, match=r"--data.size 10: .*2 resolutions and --model.patch 2 .*multiple of 4, from 8 on: take 8 or 12"
        ):
            network(ModelConfig(**SMALL), size=10, channels=1, conditions=CLASSES)
    with pytest.raises(ValueError, match=r"sizes=\(3,\) promises 3 along dim 0, but x has shape \(2,\)"):
        mismatched_conditions(torch.zeros(2), shift=1, sizes=(3,))
