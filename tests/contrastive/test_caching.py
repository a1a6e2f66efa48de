"""cached_backward gives the gradients of the whole batch at once, whatever the micro-batches, and synchronises once."""

import copy
from collections import UserDict
from contextlib import nullcontext
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import MismatchError, all_gather, count_bytes
from unisono.contrastive.caching import cached_backward

WIDTH = 4
ROWS = {1: [7], 2: [5, 2], 3: [4, 0, 7]}  # the rows of each rank, by world size


def tower(seed: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, WIDTH)).double()


class Both(nn.Module):
    """Two towers and a temperature that no tower uses: what people wrap in one DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(0), tower(1)
        self.log_scale = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))

    def forward(self, kind: str, x: Tensor) -> Tensor:
        return getattr(self, kind)(x)


def whole_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    rows = sum(ROWS[dist.get_world_size()])
    return tuple(torch.randn(rows, 3, dtype=torch.float64, generator=generator) for _ in range(2))


def own(x: Tensor) -> Tensor:
    return x.split(ROWS[dist.get_world_size()])[dist.get_rank()]


def plain_loss(images: Tensor, texts: Tensor, log_scale: Tensor | float = 0.3) -> Tensor:
    logits = images @ texts.T * (torch.as_tensor(log_scale).exp())
    target = torch.arange(len(logits))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def global_loss(images: Tensor, texts: Tensor, log_scale: Tensor | float = 0.3) -> Tensor:
    """The same number on every rank: its gradients, added over ranks, are W times too large until DDP averages."""
    return plain_loss(all_gather(images), all_gather(texts), log_scale)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def same_gradients(got: nn.Module, expected: nn.Module) -> None:
    expected_gradients = {name: p.grad for name, p in expected.named_parameters()}
    for name, parameter in got.named_parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        close(gradient, expected_gradients[name.replace("module.", "")])


def each_tower(wrap, micro_batch) -> None:
    """Several steps of SGD: what DDP leaves behind after one step must not spoil the next."""
    reference = [tower(0), tower(1)]
    towers = [wrap(copy.deepcopy(t)) for t in reference]
    for step in range(3):
        images, texts = whole_batch(step)
        expected = plain_loss(reference[0](images), reference[1](texts))
        expected.backward()
        value = cached_backward(towers, [own(images), own(texts)], global_loss, micro_batch=micro_batch)
        close(value, expected.detach())
        for got, wanted in zip(towers, reference, strict=True):
            same_gradients(got, wanted)
        for module in [*towers, *reference]:
            with torch.no_grad():  # SGD; torch.optim takes seconds to import its compiler
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
            module.zero_grad()


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes seconds

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for child in module.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


@pytest.mark.parametrize("micro_batch", [1, [2, 3], 100])
@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [(1, DistributedDataParallel), (2, DistributedDataParallel), (3, DistributedDataParallel), (3, sharded)],
)
def test_gradients_match_the_whole_batch(ranks, world_size, wrap, micro_batch):
    ranks(each_tower, wrap, micro_batch, world_size=world_size)


def one_ddp(find_unused: bool, bypass: bool) -> None:
    reference = Both()
    ddp = DistributedDataParallel(copy.deepcopy(reference), find_unused_parameters=find_unused)
    model = ddp.module if bypass else ddp
    calls = []
    ddp.register_comm_hook(None, lambda _, bucket: counted(calls, bucket))
    for step in range(3):
        images, texts = whole_batch(step)
        reference.zero_grad()
        ddp.zero_grad()
        expected = plain_loss(reference("image", images), reference("text", texts), reference.log_scale)
        expected.backward()
        cached_backward(
            [lambda x: model("image", x), lambda x: model("text", x)],
            [own(images), own(texts)],
            lambda x, y: global_loss(x, y, ddp.module.log_scale),
            micro_batch=2,
            modules=[ddp],
        )
        same_gradients(ddp, reference)
    assert calls == [sum(p.numel() for p in reference.parameters())] * 3


def counted(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_ddp_for_all_synchronises_once(ranks, world_size, find_unused, bypass):
    ranks(one_ddp, find_unused, bypass, world_size=world_size)


def shared_tower(wrap) -> None:
    reference = tower(0)
    model = wrap(copy.deepcopy(reference))
    for step in range(2):
        images, texts = whole_batch(step)
        reference.zero_grad()
        model.zero_grad()
        plain_loss(reference(images), reference(texts)).backward()
        cached_backward([model, model], [own(images), own(texts)], global_loss, micro_batch=[3, 2])
        same_gradients(model, reference)


@pytest.mark.parametrize(("world_size", "wrap"), [(1, DistributedDataParallel), (3, DistributedDataParallel), (3, sharded)])
def test_one_tower_twice(ranks, world_size, wrap):
    ranks(shared_tower, wrap, world_size=world_size)
