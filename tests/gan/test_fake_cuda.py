"""One rank of 24 on fake CUDA tensors, which have no data: a read of a value, a mix of devices or a copy to one is seen."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gan.small_gan import CASES, CLASSES, SMALL, WIDTH
from unisono_models.gan.config import LossConfig, ModelConfig
from unisono_models.gan.data.loader import Batch
from unisono_models.gan.loss import GAN
from unisono_models.gan.model.minibatch_stddev import minibatch_stddev

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
RANK, WORLD = 17, 24
UNEVEN = tuple(3 + rank % 3 for rank in range(WORLD))  # rank 17 has 5
EVEN = (4,) * WORLD


class Copies(TorchDispatchMode):
    """Records operations that make the host wait: copies between the device and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor) and t.ndim}
        if len(devices) > 1 or (func.overloadpacket == torch.ops.aten.lift_fresh and "cuda" in devices):
            self.seen.append(str(func))
        return result


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode():
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (0,) * WORLD], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("group_size", [4, 7, 1000])
def test_stddev_stays_on_the_device(fake_world, sizes, group_size):
    x = torch.empty(sizes[RANK], 3, 2, 2, device="cuda", requires_grad=True)
    with Copies() as copies:
        found = minibatch_stddev(x, group_size=group_size, sizes=sizes)
    assert found.device.type == "cuda" and found.shape == x.shape[:1] and copies.seen == []


@pytest.mark.parametrize("case", ["paired", "unconditional, groups of 2", "all terms", "all terms, vectors"])
def test_steps_stay_on_the_device(fake_world, case):
    """Without penalties, since autograd's engine needs a real GPU."""
    model, loss, _ = CASES[case]
    config = ModelConfig(**SMALL, **model)
    with torch.device("cuda"):
        gan = GAN(config, LossConfig(**loss), size=8, channels=1, conditions=CLASSES if config.condition == "class" else WIDTH)
        rows = UNEVEN[RANK]
        ids = torch.zeros(rows, dtype=torch.int64)
        condition = {"class": ids, "none": None}.get(config.condition, torch.empty(rows, WIDTH))
        batch = Batch(torch.empty(rows, 1, 8, 8), condition, ids, torch.empty(rows, 8), UNEVEN, 3)
    with Copies() as copies:
        fakes = gan.generator(batch.noise, batch.condition)
        for losses in (gan.discriminator_loss(batch, fakes), gan.generator_loss(batch, fakes)):
            assert all(value.device.type == "cuda" and value.shape == () for value in losses.values())
            assert losses["loss"].requires_grad
    assert copies.seen == []


def test_copies_are_seen(fake_world):
    x = torch.empty(3, device="cuda")
    with Copies() as copies:
        x.new_tensor([1.0, 2.0])
        torch.tensor([1, 2], device="cuda")
        x.cpu()
    assert len(copies.seen) == 3
    with pytest.raises(Exception, match="_local_scalar_dense"):
        float(x.sum())
