"""One rank of 4,096 in one process: the fake process group and fake CUDA tensors, on the path that NCCL takes.

A fake tensor has a device and a shape but no data: mixing devices, or reading a value from the GPU, raises.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.collectives import (
    all_gather,
    all_reduce,
    all_to_all_single,
    broadcast,
    count_bytes,
    exchange_sizes,
    gather,
    global_mean,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="autograd aborts on fake CUDA tensors where torch is built without CUDA"
)
WORLD, RANK, WIDTH = 4096, 17, 512
UNEVEN = [8 + (r % 3) for r in range(WORLD)]  # rank 17 has 10
TOTAL = sum(UNEVEN)
ROW = WIDTH * 4


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    # torch's own broadcast asks the device for its compute capability, the one question a fake device cannot answer
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode():
        yield
    dist.destroy_process_group()


def backward(y: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    """Gradients of y.sum() for the leaves. Autograd's engine needs a real GPU for CUDA tensors; its nodes do not."""
    arriving, order, leaves = {y.grad_fn: torch.ones_like(y)}, [], {}

    def visit(node: Any) -> None:
        if node is not None and node not in order:
            for following, _ in node.next_functions:
                visit(following)
            order.append(node)

    visit(y.grad_fn)
    for node in reversed(order):
        if hasattr(node, "variable"):
            leaves[node.variable] = arriving[node]
            continue
        if hasattr(node, "apply"):  # a Function in Python: one result for each argument, None for what is not a tensor
            results = [grad for grad in node.apply(arriving[node]) if grad is not None]
        else:
            results = node(arriving[node])
            results = results if isinstance(results, tuple) else (results,)
        for (following, _), grad in zip(node.next_functions, results, strict=True):
            if following is not None and grad is not None:
                arriving[following] = arriving[following] + grad if following in arriving else grad
    return leaves


def rows(count: int) -> torch.Tensor:
    return torch.empty(count, WIDTH, device="cuda", requires_grad=True)


# name: (call, rows in, rows out, bytes sent forward, bytes sent backward)
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, int, int, int]] = {
    "all_gather equal": (
        lambda x: all_gather(x, sizes=[8] * WORLD),
        8,
        8 * WORLD,
        8 * ROW * (WORLD - 1),
        8 * ROW * (WORLD - 1),
    ),
    "all_gather uneven": (lambda x: all_gather(x, sizes=UNEVEN), 10, TOTAL, 10 * ROW * (WORLD - 1), (TOTAL - 10) * ROW),
    "all_gather slice": (lambda x: all_gather(x, sizes=UNEVEN, grad="slice"), 10, TOTAL, 10 * ROW * (WORLD - 1), 0),
    "reduce_scatter equal": (
        lambda x: reduce_scatter(x, sizes=[2] * WORLD),
        2 * WORLD,
        2,
        2 * ROW * (WORLD - 1),
        2 * ROW * (WORLD - 1),
    ),
    "reduce_scatter uneven": (lambda x: reduce_scatter(x, sizes=UNEVEN), TOTAL, 10, (TOTAL - 10) * ROW, 10 * ROW * (WORLD - 1)),
    "all_reduce": (all_reduce, 4, 4, 2 * 4 * ROW * (WORLD - 1) // WORLD, 2 * 4 * ROW * (WORLD - 1) // WORLD),
    "all_reduce identity": (lambda x: all_reduce(x, grad="identity"), 4, 4, 2 * 4 * ROW * (WORLD - 1) // WORLD, 0),
    "broadcast from here": (lambda x: broadcast(x, root=RANK), 4, 4, 4 * ROW * (WORLD - 1), 0),
    "broadcast from 0": (broadcast, 4, 4, 0, 4 * ROW),
    "reduce to 0": (reduce, 4, 4, 4 * ROW, 0),
    "gather to 0": (lambda x: gather(x, sizes=UNEVEN), 10, 0, 10 * ROW, 0),
    "gather to here": (lambda x: gather(x, sizes=UNEVEN, root=RANK), 10, TOTAL, 0, (TOTAL - 10) * ROW),
    "shift": (lambda x: shift(x, sizes=UNEVEN), 10, 9, 10 * ROW, 9 * ROW),
    "all_to_all_single": (
        lambda x: all_to_all_single(x, send_sizes=[1] * WORLD, receive_sizes=[1] * WORLD),
        WORLD,
        WORLD,
        (WORLD - 1) * ROW,
        (WORLD - 1) * ROW,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_of_4096_on_fake_cuda(fake_world, name):
    call, rows_in, rows_out, forward_bytes, backward_bytes = CASES[name]
    x = rows(rows_in)
    with count_bytes() as forward:
        y = call(x)
    assert y.shape == (rows_out, WIDTH) and y.device.type == "cuda"
    with count_bytes() as back:
        gradient = backward(y)[x]
    assert gradient.shape == x.shape and gradient.device.type == "cuda"
    assert (forward.sent, back.sent) == (forward_bytes, backward_bytes)


@pytest.mark.parametrize("op", ["max", "min", "product", "avg"])
def test_reductions_of_4096_on_fake_cuda(fake_world, op):
    x = torch.empty(WORLD * 2, device="cuda", requires_grad=True)
    for y in (all_reduce(x, op), reduce_scatter(x, op=op, sizes=[2] * WORLD)):
        assert backward(y)[x].device.type == "cuda"
    with count_bytes() as traffic:
        all_reduce(x, op)
    assert traffic.sent == 2 * (WORLD - 1) * 2 * 4, "no more than any all_reduce"


def test_mean_of_4096_on_fake_cuda(fake_world):
    x = rows(10)
    loss = global_mean(x.sum(1))
    assert loss.device.type == backward(loss)[x].device.type == "cuda"


def test_tree_on_fake_cuda(fake_world):
    part = dist.new_group(range(256))  # slices of fake tensors are slow: 256 ranks do
    sizes = UNEVEN[:256]
    x = rows(10)
    tree = all_gather({"x": x, "label": torch.empty(10, dtype=torch.int64, device="cuda")}, sizes=sizes, group=part)
    assert tree["x"].shape == (sum(sizes), WIDTH) and tree["label"].shape == (sum(sizes),)
    with count_bytes() as traffic:
        y = all_gather({"x": x}, sizes=sizes, group=part)["x"]
    assert traffic.sent == 10 * ROW * 255
    assert backward(y)[x].device.type == "cuda"


def test_sizes_are_taken_alike_in_a_simulation(fake_world):
    x = rows(3)
    assert exchange_sizes(x) == (3,) * WORLD
    assert all_gather(x).shape == (3 * WORLD, WIDTH)
    assert all_to_all_single(rows(WORLD)).shape == (WORLD, WIDTH)


def test_scatter_of_4096_on_fake_cuda(fake_world):
    x = rows(2 * WORLD)
    part = scatter(x, root=RANK)
    assert part.shape == (2, WIDTH) and backward(part)[x].shape == x.shape
