"""How the ranks of one start find each other in a store that still holds the keys of an earlier start.

torchrun keeps one store for all its restarts. torch's process groups write their addresses under the same keys each time. So
a rank that starts before the others can read the address of a dead process, and fails to connect. Here every start has its
own keys.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

T = TypeVar("T")
_POLL_SECONDS = 0.01


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call`, which asks the store, returns.

    It runs in a thread, which is left behind after `seconds`: if the network is cut, calls of the store wait longer than their
    own timeout.

    Raises: TimeoutError if there is no answer in time, or none at all.
    """
    answers: list[T] = []

    def run() -> None:
        with suppress(Exception):  # a closed connection is no answer either
            answers.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"the store did not answer within {seconds:g} s")
    return answers[0]


def wait_for_ranks(store: Store, *, rank: int, size: int, timeout: float) -> Store:
    """Wait for all ranks of this start, and return a part of `store` that only they use.

    Rank 0 writes a new token. The other ranks answer under that token with one of their own, and go on when rank 0 repeats
    it. A rank that has read the token of an earlier start never gets its answer repeated, so it waits for the new token.

    Raises: TimeoutError on the ranks that started. It names the ranks that did not.
    """
    own = secrets.token_hex(8)
    deadline = time.monotonic() + timeout
    if rank == 0:
        store.set("unisono/start", own)
        keys = {r: _answer(own, r) for r in range(1, size)}
        while not store.check(list(keys.values())):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    _describe_absent({r for r, key in keys.items() if not store.check([key])}, rank, size, timeout)
                )
            time.sleep(_POLL_SECONDS)
        store.set(_go(own), json.dumps([own, *(_text(store, key) for key in keys.values())]))
        return PrefixStore(f"unisono/{own}", store)
    token = ""
    while True:
        if store.check(["unisono/start"]) and token != (token := _text(store, "unisono/start")):
            store.set(_answer(token, rank), own)
        repeated = json.loads(_text(store, _go(token))) if token and store.check([_go(token)]) else None
        if repeated is not None and rank < len(repeated) and repeated[rank] == own:
            return PrefixStore(f"unisono/{token}", store)
        if time.monotonic() > deadline:
            others = set(range(size)) - {rank}
            rank_0_waits = bool(token) and repeated is None
            absent = {r for r in others - {0} if not store.check([_answer(token, r)])} if rank_0_waits else set()
            raise TimeoutError(_describe_absent(absent or {0}, rank, size, timeout))
        time.sleep(_POLL_SECONDS)


def _answer(token: str, rank: int) -> str:
    return f"unisono/{token}/answer/{rank}"


def _go(token: str) -> str:
    return f"unisono/{token}/go"


def _text(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode()


def _describe_absent(absent: set[int], rank: int, size: int, timeout: float) -> str:
    who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, sorted(absent)))}"
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return (
        f"start_ranks: {who} of {size} did not start within {timeout:g} s; rank {rank} on {socket.gethostname()} waited at "
        f"{where}. Check the output of the missing ranks, and whether their hosts reach that address"
    )
