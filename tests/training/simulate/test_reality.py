"""The simulation agrees with real ranks: the bytes that the allocator gave out, the bytes that left through the sockets."""

import importlib

import pytest

from tests.training.simulate.reality import config_of, real_step
from unisono.collectives.testing import run_ranks
from unisono_models.training.simulate.rank import Topology, simulate_step

# Large enough that gloo's headers, some 64 bytes a message, are no part of the result. The recommender has no dropout: the
# simulation does not see the memory inside of the op that draws its numbers.
TRAININGS = [
    ("clip", "tiny", "--data.batch", "64"),
    ("gan", "tiny", "--data.batch", "32", "--model.generator", "64", "64", "--model.discriminator", "64", "64"),
    ("recommender", "tiny", "--data.batch", "4096", "--model.dim", "32", "--model.dropout", "0"),
]
FSDP = ("clip", "tiny", "--data.batch", "64", "--parallel.kind", "fsdp")


@pytest.mark.parametrize(
    ("training", "world_size"),
    [*((training, world_size) for training in TRAININGS for world_size in (2, 4)), (FSDP, 4)],
    ids=lambda given: f"{given[0]}{'-fsdp' * (given is FSDP)}" if isinstance(given, tuple) else None,
)
def test_memory_and_bytes_of_a_real_step_are_predicted_within_5_percent(training, world_size):
    model, recipe, *fields = training
    build = importlib.import_module(f"unisono_models.{model}.simulate").build_training
    costs = simulate_step(build, config_of(model, recipe, fields), Topology(1, world_size), device="cpu")
    real = run_ranks(real_step, model, recipe, fields, world_size=world_size, timeout=180)[0]
    assert costs.peak == pytest.approx(real["peak"], rel=0.05)
    sent = costs.ledger.traffic.sent
    if training is FSDP:  # gloo's reduce_scatter is an all_reduce, of which each rank keeps its part: it sends twice as much
        sent += costs.ledger.collectives["reduce_scatter"].sent
    assert sent == pytest.approx(real["sent"], rel=0.05)
