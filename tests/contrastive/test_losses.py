"""All losses: N ranks with any split of the batch give the value and the gradients of one process."""

import pytest
import torch
import torch.distributed as dist

from tests.contrastive.loss_cases import (
    CASES,
    SHARED,
    close,
    differentiable,
    global_batch,
    gradients,
    local_batch,
    matches_one_process,
)
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


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_changes_nothing(device):
    batch = differentiable(global_batch(7))
    expected = {name: case(batch, getattr(contrastive, case.function)) for name, case in CASES.items()}
    with torch.device(device):
        for name, case in CASES.items():
            plain = {key: t.item() if key in SHARED else t for key, t in batch.items()}  # numbers become tensors inside
            for given in (batch, plain):
                loss = case(given, getattr(contrastive, case.function))
                assert torch.equal(loss, expected[name]) and loss.device.type == "cpu", name
                gradients(loss, batch)
        assert contrastive.retrieval_metrics(batch["x"], batch["y"], batch["ids"])["rows"] == 7


def negatives_with_a_gradient(where):
    """Each rank has another number of negatives than of rows, and `where` has the only tensors that require a gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes, counts = (4, 0, 3), (2, 3, 0)
    whole = global_batch(7)
    negatives = whole["negatives"][:5].clone().requires_grad_()
    expected = contrastive.reference.clip_loss(whole["x"], whole["y"], 4.0, negatives=negatives, label_smoothing=0.1)
    expected.backward()
    mine = local_batch(whole, sizes, rank)
    own = negatives.detach().split_with_sizes(counts)[rank].clone().requires_grad_(rank in where)
    for exchange in ("gather", "ring"):
        options = {"label_smoothing": 0.1, "exchange": exchange}
        loss = contrastive.clip_loss(mine["x"], mine["y"], 4.0, negatives=own, **options)
        close(loss.detach(), expected.detach(), 1e-12, "loss")
        own.grad = None
        loss.backward()
        if rank in where:
            close(own.grad, world * negatives.grad.split_with_sizes(counts)[rank], 1e-12, "gradient of negatives", size=1.0)


@pytest.mark.parametrize("where", [(0, 1, 2), (1,)])
def test_negatives_have_a_gradient(ranks, where):
    ranks(negatives_with_a_gradient, where, world_size=3)
