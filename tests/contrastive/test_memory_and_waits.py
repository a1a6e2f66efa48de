"""On fake CUDA tensors: no loss waits for the device, and memory does not grow with the number of ranks."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.contrastive.fake_cuda import LiveBytes, first_blocks, on_fake_cuda
from unisono.collectives import count_bytes
from unisono.collectives.groups import resolve_group
from unisono.contrastive import clip_loss, ntxent_loss, sigmoid_loss, supcon_loss
from unisono.contrastive.tiled import logit_statistics, sigmoid_sum
from unisono.contrastive.tiled.columns import RingColumns
from unisono.contrastive.tiled.logit_statistics import SavedForBackward, backward, forward
from unisono.contrastive.tiled.sigmoid_sum import compute
from unisono.contrastive.tiled.tiles import TilePlan

RANK, WIDTH = 17, 512


@pytest.fixture
def fake_world(request) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=request.param)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode(allow_non_fake_inputs=True):
        yield request.param
    dist.destroy_process_group()


def features(rows: int) -> torch.Tensor:
    return torch.empty(rows, WIDTH, device="cuda")


@on_fake_cuda
@pytest.mark.parametrize("fake_world", [24], indirect=True)
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_no_loss_waits_for_the_device(fake_world, exchange):
    x, y = (features(32).requires_grad_() for _ in "xy")
    ids, weights = torch.zeros(32, dtype=torch.int64, device="cuda"), torch.ones(32, device="cuda", requires_grad=True)
    scale, bias = (torch.ones((), device="cuda", requires_grad=True) for _ in "sb")
    options = {"exchange": exchange}
    results = [
        clip_loss(x, y, scale, **options),
        clip_loss(x, y, scale, ids=ids, weights=weights, label_smoothing=0.1, hardness=0.5, **options),
        clip_loss(x, y, scale, ids=ids, same_id="masked", decoupled=True, **options),
        sigmoid_loss(x, y, scale, bias, ids=ids, weights=weights, **options),
        ntxent_loss(x, y, scale, **options),
        supcon_loss(x, ids, scale, **options),
    ]
    assert all(loss.device.type == "cuda" and loss.shape == () for loss in results)


@on_fake_cuda
@pytest.mark.parametrize("fake_world", [24], indirect=True)
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_no_backward_waits_for_the_device(fake_world, exchange):
    """Autograd's engine needs a real GPU, so the test calls the function that does the work."""
    x, y, scale = features(32), features(32), torch.ones((), device="cuda")
    ids = torch.zeros(32, dtype=torch.int64, device="cuda")
    plan = TilePlan(same_id_sums=True, exchange=exchange, sizes=(32,) * fake_world)
    found, kept = forward(x, y, scale, (ids, ids), plan, keep=True)
    for left in (kept, SavedForBackward([], [])):
        grads = backward(x, y, scale, (ids, ids), plan, found, found, left)
        assert [grad.shape for grad in grads] == [x.shape, y.shape, ()]
        assert all(grad.device.type == "cuda" for grad in grads)


@on_fake_cuda
@pytest.mark.parametrize("fake_world", [4096], indirect=True)
def test_the_ring_of_4096_ranks_needs_little_memory(fake_world):
    rows = 1024
    x, y, scale = features(rows), features(rows), torch.ones((), device="cuda")
    plan = TilePlan(exchange="auto", sizes=(rows,) * fake_world)
    with LiveBytes() as live, count_bytes() as traffic, mock.patch.object(RingColumns, "__iter__", first_blocks):
        found, kept = forward(x, y, scale, None, plan, keep=True)
        assert kept == SavedForBackward([], [])
        backward(x, y, scale, None, plan, found, found, kept)
        compute(x, y, scale, scale, None, None, False, plan, True)
    assert live.most < 0.1 * 2**30, f"{live.most / 2**20:.0f} MiB"
    block = rows * WIDTH * 4
    assert 5 * 31 * block < traffic.sent < 5.2 * 33 * block, "y three times, its gradient twice"


def peak_bytes(rows: int) -> int:
    x, y = (torch.randn(rows, 16, requires_grad=True) for _ in "xy")
    with LiveBytes() as live:
        loss = clip_loss(x, y, 10.0, logits="recompute", tile=128) + sigmoid_loss(x, y, 10.0, -5.0, tile=128)
        loss.backward()
    return live.most


def test_memory_grows_with_the_rows_and_not_with_their_square():
    small, large = peak_bytes(512), peak_bytes(2048)
    assert large < 4.2 * small and large < 2048 * 2048 * 4 / 8


@on_fake_cuda
def test_compiled_ops_return_what_they_promise():
    """The dtypes, shapes and devices that torch.compile was told; here the scale is a constant on the CPU."""
    constant = torch.tensor(3.0, dtype=torch.float64)
    plan = TilePlan(sizes=(4,))
    options = logit_statistics._encode(plan), plan.excluded_diagonals, plan.sizes, *resolve_group(None)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode(allow_non_fake_inputs=True):
        x, y = (torch.empty(4, 8, device="cuda") for _ in "xy")
        *statistics, exchanged = logit_statistics._forward_op(x, y, constant, None, None, *options)
        calls = {
            logit_statistics._forward_op: (x, y, constant, None, None, *options),
            logit_statistics._backward_op: (x, y, constant, None, None, statistics, statistics, exchanged, *options),
            sigmoid_sum._op: (
                x,
                y,
                constant,
                constant,
                None,
                None,
                False,
                True,
                "auto",
                0,
                "exact",
                (4,),
                *resolve_group(None),
            ),
        }
        for op, arguments in calls.items():
            promised, found = op(*arguments), op._init_fn(*arguments)
            kinds = [[(t.dtype, t.shape, t.device) for t in each] for each in (promised, found)]
            assert kinds[0] == kinds[1], op
