"""SyncBatchNorm under torch.compile, torch.func and forward mode."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dataparallel.test_batch_norm import CHANNELS, batch, close
from unisono.dataparallel.batch_norm import SyncBatchNorm, sync_batch_norm


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
