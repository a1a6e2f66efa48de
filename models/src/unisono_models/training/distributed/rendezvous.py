"""How the ranks of one start find each other in a store that still holds the keys of an earlier start.

torchrun keeps one store for all its restarts. torch's process groups write their addresses under the same keys each time. So
a rank that starts before the others can read the address of a dead process, and fails to connect. Here every start has its
own keys.
"""

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from unisono.collectives import LaunchEnv, read_launch_env
from unisono_models.training.errors import UserError

T = TypeVar("T")
_POLL_SECONDS = 0.01
_STORE_GRACE = 2.0  # seconds after its own timeout in which a connection fails with a better message
_NOTE_AFTER, _NOTE_AGAIN = 15.0, 60.0  # seconds of waiting after which a line says for whom


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call`, which asks the store, returns.

    It runs in a thread, which is left behind after `seconds`: if the network is cut, calls of the store wait longer than their
    own timeout.

    Raises: TimeoutError if there is no answer in time, or an exception instead, which is then its cause.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:  # a closed connection is no answer either
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        cause = errors[0] if errors else None
        raise TimeoutError(f"no answer within {seconds:g} s") from cause
    return answers[0]


def open_store(env: LaunchEnv, *, timeout: float) -> Store:
    """Connect to the store where the ranks of a launcher meet. Without torchrun's, rank 0 opens it.

    Raises: UserError if the port is taken, or if there is no store within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    who, where = f"rank {env.rank} of {env.world_size} on {socket.gethostname()}", f"{env.master_addr}:{env.master_port}"
    awaited = "rank 0" if env.rank else "the other ranks"
    note = threading.Timer(_NOTE_AFTER, _print, [f"{who}: waiting for {awaited} at {where}, up to {timeout:g} s"])
    note.daemon = True
    note.start()

    def connect() -> Store:
        if env.launcher == "torchrun":
            store: Store = next(rendezvous("env://", timeout=limit))[0]
            return store
        return TCPStore(
            *(env.master_addr, env.master_port, env.world_size, env.rank == 0, limit),
            wait_for_workers=False,  # wait_for_ranks waits, and says for whom
            multi_tenant=True,
        )

    try:
        return call_within(timeout + _STORE_GRACE, connect)
    except TimeoutError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        if "EADDRINUSE" in str(error.__cause__):
            raise UserError(
                f"{who}: another program uses the port {where}. Set MASTER_PORT to a free one, on all ranks"
            ) from None
        raise UserError(
            f"{who}: there is no store of torch.distributed at {where} ({reason}). Check that MASTER_ADDR and MASTER_PORT are "
            "the host and a free port of rank 0, that rank 0 runs, and that this host reaches it"
        ) from None
    finally:
        note.cancel()


def store_address() -> str:
    """Return HOST:PORT of the store, as this rank's launcher says. srun sets no MASTER_ADDR, but it follows from the job."""
    env = read_launch_env()
    return f"{env.master_addr}:{env.master_port}" if env is not None else "?:?"


def count_lower_ranks_here(store: Store, *, rank: int) -> int:
    """Return how many ranks below `rank` are on this host: its local rank. `store` is what wait_for_ranks returned."""
    hosts = [_text(store, _host(lower)) for lower in range(rank)]
    return hosts.count(socket.gethostname())


def wait_for_ranks(store: Store, *, rank: int, size: int, timeout: float, prints: bool = True) -> Store:
    """Wait for all ranks of this start, and return a part of `store` that only they use.

    Rank 0 writes a new token. The other ranks answer under that token with one of their own, and go on when rank 0 repeats
    it. A rank that has read the token of an earlier start never gets its answer repeated, so it waits for the new token.

    If `prints`, this rank prints whom it waits for after some seconds.

    Raises: UserError on the ranks that started. It names the ranks that did not.
    """
    own = secrets.token_hex(8)
    start = time.monotonic()
    notes = 0

    def check_time(find_absent: Callable[[], set[int]]) -> None:
        nonlocal notes
        waited = time.monotonic() - start
        if waited > timeout:
            raise UserError(_describe_absent(find_absent(), rank, size, f"did not start within {timeout:g} s"))
        if prints and waited > _NOTE_AFTER + notes * _NOTE_AGAIN:
            notes += 1
            _print(_describe_absent(find_absent(), rank, size, f"did not start yet, after {waited:.0f} s of {timeout:g} s"))

    if rank == 0:
        store.set("unisono/start", own)
        keys = {r: _answer(own, r) for r in range(1, size)}
        while not store.check(list(keys.values())):
            check_time(partial(_without_key, store, keys))
            time.sleep(_POLL_SECONDS)
        store.set(_go(own), json.dumps([own, *(_text(store, key) for key in keys.values())]))
        return _own_part(store, own, rank)
    token = ""
    while True:
        if store.check(["unisono/start"]) and token != (token := _text(store, "unisono/start")):
            store.set(_answer(token, rank), own)
        repeated = json.loads(_text(store, _go(token))) if token and store.check([_go(token)]) else None
        if repeated is not None and rank < len(repeated) and repeated[rank] == own:
            return _own_part(store, token, rank)
        rank_0_waits = bool(token) and repeated is None
        keys = {r: _answer(token, r) for r in range(1, size)} if rank_0_waits else {}
        check_time(partial(_without_key, store, keys))
        time.sleep(_POLL_SECONDS)


def _without_key(store: Store, keys: Mapping[int, str]) -> set[int]:
    """Return the ranks whose keys are not in the store: rank 0 if all are, for then it has yet to do its part."""
    return {rank for rank, key in keys.items() if not store.check([key])} or {0}


def _own_part(store: Store, token: str, rank: int) -> Store:
    part = PrefixStore(f"unisono/{token}", store)
    part.set(_host(rank), socket.gethostname())
    return part


def _host(rank: int) -> str:
    return f"host/{rank}"


def _answer(token: str, rank: int) -> str:
    return f"unisono/{token}/answer/{rank}"


def _go(token: str) -> str:
    return f"unisono/{token}/go"


def _text(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode()


def _describe_absent(absent: set[int], rank: int, size: int, when: str) -> str:
    who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, sorted(absent)))}"
    return (
        f"{who} of {size} {when}; rank {rank} on {socket.gethostname()} waits at {store_address()}. Check the output of the "
        "missing ranks, and whether their hosts reach that address"
    )


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
