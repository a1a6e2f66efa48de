"""Every collective matches one process: value, gradient and second gradient, at world sizes 1 to 4, on every kind of group.

The regressions at the end are faults of earlier libraries: torch.distributed.nn.functional, _functional_collectives, x-clip.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.collectives.one_process import CASES, first_and_second, inputs_of, local_loss, matches_one_process
from unisono.collectives import (
    Ring,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    exchange_sizes,
    gather,
    global_mean,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from unisono.collectives.testing import run_ranks

GROUPS = ["without rank 0", "every other rank", "mesh dimension", "1-D mesh"]


@pytest.mark.parametrize("case", CASES)
def test_matches_one_process(ranks, world_size, case):
    ranks(matches_one_process, case, "world", world_size=world_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", GROUPS)
def test_matches_one_process_on_group(case, group):
    run_ranks(matches_one_process, case, group, world_size=4)


@pytest.mark.parametrize("name", CASES)
def test_no_process_group_is_one_rank(name):
    assert not dist.is_initialized()
    case = CASES[name]
    (x,) = (x.requires_grad_() for x in inputs_of(case, 1))
    (expected,) = case.reference([x])
    y = case(x, None)
    torch.testing.assert_close(y, expected)
    assert y.data_ptr() != x.data_ptr() or y.numel() == 0, "the result is the caller's own"
    got, want = (first_and_second(local_loss(result, 0), [x]) for result in (y, expected))
    torch.testing.assert_close(got, want)


def test_no_process_group_for_what_is_not_a_case():
    x = torch.ones(3, 2)
    assert exchange_sizes(x, 1) == (2,) and torch.equal(all_to_all([x])[0], x)
    assert torch.equal(all_gather({"x": x}, sizes=[3])["x"], x)


def inputs_of_all_ranks(shape: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(dist.get_world_size())]


def compare_with_one_process(
    ours: Callable[[Tensor], Tensor], one_process: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor]
) -> None:
    """Compare value and gradient of the sum over ranks of (rank + 2) * (y ** 2).sum()."""
    rank = dist.get_rank()
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = one_process(whole)
    loss = torch.stack([(r + 2) * (y**2).sum() for r, y in enumerate(expected)]).sum()
    gradients = torch.autograd.grad(loss, whole, materialize_grads=True)
    x = inputs[rank].clone().requires_grad_()
    y = ours(x)
    torch.testing.assert_close(y, expected[rank])
    torch.testing.assert_close(torch.autograd.grad(((rank + 2) * y**2).sum(), x)[0], gradients[rank])


def all_reduce_max_min_product_backward() -> None:
    """torch.distributed.nn.functional applied `op` to the gradients again; _functional_collectives raised for product."""
    for op, reference in (("max", torch.amax), ("min", torch.amin), ("product", torch.prod)):
        compare_with_one_process(
            lambda x, op=op: all_reduce(x, op), lambda xs, f=reference: [f(torch.stack(xs), 0)] * len(xs), inputs_of_all_ranks()
        )


def reduce_backward_of_op() -> None:
    """torch.distributed.nn.functional.reduce ignored `op` in backward."""
    for op, reference in (("avg", torch.mean), ("max", torch.amax), ("product", torch.prod)):
        compare_with_one_process(
            lambda x, op=op: reduce(x, op),
            lambda xs, f=reference: [f(torch.stack(xs), 0), *[0 * xs[0]] * (len(xs) - 1)],
            inputs_of_all_ranks(),
        )


def reduce_scatter_backward_of_op() -> None:
    """torch.distributed.nn.functional ignored `op` in this backward; _functional_collectives raised for avg and max."""
    for op, reference in (("avg", torch.mean), ("max", torch.amax)):
        compare_with_one_process(
            lambda x, op=op: reduce_scatter(x, op=op),
            lambda xs, f=reference: list(f(torch.stack(xs), 0).tensor_split(len(xs))),
            inputs_of_all_ranks((5, 2)),
        )


def reduce_gives_zeros_on_other_ranks() -> None:
    """torch.distributed.nn.functional.reduce left a partial sum on ranks other than the root."""
    y = reduce(torch.ones(3), root=1)
    assert torch.equal(y, torch.full((3,), float(dist.get_world_size() if dist.get_rank() == 1 else 0)))


def gather_and_scatter_on_a_subgroup() -> None:
    """torch.distributed.nn.functional.gather and scatter took a rank of the group for a global rank."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    mine = dist.get_rank() - 1
    x = torch.tensor([mine + 1.0], requires_grad=True)
    y = gather(x, root=1, group=group)
    assert y.tolist() == ([1.0, 2.0] if mine == 1 else [])
    (y * 3).sum().backward()
    assert x.grad.item() == 3
    whole = torch.tensor([5.0, 6.0], requires_grad=True) if mine == 1 else None
    part = scatter(whole, root=1, group=group)
    assert part.item() == 5 + mine
    (part * (mine + 1)).sum().backward()
    assert mine == 0 or whole.grad.tolist() == [1.0, 2.0]


