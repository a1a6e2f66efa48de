"""torch.profiler shows our calls by name, forward and backward, around the collectives that they run."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from unisono.collectives import Ring, all_gather, all_reduce, shift, start_all_gather
from unisono.collectives.testing import run_ranks


def names_of(program) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        program()
    return [event.name for event in sorted(recorded.events(), key=lambda e: e.time_range.start) if "unisono" in event.name]


def step(call) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    call(x).sum().backward()


def shown() -> None:
    for call, names in (
        (lambda x: all_gather(x, sizes="equal"), ["all_gather", "backward of all_gather"]),
        (lambda x: all_gather(x), ["metadata of all_gather", "metadata of all_gather", "all_gather", "backward of all_gather"]),
        (lambda x: all_reduce(x, "max"), ["all_reduce", "backward of all_reduce", "backward of all_reduce"]),
        (lambda x: shift(x, sizes="equal"), ["shift", "backward of shift"]),
        (lambda x: all_gather([x, x], sizes="equal")[0], ["all_gather of a tree", "backward of all_gather of a tree"]),
        (
            lambda x: start_all_gather(x, sizes="equal").wait(),
            [f"{part}{way}start_all_gather" for way in ("", "backward of ") for part in ("", "wait of ")],
        ),
    ):
        step(call)
        assert names_of(lambda call=call: step(call)) == [f"unisono::{name}" for name in names]
    ring = names_of(lambda: [block for _, block in Ring([torch.ones(1)], sizes="equal")])
    assert ring == ["unisono::Ring", *["unisono::wait of Ring"] * dist.get_world_size()]


def test_calls_have_names():
    run_ranks(shown, world_size=2)


def nothing_is_named() -> None:
    """Without a profiler not even the name is made."""
    original, made = profiler.record_function, []
    profiler.record_function = lambda name: made.append(name) or original(name)
    try:
        step(all_gather)
        assert not made
        names_of(lambda: step(all_gather))
        assert "unisono::all_gather" in made
    finally:
        profiler.record_function = original


def test_without_a_profiler_nothing_is_recorded():
    run_ranks(nothing_is_named, world_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_gloo_shows_the_dtype(dtype):
    run_ranks(sends_its_dtype, dtype, world_size=2)


def sends_its_dtype(dtype: torch.dtype) -> None:
    """On gloo, messages take any dtype: nothing is sent as bytes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sent = []

    class Sends(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "c10d::send":
                sent.append(args[0][0].dtype)
            return func(*args, **(kwargs or {}))

    with Sends():
        all_gather(torch.ones(2, dtype=dtype), sizes="equal")
    assert sent == [dtype]
