"""What one rank's process does: join the group, then run what it is sent until it is sent nothing."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def serve(connection: Connection, rank: int, world_size: int, folder: Path, group_timeout: float) -> None:
    """Answer each pickled (fn, args) with ("returned", value) or ("raised", traceback)."""
    with open(stacks_file(folder, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # so that the parent can ask where we hang
        torch.set_num_threads(1)
        if sys.platform in LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        while (request := _receive(connection)) is not None:
            connection.send_bytes(pickle.dumps(_answer(request)))
        dist.destroy_process_group()


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except EOFError:  # the parent is gone
        return None


def _answer(request: bytes) -> tuple[str, Any]:
    torch.manual_seed(0)  # a test must not depend on those before it
    try:
        try:
            fn, args = pickle.loads(request)
        except ImportError as error:  # pytest's importlib mode, for one, gives modules names that nobody can import
            raise ImportError(f"a rank cannot import the function to run ({error}): it must be importable by name") from error
        value = fn(*args)
        pickle.dumps(value)
        return "returned", value
    except BaseException:  # SystemExit and KeyboardInterrupt must reach the parent too
        return "raised", traceback.format_exc()
