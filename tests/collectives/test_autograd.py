"""gradcheck and gradgradcheck through real ranks, the named gradients, and torch.func."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch._vmap_internals import _vmap

from tests.collectives.one_process import CASES, SKEWED, inputs_of
from unisono.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    average_gradient,
    gather,
    global_mean,
    reduce_scatter,
    scatter,
    shift,
    split,
    sum_gradient,
)
from unisono.collectives.testing import gradcheck, gradgradcheck, run_ranks

CHECKED = ["all_gather_dim1", "gather", "scatter", "broadcast", "all_to_all_single", "shift", "all_reduce_sum"]
CHECKED += ["all_reduce_avg", "all_reduce_max", "all_reduce_min", "all_reduce_product", "reduce_sum", "reduce_product"]
CHECKED += ["reduce_scatter_sum", "reduce_scatter_product", "reduce_scatter_max", "global_mean_one_side"]


def check_case(name: str) -> None:
    x = inputs_of(CASES[name], dist.get_world_size())[dist.get_rank()].requires_grad_()
    gradcheck(lambda x: CASES[name](x, None), x, atol=1e-6)
    gradgradcheck(lambda x: CASES[name](x, None) ** 2, x, atol=1e-6)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradcheck_and_gradgradcheck(name, world_size):
    run_ranks(check_case, name, world_size=world_size)


def check_product_with_zeros() -> None:
    """Where one rank has a zero, torch's derivative is the product of the others; where two have, zero."""
    x = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0], [5.0, 7.0, 2.0]], dtype=torch.float64)[dist.get_rank()].requires_grad_()
    gradcheck(lambda x: all_reduce(x, "product"), x)
    gradgradcheck(lambda x: all_reduce(x, "product"), x)


def test_gradcheck_of_product_with_zeros():
    run_ranks(check_product_with_zeros, world_size=3)


