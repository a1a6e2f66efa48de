"""convert_sync_batchnorm, whole models over ranks, checkpoints, and placement on fake CUDA."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.collectives import all_reduce, count_bytes, global_mean
from unisono.dataparallel.batch_norm import SyncBatchNorm, convert_sync_batchnorm


def net():
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4)
    layers = [nn.Conv2d(3, 4, 3), shared, nn.ReLU(), nn.Conv2d(4, 4, 1), shared, nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers, nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 1)).double()


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_conversion_keeps_what_the_model_is():
    model = net()
    norm, seen = model[1], []
    norm.qconfig = "a qconfig"
    norm.register_forward_hook(lambda *_: seen.append(1))
    norm.eval()
    tensors, keys = [*model.parameters(), *model.buffers()], list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    assert type(model[1]) is type(model[7]) is SyncBatchNorm
    assert model[1] is model[4] is norm and not norm.training and model[7].training
    assert norm.qconfig == "a qconfig" and norm.weight.dtype == torch.float64 and model[7].momentum is None
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    assert list(model.state_dict()) == keys
    model(torch.randn(4, 3, 6, 6, dtype=torch.float64))
    assert len(seen) == 2
    twin = pickle.loads(pickle.dumps(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4)))))
    assert type(twin[0]) is SyncBatchNorm


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm])
def test_a_norm_itself_is_converted_and_checkpoints_are_interchangeable(kind):
    norm = kind(3, affine=True)
    norm.running_mean.fill_(2)
    state = copy.deepcopy(norm.state_dict())
    ours = convert_sync_batchnorm(norm)
    assert type(ours) is SyncBatchNorm and ours is norm
    fresh = SyncBatchNorm(3)
    fresh.load_state_dict(state, strict=True)
    assert fresh.running_mean.eq(2).all()
    kind(3).load_state_dict(fresh.state_dict(), strict=True)
    assert list(fresh.state_dict()) == list(state)


def test_conversion_of_groups_and_lazy_norms():
    own = nn.SyncBatchNorm(3, process_group="its own")  # any value: conversion does not ask for it
    assert convert_sync_batchnorm(own).group == "its own" and not hasattr(own, "process_group")
    assert convert_sync_batchnorm(own).group == "its own"
    assert convert_sync_batchnorm(own, group="another").group == "another"
    assert "another" in repr(own)
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match=r"0: torch\.nn\.modules\.batchnorm\.LazyBatchNorm1d.*run a batch"):
        convert_sync_batchnorm(lazy)
    lazy(torch.randn(3, 2))
    assert type(convert_sync_batchnorm(lazy)[0]) is SyncBatchNorm


class Squared(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) ** 2


def test_unknown_subclasses_raise_by_name_and_nothing_is_changed():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Squared(3)), nn.InstanceNorm2d(3))
    with pytest.raises(TypeError, match=r"1\.0: tests\.dataparallel\.test_convert_sync_batchnorm\.Squared"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert type(convert_sync_batchnorm(model[2])) is nn.InstanceNorm2d


def trains_beside_ddp(sizes):
    """Three steps of SGD on uneven batches, the optimizer made before the conversion."""
    rank, whole = dist.get_rank(), torch.randn(sum(sizes), 3, 6, 6, dtype=torch.float64)
    one, ours = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, ours)]
    parallel = DistributedDataParallel(convert_sync_batchnorm(ours))
    mine = whole.split(list(sizes))[rank]
    for _ in range(3):
        for model, x, optimizer in ((one, whole, optimizers[0]), (parallel, mine, optimizers[1])):
            optimizer.zero_grad()
            y = model(x).square()
            (y.mean() if model is one else global_mean(y)).backward()
            optimizer.step()
    for (name, found), wanted in zip(ours.state_dict().items(), one.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sizes", [(4, 3), (5, 0)], ids=str)
def test_trains_beside_ddp_as_in_one_process(ranks, sizes):
    ranks(trains_beside_ddp, sizes, world_size=2)


def timm_model(sizes):
    import timm

    torch.manual_seed(0)
    rank, whole = dist.get_rank(), torch.randn(sum(sizes), 3, 32, 32, dtype=torch.float64)
    one = timm.create_model("mobilenetv3_small_050", num_classes=4).double()
    ours = convert_sync_batchnorm(copy.deepcopy(one))
    before, after = ([type(module).__name__ for module in model.modules()] for model in (one, ours))
    assert before.count("BatchNormAct2d") == after.count("_SyncBatchNormAct") > 10 and "BatchNormAct2d" not in after
    expected, found = one(whole), ours(whole.split(list(sizes))[rank])
    close(found, expected.split(list(sizes))[rank])
    expected.square().sum().backward()
    found.square().sum().backward()
    size = max(parameter.grad.abs().max().item() for parameter in one.parameters())
    for parameter, wanted in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(all_reduce(parameter.grad), wanted.grad, rtol=0, atol=1e-11 * size)


def test_timms_norm_with_activation_matches_one_process(ranks):
    pytest.importorskip("timm")
    ranks(timm_model, (3, 2), world_size=2)


def torchs_own_refuses():
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        nn.SyncBatchNorm(3)(torch.randn(4, 3))
    convert_sync_batchnorm(nn.SyncBatchNorm(3))(torch.randn(4, 3))


def test_works_on_cpus_where_torchs_own_refuses(ranks):
    ranks(torchs_own_refuses, world_size=2)


def fake_update_stats(x, running_mean, running_var, momentum):
    return torch.empty_like(running_mean), torch.empty_like(running_var)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stays_on_the_device_and_waits_for_nothing(dtype):
    """One rank of 1,024 on fake CUDA: reading a value or mixing devices would raise."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    try:
        with torch.library._scoped_library("aten", "IMPL") as aten, FakeTensorMode():
            aten.impl("batch_norm_update_stats", fake_update_stats, "Meta")  # torch has none
            norm = SyncBatchNorm(8, momentum=None, device="cuda")
            x = torch.empty(4, 8, 5, 5, device="cuda", dtype=dtype, requires_grad=True)
            with count_bytes() as traffic:
                y = norm(x)
                with torch.no_grad():  # autograd's engine needs a real GPU; its nodes do not
                    dx, dweight, dbias, *_ = y.grad_fn.apply(torch.empty_like(y))
            assert y.device.type == dx.device.type == dweight.device.type == "cuda"
            assert y.dtype == dx.dtype == dtype and dweight.dtype == dbias.dtype == torch.float32
            assert y.shape == dx.shape == x.shape and dbias.shape == (8,)
            assert {name: op.calls for name, op in traffic.by_op.items()} == {"all_gather": 1, "all_reduce": 1}
    finally:
        dist.destroy_process_group()
