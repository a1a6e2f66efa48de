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
from torch.utils._python_dispatch import TorchDispatchMode

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
    start_all_gather,
    start_all_to_all_single,
)
from unisono.collectives.autograd import LinearMap
from unisono.collectives.coalesced import run_coalesced
from unisono.collectives.groups import GroupRanks

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="autograd aborts on fake CUDA tensors where torch is built without CUDA"
)
WORLD, RANK, WIDTH = 4096, 17, 512
OTHERS = WORLD - 1
UNEVEN = [8 + (r % 3) for r in range(WORLD)]  # rank 17 has 10
TOTAL = sum(UNEVEN)
PADDED = 10 * WORLD  # rows if each rank's part is padded to the longest, which is 1.11 of TOTAL
SKEWED = [100 if r == RANK else r % 2 for r in range(WORLD)]  # padding would send 190 times as much
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
    "all_gather uneven": (lambda x: all_gather(x, sizes=UNEVEN), 10, TOTAL, 10 * ROW * (WORLD - 1), (PADDED - 10) * ROW),
    "all_gather skewed": (
        lambda x: all_gather(x, sizes=SKEWED),
        100,
        sum(SKEWED),
        100 * ROW * (WORLD - 1),
        (sum(SKEWED) - 100) * ROW,
    ),
    "all_gather slice": (lambda x: all_gather(x, sizes=UNEVEN, grad="slice"), 10, TOTAL, 10 * ROW * (WORLD - 1), 0),
    "reduce_scatter equal": (
        lambda x: reduce_scatter(x, sizes=[2] * WORLD),
        2 * WORLD,
        2,
        2 * ROW * (WORLD - 1),
        2 * ROW * (WORLD - 1),
    ),
    "reduce_scatter uneven": (
        lambda x: reduce_scatter(x, sizes=UNEVEN),
        TOTAL,
        10,
        (PADDED - 10) * ROW,
        10 * ROW * (WORLD - 1),
    ),
    "all_reduce": (all_reduce, 4, 4, 2 * 4 * ROW * (WORLD - 1) // WORLD, 2 * 4 * ROW * (WORLD - 1) // WORLD),
    "all_reduce identity": (lambda x: all_reduce(x, grad="identity"), 4, 4, 2 * 4 * ROW * (WORLD - 1) // WORLD, 0),
    "start_all_gather": (
        lambda x: start_all_gather(x, sizes=[8] * WORLD).wait(),
        8,
        8 * WORLD,
        8 * ROW * (WORLD - 1),
        8 * ROW * (WORLD - 1),
    ),
    "start_all_gather uneven": (
        lambda x: start_all_gather(x, sizes=UNEVEN).wait(),
        10,
        TOTAL,
        10 * ROW * (WORLD - 1),
        (PADDED - 10) * ROW,
    ),
    "start_all_to_all_single": (
        lambda x: start_all_to_all_single(x, send_sizes=[1] * WORLD, receive_sizes=[1] * WORLD).wait(),
        WORLD,
        WORLD,
        (WORLD - 1) * ROW,
        (WORLD - 1) * ROW,
    ),
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


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        (lambda x: shift(x, sizes=UNEVEN), {"send": 1, "recv": 1}),
        (lambda x: gather(x, sizes=UNEVEN), {"send": 1}),
        (lambda x: gather(x, sizes=UNEVEN, root=RANK), {"recv": WORLD - 1}),
    ],
)
def test_point_to_point_posts_only_messages_with_rows(fake_world, call, messages):
    x = rows(10)
    with count_bytes() as forward:
        y = call(x)
    with count_bytes() as back:
        backward(y)
    assert {name: op.calls for name, op in forward.by_op.items()} == messages
    swapped = {"send": messages.get("recv", 0), "recv": messages.get("send", 0)}
    assert {name: op.calls for name, op in back.by_op.items()} == {name: n for name, n in swapped.items() if n}


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


class Kernels(TorchDispatchMode):
    """Lists the ops that read or write memory and are no collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sizes", [[1024] * 64, [1024 - (r == 5) for r in range(64)]], ids=["equal", "uneven"])
def test_trees_launch_nothing_but_their_collectives(fake_world, sizes):
    """One message of bytes for all leaves took 131 kernels in this backward, and 4.8 GB of memory traffic.

    Uneven leaves are padded for the fused collective: a call removes the padding, and two make it in the backward.
    """
    uneven = len(set(sizes)) > 1
    part = dist.new_group(range(64))
    plans = [LinearMap("all_gather", GroupRanks(part.group_name, RANK, 64), (1024,), tuple(sizes))] * 2
    leaves = [torch.empty(1024, 1024, device="cuda"), torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")]
    with Kernels() as kernels, count_bytes() as forward:
        gathered = run_coalesced(leaves, plans)
    assert kernels.names == ["aten::_foreach_copy_"] * 2 * uneven
    kernels.names.clear()
    with kernels, count_bytes() as backward:
        shares = run_coalesced(gathered, [plan.adjoint() for plan in plans])
    assert kernels.names == ["aten::new_zeros", "aten::_foreach_copy_"] * 2 * uneven
    assert {name: op.calls for name, op in forward.by_op.items()} == {"all_gather": 2}
    assert {name: op.calls for name, op in backward.by_op.items()} == {"reduce_scatter": 2}
    assert [(y.shape, y.dtype) for y in shares] == [(x.shape, x.dtype) for x in leaves]


def test_native_reductions_and_reduce_dtype_on_fake_cuda(fake_world):
    x = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    once = 2 * 1000 * (WORLD - 1) // WORLD  # elements that an all_reduce sends
    for call, itemsize in (
        (lambda: all_reduce(x.float(), "max"), 4),
        (lambda: all_reduce(x.float(), "product"), 4),
        (lambda: all_reduce(x), 2),
        (lambda: all_reduce(x, reduce_dtype=torch.float32), 4),
        (lambda: all_reduce({"a": x[:500], "b": x[500:]}, reduce_dtype=torch.float32), 4),
    ):
        with count_bytes() as traffic:
            call()
        assert set(traffic.by_op) == {"all_reduce"}
        assert abs(traffic.sent - once * itemsize) <= 2 * itemsize
    part = reduce_scatter(
        torch.empty(WORLD, dtype=torch.bfloat16, device="cuda"), sizes=[1] * WORLD, reduce_dtype=torch.float32
    )
    assert part.dtype is torch.bfloat16


def test_sizes_are_taken_alike_in_a_simulation(fake_world):
    x = rows(3)
    assert exchange_sizes(x) == (3,) * WORLD
    assert all_gather(x).shape == (3 * WORLD, WIDTH)
    assert all_to_all_single(rows(WORLD)).shape == (WORLD, WIDTH)


def test_scatter_of_4096_on_fake_cuda(fake_world):
    x = rows(2 * WORLD)
    part = scatter(x, root=RANK)
    assert part.shape == (2, WIDTH) and backward(part)[x].shape == x.shape
