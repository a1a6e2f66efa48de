"""N ranks, any split: the losses of both networks and their gradients are those of one process with the whole batch."""

import re
from functools import lru_cache

import pytest
import torch
from torch.optim import Adam

from tests.gan.small_game import CASES, ROWS, make_batch, make_game, play_once, played_by_one, share_of, worst_error
from unisono.dataparallel import GradientSync
from unisono_models.gan.model.generator import start_average, update_average

SPLITS = [(64,), (32, 32), (40, 24), (63, 1), (64, 0), (22, 21, 21), (30, 1, 33), (0, 21, 0, 43), (1, 0, 1)]


def play_all(sizes):
    return {case: play_once(case, sizes) for case in CASES}


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_term_matches_one_process(ranks, sizes):
    for played in ranks(play_all, sizes, world_size=len(sizes)):
        for case, (values, gradients) in played.items():
            expected_values, expected_gradients = played_by_one(case, rows=sum(sizes))
            assert values == pytest.approx(expected_values, rel=1e-12, abs=1e-14), case
            for network in ("discriminator", "generator"):
                assert worst_error(gradients, expected_gradients, network) < 1e-12, (case, network)


def train(sizes):
    """Twelve steps as train.py plays them: the weights of both networks and the moving average, of two games."""
    weights = {}
    for case in ("paired", "all terms"):
        game = make_game(case)
        average, seen = start_average(game.generator), 0
        networks = {"discriminator": game.discriminator, "generator": game.generator}
        optimizers = {name: Adam(network.parameters(), lr=2e-3, betas=(0.0, 0.99)) for name, network in networks.items()}
        syncs = {name: GradientSync(network.parameters()) for name, network in networks.items()}

        def play(name, loss, syncs=syncs, optimizers=optimizers):
            loss.backward()
            syncs[name]()
            optimizers[name].step()
            optimizers[name].zero_grad()

        for step in range(12):
            batch = share_of(make_batch(game.generator.config.condition, step), sizes)
            fakes = game.generator(batch.noise, batch.condition)
            play("discriminator", game.discriminator_step(batch, fakes, gamma=0.0 if step % 2 else 1.0)["loss"])
            play("generator", game.generator_step(batch, fakes)["loss"])
            seen += sum(batch.sizes)
            update_average(average, game.generator, pictures=sum(batch.sizes), seen=seen, half_life=5000)
        for name, network in {**networks, "average": average}.items():
            weights |= {f"{case}: {name}.{key}": value.detach() for key, value in network.named_parameters()}
    return weights


@lru_cache
def trained_by_one():
    return train((ROWS,))


@pytest.mark.parametrize("sizes", [(32, 32), (40, 24), (63, 1), (22, 21, 21)], ids=str)
def test_trajectories_match_one_process(ranks, sizes):
    expected = trained_by_one()
    for weights in ranks(train, sizes, world_size=len(sizes)):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=5e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_trajectories_go_somewhere():
    for name, value in trained_by_one().items():
        case, network, parameter = re.split(": |\\.", name, maxsplit=2)
        before = getattr(make_game(case), network.replace("average", "generator")).get_parameter(parameter).detach()
        unseen = ("head.bias", "plain.bias")  # a relativistic loss does not see what is added to all scores
        assert parameter in unseen or (value - before).abs().max() > 5e-3, name
