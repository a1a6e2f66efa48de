"""Collectives in flight: values and gradients, beside other calls, in any order of waiting; pending tensors that are dropped.

That they match one process, in value and derivatives, is in test_functional.py: one_process.CASES has them.
"""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import (
    PendingTensor,
    all_gather,
    all_reduce,
    all_to_all_single,
    count_bytes,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all_single,
    start_reduce_scatter,
)
from unisono.collectives.testing import gradcheck, gradgradcheck, run_ranks

PAIRS = [
    (start_all_gather, all_gather),
    (start_all_reduce, all_reduce),
    (start_reduce_scatter, reduce_scatter),
    (start_all_to_all_single, all_to_all_single),
]


def many_in_flight(order: str) -> None:
    """Twenty are in flight, more than gloo has tags, with calls that wait in between; they are waited for in any order."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.randn(5 + k, 3, generator=generator, dtype=torch.float64, requires_grad=True) for k in range(20)]
    pending = []
    for k, x in enumerate(xs):
        pending.append(PAIRS[k % 4][0](x * (k + 1)))
        if k % 3 == 0:  # calls on the same group that wait at once
            assert all_gather(torch.tensor([rank * k])).tolist() == [r * k for r in range(dist.get_world_size())]
            all_reduce(torch.ones(k + 1))
    places = list(range(20))
    if order == "reversed":
        places.reverse()
    elif order == "differs by rank":
        places = places[7 * rank :] + places[: 7 * rank]
    results = {k: pending[k].wait() for k in places}
    expected = [PAIRS[k % 4][1](x * (k + 1)) for k, x in enumerate(xs)]
    torch.testing.assert_close([results[k] for k in range(20)], expected, rtol=0, atol=0)
    assert all(p.wait() is results[k] and p.is_completed() for k, p in enumerate(pending))
    if order == "differs by rank":  # fine without a backward, whose order it decides
        return

    for ys in ([results[k] for k in range(20)], expected):
        loss = torch.stack([((rank + 1) * y**3).sum() for y in ys]).sum()
        first = torch.autograd.grad(loss, xs, create_graph=True)
        second = torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), xs)
        if ys is not expected:
            kept = (*first, *second)
    torch.testing.assert_close(kept, (*first, *second), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("order", ["as started", "reversed", "differs by rank"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_in_flight_beside_other_calls(world_size, order):
    run_ranks(many_in_flight, order, world_size=world_size)


def check_gradients() -> None:
    x = torch.randn(4, 2 + dist.get_rank(), dtype=torch.float64, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        pending = start_all_gather(x, 1)
        return x.sin().sum() * pending.wait() ** 2  # the way back goes through both branches

    gradcheck(program, x, atol=1e-6)
    gradgradcheck(program, x, atol=1e-5)


def test_gradcheck_of_what_runs_beside():
    run_ranks(check_gradients, world_size=2)


def overlaps_in_backward() -> list[str]:
    """The adjoint starts before, and is waited for after, the backward of what was called between start and wait."""
    events: list[str] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            events.append(f"between, {len(traffic.by_op) > 0}")
            return grad

    x = torch.ones(3, requires_grad=True)
    before = x * 2
    before.register_hook(lambda grad: events.append("gradient of the input"))
    pending = start_all_gather(before)
    other = Note.apply(torch.ones(3, requires_grad=True))
    y = pending.wait()
    with count_bytes() as traffic:
        (y.sum() * other.sum()).backward()
    assert x.grad.tolist() == [2 * 3.0 * dist.get_world_size()] * 3
    return events


def test_backward_is_in_flight_during_what_lies_between():
    for events in run_ranks(overlaps_in_backward, world_size=2):
        assert events == ["between, True", "gradient of the input"]


def dropped() -> list[str]:
    """Rank 1 drops a pending tensor: it is warned, nothing hangs, and later calls are right."""
    rank = dist.get_rank()
    found = []
    for start, _ in PAIRS:
        pending = start(torch.full((4, 2), float(rank)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank == 1:
                del pending
                gc.collect()
            else:
                pending.wait()
        found += [str(warning.message) for warning in caught]
        for _ in range(9):  # all tags of gloo's messages
            assert all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]
            assert all_reduce(torch.ones(2)).tolist() == [3, 3]
            assert torch.equal(start_all_gather(torch.full((4, 2), 1.0 * rank)).wait()[::4, 0], torch.arange(3.0))
    return found


def test_dropped_pending_tensors_warn_and_disturb_nobody():
    found = run_ranks(dropped, world_size=3)
    assert found[0] == found[2] == []
    assert len(found[1]) == 4
    assert "start_all_gather(grad='sum') at test_pending.py" in found[1][0] and "without wait()" in found[1][0]


def transforms() -> None:
    x = torch.randn(3, dtype=torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert torch.equal(torch.func.grad(lambda x: start_all_reduce(x).wait().sum())(x), torch.full_like(x, size))
    _, tangent = torch.func.jvp(lambda x: start_all_gather(x).wait(), (x,), (x + rank,))
    assert torch.equal(tangent, all_gather(x + rank))
    assert torch.func.vmap(lambda x: start_all_gather(x[None]).wait())(x).shape == (3, size)
    y = x.clone().requires_grad_()
    (batched,) = torch.autograd.grad(start_all_reduce(y).wait(), y, torch.eye(3, dtype=x.dtype), is_grads_batched=True)
    assert torch.equal(batched, size * torch.eye(3, dtype=x.dtype))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: start_all_reduce(x * 2).wait() * 2, backend="aot_eager")
    assert torch.equal(compiled(x), all_reduce(x * 2) * 2)


def test_transforms_of_pending_tensors():
    run_ranks(transforms, world_size=2)


def bad_calls() -> None:
    for call, message in (
        (lambda: start_all_reduce(torch.ones(2), "max"), "start_all_reduce: op='max' cannot be started"),
        (lambda: start_reduce_scatter(torch.ones(2), op="min"), "start_reduce_scatter: op='min' cannot be started"),
        (lambda: start_all_gather({"x": torch.ones(2)}), "start_all_gather: x: expected a Tensor, got dict; start a tree"),
        (lambda: start_all_reduce(torch.ones(2), "avg", grad="identity"), "grad='identity' goes with op='sum'"),
        (lambda: start_all_gather(torch.ones(2), 3), "(?s)start_all_gather: .*dim=3 is out of range"),
        (lambda: start_all_to_all_single(torch.ones(2), send_sizes=[2, 2]), "start_all_to_all_single"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert isinstance(start_all_gather(torch.ones(1)).wait(), torch.Tensor)
    assert PendingTensor.__doc__


def test_bad_calls_are_refused():
    run_ranks(bad_calls, world_size=2)
