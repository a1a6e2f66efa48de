"""Run several scripts one after the other, each in a fork of this process: torch is imported once for all of them.

torchrun --nproc-per-node 3 tests/repo/run_examples.py a.py b.py

What rank 1 prints of a.py is in a.py.1.txt, and its exit status in a.py.1.status.
"""

import importlib
import os
import runpy
import socket
import sys
import time
from pathlib import Path

# What the scripts import, and what torch imports when an optimizer steps.
for name in ("unisono.contrastive", "unisono.embedding", "unisono_models.training.loop", "torch._dynamo"):
    importlib.import_module(name)


def shared_port(script: str, rank: str) -> str:
    """A port that rank 0 has found free: torchrun's own store has the addresses of the scripts before."""
    file = Path(f"{script}.port")
    if rank == "0":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(str(listener.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


rank = os.environ.get("RANK", "alone")
for script in sys.argv[1:]:
    if rank != "alone":
        os.environ |= {"MASTER_PORT": shared_port(script, rank), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    child = os.fork()
    if child == 0:
        output = os.open(f"{script}.{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    _, status = os.waitpid(child, 0)
    Path(f"{script}.{rank}.status").write_text(str(status))
