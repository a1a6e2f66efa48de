"""Two towers trained under DDP and FSDP2 end with the parameters of one process with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.contrastive.loss_cases import SPLITS, close
from unisono.contrastive import ClipLoss, SigmoidLoss, clip_loss, reference, sigmoid_loss


class TwoTowers(nn.Module):
    """The loss module may be inside of the module that DDP wraps, or outside of it."""

    def __init__(self, loss: nn.Module | None) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.text = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.loss = loss

    def forward(self, images, texts, ids=None):
        x, y = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        return (x, y) if self.loss is None else self.loss(x, y, ids=ids)


def make(loss_class, inside):
    torch.manual_seed(0)
    loss = loss_class(same_id="masked").double()
    return TwoTowers(loss if inside else None).double(), loss


def trained_alone(loss_class, images, texts, ids):
    """Train three steps with the reference on the whole batch."""
    model, loss = make(loss_class, inside=False)
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x, y = model(images, texts)
        if loss_class is ClipLoss:
            value = reference.clip_loss(x, y, loss.log_scale.exp().squeeze(), ids=ids, same_id="masked")
        else:
            scale, bias = loss.log_scale.exp().squeeze(), loss.bias.squeeze()
            value = reference.sigmoid_loss(x, y, scale, bias, ids=ids, same_id="masked")
        value.backward()
        optimizer.step()
    return {name: p.detach() for name, p in [*model.named_parameters(), *loss.named_parameters()]}, value.detach()


def trains_alike(loss_name, wrapper, inside):
    loss_class = {"clip": ClipLoss, "sigmoid": SigmoidLoss}[loss_name]
    sizes, rank, world = list(SPLITS[dist.get_world_size()]), dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    texts = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (sum(sizes),), generator=generator)
    expected, expected_value = trained_alone(loss_class, images, texts, ids)

    model, loss = make(loss_class, inside)
    inner = model
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for tower in (model.image, model.text):
            fully_shard(tower, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = [*model.parameters(), *(() if inside else loss.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    mine = [t.split_with_sizes(sizes)[rank] for t in (images, texts, ids)]
    for _ in range(3):
        optimizer.zero_grad()
        value = model(*mine) if inside else loss(*model(*mine[:2]), ids=mine[2])
        value.backward()
        optimizer.step()
    close(value.detach(), expected_value, 1e-12, "loss")
    found = dict(inner.named_parameters()) if inside else dict(inner.named_parameters()) | dict(loss.named_parameters())
    assert len(found) == len(expected)
    for name, parameter in found.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        close(whole.detach(), expected[name.removeprefix("loss.")], 1e-12, name)


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("loss", ["clip", "sigmoid"])
def test_training_matches_one_process(ranks, loss, wrapper, inside):
    for world_size in (1, 2, 4):
        ranks(trains_alike, loss, wrapper, inside, world_size=world_size)


def frozen_tower(exchange):
    """One tower needs no gradient (locked-image tuning), on all ranks or on some; or a whole rank needs none."""
    for frozen in (["x"], ["y"], ["y"] if dist.get_rank() else [], ["x", "y"] if dist.get_rank() == 1 else []):
        generator = torch.Generator().manual_seed(dist.get_rank())
        given = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in ("x", "y")}
        tensors = {name: t.requires_grad_(name not in frozen) for name, t in given.items()}
        clip_loss(tensors["x"], tensors["y"], 3.0, exchange=exchange).backward()
        sigmoid_loss(tensors["x"], tensors["y"], 3.0, 0.0, exchange=exchange).backward()
        full = {name: copy.deepcopy(t.detach()).requires_grad_() for name, t in given.items()}
        clip_loss(full["x"], full["y"], 3.0, exchange=exchange).backward()
        sigmoid_loss(full["x"], full["y"], 3.0, 0.0, exchange=exchange).backward()
        for name, t in tensors.items():
            assert (t.grad is None) == (name in frozen)
            if t.grad is not None:
                close(t.grad, full[name].grad, 1e-13, name)


def test_frozen_towers(ranks):
    for exchange in ("gather", "ring"):
        ranks(frozen_tower, exchange, world_size=3)


def bound_holds(wrap):
    """Push a scale beyond its bound and back, in a parameter that FSDP2 shards, or in a plain one."""
    loss = ClipLoss(init_scale=9.0, max_scale=10.0).double()
    if wrap:
        fully_shard(loss, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    x = torch.eye(4, dtype=torch.float64).tensor_split(dist.get_world_size())[dist.get_rank()]
    path = []
    for sign in (1, 1, 1, -1, -1):  # the loss of perfect pairs falls as the scale grows
        optimizer.zero_grad()
        value = loss(x, x)
        (sign * 1e4 * value).backward()
        optimizer.step()
        log_scale = loss.log_scale.full_tensor() if hasattr(loss.log_scale, "full_tensor") else loss.log_scale
        path.append((value.item(), log_scale.item()))
    return path


def test_the_bound_holds_in_a_sharded_parameter(ranks):
    (plain,) = ranks(bound_holds, False, world_size=1)
    assert plain[1][1] == plain[2][1] > 2.31 and plain[4][1] < plain[3][1] < plain[2][1], (
        "beyond the bound by one step, held there, and back"
    )
    for path in ranks(bound_holds, True, world_size=2):
        torch.testing.assert_close(torch.tensor(path), torch.tensor(plain), rtol=1e-6, atol=0)
