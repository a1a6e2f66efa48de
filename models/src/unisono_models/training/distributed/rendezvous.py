"""How the ranks of one start find each other in a store that still holds the words of an earlier one.

torchrun keeps one store for all its restarts. torch's own groups write their addresses under the same keys each time, so that
a rank that is quicker than another reads the address of a dead process and fails to connect. Here every start gets keys
of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time

from torch._C._distributed_c10d import PrefixStore, Store

_PAUSE = 0.01  # seconds between looks into the store


def wait_for_ranks(store: Store, *, rank: int, size: int, timeout: float) -> Store:
    """Wait for all ranks of this start; what comes back is a part of `store` that they alone use, on every rank the same.

    Rank 0 writes a new token. The others answer under it with one of their own, and go on when rank 0 repeats it: so a rank
    that came early and read the token of an earlier start notices, for that one does not know its answer.

    Raises: TimeoutError on the ranks that came, which names those that did not.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout
    if rank == 0:
        store.set("unisono/start", own)
        keys = {r: _answer(own, r) for r in range(1, size)}
        while not store.check(list(keys.values())):
            if time.monotonic() > deadline:
                raise TimeoutError(_absence({r for r, key in keys.items() if not store.check([key])}, rank, size, timeout))
            time.sleep(_PAUSE)
        store.set(_go(own), json.dumps([own, *(_text(store, key) for key in keys.values())]))
        return PrefixStore(f"unisono/{own}", store)
    token = ""
    while True:
        if store.check(["unisono/start"]) and token != (token := _text(store, "unisono/start")):
            store.set(_answer(token, rank), own)
        heard = json.loads(_text(store, _go(token))) if token and store.check([_go(token)]) else None
        if heard is not None and rank < len(heard) and heard[rank] == own:
            return PrefixStore(f"unisono/{token}", store)
        if time.monotonic() > deadline:
            others = set(range(size)) - {rank}
            waits = bool(token) and heard is None  # rank 0, as this rank does: unless all have answered it
            absent = {r for r in others - {0} if not store.check([_answer(token, r)])} if waits else set()
            raise TimeoutError(_absence(absent or {0}, rank, size, timeout))
        time.sleep(_PAUSE)


def _answer(token: str, rank: int) -> str:
    return f"unisono/{token}/answer/{rank}"


def _go(token: str) -> str:
    return f"unisono/{token}/go"


def _text(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode()


def _absence(absent: set[int], rank: int, size: int, timeout: float) -> str:
    who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, sorted(absent)))}"
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return (
        f"start_ranks: {who} of {size} did not come within {timeout:g} s; rank {rank} on {socket.gethostname()} waited at "
        f"{where}. See the output of the missing ranks, and whether their hosts reach that address"
    )
