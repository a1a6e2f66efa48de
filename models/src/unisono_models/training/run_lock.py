"""A run directory belongs to one run at a time: two at once would ruin each other's files."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

WAIT = 10.0  # seconds: a run that was told to stop may be about to end


def lock_run(path: Path) -> IO[str] | None:
    """Hold the run directory `path` until the returned file is closed or this process ends, in whichever way.

    Raises: BlockingIOError that names the process that holds it.
    Returns None where there are no locks to be had: on some network file systems, and without POSIX.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = (path / ".lock").open("a+")
    deadline = time.monotonic() + WAIT
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the process: workers forked from it do not inherit it
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                text = f"open_run: {path} is in use by {holder}: wait for it, stop it, or choose another --run.dir"
                raise BlockingIOError(text) from error
            time.sleep(0.2)
        except OSError:
            file.close()
            return None
    with suppress(OSError):  # what it says is only for the message above
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
    return file
