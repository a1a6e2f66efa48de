"""Ranks of one start find each other, whatever an earlier start has left in the store."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.training.torchrun import free_port
from unisono.collectives import LaunchEnv
from unisono_models.training.distributed import rendezvous
from unisono_models.training.distributed.rendezvous import wait_for_ranks
from unisono_models.training.errors import UserError


def meet_all(store: dist.Store, size: int, delays: dict[int, float], come: list[int], timeout: float = 20.0) -> list:
    def one(rank):
        time.sleep(delays.get(rank, 0.0))
        try:
            part = wait_for_ranks(store, rank=rank, size=size, timeout=timeout)
            part.set(f"address/{rank}", f"{rank}")
            return part
        except UserError as error:
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
    assert all("rank 1 of 3 did not start within 0.5 s" in error for error in errors), errors
    errors = meet_all(store, 3, {}, [1, 2], timeout=0.5)
    assert all("rank 0 of 3 did not start" in error for error in errors), errors


def test_ranks_that_wait_say_for_whom(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_NOTE_AFTER", 0.1)
    store = dist.HashStore()
    meet_all(store, 3, {1: 0.5}, [0, 1, 2])
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("; ")[0] for line in lines] == ["rank 1 of 3 did not start yet, after 0 s of 20 s"] * 2
    meet_all(store, 2, {0: 0.5}, [0, 1])
    assert "rank 0 of 2 did not start yet" in capsys.readouterr().err


def test_a_port_that_another_program_uses_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        env = LaunchEnv(0, 2, 0, 2, "127.0.0.1", port, "env")
        with pytest.raises(UserError, match=f"another program uses the port 127.0.0.1:{port}. Set MASTER_PORT to a free one"):
            rendezvous.open_store(env, timeout=60)


def test_a_program_that_is_no_store_does_not_hold_a_rank_for_ever(monkeypatch):
    monkeypatch.setattr(rendezvous, "_STORE_GRACE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        env = LaunchEnv(1, 2, 1, 2, *stranger.getsockname(), "env")
        with pytest.raises(
            UserError, match=r"there is no store of torch.distributed at .* Check that MASTER_ADDR and MASTER_PORT"
        ):
            rendezvous.open_store(env, timeout=0.5)


def test_a_store_that_never_comes_is_named(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_NOTE_AFTER", 0.1)
    env = LaunchEnv(1, 2, 1, 2, "127.0.0.1", free_port(), "env")
    with pytest.raises(
        UserError, match=rf"rank 1 of 2 on \S+: there is no store of torch.distributed at 127.0.0.1:{env.master_port}"
    ):
        rendezvous.open_store(env, timeout=1)
    assert f"waiting for rank 0 at 127.0.0.1:{env.master_port}, up to 1 s" in capsys.readouterr().err


def test_ranks_meet_after_a_start_that_came_to_nothing():
    store = dist.HashStore()
    meet_all(store, 3, {}, [0, 2], timeout=0.2)
    parts = meet_all(store, 3, {0: 0.2}, [0, 1, 2])
    assert [part.get("address/1") for part in parts] == [b"1"] * 3


def test_address_of_the_store_is_known_under_srun(monkeypatch):
    """Messages about missing ranks said `?:?`: srun sets neither MASTER_ADDR nor MASTER_PORT."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    for name, value in (step | {"SLURM_STEP_NODELIST": "node[3-4]"}).items():
        monkeypatch.setenv(name, value)
    host, port = rendezvous.store_address().split(":")
    assert host == "node3" and port.isdecimal()
