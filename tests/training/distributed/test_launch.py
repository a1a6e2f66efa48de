"""Ranks that find each other, tell who is missing, and agree to stop."""

import io
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.rendezvous import wait_for_ranks
from unisono_models.training.distributed.watchdog import RankStatus, StatusBoard, Watchdog, describe_missing_ranks
from unisono_models.training.run import preemption
from unisono_models.training.run.preemption import StopSignal

ONE = Ranks(0, 1, 0, torch.device("cpu"))


# ranks.py


def test_without_torchrun_there_is_one_rank_and_no_group():
    with start_ranks() as ranks:
        assert (ranks.rank, ranks.size, ranks.local_rank, ranks.first) == (0, 1, 0, True)
        assert not dist.is_initialized()


def in_a_group_that_exists():
    with start_ranks() as ranks:
        assert (ranks.rank, ranks.size) == (dist.get_rank(), dist.get_world_size())
        assert ranks.first == (ranks.rank == 0)
    assert dist.is_initialized()  # it is not ours to end
    with pytest.raises(ValueError, match="as it is"), start_ranks():
        raise ValueError("as it is")
    assert dist.is_initialized()


def test_a_group_that_exists_is_used_and_left_alone(ranks):
    ranks(in_a_group_that_exists, world_size=2)


# meeting.py


def meet_all(store: dist.Store, size: int, delays: dict[int, float], come: list[int], timeout: float = 20.0) -> list:
    def one(rank):
        time.sleep(delays.get(rank, 0.0))
        try:
            part = wait_for_ranks(store, rank=rank, size=size, timeout=timeout)
            part.set(f"address/{rank}", f"{rank}")
            return part
        except TimeoutError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, come))


def test_ranks_of_one_start_share_keys_and_those_of_the_next_do_not():
    store = dist.HashStore()
    for size, late in ((3, 0), (3, 2), (2, 1), (4, 0), (1, 0)):  # as torchrun restarts, with the same store
        parts = meet_all(store, size, {late: 0.1}, list(range(size)))
        assert all(part.get(f"address/{rank}") == f"{rank}".encode() for part in parts for rank in range(size))
        assert not parts[0].check(["address/old"])
        parts[-1].set("address/old", "an address that nobody listens at")


def test_a_rank_that_did_not_come_is_named_by_those_that_did():
    store = dist.HashStore()
    meet_all(store, 3, {}, [0, 1, 2])  # an earlier start, whose words are still there
    errors = meet_all(store, 3, {}, [0, 2], timeout=0.5)
    assert all("start_ranks: rank 1 of 3 did not come within 0.5 s" in error for error in errors), errors
    errors = meet_all(store, 3, {}, [1, 2], timeout=0.5)
    assert all("start_ranks: rank 0 of 3 did not come" in error for error in errors), errors


def test_ranks_meet_after_a_start_that_came_to_nothing():
    store = dist.HashStore()
    meet_all(store, 3, {}, [0, 2], timeout=0.2)
    parts = meet_all(store, 3, {0: 0.2}, [0, 1, 2])
    assert [part.get("address/1") for part in parts] == [b"1"] * 3


# roll_call.py

WORD = RankStatus(host="node7", pid=47, step=17, idle=0.5, time=100.0, count=5)


def told(before, after, rank=0, now=110.0):
    return describe_missing_ranks([WORD, *before], [replace(WORD, count=9), *after], rank=rank, now=now)


def test_a_silent_rank_is_named_with_its_last_step():
    assert told([WORD], [WORD]) == (
        "missing: rank 1 on node7 (pid 47): last seen at step 17, 10.5 s ago; "
        "not heard of for 10.0 s: killed, stopped or cut off"
    )


def test_a_rank_that_lives_but_stands_still_is_named():
    later = replace(WORD, count=9, idle=9.0, time=109.5)
    assert told([WORD], [later]) == "no progress: rank 1 on node7 (pid 47): alive, but at step 17 for 9.5 s"


def test_a_rank_that_moves_is_not_named():
    assert told([WORD], [replace(WORD, count=9, step=18)]) == "every other rank is alive and makes progress"


def test_the_likeliest_cause_comes_first():
    failed = replace(WORD, state="failed", error="RuntimeError: connection closed")
    lines = told(
        [failed, WORD, WORD, None, WORD],
        [failed, replace(WORD, count=9), WORD, None, replace(WORD, state="ended")],
    ).splitlines()
    assert [line.split(" on ")[0] for line in lines] == [
        "missing: rank 3",
        "missing: rank 4: never heard of",
        "no progress: rank 2",
        "gone: rank 5",
        "failed too: rank 1",
    ]
    assert lines[-1].endswith("failed at step 17: RuntimeError: connection closed")


def test_a_message_names_a_few_of_many_ranks():
    lines = told([WORD] * 1000, [WORD] * 1000).splitlines()
    assert len(lines) == 9 and lines[-1] == "and 992 ranks more"


