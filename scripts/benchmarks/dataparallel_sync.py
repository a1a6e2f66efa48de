"""Two ranks: the time that syncing adds to a backward pass.

The model computes next to nothing: each parameter's gradient is made by one fill. DDP's time is that of its backward less its
backward under no_sync; that of overlap() is its block less a plain backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dataparallel_report import Figure, ratios
from shared_measuring import order_of_turns, time_call
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.dataparallel import GradientSync, sync_gradients

DDP, KEPT, OVERLAP, ONCE, EACH = "DDP", "GradientSync", "GradientSync.overlap", "sync_gradients", "one all_reduce each"


def resnet50_sizes() -> list[int]:
    sizes, width = [64 * 3 * 49, 64, 64], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            sizes += [width * inner, inner, inner, inner * inner * 9, inner, inner, inner * inner * 4, inner * 4, inner * 4]
            if block == 0:
                sizes += [width * inner * 4, inner * 4, inner * 4]
            width = inner * 4
    return [*sizes, 2048 * 1000, 1000]


MODELS = {
    "200 small parameters": [1000 + 45 * k for k in range(200)],
    "ResNet-50": resnet50_sizes(),
    "4 of 4 M": [2**22] * 4,
}


class Fill(torch.autograd.Function):
    """A gradient of ones for each parameter, at the price of one fill."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.shape = p.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(ctx.shape)


class Model(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Fill.apply(x, weight)
        return x.sum()


def time_sync(name: str, sizes: list[int], quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    rounds = 80 if sum(sizes) < 10**7 else 24
    rounds = max(4, rounds // 10) if quick else rounds
    entries = make_entries(sizes)
    seconds: dict[str, list[float]] = {entry: [] for entry in entries}
    for turn in range(rounds + 3):
        for entry in order_of_turns(list(entries), turn):
            prepare, call = entries[entry]
            made = prepare()
            wall, _ = time_call(lambda call=call, made=made: call(made))
            if turn >= 3:
                seconds[entry].append(wall)
    # round by round: of a shared machine, what happened to both is taken away
    backward = seconds.pop("plain backward")
    silent = seconds.pop("DDP, no_sync")
    seconds[DDP] = [a - b for a, b in zip(seconds[DDP], silent, strict=True)]
    seconds[OVERLAP] = [a - b for a, b in zip(seconds[OVERLAP], backward, strict=True)]
    return ratios(f"gradient sync, {name}", DDP, seconds)


def make_entries(sizes: list[int]) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What is done before the clock starts, and what is timed."""
    x = torch.ones(1)
    plain, wrapped = Model(sizes), DistributedDataParallel(Model(sizes))
    parameters = list(plain.parameters())
    sync = GradientSync(parameters)

    def forward(model: nn.Module) -> Tensor:
        model.zero_grad()
        return model(x)

    def forward_silently() -> Tensor:
        with wrapped.no_sync():
            return forward(wrapped)

    def overlap(loss: Tensor) -> None:
        with sync.overlap():
            loss.backward()

    def one_by_one(_: None) -> None:
        for p in parameters:
            p.grad.mul_(1 / dist.get_world_size())
            dist.all_reduce(p.grad)

    return {
        DDP: (lambda: forward(wrapped), Tensor.backward),
        "DDP, no_sync": (forward_silently, Tensor.backward),
        "plain backward": (lambda: forward(plain), Tensor.backward),
        OVERLAP: (lambda: forward(plain), overlap),
        KEPT: (lambda: forward(plain).backward(), lambda _: sync()),
        ONCE: (lambda: forward(plain).backward(), lambda _: sync_gradients(parameters)),
        EACH: (lambda: forward(plain).backward(), one_by_one),
    }
