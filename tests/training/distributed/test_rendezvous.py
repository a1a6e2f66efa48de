"""Ranks of one start find each other, whatever an earlier start has left in the store."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from unisono_models.training.distributed.rendezvous import wait_for_ranks


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
    assert all("start_ranks: rank 1 of 3 did not start within 0.5 s" in error for error in errors), errors
    errors = meet_all(store, 3, {}, [1, 2], timeout=0.5)
    assert all("start_ranks: rank 0 of 3 did not start" in error for error in errors), errors


def test_ranks_meet_after_a_start_that_came_to_nothing():
    store = dist.HashStore()
    meet_all(store, 3, {}, [0, 2], timeout=0.2)
    parts = meet_all(store, 3, {0: 0.2}, [0, 1, 2])
    assert [part.get("address/1") for part in parts] == [b"1"] * 3
