"""global_mean is exact together with DDP, FSDP2 and summed gradients, on uneven batches."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.collectives import all_reduce, global_mean
from unisono.collectives.testing import run_ranks

ROWS = (5, 0, 2, 4)


def whole_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(ROWS[:size])
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64), torch.rand(
        rows, generator=generator, dtype=torch.float64
    )


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def per_sample(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) ** 2).sum(1)


def global_mean_with(sync: str, weighted: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, w = whole_batch(size)
    one = model()
    values = per_sample(one, x)
    expected = (values * w).sum() / w.sum() if weighted else values.mean()
    expected.backward()

    net = model()
    my_x, my_w = x.split(ROWS[:size])[rank], w.split(ROWS[:size])[rank]
    if sync == "DDP":
        wrapped = DistributedDataParallel(net)
    elif sync == "FSDP2":
        wrapped = fully_shard(net)
    else:
        wrapped = net
    loss = global_mean(
        per_sample(wrapped, my_x), weights=my_w if weighted else None, grad_reduce="sum" if sync == "sum" else "mean"
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for got, want in zip(net.parameters(), one.parameters(), strict=True):
        grad = all_reduce(got.grad) if sync == "sum" else got.grad
        grad = grad.full_tensor() if sync == "FSDP2" else grad
        torch.testing.assert_close(grad, want.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("sync", ["DDP", "FSDP2", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_global_mean_is_exact_with(sync, world_size, weighted):
    run_ranks(global_mean_with, sync, weighted, world_size=world_size)


def mean_details() -> None:
    rank = dist.get_rank()
    x = torch.full((1 + rank, 2), 1.0 + rank, dtype=torch.bfloat16)
    assert global_mean(x).dtype == torch.bfloat16
    assert global_mean(torch.zeros(0)).isnan()
    weights = torch.rand(1 + rank, dtype=torch.float64, requires_grad=True)
    values = torch.rand(1 + rank, 2, dtype=torch.float64)
    global_mean(values, weights=weights).backward()
    assert weights.grad.shape == weights.shape
    with pytest.raises(TypeError, match="floating point"):
        global_mean(torch.ones(2, dtype=torch.int64))


def test_global_mean_details():
    run_ranks(mean_details, world_size=2)


class Refuses64Bits(TorchDispatchMode):
    """As mps does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not (isinstance(result, torch.Tensor) and result.device.type == "mps" and result.dtype.itemsize == 8), func
        return result


def test_mps_has_no_float64():
    with FakeTensorMode(), Refuses64Bits():
        x = torch.empty(3, device="mps")
        assert global_mean(x, weights=torch.empty(3, device="mps")).dtype is global_mean(x).dtype is torch.float32
