"""parallel_apply: threads with the modes of the caller, and errors that say where they come from."""

import contextvars
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from unisono.dataparallel import parallel_apply

CPUS = ["cpu"] * 3
TEXT = contextvars.ContextVar("TEXT", default="")


def modes(_: Any) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        str(torch.ones(1).device),
        (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        TEXT.get(),
        threading.current_thread() is threading.main_thread(),
    )


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_threads_have_the_modes_of_the_caller(context):
    token = TEXT.set("said by the caller")
    with context():
        expected = modes(None)
        seen = parallel_apply([modes] * 3, [None] * 3, CPUS)
    TEXT.reset(token)
    assert [found[:-1] for found in seen] == [expected[:-1]] * 3
    assert not any(found[-1] for found in seen)  # each in a thread of its own
    assert expected[7] == "said by the caller" and len({expected, modes(None)}) == 2  # the context did change something


def test_default_device_and_saved_tensor_hooks():
    torch.set_default_device("meta")
    try:
        assert parallel_apply([lambda: torch.ones(1).device.type] * 2, [()] * 2, CPUS[:2]) == ["meta", "meta"]
    finally:
        torch.set_default_device(None)
    packed = []
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        parallel_apply([torch.exp] * 3, [x] * 3, CPUS)
    assert len(packed) == 3


def test_what_a_thread_sets_stays_there():
    def change(_: Any) -> None:
        TEXT.set("inside")
        torch.set_grad_enabled(False)

    parallel_apply([change] * 2, [None] * 2, CPUS[:2])
    assert TEXT.get() == "" and torch.is_grad_enabled()


class CountingCalls(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.sin
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 3])
def test_function_modes_see_every_call_once(number):
    with CountingCalls() as counter:
        parallel_apply([torch.sin] * number, [torch.ones(1)] * number, CPUS[:number])
    assert counter.calls == number


def test_dispatch_modes_see_every_call():
    with FakeTensorMode():
        made = parallel_apply([lambda n: torch.ones(n)] * 3, [1, 2, 3], CPUS)
    assert [type(x) for x in made] == [FakeTensor] * 3 and [len(x) for x in made] == [1, 2, 3]
    with FlopCounterMode(display=False) as counter:
        parallel_apply([torch.mm] * 3, [(torch.ones(2, 3), torch.ones(3, 4))] * 3, CPUS)
    assert counter.get_total_flops() == 3 * 2 * 2 * 3 * 4


def test_calls_run_at_the_same_time_and_results_are_in_order():
    barrier = threading.Barrier(3, timeout=30)

    def meet(x: int, *, scale: int) -> int:
        barrier.wait()
        return x * scale

    assert parallel_apply([meet] * 3, [1, (2,), 3], CPUS, kwargs=[{"scale": k} for k in (5, 6, 7)]) == [5, 12, 21]


def fail(x: Any) -> Any:
    if isinstance(x, BaseException):
        raise x
    return x


def test_all_failures_are_raised_with_their_places():
    with pytest.raises(ExceptionGroup) as caught:
        parallel_apply([fail] * 3, [ValueError("first"), 1, KeyError("third")], CPUS)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]
    assert caught.value.exceptions[1].__notes__ == ["in replica 2 on cpu"]
    assert "2 of 3 replicas failed: replica 0 on cpu, replica 2 on cpu" in str(caught.value)
    with pytest.raises(ExceptionGroup):  # one call is not another case
        parallel_apply([fail], [ValueError()], ["cpu"])
    with FakeTensorMode(), pytest.raises(ExceptionGroup):
        parallel_apply([fail] * 2, [ValueError()] * 2, CPUS[:2])


def test_an_exit_in_a_replica_is_not_swallowed():
    with pytest.raises(BaseExceptionGroup) as caught:
        parallel_apply([fail] * 2, [KeyboardInterrupt(), SystemExit(3)], CPUS[:2])
    assert not isinstance(caught.value, ExceptionGroup)
    assert [type(error) for error in caught.value.exceptions] == [KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("given", [([fail], [1, 2], ["cpu"]), ([fail], [1], CPUS), ([fail] * 2, [1, 2], ["cpu"])])
def test_lengths_that_do_not_fit_raise(given):
    with pytest.raises(ValueError, match=r"parallel_apply: got \d fns, \d args, \d kwargs and \d devices"):
        parallel_apply(*given)


def test_current_device_and_streams(pretend):
    """Each call has its device as the current one, and works on the caller's streams."""
    devices = [torch.device("pretend", k) for k in range(3)]
    streams = [torch.Stream(device=device) for device in devices]

    def look(_: Any) -> tuple[int, list[torch.Stream]]:
        return torch.accelerator.current_device_index(), [torch.accelerator.current_stream(device) for device in devices]

    with streams[0], streams[2]:
        expected = [torch.accelerator.current_stream(device) for device in devices]
        assert parallel_apply([look] * 3, [None] * 3, devices) == [(k, expected) for k in range(3)]
    assert expected[0] == streams[0] and expected[1] != streams[1] and expected[2] == streams[2]


def test_gradients_and_transforms():
    x = torch.randn(4, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return torch.cat(parallel_apply([torch.sin, torch.cos], list(x.split(2)), CPUS[:2])).sum()

    expected = torch.cat([x[:2].cos(), -x[2:].sin()])
    torch.testing.assert_close(torch.func.grad(run)(x), expected)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(run(leaf), leaf)[0], expected)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))


def test_parallel_apply_keeps_inference_mode_context_variables_and_dispatch_modes():
    """The threads of torch.nn.parallel.parallel_apply had neither inference mode, context variables nor dispatch modes."""
    text = contextvars.ContextVar("text", default="lost")
    text.set("kept")
    with torch.inference_mode():
        assert (
            parallel_apply([lambda: (torch.is_inference_mode_enabled(), text.get())] * 2, [()] * 2, CPUS[:2])
            == [(True, "kept")] * 2
        )
    with FakeTensorMode():
        assert all(isinstance(x, FakeTensor) for x in parallel_apply([partial(torch.ones, 2)] * 2, [()] * 2, CPUS[:2]))


def leave(error: BaseException) -> None:
    raise error


def test_an_exit_in_a_replica_is_not_a_key_error():
    """A SystemExit in a replica became a KeyError in torch.nn.parallel.parallel_apply."""
    with pytest.raises(BaseExceptionGroup) as caught:
        parallel_apply([leave] * 2, [SystemExit(2), SystemExit(2)], CPUS[:2])
    assert isinstance(caught.value.exceptions[0], SystemExit)