def all_to_all_and_backwards_on_a_subgroup() -> None:
    """torch.distributed.nn.functional raised on subgroups, in all_to_all and in the backward of gathers."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    x = torch.ones(2, requires_grad=True)
    all_gather(x, group=group).sum().backward()
    reduce_scatter(x, group=group).sum().backward()
    sum(y.sum() for y in all_to_all([x, x], group=group)).backward()
    assert x.grad.tolist() == [2 + 1 + 2] * 2


def scatter_of_non_contiguous_input() -> None:
    """torch.distributed.nn.functional.scatter gave wrong values for inputs that are not contiguous."""
    x = torch.arange(12.0).view(3, 4).T
    assert torch.equal(scatter(x if dist.get_rank() == 0 else None), x.tensor_split(3)[dist.get_rank()])


def scatter_of_none_on_receivers() -> None:
    """torch.distributed.nn.functional.scatter raised TypeError for None on the receivers, which its docs allow."""
    assert scatter(torch.ones(3) if dist.get_rank() == 2 else None, root=2).tolist() == [1.0]


def all_gather_has_a_backward_on_gloo() -> None:
    """The all_gather of torch.distributed.nn.functional into one tensor had no backward on gloo."""
    compare_with_one_process(all_gather, lambda xs: [torch.cat(xs)] * len(xs), inputs_of_all_ranks())


def all_to_all_single_of_non_contiguous_input() -> None:
    """torch.distributed.nn.functional.all_to_all_single raised for tensors that are not contiguous."""
    x = torch.arange(6.0).view(2, 3).T.requires_grad_()
    y = all_to_all_single(x)
    y.sum().backward(torch.ones(()).expand(()))
    assert y.shape == (3, 2) and (x.grad == 1).all()


def uneven_all_to_all_on_gloo() -> None:
    """torch.distributed.nn.functional.all_to_all raised for uneven sizes on gloo."""
    rank = dist.get_rank()
    xs = [torch.full((target, rank + 1), float(rank), requires_grad=True) for target in range(3)]
    ys = all_to_all(xs)
    assert [y.shape for y in ys] == [(rank, source + 1) for source in range(3)]
    sum(y.sum() for y in ys).backward()
    assert all((x.grad == 1).all() for x in xs)


def broadcast_gradient() -> None:
    """torch.distributed._functional_collectives.broadcast had a wrong gradient, also under torch.compile."""
    compare_with_one_process(lambda x: broadcast(x, root=1), lambda xs: [xs[1]] * len(xs), inputs_of_all_ranks())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: broadcast(x, root=1), backend="aot_eager", fullgraph=True)
    compare_with_one_process(compiled, lambda xs: [xs[1]] * len(xs), inputs_of_all_ranks())


def every_op_of_uneven_sizes() -> None:
    """torch.distributed._functional_collectives had no gather, scatter, reduce, list all_to_all or uneven all_gather."""
    rank = dist.get_rank()
    assert gather(torch.ones(rank)).shape == (3 if rank == 0 else 0,)
    assert scatter(torch.ones(3) if rank == 0 else None).shape == (1,)
    assert reduce(torch.ones(1)).item() == (3 if rank == 0 else 0)
    assert len(all_to_all([torch.ones(rank)] * 3)) == 3
    assert all_gather(torch.ones(rank)).shape == (3,)
    assert shift(torch.tensor(rank)).item() == (rank - 1) % 3


def all_gather_gradient_has_the_terms_of_all_ranks() -> None:
    """The backward of the all_gather of x-clip took the own slice: with equal losses on 3 ranks, a third of the gradient."""
    x = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)
    (all_gather(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 3 * 2 * x.detach())


def all_gather_of_a_scalar() -> None:
    """The all_gather of x-clip failed on scalars."""
    assert all_gather(torch.tensor(dist.get_rank())).tolist() == [0, 1, 2]


def all_gather_on_a_group() -> None:
    """The all_gather of x-clip took no group."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        assert all_gather(torch.tensor([dist.get_rank()]), group=group).tolist() == [0, 2]


