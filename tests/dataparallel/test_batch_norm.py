"""sync_batch_norm and SyncBatchNorm: values, statistics and gradients of nn.BatchNorm in one process with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.collectives.one_process import group_named
from unisono.collectives import MismatchError, all_gather, all_reduce, checked, count_bytes
from unisono.collectives.groups import resolve_group
from unisono.collectives.testing import gradcheck, gradgradcheck
from unisono.dataparallel.batch_norm import SyncBatchNorm, sync_batch_norm

SPLITS = {1: (5,), 2: (4, 3), 3: (5, 0, 3), 4: (0, 1, 5, 2)}
CHANNELS = 3
KINDS = {
    "1d, 2-D": (nn.BatchNorm1d, ()),
    "1d, 3-D": (nn.BatchNorm1d, (4,)),
    "2d": (nn.BatchNorm2d, (2, 3)),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
}
OPTIONS = [{}, {"momentum": None}, {"affine": False, "eps": 0.1}, {"track_running_stats": False}]


def batch(rows, positions=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, CHANNELS, *positions), generator=generator, dtype=torch.float64) * 3 + 5


def close(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def loss_of(y, x):
    return (y * (x.detach().sin() + 2)).sum() + (y**3).sum()


def steps(norm, x):
    """Two batches in training mode and one in eval mode: the results and the gradients of the input."""
    found = []
    for mode, scale in ((True, 1.0), (True, -2.0), (False, 3.0)):
        norm.train(mode)
        given = (x * scale).requires_grad_()
        y = norm(given)
        loss_of(y, given).backward()
        found += [y.detach(), given.grad]
    return found


def matches_one_process(sizes, group=None, kinds=tuple(KINDS)):
    rank = resolve_group(group).rank
    for kind in kinds:
        reference_class, positions = KINDS[kind]
        for options in OPTIONS:
            whole = batch(sum(sizes), positions)
            one = reference_class(CHANNELS, dtype=torch.float64, **options)
            ours = SyncBatchNorm(CHANNELS, dtype=torch.float64, group=group, **options)
            for norm in (one, ours):
                for parameter in norm.parameters():
                    parameter.data.copy_(torch.arange(1.0, CHANNELS + 1))
            expected = steps(one, whole)
            for found, wanted in zip(steps(ours, whole.split(list(sizes))[rank]), expected, strict=True):
                close(found, wanted.split(list(sizes))[rank])
            for parameter, wanted in zip(ours.parameters(), one.parameters(), strict=True):
                close(all_reduce(parameter.grad, group=group), wanted.grad)
            for buffer, wanted in zip(ours.buffers(), one.buffers(), strict=True):
                close(buffer, wanted)
                everyones = all_gather(buffer.reshape(1, -1), group=group)
                assert (everyones == everyones[0]).all(), "the ranks' running statistics differ in their bits"
    return None


def test_matches_one_process(ranks, world_size):
    ranks(matches_one_process, SPLITS[world_size], world_size=world_size)


@pytest.mark.parametrize("sizes", [(6, 0), (0, 1, 1), (0, 0, 2)], ids=str)
def test_few_and_empty_batches_match_one_process(ranks, sizes):
    ranks(matches_one_process, sizes, None, ("1d, 2-D", "2d"), world_size=len(sizes))


def in_a_group(name):
    group, members = group_named(name)
    if members:
        matches_one_process(SPLITS[resolve_group(group).size], group, ("2d",))


@pytest.mark.parametrize("name", ["without rank 0", "mesh dimension", "1-D mesh"])
def test_groups_match_one_process(ranks, name):
    ranks(in_a_group, name, world_size=4)


def test_without_a_process_group_matches_torch():
    matches_one_process((6,))


def derivatives(sizes):
    """All arguments, and each argument alone: what needs no gradient must not keep a rank out of the backward."""
    rank = dist.get_rank()
    x = batch(sum(sizes), (2,)).split(list(sizes))[rank].clone()
    weight, bias = torch.rand(CHANNELS, dtype=torch.float64) + rank, torch.rand(CHANNELS, dtype=torch.float64)
    for wanted in ("xwb", "x", "wb"):
        for name, tensor in (("x", x), ("w", weight), ("b", bias)):
            tensor.requires_grad_(name in wanted)

        def norm(x, weight, bias):
            return sync_batch_norm(x, None, None, weight, bias, training=True, eps=0.1)

        gradcheck(norm, x, weight, bias)
        gradgradcheck(lambda *given: norm(*given).sin(), x, weight, bias, atol=1e-6)


@pytest.mark.parametrize("sizes", [(2, 1), (0, 2)], ids=str)
def test_gradcheck_and_gradgradcheck(ranks, sizes):
    ranks(derivatives, sizes, world_size=2)


def plain(x):
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()  # torch's own has no third derivative


def third_derivative_and_mixed_needs():
    """Against one process. Only rank 0's input needs a gradient; all ranks take part all the same."""
    rank = dist.get_rank()
    whole = batch(4).requires_grad_()
    weight = torch.ones(CHANNELS, dtype=torch.float64, requires_grad=True)
    mine = whole.detach().split(2)[rank].clone().requires_grad_(rank == 0)
    y = F.batch_norm(whole, None, None, weight, training=True)
    expected = torch.autograd.grad((y**3).sum(), whole)[0]
    ours = sync_batch_norm(mine, None, None, weight, training=True)
    grads = torch.autograd.grad((ours**3).sum(), [mine, weight] if rank == 0 else [weight])
    if rank == 0:
        close(grads[0], expected[:2])
    third = []
    for x, norm in ((whole, plain), (mine.detach().requires_grad_(), lambda x: sync_batch_norm(x, None, None, training=True))):
        value = norm(x).exp().sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = (g.sin() * x).sum()
        third.append(g.detach())
    close(third[1], third[0].split(2)[rank], 1e-9)


