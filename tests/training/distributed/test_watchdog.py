"""The watchdog names ranks that are missing or hang."""

import io
import threading
import time
from contextlib import redirect_stderr, suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.watchdog import RankStatus, StatusBoard, Watchdog, describe_missing_ranks

ONE = Ranks(0, 1, 0, torch.device("cpu"))
STATUS = RankStatus(host="node7", pid=47, step=17, idle=0.5, time=100.0, count=5)


def describe(before, after, rank=0, now=110.0):
    return describe_missing_ranks([STATUS, *before], [replace(STATUS, count=9), *after], rank=rank, now=now)


def test_a_silent_rank_is_named_with_its_last_step():
    assert describe([STATUS], [STATUS]) == (
        "missing: rank 1 on node7 (pid 47): last seen at step 17, 10.5 s ago; silent for 10.0 s: killed, stopped or cut off"
    )


def test_a_rank_that_lives_but_stands_still_is_named():
    later = replace(STATUS, count=9, idle=9.0, time=109.5)
    assert describe([STATUS], [later]) == "no progress: rank 1 on node7 (pid 47): alive, but at step 17 for 9.5 s"


def test_a_rank_that_moves_is_not_named():
    assert describe([STATUS], [replace(STATUS, count=9, step=18)]) == "every other rank is alive and makes progress"


def test_the_likeliest_cause_comes_first():
    failed = replace(STATUS, state="failed", error="RuntimeError: connection closed")
    lines = describe(
        [failed, STATUS, STATUS, None, STATUS],
        [failed, replace(STATUS, count=9), STATUS, None, replace(STATUS, state="ended")],
    ).splitlines()
    assert [line.split(" on ")[0] for line in lines] == [
        "missing: rank 3",
        "missing: rank 4: never started",
        "no progress: rank 2",
        "ended: rank 5",
        "failed too: rank 1",
    ]
    assert lines[-1].endswith("failed at step 17: RuntimeError: connection closed")


def test_a_message_names_a_few_of_many_ranks():
    lines = describe([STATUS] * 1000, [STATUS] * 1000).splitlines()
    assert len(lines) == 9 and lines[-1] == "and 992 more ranks"


def with_a_store_that_hangs():
    board = StatusBoard(dist.get_rank(), dist.get_world_size(), patience=0.2)
    with pytest.raises(TimeoutError, match=r"the store at .* does not answer"):
        board.within(threading.Event().wait)


def test_a_store_that_does_not_answer_is_named_in_time(ranks):
    ranks(with_a_store_that_hangs, world_size=1)


def fail(step, error):
    """The notes that the error has after a Watchdog."""
    with start_ranks() as ranks, suppress(type(error)), Watchdog(ranks, timeout=4) as watchdog:
        watchdog.beat(step)
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
    with Watchdog(ONE, timeout=5) as watchdog:
        watchdog.beat(1)
        assert threading.active_count() == before + 1
    with pytest.raises(ValueError, match=r"Watchdog: timeout=0: must be above 0"):
        Watchdog(ONE, timeout=0)


def test_a_rank_that_stands_still_shows_its_stacks_and_may_go_on(capfd):
    with Watchdog(ONE, timeout=0.4) as watchdog:  # gives up only after 3 s more
        for step in (7, 8):
            watchdog.beat(step)
            printed = read_until("in read_until\n", capfd)
            assert "rank 0 on " in printed and f"at step {step} for" in printed
            assert printed.count("no progress for 0.4 s. Its stacks:") == 1
            watchdog.beat(step)
            assert f"at step {step} for" in read_until("makes progress again", capfd)


def with_a_stall_on_rank_1():
    printed = io.StringIO()
    with start_ranks() as ranks, Watchdog(ranks, timeout=1) as watchdog, redirect_stderr(printed):
        watchdog.beat(4)
        deadline = time.monotonic() + 3  # before it gives up
        while ranks.rank != 1 and "Its stacks" not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
            watchdog.beat(5)
        dist.barrier()
    return printed.getvalue()


def test_ranks_that_work_show_their_stacks_when_another_stands_still(ranks):
    working, stalled = ranks(with_a_stall_on_rank_1, world_size=2)
    assert "at step 4 for" in stalled and "no progress for 1 s. Its stacks:" in stalled and "barrier" in stalled
    assert "requested by rank 1 at step 4, which makes no progress. Its stacks:" in working
    assert "in with_a_stall_on_rank_1" in working


def read_until(text, capfd):
    printed, deadline = "", time.monotonic() + 20
    while text not in printed and time.monotonic() < deadline:
        time.sleep(0.02)
        printed += capfd.readouterr().err
    return printed