def all_to_all_results_are_tensors_of_their_own() -> None:
    """They were views of one tensor: a change in place raised, and one part kept the memory of all."""
    ys = all_to_all([torch.ones(2, requires_grad=True) for _ in range(3)])
    assert [y.untyped_storage().nbytes() for y in ys] == [8, 8, 8]
    ys[0].mul_(2)
    sum(y.sum() for y in ys).backward()


def scatter_ignores_what_receivers_pass() -> None:
    """torch's scatter takes tensors on all ranks. Ours raised, unless they were empty."""
    rank = dist.get_rank()
    x = torch.arange(3.0 + rank, requires_grad=True)  # the receivers' shapes differ from the root's
    part = scatter(x, root=1)
    assert part.tolist() == [[0, 1], [2], [3]][rank]
    part.sum().backward()
    assert x.grad.tolist() == [float(rank == 1)] * len(x)
    assert not scatter(x.detach().requires_grad_(rank != 1), root=1).requires_grad  # the root would not run the backward


def a_default_device_does_not_matter() -> None:
    torch.set_default_device("meta")
    try:
        x = torch.ones(3, 2, device="cpu", requires_grad=True)
        results = [call(x) for call in (all_gather, gather, all_to_all_single, shift, reduce_scatter, all_reduce, global_mean)]
        results += [all_gather({"x": x})["x"], all_reduce(x, "max"), *all_to_all([x] * 3), scatter(x)]
        assert all_gather({"x": None}) == {"x": None}
        ring = Ring([x])
        for _, (block,) in ring:
            ring.add(block * 2)
        assert {y.device.type for y in [*results, ring.total()]} == {"cpu"}
        sum(y.sum() for y in results).backward()
    finally:
        torch.set_default_device(None)


REGRESSIONS = [
    all_to_all_results_are_tensors_of_their_own,
    scatter_ignores_what_receivers_pass,
    a_default_device_does_not_matter,
    all_reduce_max_min_product_backward,
    reduce_backward_of_op,
    reduce_scatter_backward_of_op,
    reduce_gives_zeros_on_other_ranks,
    gather_and_scatter_on_a_subgroup,
    all_to_all_and_backwards_on_a_subgroup,
    scatter_of_non_contiguous_input,
    scatter_of_none_on_receivers,
    all_gather_has_a_backward_on_gloo,
    all_to_all_single_of_non_contiguous_input,
    uneven_all_to_all_on_gloo,
    broadcast_gradient,
    every_op_of_uneven_sizes,
    all_gather_gradient_has_the_terms_of_all_ranks,
    all_gather_of_a_scalar,
    all_gather_on_a_group,
]


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda body: body.__name__)
def test_regression(regression):
    run_ranks(regression, world_size=3)
