"""SIGTERM and Ctrl-C stop all ranks after the same step."""

import os
import signal

import pytest
import torch.distributed as dist

from unisono_models.training.run import preemption
from unisono_models.training.run.preemption import StopSignal


def with_a_signal_to_rank_1(every):
    answers = []
    with StopSignal(every=every) as stop_signal:
        for step in range(8):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(stop_signal.received_by_any_rank())
    return answers, stop_signal.received


@pytest.mark.parametrize("every", [1, 3])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks, every):
    seen = ranks(with_a_signal_to_rank_1, every, world_size=3)
    first = {1: 2, 3: 2}[every]
    assert [answers for answers, _ in seen] == [[False] * first + [True] * (8 - first)] * 3
    assert [told for _, told in seen] == [None, "SIGTERM", None]


def with_a_failure_of_rank_0(every):
    with StopSignal(every=every) as stop_signal:
        return [stop_signal.agree(failed=dist.get_rank() == 0)[1] for _ in range(4)]


def test_ranks_agree_about_a_failure(ranks):
    """A rank that answered by what it knows alone would wait for the others."""
    assert ranks(with_a_failure_of_rank_0, 3, world_size=2) == [[False, False, True, False]] * 2


def test_the_second_interrupt_ends_at_once(monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop_signal:
        assert not stop_signal.received_by_any_rank()
        for _ in range(2):  # one press, which may come twice
            os.kill(os.getpid(), signal.SIGINT)
        assert stop_signal.received_by_any_rank() and stop_signal.received == "SIGINT"
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
