"""Second derivatives of all losses, against autograd of the reference and against finite differences."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.collectives.one_process import group_named
from tests.contrastive.loss_cases import CASES, SHARED, close, differentiable, global_batch, local_batch
from unisono import contrastive
from unisono.collectives import all_reduce
from unisono.collectives.groups import resolve_group
from unisono.collectives.testing import gradcheck, gradgradcheck
from unisono.contrastive import clip_loss
from unisono.contrastive.tiled import logit_statistics, softmax_mean


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
    names = [name for name in (*case.inputs, *shared) if mine[name].is_floating_point()]

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


BATCHED = ["clip_everything", "clip_one_way", "sigmoid_weights", "ntxent", "supcon"]


def batches_of_gradients():
    """is_grads_batched, which jacobian(vectorize=True) uses, gives what one backward after the other gives."""
    sizes = FEW[dist.get_world_size()]
    for name in BATCHED:
        case = CASES[name]
        mine = differentiable(local_batch(global_batch(sum(sizes)), sizes, dist.get_rank()))
        used = {"x", "temperature" if case.function in ("ntxent_loss", "supcon_loss") else "scale", *case.inputs}
        leaves = [mine[key] for key in sorted(used) if mine[key].requires_grad]
        loss = case(mine, getattr(contrastive, case.function))
        seeds = torch.tensor([1.0, 0.0, -2.5], dtype=torch.float64)
        found = torch.autograd.grad(loss, leaves, seeds, is_grads_batched=True, retain_graph=True)
        single = torch.autograd.grad(loss, leaves)
        for grad, one in zip(found, single, strict=True):
            close(
                grad, seeds.view(-1, *[1] * one.ndim) * one, 1e-12, name, size=float(one.abs().amax()) if one.numel() else 1.0
            )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_of_gradients(ranks, world_size):
    ranks(batches_of_gradients, world_size=world_size)


@pytest.mark.parametrize("module", [softmax_mean, logit_statistics])
def test_batched_gradients_in_a_backward_of_another_thread(module, monkeypatch):
    """On accelerators autograd runs the backward in threads of its own, in which no vmap is active."""

    calls = []

    def in_a_thread(*args):
        calls.append(args)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(one_by_one), *args).result()  # autograd sets this mode, too

    one_by_one = module.one_by_one
    monkeypatch.setattr(module, "one_by_one", in_a_thread)
    x, y = (torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5).roll(shift).requires_grad_() for shift in (0, 7))
    loss = clip_loss(x, y, 3.0, hardness=0.0 if module is softmax_mean else 0.5)
    found = torch.autograd.grad(loss, [x, y], torch.tensor([1.0, 2.0]).double(), is_grads_batched=True, retain_graph=True)
    for batch, truth in zip(found, torch.autograd.grad(loss, [x, y]), strict=True):
        torch.testing.assert_close(batch, torch.stack([truth, 2 * truth]))
    assert calls


def test_jacobian_and_hessian_with_vectorize():
    batch = global_batch(4)
    for name in BATCHED:
        case = CASES[name]

        def loss(x, case=case):
            return case(batch | {"x": x}, getattr(contrastive, case.function))

        for derivative in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
            expected = derivative(loss, batch["x"])
            torch.testing.assert_close(derivative(loss, batch["x"], vectorize=True), expected, rtol=1e-10, atol=1e-12)


def test_transforms_of_torch_func_are_refused():
    x = global_batch(4)["x"]
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"clip_loss: the transforms of torch\.func .* are not supported"):
            transform(lambda x: contrastive.clip_loss(x, x, 10.0))(x if transform is torch.func.grad else x.unsqueeze(0))