def test_third_derivative_and_gradients_needed_on_one_rank_only(ranks):
    ranks(third_derivative_and_mixed_needs, world_size=2)


def traffic_of_a_step():
    norm, x = SyncBatchNorm(CHANNELS), batch(4).float().requires_grad_()
    with count_bytes() as forward:
        y = norm(x)
    with count_bytes() as backward:
        y.sum().backward()
    with count_bytes() as evaluation:
        norm.eval()(x).sum().backward()
    return forward.sent, forward.by_op["send"].calls, backward.calls, backward.sent, evaluation.calls


def test_communicates_once_each_way_and_never_in_eval(ranks):
    assert ranks(traffic_of_a_step, world_size=2) == [((2 * CHANNELS + 1) * 4, 1, 1, 2 * CHANNELS * 4, 0)] * 2


def large_mean(drift):
    """Mean 1e4, deviation 1, in float32: as exact as torch is in one process, also where the ranks' means differ."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = (
        torch.randn(240, 4, 5, generator=generator) + 1e4 + drift * torch.arange(240).view(-1, 1, 1) // 80
    ).requires_grad_()
    exact, one, ours = (make(4, momentum=1.0) for make in (nn.BatchNorm1d, nn.BatchNorm1d, SyncBatchNorm))
    exact = exact.double()
    mine = whole.detach().chunk(world)[rank].requires_grad_()
    truth, single, split = exact(whole.double()), one(whole), ours(mine)
    worst = (single - truth).abs().max()
    assert (split - truth.chunk(world)[rank]).abs().max() <= 1.5 * worst
    torch.testing.assert_close(ours.running_mean.double(), exact.running_mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(ours.running_var.double(), exact.running_var, rtol=5e-4, atol=0)
    (expected,) = torch.autograd.grad((truth**3).sum(), whole)
    (found,) = torch.autograd.grad((split**3).sum(), mine)
    torch.testing.assert_close(found, expected.chunk(world)[rank], rtol=5e-3, atol=5e-3)


def test_large_mean_keeps_its_digits(ranks):
    # a mean of 1e4 is known to 5e-4 in float32, and so is the distance of two
    ranks(large_mean, 0, world_size=3)
    ranks(large_mean, 3, world_size=3)


def sixteen_bits(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = batch(12, (3, 3)).to(dtype).requires_grad_()
    mine = whole.detach().chunk(world)[rank].requires_grad_()
    one, ours = nn.BatchNorm2d(CHANNELS), SyncBatchNorm(CHANNELS)
    y = one(whole.float())
    (y**3).sum().backward()
    with torch.autocast("cpu", dtype=dtype):
        found = ours(mine)
    assert found.dtype == dtype
    (found.float() ** 3).sum().backward()
    arrived = (3 * found.detach().float() ** 2).to(dtype)  # what the backward is given
    torch.testing.assert_close(ours.bias.grad, arrived.float().sum((0, 2, 3)), rtol=1e-5, atol=0)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), y.chunk(world)[rank], rtol=rounding, atol=rounding)
    torch.testing.assert_close(mine.grad.float(), whole.grad.float().chunk(world)[rank], rtol=rounding, atol=10 * rounding)
    torch.testing.assert_close(ours.running_mean, one.running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.running_var, one.running_var, rtol=1e-6, atol=1e-7)
    assert ours.weight.grad.dtype == torch.float32
    narrow = SyncBatchNorm(CHANNELS, dtype=dtype)
    narrow(mine).float().sum().backward()
    assert narrow.running_mean.dtype == narrow.weight.grad.dtype == narrow.bias.grad.dtype == dtype
    torch.testing.assert_close(narrow.running_var.float(), ours.running_var, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_have_float32_statistics(ranks, dtype):
    ranks(sixteen_bits, dtype, world_size=2)


def layouts():
    rank = dist.get_rank()
    whole = batch(6, (4, 5))
    expected = F.batch_norm(whole, None, None, training=True).chunk(2)[rank]
    mine = whole.chunk(2)[rank]
    last = mine.contiguous(memory_format=torch.channels_last).requires_grad_()
    y = sync_batch_norm(last, None, None, training=True)
    close(y, expected)
    (g,) = torch.autograd.grad((y**2).sum(), last)
    assert y.is_contiguous(memory_format=torch.channels_last) and g.is_contiguous(memory_format=torch.channels_last)
    strided = torch.stack([mine, mine], dim=-1)[..., 0].transpose(2, 3)
    assert not strided.is_contiguous()
    close(sync_batch_norm(strided, None, None, training=True), expected.transpose(2, 3))


def test_layouts_are_kept(ranks):
    ranks(layouts, world_size=2)


def single_value(sizes):
    rank, norm = dist.get_rank(), SyncBatchNorm(CHANNELS)
    x = torch.ones(sizes[rank], CHANNELS)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x)
    assert norm.running_mean.eq(0).all() and norm.running_var.eq(1).all()
    nothing = norm(x[:0])  # passes and changes nothing, as in torch
    assert nothing.shape == (0, CHANNELS) and norm.running_mean.eq(0).all() and norm.running_var.eq(1).all()
    nothing.sum().backward()
    assert norm.weight.grad.eq(0).all()


@pytest.mark.parametrize("sizes", [(1,), (0, 1), (0, 1, 0)], ids=str)
def test_a_global_batch_of_one_value_is_rejected_on_all_ranks(ranks, sizes):
    ranks(single_value, sizes, world_size=len(sizes))


def bad_calls():
    rank = dist.get_rank()
    x = torch.ones(4, CHANNELS)
    rejected = [
        (
            torch.ones(4, 5) if rank else x,
            r"sync_batch_norm: a bad call on rank 1(.|\n)*running_mean: shape \(3,\) does not fit the 5 channels",
        ),
        (torch.ones(4) if rank else x, r"expected \(N, C\) or \(N, C, \.\.\.\), got shape \(4,\)"),
        (x.long() if rank else x, "floating point of 16 bits or more, got torch.int64"),
        (x.double() if rank else x, "the ranks disagree"),
    ]
    for given, text in rejected:
        with checked(), pytest.raises(MismatchError, match=text):
            SyncBatchNorm(CHANNELS)(given)
    with pytest.raises(ValueError, match=rf"x of shape \(4, 3\) \(rank {rank} of 2; the others may wait"):
        sync_batch_norm(x, None, None, torch.ones(2), training=True)
    with pytest.raises(ValueError, match="eps=0 must be positive"):
        sync_batch_norm(x, None, None, training=True, eps=0)
    with pytest.raises(ValueError, match="running_mean=None, but training=False"):
        sync_batch_norm(x, None, None, training=False)
    with checked():
        SyncBatchNorm(CHANNELS)(x + torch.arange(4.0).view(-1, 1)).sum().backward()


def test_bad_calls_name_what_is_wrong_on_all_ranks(ranks):
    ranks(bad_calls, world_size=2)


def deep_copies():
    for group in (dist.group.WORLD, init_device_mesh("cpu", (2,))):
        norm = SyncBatchNorm(CHANNELS, group=group)
        twin = copy.deepcopy(norm)
        assert twin.group is group and twin.weight is not norm.weight
        assert torch.equal(twin(torch.eye(3) + dist.get_rank()), norm(torch.eye(3) + dist.get_rank()))


def test_deep_copies_share_the_group(ranks):
    ranks(deep_copies, world_size=2)


def transforms():
    """torch.func and forward mode see the formula: the same gradient and the tangent of one process."""
    rank = dist.get_rank()
    whole, tangent = batch(5), batch(5, seed=1)
    mine, own_tangent = whole.split([2, 3])[rank], tangent.split([2, 3])[rank]

    def loss(norm, x):
        return (norm(x, None, None, training=True) ** 3).sum()

    close(
        torch.func.grad(lambda x: loss(sync_batch_norm, x))(mine),
        torch.func.grad(lambda x: loss(F.batch_norm, x))(whole).split([2, 3])[rank],
    )
    wanted = torch.func.jvp(lambda x: F.batch_norm(x, None, None, training=True), (whole,), (tangent,))[1]
    found = torch.func.jvp(lambda x: sync_batch_norm(x, None, None, training=True), (mine,), (own_tangent,))[1]
    close(found, wanted.split([2, 3])[rank])
    with torch.autograd.forward_ad.dual_level():
        y = sync_batch_norm(torch.autograd.forward_ad.make_dual(mine, own_tangent), None, None, training=True)
        close(torch.autograd.forward_ad.unpack_dual(y).tangent, found)


def test_torch_func_and_forward_mode(ranks):
    ranks(transforms, world_size=2)


def compiled(sizes, options, backend):
    torch._dynamo.reset()
    x = batch(sum(sizes), (4,)).split(list(sizes))[dist.get_rank()].requires_grad_()
    eager = SyncBatchNorm(CHANNELS, dtype=torch.float64, **options)
    twin = copy.deepcopy(eager)
    traced = torch.compile(twin, fullgraph=True, backend=backend)
    for _ in range(2):
        found = []
        for norm in (eager, traced):
            y = norm(x)
            found.append([y.detach(), *torch.autograd.grad((y**3).sum(), [x, *norm.parameters()])])
        for ours, wanted in zip(*found, strict=True):
            close(ours, wanted)
    for ours, wanted in zip(twin.buffers(), eager.buffers(), strict=True):
        close(ours, wanted)


def test_compiles_to_a_whole_graph(ranks):
    ranks(compiled, (2, 3), {}, "aot_eager", world_size=2)
    ranks(compiled, (4, 0), {"momentum": None}, "aot_eager", world_size=2)


def one_rank_compiles():
    """As where one rank has reached the limit of recompilations: the ranks' messages must still fit."""
    torch._dynamo.reset()
    rank, whole = dist.get_rank(), batch(5, (4,)).requires_grad_()
    norm = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    x = whole.detach().split([2, 3])[rank].clone().requires_grad_()
    y = (torch.compile(norm, fullgraph=True, backend="aot_eager") if rank else norm)(x)
    expected = F.batch_norm(whole, None, None, training=True)
    close(torch.autograd.grad((y**3).sum(), x)[0], torch.autograd.grad((expected**3).sum(), whole)[0].split([2, 3])[rank])


def test_one_rank_may_run_compiled_code_while_another_does_not(ranks):
    ranks(one_rank_compiles, world_size=2)
