"""run_ranks does not hang, loses no error and recovers: otherwise no other test means anything."""

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import all_reduce
from unisono.collectives.testing import RanksFailed, gradcheck, run_ranks


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def raise_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise ZeroDivisionError(f"from rank {bad_rank}")
    dist.barrier()


def exit_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        sys.exit(7)


def vanish_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os._exit(7)
    dist.barrier()


def abort_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os.abort()
    dist.barrier()


def segfault_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        ctypes.string_at(0)
    dist.barrier()


def forever_in_a_named_place() -> None:
    time.sleep(1000)


def hang_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        forever_in_a_named_place()


def length_of(argument: bytes) -> int:
    return len(argument)


def stop_within_a_large_result() -> bytes:
    """Send the length of the result, and stop before the result itself."""
    if dist.get_rank() == 1:
        send = Connection._send

        def stop_after_first(self: Connection, part: bytes) -> None:
            send(self, part)
            os.kill(os.getpid(), signal.SIGSTOP)

        Connection._send = stop_after_first
    return b"0" * (1 << 20)


def return_a_lambda() -> object:
    return lambda: 0


def leave_a_barrier_over() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def draw() -> float:
    return torch.rand(()).item()


def hash_of_a() -> int:
    return hash("a")


def wrong_backward() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.clone()
            dist.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    gradcheck(Wrong.apply, torch.ones(2, dtype=torch.float64, requires_grad=True))


def right_backward() -> None:
    gradcheck(all_reduce, torch.ones(2, dtype=torch.float64, requires_grad=True))


def states(failure: RanksFailed) -> list[str]:
    return [report.state for report in failure.reports]


@pytest.fixture
def failed():
    """The failure of fn(*args) on 3 ranks, which must come promptly and leave a working pool behind."""

    def run(fn, *args, timeout=30.0) -> RanksFailed:
        with pytest.raises(RanksFailed) as caught:
            run_ranks(fn, *args, world_size=3, timeout=timeout)
        assert [rank for rank, _ in run_ranks(rank_and_pid, world_size=3)] == [0, 1, 2]
        return caught.value

    return run


def test_processes_are_reused_between_calls():
    assert run_ranks(rank_and_pid, world_size=3) == run_ranks(rank_and_pid, world_size=3)


def test_neighbouring_ranks_have_different_hash_seeds():
    """All ranks had the hash seed of one server. So no test saw a rank whose sets are in another order."""
    hashes = run_ranks(hash_of_a, world_size=3)
    assert hashes[0] != hashes[1] != hashes[2]


def test_raising_rank_is_reported_with_its_traceback(failed):
    failure = failed(raise_on, 1)
    assert failure.reports[1].state == "raised"
    assert "ZeroDivisionError: from rank 1" in failure.reports[1].detail and "raise_on" in failure.reports[1].detail
    assert states(failure)[0] == states(failure)[2] == "hung"
    assert "barrier" in failure.reports[0].detail, "the stack of a waiting rank says what it waits for"


def test_exit_is_reported(failed):
    assert "SystemExit: 7" in failed(exit_on, 2).reports[2].detail


def test_vanished_rank_is_reported(failed):
    assert failed(vanish_on, 0).reports[0].detail == "exit code 7"


@pytest.mark.parametrize(("fn", "name"), [(abort_on, "SIGABRT"), (segfault_on, "SIGSEGV")])
def test_signal_is_reported_for_every_rank(failed, fn, name):
    failure = failed(fn, 1)
    assert failure.reports[1].detail == f"killed by {name}"
    assert len(failure.reports) == 3 and name in str(failure)


def test_hanging_rank_is_reported_with_its_place(failed):
    failure = failed(hang_on, 1, timeout=2.0)
    assert states(failure) == ["returned", "hung", "returned"]
    assert "forever_in_a_named_place" in failure.reports[1].detail


def test_rank_killed_between_calls_is_reported(failed):
    os.kill(run_ranks(rank_and_pid, world_size=3)[1][1], signal.SIGKILL)
    assert failed(rank_and_pid).reports[1].detail == "killed by SIGKILL"


def test_stopped_rank_does_not_hold_up_a_large_argument(failed):
    """The message did not fit into the pipe, so that sending it waited for the rank, beyond the timeout."""
    pid = run_ranks(rank_and_pid, world_size=3)[1][1]
    os.kill(pid, signal.SIGSTOP)
    wake = threading.Timer(20, os.kill, (pid, signal.SIGCONT))  # ends a test that fails
    wake.start()
    assert states(failed(length_of, b"0" * (8 << 20), timeout=2.0)) == ["returned", "hung", "returned"]
    wake.cancel()


def test_rank_that_stops_within_a_large_result_hangs_alone(failed):
    """Its part of the result was read without a timeout, so that run_ranks never returned."""
    assert states(failed(stop_within_a_large_result, timeout=2.0)) == ["returned", "hung", "returned"]


def test_result_that_cannot_be_sent_is_reported(failed):
    assert "pickle" in failed(return_a_lambda).reports[0].detail


def test_ranks_left_out_of_step_fail_the_test_that_left_them(failed):
    failed(leave_a_barrier_over, timeout=3.0)


def test_interrupt_leaves_no_rank_behind():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pids = [pid for _, pid in run_ranks(rank_and_pid, world_size=2)]
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(forever_in_a_named_place, world_size=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_cannot_run_raises_at_once():
    with pytest.raises(TypeError, match="top-level function"):
        run_ranks(lambda: None)
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(draw, world_size=0)


def test_failure_begins_with_its_cause_and_tells_the_same_once(failed):
    text = str(failed(raise_on, 1))
    assert text.startswith("raise_on: rank 1 of 3 raised: ZeroDivisionError: from rank 1\n--- rank 1 raised")


def test_every_call_starts_from_the_same_seed():
    assert len({*run_ranks(draw, world_size=2), *run_ranks(draw, world_size=2)}) == 1


def test_distributed_gradcheck_tells_right_from_wrong():
    run_ranks(right_backward, world_size=2)
    with pytest.raises(RanksFailed, match="not that of the sum over ranks"):
        run_ranks(wrong_backward, world_size=2)
