"""Second derivatives of all losses, against autograd of the reference and against finite differences."""

import pytest
import torch
import torch.distributed as dist

from tests.collectives.one_process import group_named
from tests.contrastive.loss_cases import CASES, SHARED, close, differentiable, global_batch, local_batch
from unisono import contrastive
from unisono.collectives import all_reduce
from unisono.collectives.groups import resolve_group
from unisono.collectives.testing import gradcheck, gradgradcheck


def first_and_second(loss, batch):
    names = [name for name, t in batch.items() if t.requires_grad]
    leaves = [batch[name] for name in names]
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    features = [grad for name, grad in zip(names, first, strict=True) if name not in SHARED]
    penalty = sum((grad**3).sum() for grad in features)
    return penalty, dict(zip(names, leaves, strict=True))


FEW = {1: (5,), 2: (3, 2), 3: (3, 0, 2), 4: (2, 0, 3, 1)}  # rows of each rank; few, because the reference is slow


def second_matches_one_process(case_name, group_name="world"):
    """The gradient of a gradient penalty, summed over ranks, is that of one process."""
    group, members = group_named(group_name)
    if not members:
        return
    case, sizes, rank = CASES[case_name], FEW[len(members)], resolve_group(group).rank
    batch = differentiable(global_batch(sum(sizes)))
    penalty, leaves = first_and_second(case(batch, case.reference), batch)
    expected = dict(zip(leaves, torch.autograd.grad(penalty, leaves.values(), materialize_grads=True), strict=True))

    mine = differentiable(local_batch(global_batch(sum(sizes)), sizes, rank))
    loss = case(mine, getattr(contrastive, case.function), grad_reduce="sum", group=group)
    penalty, leaves = first_and_second(loss, mine)
    second = torch.autograd.grad(penalty, leaves.values(), materialize_grads=True)
    for name, grad in zip(leaves, second, strict=True):
        whole_grad = expected[name]
        truth = whole_grad / len(members) if name in SHARED else whole_grad.split_with_sizes(list(sizes))[rank]
        close(grad, truth, 1e-10, f"{case_name}: second gradient of {name}", size=float(whole_grad.abs().max()))


def all_second_derivatives(group_name):
    for case in CASES:
        second_matches_one_process(case, group_name)


def test_second_derivatives_match_one_process(ranks, world_size):
    ranks(all_second_derivatives, "world", world_size=world_size, timeout=120)


@pytest.mark.parametrize("group", ["without rank 0", "mesh dimension"])
def test_second_derivatives_of_groups_match_one_process(ranks, group):
    ranks(all_second_derivatives, group, world_size=4, timeout=120)


def finite_differences(case_name, exchange):
    case, rank = CASES[case_name], dist.get_rank()
    batch = {name: t[:, :2] if t.ndim == 2 else t for name, t in global_batch(3, scale=2.0).items()}
    mine = local_batch(batch, (2, 1), rank)
    shared = {"clip_loss": ["scale"], "sigmoid_loss": ["scale", "bias"]}.get(case.function, ["temperature"])
    names = [name for name in (*case.inputs, *shared) if mine[name].is_floating_point() and name != "negatives"]

    def loss(*tensors):
        # one variable for all ranks: a finite difference on one rank must change it on all
        given = {name: all_reduce(t, "avg") if name in SHARED else t for name, t in zip(names, tensors, strict=True)}
        return case(mine | given, getattr(contrastive, case.function), exchange=exchange)

    tensors = [mine[name].clone().requires_grad_() for name in names]
    gradcheck(loss, *tensors)
    gradgradcheck(loss, *tensors)


def test_gradcheck_and_gradgradcheck(ranks):
    for case in ("clip", "clip_everything", "sigmoid", "ntxent", "supcon_weights"):
        for exchange in ("gather", "ring"):
            ranks(finite_differences, case, exchange, world_size=2)


def twice(exchange):
    """With retain_graph=True the second backward uses the same saved tensors."""
    for case in CASES.values():
        mine = differentiable(local_batch(global_batch(9), (5, 4), dist.get_rank()))
        loss = case(mine, getattr(contrastive, case.function), exchange=exchange)
        first = torch.autograd.grad(loss, mine["x"], retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(loss, mine["x"])[0], first, rtol=0, atol=0)


def test_backward_twice_gives_the_same_bits(ranks):
    for exchange in ("gather", "ring"):
        ranks(twice, exchange, world_size=2)
