"""broadcast and reduce_add: new tensors, each other's adjoint, in few copies."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from tests.dataparallel.device_kinds import KINDS, devices_of
from unisono.dataparallel import broadcast, reduce_add


def mixed() -> list[Tensor]:
    return [
        torch.randn(3, 2, dtype=torch.float64),
        torch.arange(5),
        torch.tensor(2.5),
        torch.randn(4, 3, dtype=torch.complex64).T,
        torch.randn(0, 3),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.randn(7, dtype=torch.bfloat16),
        torch.randn(300),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10 * 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_copies_and_reduce_add_adds(kind, bucket_bytes, request):
    devices, tensors = devices_of(kind, request), mixed()
    rows = broadcast(tensors, devices, bucket_bytes=bucket_bytes)
    assert [[x.device for x in row] for row in rows] == [[device] * len(tensors) for device in devices]
    for row in rows:
        for x, copy in zip(tensors, row, strict=True):
            assert (torch.equal(x, copy.cpu()) and x.dtype == copy.dtype and x.data_ptr() != copy.data_ptr()) or x.numel() == 0
    for target in (devices[2], "cpu"):
        for x, total in zip(tensors, reduce_add(rows, target, bucket_bytes=bucket_bytes), strict=True):
            expected = x if x.dtype == torch.bool else x * 4
            assert total.device == torch.device(target)
            torch.testing.assert_close(total.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_first_and_second_order(kind, request):
    devices = devices_of(kind, request)
    a, b = torch.randn(2, 2, dtype=torch.float64, requires_grad=True), torch.randn(3, dtype=torch.float64, requires_grad=True)

    def spread(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        rows = broadcast([a, b, torch.arange(3)], devices, bucket_bytes=2**20)
        return tuple((x.cpu() * (k + 1)).sin() for k, row in enumerate(rows) for x in row[:2])

    def collect(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        rows = [[(a * k).to(device).sin(), (b + k).to(device) ** 2] for k, device in enumerate(devices)]
        return tuple(reduce_add(rows, "cpu"))

    for function in (spread, collect):
        # what the two functions themselves make of their arguments is added as the devices come to it
        assert gradcheck(function, (a, b), nondet_tol=1e-12)
        assert gradgradcheck(function, (a, b), nondet_tol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_the_adjoint_of_the_other(kind, request):
    devices = devices_of(kind, request)
    tensors = [
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
    ]
    rows = broadcast(tensors, devices)
    flat = [x for row in rows for x in row]
    gradients = [torch.randn_like(x) for x in flat]
    pairs = [gradients[k : k + 2] for k in range(0, len(gradients), 2)]
    for got, expected in zip(torch.autograd.grad(flat, tensors, gradients), reduce_add(pairs, "cpu"), strict=True):
        torch.testing.assert_close(got, expected)
    leaves = [[x.detach().requires_grad_() for x in row] for row in rows]
    totals = reduce_add(leaves, "cpu")
    upstream = [torch.randn_like(x) for x in totals]
    got = torch.autograd.grad(totals, [x for row in leaves for x in row], upstream)
    for one, expected in zip(got, [x for row in broadcast(upstream, devices) for x in row], strict=True):
        assert one.device == expected.device
        torch.testing.assert_close(one, expected)


def test_gradients_are_added_in_the_order_of_the_devices(pretend):
    """To the bit, whichever device is done first."""
    torch.manual_seed(0)
    tensors = [torch.randn(50, requires_grad=True), torch.randn(20, requires_grad=True)]
    rows = broadcast(tensors, ["pretend:2", "pretend:0", "pretend:3", "pretend:1"])
    flat = [x for row in rows for x in row]
    gradients = [torch.randn_like(x) * 10 ** (k // 2) for k, x in enumerate(flat)]
    expected = [gradients[k].cpu() + gradients[2 + k].cpu() + gradients[4 + k].cpu() + gradients[6 + k].cpu() for k in range(2)]
    for _ in range(10):
        found = torch.autograd.grad(flat, tensors, gradients, retain_graph=True)
        assert all(map(torch.equal, found, expected))


def test_only_what_needs_a_gradient_is_in_the_graph(pretend):
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2), torch.arange(2)]
    for row in broadcast(tensors, ["pretend:0", "pretend:1", "cpu"]):
        assert [x.requires_grad for x in row] == [True, False, False]
    assert [x.requires_grad for x in reduce_add([tensors, tensors], "pretend:1")] == [True, False, False]
    with torch.no_grad():
        assert not broadcast(tensors, ["pretend:0"])[0][0].requires_grad


def test_results_are_new_and_independent(pretend):
    """A change of one is none of the others, and is not seen as one by autograd."""
    x, y = torch.ones(2), torch.ones(3)
    assert reduce_add([[x]], "cpu")[0].data_ptr() != x.data_ptr()
    (row,) = broadcast([x, y], ["pretend:1"])
    weight = torch.ones(2, device="pretend:1", requires_grad=True)
    loss = (weight * row[0]).sum()
    row[1].zero_()  # shares its memory with row[0], but not its history
    loss.backward()
    assert weight.grad.tolist() == [1, 1] and x.tolist() == [1, 1] and y.tolist() == [1, 1, 1]


def test_small_tensors_travel_together_to_a_device_and_alone_between_cpus(pretend):
    tensors = [torch.full((10,), float(k)) for k in range(50)] + [torch.randn(1000)]
    devices = ["pretend:0", "pretend:1", "pretend:2"]
    rows = broadcast(tensors, devices, bucket_bytes=1024)
    # 50 * 40 bytes in buckets of 1024: two; the large one by itself
    assert pretend.counters()["h2d"] == 3 * 3
    pretend.reset_counters()
    reduce_add(rows, "pretend:0", bucket_bytes=1024)
    assert pretend.counters()["d2d"] == 2 * 3
    pretend.reset_counters()
    assert all(torch.equal(a, b) for a, b in zip(broadcast(tensors, ["cpu"])[0], tensors, strict=True))
    assert pretend.counters()["allocations"] == 0


def test_sparse_tensors():
    x = torch.eye(3).to_sparse()
    rows = broadcast([x, torch.ones(2)], ["cpu", "cpu"])
    total, ones = reduce_add(rows, "cpu")
    assert total.is_sparse and torch.equal(total.to_dense(), 2 * torch.eye(3)) and ones.tolist() == [2, 2]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_placement_on_cuda_without_cuda():
    with FakeTensorMode():
        tensors = [torch.empty(3, device="cuda:1"), torch.empty(2, 2, device="cuda:1"), torch.empty(2)]
        rows = broadcast(tensors, ["cuda:0", "cuda:1", "cpu"])
        assert [{str(x.device) for x in row} for row in rows] == [{"cuda:0"}, {"cuda:1"}, {"cpu"}]
        assert {str(x.device) for x in reduce_add(rows, "cuda:3")} == {"cuda:3"}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: broadcast(torch.ones(2), ["cpu"]), TypeError, ["broadcast", "tensors", "a Tensor"]),
        (lambda: broadcast([torch.ones(2), 3], ["cpu"]), TypeError, ["broadcast", "Tensor, int"]),
        (lambda: broadcast([], []), ValueError, ["broadcast", "devices=[]"]),
        (lambda: broadcast([], ["cpu"], bucket_bytes=0), ValueError, ["broadcast", "bucket_bytes=0"]),
        (lambda: reduce_add([], "cpu"), ValueError, ["reduce_add", "rows=[]"]),
        (lambda: reduce_add([[torch.ones(2)], []], "cpu"), ValueError, ["rows[1] has 0", "rows[0] has 1"]),
        (lambda: reduce_add([[torch.ones(2)], [torch.ones(3)]], "cpu"), ValueError, ["rows[1][0]", "(3,)", "(2,)"]),
        (lambda: reduce_add([[torch.ones(2)], [torch.ones(2).int()]], "cpu"), ValueError, ["torch.int32", "torch.float32"]),
    ],
)
def test_bad_input_raises_and_names_the_argument(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_compiles_without_a_graph_break():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        return reduce_add(broadcast([x.sin()], ["cpu", "cpu"]), "cpu")[0]

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(run(x), 2 * x.sin())
    torch.testing.assert_close(torch.autograd.grad(run(x).sum(), x)[0], 2 * x.cos())


def test_cpu_tensors_are_broadcast_and_added():
    """torch.cuda.comm raised for CPU tensors."""
    x = torch.arange(4.0)
    assert torch.equal(reduce_add(broadcast([x], ["cpu"] * 4), "cpu")[0], 4 * x)


def test_the_sum_of_one_input_is_no_alias():
    """torch.cuda.comm.reduce_add returned its only input itself."""
    x = torch.ones(2)
    reduce_add([[x]], "cpu")[0].add_(1)
    assert x.tolist() == [1, 1]