def with_a_store_that_hangs():
    roll = StatusBoard(dist.get_rank(), dist.get_world_size(), patience=0.2)
    with pytest.raises(TimeoutError, match=r"the store at .* does not answer"):
        roll.within(threading.Event().wait)


def test_a_store_that_does_not_answer_is_named_in_time(ranks):
    ranks(with_a_store_that_hangs, world_size=1)


# heartbeat.py


def fail(step, error):
    """The notes that the error has after a Watchdog."""
    with start_ranks() as ranks, suppress(type(error)), Watchdog(ranks, timeout=4) as heartbeat:
        heartbeat.beat(step)
        raise error
    return "\n".join(getattr(error, "__notes__", []))


def with_a_failure_on_rank_1():
    if dist.get_rank() == 1:
        fail(3, ValueError("a fault\nof its own"))
    dist.barrier()
    notes = fail(5, RuntimeError("closed by peer")) if dist.get_rank() != 1 else ""  # as collectives say
    dist.barrier()
    return notes


def test_an_error_of_another_rank_is_quoted(ranks):
    notes = ranks(with_a_failure_on_rank_1, world_size=3)
    for rank in (0, 2):
        assert f"rank {rank} on " in notes[rank] and ", at step 5 for " in notes[rank]
        assert "failed too: rank 1 on " in notes[rank]
        assert "failed at step 3: ValueError: a fault" in notes[rank]


def with_an_error_of_its_own():
    return fail(3, ValueError("not the others' fault"))


def test_an_error_that_no_other_rank_can_have_caused_gets_no_note(ranks):
    assert ranks(with_an_error_of_its_own, world_size=2) == ["", ""]


def test_heartbeat_works_on_one_rank_without_a_group():
    before = threading.active_count()
    with Watchdog(ONE, timeout=5) as heartbeat:
        heartbeat.beat(1)
        assert threading.active_count() == before + 1
    with pytest.raises(ValueError, match=r"Watchdog: timeout=0: must be above 0"):
        Watchdog(ONE, timeout=0)


def test_a_rank_that_stands_still_shows_its_stacks_and_may_go_on(capfd):
    with Watchdog(ONE, timeout=0.4) as heartbeat:  # gives up only after 3 s more
        for step in (7, 8):
            heartbeat.beat(step)
            printed = read_until("in read_until\n", capfd)
            assert "rank 0 on " in printed and f"at step {step} for" in printed
            assert printed.count("no progress for 0.4 s. Its stacks:") == 1
            heartbeat.beat(step)
            assert f"at step {step} for" in read_until("goes on", capfd)


def with_a_stall_on_rank_1():
    printed = io.StringIO()
    with start_ranks() as ranks, Watchdog(ranks, timeout=1) as heartbeat, redirect_stderr(printed):
        heartbeat.beat(4)
        deadline = time.monotonic() + 3  # before it gives up
        while ranks.rank != 1 and "Its stacks" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
            heartbeat.beat(5)
        dist.barrier()
    return printed.getvalue()


def test_ranks_that_work_show_their_stacks_when_another_stands_still(ranks):
    working, stalled = ranks(with_a_stall_on_rank_1, world_size=2)
    assert "at step 4 for" in stalled and "no progress for 1 s. Its stacks:" in stalled and "barrier" in stalled
    assert "asked by rank 1 at step 4, which makes no progress. Its stacks:" in working
    assert "in with_a_stall_on_rank_1" in working


def read_until(text, capfd):
    printed, deadline = "", time.monotonic() + 20
    while text not in printed and time.monotonic() < deadline:
        time.sleep(0.02)
        printed += capfd.readouterr().err
    return printed


# stopping.py


def with_a_signal_to_rank_1(every):
    answers = []
    with StopSignal(every=every) as stopping:
        for step in range(8):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(stopping.agreed())
    return answers, stopping.told


@pytest.mark.parametrize("every", [1, 3])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks, every):
    seen = ranks(with_a_signal_to_rank_1, every, world_size=3)
    first = {1: 2, 3: 2}[every]
    assert [answers for answers, _ in seen] == [[False] * first + [True] * (8 - first)] * 3
    assert [told for _, told in seen] == [None, "SIGTERM", None]


def test_the_second_interrupt_ends_at_once(monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal() as stopping:
        assert not stopping.agreed()
        for _ in range(2):  # one press, which may come twice
            os.kill(os.getpid(), signal.SIGINT)
        assert stopping.agreed() and stopping.told == "SIGINT"
        monkeypatch.setattr(preemption, "_SAME_PRESS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_terminate_signal_does_not_end_a_rank_that_fails():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError), StopSignal():
            raise RuntimeError
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does, while the rank is yet to tell its error
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stopping_rejects_an_interval_below_1():
    with pytest.raises(ValueError, match="StopSignal: every=0: must be at least 1"):
        StopSignal(every=0)
