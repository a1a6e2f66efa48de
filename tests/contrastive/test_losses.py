"""All losses: N ranks with any split of the batch give the value and the gradients of one process."""

import pytest
import torch

from tests.contrastive.loss_cases import CASES, differentiable, global_batch, gradients, matches_one_process
from unisono import contrastive


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("case", CASES)
def test_matches_one_process(ranks, world_size, case, exchange):
    ranks(matches_one_process, case, {"exchange": exchange}, world_size=world_size)


def in_small_tiles_and_sums(tile):
    for case in CASES:
        for exchange in ("gather", "ring"):
            matches_one_process(case, {"exchange": exchange, "tile": tile, "grad_reduce": "sum"})


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_small_tiles_and_summed_gradients_match_one_process(ranks, tile):
    ranks(in_small_tiles_and_sums, tile, world_size=3)


def in_group(group_name):
    for case in CASES:
        for exchange in ("gather", "ring"):
            matches_one_process(case, {"exchange": exchange}, group_name)


@pytest.mark.parametrize("group", ["without rank 0", "every other rank", "mesh dimension", "1-D mesh"])
def test_groups_match_one_process(ranks, group):
    ranks(in_group, group, world_size=4)


@pytest.mark.parametrize("case", CASES)
def test_without_a_process_group(case):
    batch = differentiable(global_batch(7))
    expected = CASES[case](batch, CASES[case].reference)
    loss = CASES[case](batch, getattr(contrastive, CASES[case].function))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    expected_grads = gradients(expected, batch)
    for name, grad in gradients(loss, batch).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-10, atol=1e-13)


def with_empty_neighbours(sizes):
    for case in ("clip", "clip_everything", "sigmoid_weights", "ntxent", "supcon"):
        for exchange in ("gather", "ring"):
            matches_one_process(case, {"exchange": exchange}, sizes=sizes)


@pytest.mark.parametrize("sizes", [(0, 6, 1, 0), (4, 0, 0), (0, 0, 0, 5), (3, 0, 0, 4)], ids=str)
def test_empty_neighbours_match_one_process(ranks, sizes):
    ranks(with_empty_neighbours, sizes, world_size=len(sizes))