def check_list_all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn((rank + 1, *(2,) * (target % 3)), dtype=torch.float64, requires_grad=True) for target in range(size)]
    received = all_to_all(xs)
    assert [y.shape for y in received] == [torch.Size((source + 1, *(2,) * (rank % 3))) for source in range(size)]
    gradcheck(lambda *xs: all_to_all(list(xs)), *xs)
    gradgradcheck(lambda *xs: [y**2 for y in all_to_all(list(xs))], *xs, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_to_all_of_any_shapes_gradcheck(world_size):
    run_ranks(check_list_all_to_all, world_size=world_size)


def named_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((SKEWED[rank], 2), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = all_gather(x, grad="slice")
    weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).view(y.shape) * (rank + 1)
    (g,) = torch.autograd.grad((weights * y**2).sum(), x, create_graph=True)
    start = sum(SKEWED[:rank])
    mine = weights[start : start + SKEWED[rank]]
    torch.testing.assert_close(g, 2 * mine * x)
    torch.testing.assert_close(torch.autograd.grad((g**3).sum(), x)[0], 3 * g**2 * 2 * mine)

    x = torch.tensor([rank + 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    total = all_reduce(x, grad="identity")
    torch.testing.assert_close(total[0], torch.tensor(size * (size + 1) / 2, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad((total**2 * (rank + 1)).sum(), x)[0], 2 * total.detach() * (rank + 1))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_named_gradients_do_what_their_name_says(world_size):
    run_ranks(named_gradients, world_size=world_size)


def tensor_parallel(sizes: list[int], by_columns: bool) -> None:
    """Two layers divided over the ranks, between Megatron's pairs, against the whole layers in one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = sizes[:size]
    generator = torch.Generator().manual_seed(5)
    x, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (4, sum(sizes)), (sum(sizes), 2))
    )
    expected = torch.autograd.grad(((x @ first).sin() @ second).pow(3).sum(), (x, first, second))
    mine = [w.detach().split(sizes, dim)[rank].requires_grad_() for w, dim in ((first, 1), (second, 0))]
    if by_columns:  # the hidden layer is gathered, and split again
        hidden = all_gather(sum_gradient(x) @ mine[0], 1, sizes=sizes, grad="slice")
        hidden = split(hidden, 1, sizes=sizes)
    else:
        hidden = sum_gradient(x) @ mine[0]
    loss = all_reduce(hidden.sin() @ mine[1], grad="identity").pow(3).sum()
    got = torch.autograd.grad(loss, (x, *mine))
    wanted = (expected[0], expected[1].split(sizes, 1)[rank], expected[2].split(sizes, 0)[rank])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tensor_parallel_layers_match_one_process(world_size, by_columns):
    run_ranks(tensor_parallel, [3, 1, 0, 2], by_columns, world_size=world_size)


def sum_gradient_and_split() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(1.0, 8.0, dtype=torch.float64, requires_grad=True)
    y = sum_gradient(x)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    (g,) = torch.autograd.grad((rank + 1) * (y**2).sum(), x, create_graph=True)
    torch.testing.assert_close(g, 2 * x * size * (size + 1) / 2)
    part = split(x)
    assert torch.equal(part, x.tensor_split(size)[rank])
    (g,) = torch.autograd.grad((part**2).sum(), x, create_graph=True)
    torch.testing.assert_close(g, 2 * x)  # whole on every rank
    torch.testing.assert_close(torch.autograd.grad((g**3).sum(), x)[0], 3 * g**2 * 2)
    torch.testing.assert_close(split(x.view(7, 1).T, 1), x.view(7, 1).T.tensor_split(size, 1)[rank])
    _, tangent = torch.func.jvp(split, (x.detach(),), (2 * x.detach(),))
    assert torch.equal(tangent, 2 * part)
    with pytest.raises(ValueError, match=r"split: sizes=.* do not add up"):
        split(x, sizes=[1] * size)


def test_sum_gradient_and_split_have_the_backward_of_their_docs():
    run_ranks(sum_gradient_and_split, world_size=3)


def ties_by_hand() -> None:
    """The native max and min share gradients among ties, forward values keep NaN, second derivatives are torch's."""
    rank = dist.get_rank()
    rows = torch.tensor([[1.0, 3.0, -0.0, 5.0], [1.0, 2.0, 0.0, 4.0], [0.0, 3.0, -1.0, 6.0]], dtype=torch.float64)
    for op, reference in (("max", torch.amax), ("min", torch.amin)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            whole = rows.clone().to(dtype).requires_grad_()
            (reference(whole, 0) * torch.arange(1, 5)).sum().backward()
            x = rows[rank].clone().to(dtype).requires_grad_()
            y = all_reduce(x, op)
            assert torch.equal(y, reference(whole, 0))
            (y * torch.arange(1, 5) / 3).sum().backward()  # a third on each of three ranks
            torch.testing.assert_close(x.grad, whole.grad[rank], rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
        nan = torch.zeros(3).index_fill_(0, torch.tensor(rank), -float("nan"))  # each rank has it elsewhere
        assert all_reduce(nan, op).isnan().all()


def test_native_max_and_min_share_ties_and_keep_nan():
    run_ranks(ties_by_hand, world_size=3)


def only_some_ranks_need_a_gradient() -> None:
    """The exchange tells the others, so that nobody waits in backward for a rank that has no graph."""
    rank = dist.get_rank()
    x = torch.ones(2 + rank, 3, dtype=torch.float64, requires_grad=rank == 1)
    for op in (all_gather, gather, shift, lambda x: all_gather({"x": x})["x"]):
        y = op(x)
        assert y.requires_grad
        (y**2).sum().backward()
    assert rank != 1 or x.grad is not None
    part = scatter(x if rank == 1 else None, root=1)
    assert part.requires_grad
    part.sum().backward()
    square = torch.ones(4, 3, requires_grad=rank == 0)
    assert reduce_scatter(square).requires_grad
    with torch.no_grad():
        assert not all_gather(x).requires_grad


def test_gradient_needed_on_one_rank_only_does_not_hang():
    run_ranks(only_some_ranks_need_a_gradient, world_size=3)


def inference_tensor_on_one_rank() -> None:
    """It cannot have a gradient, but its rank must take part in the backward of the others."""
    with torch.inference_mode(dist.get_rank() == 1):
        x = torch.ones(2)
    if dist.get_rank() == 0:
        x.requires_grad_()
    for gathered in (all_gather(x), all_gather([x])[0]):
        gathered.sum().backward()
    assert dist.get_rank() == 1 or x.grad.tolist() == [4, 4]


def test_inference_tensor_on_one_rank_does_not_hang():
    run_ranks(inference_tensor_on_one_rank, world_size=2)


def batched_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2 + rank, 3, dtype=torch.float64, requires_grad=True)
    same = torch.randn(4, dtype=torch.float64, requires_grad=True)
    calls = [
        (lambda x: all_gather(x) ** 2, x),
        (lambda x: all_gather(x, grad="slice") ** 2, x),
        (lambda x: all_gather({"x": x, "unused": x.sum(1)})["x"] ** 2, x),
        (lambda x: all_gather([x, x.sum(1)], grad="slice")[rank % 2] ** 2, x),
        (global_mean, x),
        (lambda x: all_reduce(x, "max") ** 2, same),
        (lambda x: all_reduce(x) ** 2, same),
        (average_gradient, same),
    ]
    for call, x in calls:
        y = call(x)
        seeds = torch.stack([torch.full_like(y, rank + k + 1.0) for k in range(3)])
        expected = torch.stack([torch.autograd.grad(y, x, seed, retain_graph=True)[0] for seed in seeds])
        (got,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True, create_graph=True)
        torch.testing.assert_close(got, expected)
        if got.requires_grad:  # linear ones have no second derivative
            second = torch.autograd.grad(got.square().sum(), x, retain_graph=True)[0]
            single = [torch.autograd.grad(y, x, seed, create_graph=True)[0].square().sum() for seed in seeds]
            torch.testing.assert_close(second, torch.autograd.grad(sum(single), x)[0])
    rows = torch.autograd.functional.jacobian(lambda x: all_reduce(x) ** 2, same, vectorize=True)
    torch.testing.assert_close(rows, torch.diag(2 * size * all_reduce(same.detach())))


@pytest.mark.parametrize("world_size", [1, 2])
def test_batched_gradients_match_single_ones(world_size):
    run_ranks(batched_gradients, world_size=world_size)


def batched_gradient_in_another_thread() -> None:
    """On accelerators autograd runs in threads of its own, where torch's counter of levels does not count this batch."""
    batch = torch.arange(6.0).view(3, 2)
    results = []

    def in_thread(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: results.append(all_gather(x, sizes=(2, 2))))
        thread.start()
        thread.join()
        return results[-1]

    assert _vmap(in_thread)(batch).tolist() == torch.cat([batch, batch], 1).tolist()


def test_batched_gradient_in_another_thread():
    run_ranks(batched_gradient_in_another_thread, world_size=2)


def incoming_gradient_is_left_alone() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    for op in (all_gather, all_reduce, reduce_scatter, shift, gather):
        y = op(x)
        incoming = torch.ones_like(y)
        y.backward(incoming)
        assert torch.equal(incoming, torch.ones_like(y)) and incoming._version == 0
        with torch.no_grad():
            y.add_(1)  # the result is the caller's own: changing it must not reach x
        assert x._version == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_and_incoming_gradients_are_never_modified(world_size):
    run_ranks(incoming_gradient_is_left_alone, world_size=world_size)


def func_transforms(name: str) -> None:
    """grad, vmap and jvp against the reference in one process."""
    case, rank, size = CASES[name], dist.get_rank(), dist.get_world_size()
    inputs = inputs_of(case, size)
    seeds = inputs_of(case, size, seed=1)

    def whole(*xs):
        return torch.stack([(r + 1) * (y**2).sum() for r, y in enumerate(case.reference(list(xs)))]).sum()

    expected = torch.func.grad(whole, argnums=tuple(range(size)))(*inputs)[rank]
    got = torch.func.grad(lambda x: (rank + 1) * (case(x, None) ** 2).sum())(inputs[rank])
    torch.testing.assert_close(got, expected)

    _, expected = torch.func.jvp(lambda *xs: case.reference(list(xs))[rank], tuple(inputs), tuple(seeds))
    _, got = torch.func.jvp(lambda x: case(x, None), (inputs[rank],), (seeds[rank],))
    torch.testing.assert_close(got, expected)

    for place in (0, -1):
        batches = [torch.stack([x, s, 2 * s], place) for x, s in zip(inputs, seeds, strict=True)]
        singles = [[b.select(place, k) for b in batches] for k in range(3)]
        expected = torch.stack([case.reference(xs)[rank] for xs in singles])
        got = torch.func.vmap(lambda x: case(x, None), in_dims=place)(batches[rank])
        torch.testing.assert_close(got, expected)

    per_sample = torch.func.vmap(torch.func.grad(lambda x: (rank + 1) * (case(x, None) ** 2).sum()), in_dims=-1)(batches[rank])
    expected = torch.stack([torch.func.grad(whole, argnums=tuple(range(size)))(*xs)[rank] for xs in singles])
    torch.testing.assert_close(per_sample, expected)


@pytest.mark.parametrize("name", [name for name in CASES if "ties" not in name and not name.startswith("scatter")])
def test_torch_func_matches_one_process(name):
    run_ranks(func_transforms, name, world_size=3)


def func_of_named_gradients() -> None:
    rank = dist.get_rank()
    x, t = torch.randn(2 + rank), torch.randn(2 + rank)
    _, tangent = torch.func.jvp(lambda x: all_gather(x, grad="slice"), (x,), (t,))
    parts = tangent.split([2, 3])
    assert torch.equal(parts[rank], t) and not parts[1 - rank].any()
    x, t = torch.randn(2), torch.randn(2)
    _, tangent = torch.func.jvp(lambda x: all_reduce(x, grad="identity"), (x,), (t,))
    assert torch.equal(tangent, t)


def test_jvp_of_named_gradients_is_their_transpose():
    run_ranks(func_of_named_gradients, world_size=2)


def torch_func_and_compile() -> None:
    """torch.distributed.nn.functional worked neither under torch.func nor under torch.compile."""
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(torch.func.grad(lambda x: (all_gather(x) ** 2).sum())(x), 6 * x)
    assert torch.func.vmap(all_gather)(x).shape == (2, 9)
    assert torch.equal(torch.func.jvp(all_reduce, (x,), (x,))[1], 3 * x)
    torch._dynamo.reset()
    assert torch.compile(all_gather, backend="aot_eager", fullgraph=True)(x).shape == (6, 3)


def vmap_of_all_gather() -> None:
    """vmap of torch.distributed._functional_collectives gave garbage."""
    rank = dist.get_rank()
    batch = torch.arange(6.0).view(2, 3) + 10 * rank
    expected = torch.stack([torch.cat([row + 10 * (r - rank) for r in range(3)]) for row in batch])
    assert torch.equal(torch.func.vmap(all_gather)(batch), expected)


def jvp_of_all_gather() -> None:
    """jvp of torch.distributed._functional_collectives gave zeros."""
    x = torch.ones(2)
    tangent = torch.func.jvp(all_gather, (x,), (x * (dist.get_rank() + 1),))[1]
    assert tangent.tolist() == [1, 1, 2, 2, 3, 3]


def func_grad_of_all_reduce() -> None:
    """torch.func.grad of torch.distributed._functional_collectives failed."""
    x = torch.ones(2)
    assert torch.func.grad(lambda x: all_reduce(x).pow(2).sum())(x).tolist() == [18, 18]


def gradient_penalty() -> None:
    """The R1 penalty of a function of the gathered batch was 72 % wrong with the all_gather of x-clip."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(dist.get_world_size())]

    def penalised(whole: list[torch.Tensor]) -> torch.Tensor:
        mixed = torch.cat(whole).var(0).sum()  # what a minibatch statistic does
        gradients = torch.autograd.grad(mixed, whole, create_graph=True)
        return sum((g**2).sum() for g in gradients)

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(penalised(whole), whole)[dist.get_rank()]
    x = inputs[dist.get_rank()].clone().requires_grad_()
    statistic = all_gather(x).var(0).sum() / dist.get_world_size()
    (g,) = torch.autograd.grad(statistic, x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad((g**2).sum(), x)[0], expected)


@pytest.mark.parametrize(
    "regression",
    [torch_func_and_compile, vmap_of_all_gather, jvp_of_all_gather, func_grad_of_all_reduce, gradient_penalty],
    ids=lambda body: body.__name__,
)
def test_regression(regression):
    run_ranks(regression, world_size=3)
