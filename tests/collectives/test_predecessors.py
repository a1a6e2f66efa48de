"""Each known defect of the predecessors, by its number in notes/collectives.md, is right here.

NF is torch.distributed.nn.functional, FC torch.distributed._functional_collectives. Gradients are compared with one process:
`law` computes the gradient of the sum over ranks of (rank + 2) * (y ** 2).sum().
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives import (
    MismatchError,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    count_bytes,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from unisono.collectives.testing import run_ranks


def everyones(shape: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(dist.get_world_size())]


def law(ours: Callable[[Tensor], Tensor], one_process: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor]) -> None:
    rank = dist.get_rank()
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = one_process(whole)
    loss = torch.stack([(r + 2) * (y**2).sum() for r, y in enumerate(expected)]).sum()
    gradients = torch.autograd.grad(loss, whole, materialize_grads=True)
    x = inputs[rank].clone().requires_grad_()
    y = ours(x)
    torch.testing.assert_close(y, expected[rank])
    torch.testing.assert_close(torch.autograd.grad(((rank + 2) * y**2).sum(), x)[0], gradients[rank])


def nf_01_all_reduce_max_min_product_backward() -> None:
    for op, reference in (("max", torch.amax), ("min", torch.amin), ("product", torch.prod)):
        law(lambda x, op=op: all_reduce(x, op), lambda xs, f=reference: [f(torch.stack(xs), 0)] * len(xs), everyones())


def nf_02_reduce_ignores_op_in_backward() -> None:
    for op, reference in (("avg", torch.mean), ("max", torch.amax), ("product", torch.prod)):
        law(
            lambda x, op=op: reduce(x, op),
            lambda xs, f=reference: [f(torch.stack(xs), 0), *[0 * xs[0]] * (len(xs) - 1)],
            everyones(),
        )


def nf_03_reduce_scatter_ignores_op_in_backward() -> None:
    for op, reference in (("avg", torch.mean), ("max", torch.amax)):
        law(
            lambda x, op=op: reduce_scatter(x, op=op),
            lambda xs, f=reference: list(f(torch.stack(xs), 0).tensor_split(len(xs))),
            everyones((5, 2)),
        )


def nf_04_reduce_leaves_a_partial_sum_on_other_ranks() -> None:
    y = reduce(torch.ones(3), root=1)
    assert torch.equal(y, torch.full((3,), float(dist.get_world_size() if dist.get_rank() == 1 else 0)))


def nf_05_gather_and_scatter_confuse_ranks_on_a_subgroup() -> None:
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


def nf_06_all_to_all_and_backwards_on_a_subgroup() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    x = torch.ones(2, requires_grad=True)
    all_gather(x, group=group).sum().backward()
    reduce_scatter(x, group=group).sum().backward()
    sum(y.sum() for y in all_to_all([x, x], group=group)).backward()
    assert x.grad.tolist() == [2 + 1 + 2] * 2


def nf_07_scatter_of_non_contiguous_input() -> None:
    x = torch.arange(12.0).view(3, 4).T
    assert torch.equal(scatter(x if dist.get_rank() == 0 else None), x.tensor_split(3)[dist.get_rank()])


def nf_08_scatter_of_none_on_receivers() -> None:
    assert scatter(torch.ones(3) if dist.get_rank() == 2 else None, root=2).tolist() == [1.0]


def nf_09_all_gather_into_one_tensor_has_a_backward_on_gloo() -> None:
    law(all_gather, lambda xs: [torch.cat(xs)] * len(xs), everyones())


def nf_10_all_to_all_single_non_contiguous() -> None:
    x = torch.arange(6.0).view(2, 3).T.requires_grad_()
    y = all_to_all_single(x)
    y.sum().backward(torch.ones(()).expand(()))
    assert y.shape == (3, 2) and (x.grad == 1).all()


def nf_11_uneven_all_to_all_on_gloo() -> None:
    rank = dist.get_rank()
    xs = [torch.full((target, rank + 1), float(rank), requires_grad=True) for target in range(3)]
    ys = all_to_all(xs)
    assert [y.shape for y in ys] == [(rank, source + 1) for source in range(3)]
    sum(y.sum() for y in ys).backward()
    assert all((x.grad == 1).all() for x in xs)


def nf_12_torch_func_and_compile() -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(torch.func.grad(lambda x: (all_gather(x) ** 2).sum())(x), 6 * x)
    assert torch.func.vmap(all_gather)(x).shape == (2, 9)
    assert torch.equal(torch.func.jvp(all_reduce, (x,), (x,))[1], 3 * x)
    torch._dynamo.reset()
    assert torch.compile(all_gather, backend="aot_eager", fullgraph=True)(x).shape == (6, 3)


def fc_13_broadcast_gradient() -> None:
    law(lambda x: broadcast(x, root=1), lambda xs: [xs[1]] * len(xs), everyones())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: broadcast(x, root=1), backend="aot_eager", fullgraph=True)
    law(compiled, lambda xs: [xs[1]] * len(xs), everyones())


def fc_14_reduce_scatter_avg_and_max_backward() -> None:
    nf_03_reduce_scatter_ignores_op_in_backward()


def fc_15_all_reduce_product_backward() -> None:
    law(lambda x: all_reduce(x, "product"), lambda xs: [torch.stack(xs).prod(0)] * len(xs), everyones())


def fc_16_vmap_is_not_garbage() -> None:
    rank = dist.get_rank()
    batch = torch.arange(6.0).view(2, 3) + 10 * rank
    expected = torch.stack([torch.cat([row + 10 * (r - rank) for r in range(3)]) for row in batch])
    assert torch.equal(torch.func.vmap(all_gather)(batch), expected)


def fc_17_jvp_is_not_zero() -> None:
    x = torch.ones(2)
    tangent = torch.func.jvp(all_gather, (x,), (x * (dist.get_rank() + 1),))[1]
    assert tangent.tolist() == [1, 1, 2, 2, 3, 3]


def fc_18_func_grad() -> None:
    x = torch.ones(2)
    assert torch.func.grad(lambda x: all_reduce(x).pow(2).sum())(x).tolist() == [18, 18]


def fc_19_ops_that_were_missing() -> None:
    rank = dist.get_rank()
    assert gather(torch.ones(rank)).shape == (3 if rank == 0 else 0,)
    assert scatter(torch.ones(3) if rank == 0 else None).shape == (1,)
    assert reduce(torch.ones(1)).item() == (3 if rank == 0 else 0)
    assert len(all_to_all([torch.ones(rank)] * 3)) == 3
    assert all_gather(torch.ones(rank)).shape == (3,)
    assert shift(torch.tensor(rank)).item() == (rank - 1) % 3


def xclip_20_gradient_keeps_the_local_term_only() -> None:
    """The seeds' backward took the own slice: at 3 ranks with equal losses that is a third of the truth."""
    x = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)
    (all_gather(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 3 * 2 * x.detach())


def xclip_21_gradient_penalty() -> None:
    """72 % off in the seeds: the R1 term of a function of the gathered batch."""
    inputs = everyones()

    def penalised(whole: list[Tensor]) -> Tensor:
        mixed = torch.cat(whole).var(0).sum()  # what a minibatch statistic does
        gradients = torch.autograd.grad(mixed, whole, create_graph=True)
        return sum((g**2).sum() for g in gradients)

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(penalised(whole), whole)[dist.get_rank()]
    x = inputs[dist.get_rank()].clone().requires_grad_()
    statistic = all_gather(x).var(0).sum() / dist.get_world_size()
    (g,) = torch.autograd.grad(statistic, x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad((g**2).sum(), x)[0], expected)


def xclip_22_bytes_are_the_payload() -> None:
    rows = (70, 10, 10)
    x = torch.zeros(rows[dist.get_rank()], 4)
    with count_bytes() as traffic:
        all_gather(x, sizes=rows)
    assert traffic.sent == 2 * x.numel() * 4 and traffic.received == (90 - len(x)) * 16


def xclip_23_mismatches_raise_on_every_rank() -> None:
    rank = dist.get_rank()
    for x in (
        torch.zeros(2, 3 + (rank == 1)),
        torch.zeros((2, 3, 1) if rank else (2, 3)),
        torch.zeros(2, dtype=torch.float32 if rank else torch.int32),
        torch.zeros(2, dtype=torch.float32 if rank else torch.float64),
    ):
        with pytest.raises(MismatchError):
            all_gather(x)


def xclip_24_a_scalar_gathers() -> None:
    assert all_gather(torch.tensor(dist.get_rank())).tolist() == [0, 1, 2]


def xclip_25_takes_a_group() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        assert all_gather(torch.tensor([dist.get_rank()]), group=group).tolist() == [0, 2]


DEFECTS = {name: body for name, body in globals().items() if name.startswith(("nf_", "fc_", "xclip_"))}


@pytest.mark.parametrize("name", DEFECTS)
def test_defect(name):
    run_ranks(DEFECTS[name], world_size=3)


def test_all_numbered_defects_are_here():
    assert sorted(int(name.split("_")[1]) for name in DEFECTS) == list(range(1, 26))
