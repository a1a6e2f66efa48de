"""The fused CUDA kernels of sync_batch_norm: how many run and what they touch, and the formulas around them.

Nobody here has a GPU. Counts come from the ledger. Values come from the kernels' formulas, as torch's CUDA code has them
(aten/src/ATen/native/cuda/Normalization.cuh), which stand in for the kernels on CPU tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dataparallel.test_batch_norm import (
    KINDS,
    SPLITS,
    batch,
    close,
    derivatives,
    layouts,
    matches_one_process,
    sixteen_bits,
)
from unisono.collectives import simulate_rank
from unisono.dataparallel import SyncBatchNorm, batch_norm_kernels, sync_batch_norm

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA"
)
calls: list[str] = []


def view(values, x):
    return values.view(-1, *(1,) * (x.ndim - 2))


def sum_over(x):
    return x.sum([0, *range(2, x.ndim)])


def elemt(x, weight, bias, mean, invstd, eps):
    calls.append("elemt")
    y = (x.to(mean.dtype) - view(mean, x)) * view(invstd if weight is None else invstd * weight, x)
    return (y if bias is None else y + view(bias, x)).to(x.dtype)


def backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    assert input_g and not weight_g and not bias_g, "the only form of nn.SyncBatchNorm that needs no weight"
    calls.append("reduce")
    grad = grad.to(mean.dtype)
    nothing = mean.new_empty(0)
    return sum_over(grad), sum_over(grad * (x.to(mean.dtype) - view(mean, x))), nothing, nothing


def backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert count.dtype == torch.int32 and (weight is None or weight.dtype == mean.dtype)
    assert grad.stride() == x.stride(), "another layout makes the kernel copy x"
    calls.append("backward_elemt")
    total = count.sum()
    deviations = x.to(mean.dtype) - view(mean, x)
    inner = grad.to(mean.dtype) - view(sum_dy / total, x) - deviations * view(invstd.square() * sum_dy_xmu / total, x)
    dx = inner * view(invstd if weight is None else invstd * weight, x)
    return torch.empty_like(x).copy_(dx)


@contextmanager
def formulas_for_kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_elemt", elemt, "CPU")
    library.impl("batch_norm_backward_reduce", backward_reduce, "CPU")
    library.impl("batch_norm_backward_elemt", backward_elemt, "CPU")
    batch_norm_kernels._FUSED.add("cpu")
    calls.clear()
    try:
        yield
    finally:
        batch_norm_kernels._FUSED.discard("cpu")
        library._destroy()


def by_fused_kernels(body, *args):
    with formulas_for_kernels():
        body(*args)
        has_rows = body is not matches_one_process or args[0][dist.get_rank()]
        assert {*calls} == ({"elemt", "reduce", "backward_elemt"} if has_rows else set())


def test_fused_kernels_match_one_process(ranks, world_size):
    if world_size > 1:  # alone, torch's own batch norm runs
        ranks(by_fused_kernels, matches_one_process, SPLITS[world_size], None, tuple(KINDS), world_size=world_size)


def test_fused_kernels_have_right_derivatives_layouts_and_dtypes(ranks):
    ranks(by_fused_kernels, derivatives, (2, 1), world_size=2)
    ranks(by_fused_kernels, layouts, world_size=2)
    ranks(by_fused_kernels, sixteen_bits, torch.bfloat16, world_size=2)


def zero_weights():
    """A weight of zero, as in the last batch norm of a residual block: no NaN, and the other channels are right."""
    rank = dist.get_rank()
    weight = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64)
    whole = batch(7, (2,)).requires_grad_()
    mine = whole.detach().split([4, 3])[rank].requires_grad_()
    (nn.functional.batch_norm(whole, None, None, weight, training=True) ** 3).sum().backward()
    (sync_batch_norm(mine, None, None, weight, training=True) ** 3).sum().backward()
    close(mine.grad, whole.grad.split([4, 3])[rank])
    assert (mine.grad[:, 0] == 0).all()


def test_channels_with_a_weight_of_zero(ranks):
    ranks(zero_weights, world_size=2)
    ranks(by_fused_kernels, zero_weights, world_size=2)


def test_total_is_larger_than_an_int32():
    """Each of 4,096 ranks has 64 images of 112 x 112 pixels."""
    mean, grad, x, total = torch.zeros(1), torch.ones(2, 1), torch.tensor([[1.0], [-1.0]]), torch.tensor([4096.0 * 64 * 112**2])
    for weight in (None, torch.tensor([2.0])):
        scale = 1.0 if weight is None else 2.0
        sums = total * torch.tensor([[0.5], [0.25]]) * scale
        with formulas_for_kernels():
            dx = batch_norm_kernels.backward_input(grad, x, mean, mean + 1, mean + 1, weight, sums, total, 0.0)
        assert calls == ["backward_elemt"]
        close(dx, scale * torch.tensor([[0.25], [0.75]]))


def mixed_layouts():
    """One of grad and x is channels_last. The kernel reads both in the layout of x."""
    rank = dist.get_rank()
    for layout, other in ((torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)):
        whole = batch(7, (2, 3)).requires_grad_()
        grad = batch(7, (2, 3)).cos()
        nn.functional.batch_norm(whole, None, None, training=True).backward(grad)
        mine = whole.detach().split([4, 3])[rank].contiguous(memory_format=layout).requires_grad_()
        own_grad = grad.split([4, 3])[rank].contiguous(memory_format=other)
        sync_batch_norm(mine, None, None, training=True).backward(own_grad)
        close(mine.grad, whole.grad.split([4, 3])[rank])


def test_gradient_in_another_layout(ranks):
    ranks(mixed_layouts, world_size=2)
    ranks(by_fused_kernels, mixed_layouts, world_size=2)


def costs(make, world_size, dtype=torch.bfloat16):
    """A step in training mode: the costs of forward and backward, without those of the loss."""
    with simulate_rank(world_size, 3) as ledger:
        norm = make(64, device="cuda")
        x = torch.empty(32, 64, 56, 56, device="cuda", dtype=dtype, requires_grad=True)
        grad = torch.empty_like(x, requires_grad=False)
        with ledger.phase("ours forward"):
            y = norm(x)
        with ledger.phase("ours backward"):
            y.backward(grad)
    assert x.grad.shape == x.shape and norm.weight.grad.shape == (64,)
    return ledger.phases["ours forward"], ledger.phases["ours backward"], x.numel() * x.element_size()


@needs_cuda_build
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_passes_each_way_as_torch_and_no_host_sync(dtype):
    ours, theirs = costs(SyncBatchNorm, 8, dtype), costs(nn.SyncBatchNorm, 8, dtype)
    size, channels = ours[2], 64 * 4
    for direction, passes in ((0, 3), (1, 5)):  # forward: read, read, write; backward: read both, read both, write
        rest = ours[direction].bytes_touched - passes * size
        assert 0 <= rest <= 200 * channels, "the rest is as small as the channels, of 8 ranks in forward"
        assert ours[direction].bytes_touched <= theirs[direction].bytes_touched + rest
        assert ours[direction].host_syncs == []
        assert sum(op.calls for op in ours[direction].collectives.values()) == 1
    assert theirs[0].host_syncs, "torch's waits for the device, to leave out empty ranks"
    assert ours[0].kernels <= 28 and ours[1].kernels <= 11, (ours[0].by_op, ours[1].by_op)


@needs_cuda_build
def test_kernels_do_not_grow_with_the_number_of_ranks():
    few, many = costs(SyncBatchNorm, 8), costs(SyncBatchNorm, 256)
    for direction in (0, 1):
        assert few[direction].kernels == many[direction].kernels


@needs_cuda_build
@pytest.mark.parametrize("rows", [0, 1])
def test_few_values_make_the_host_wait_for_nothing(rows):
    with simulate_rank(8, 3) as ledger:
        norm = SyncBatchNorm(4, momentum=None, device="cuda")
        x = torch.empty(rows, 4, device="cuda", requires_grad=True)
        with ledger.phase("step"):
            norm(x).sum().backward()
    assert x.grad.shape == x.shape and ledger.phases["step"].host_syncs == []
