"""Mistakes of the user, apart from faults of the program, and how a command ends after one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

EXIT_CODE = 2  # of a command that the user's mistake ended; argparse has the same
DEBUG = "UNISONO_DEBUG"  # the environment variable that shows the traceback of a mistake, as --debug does
LOG = "errors.log"  # the file of the run directory with the tracebacks
ERROR_FILE_KEY = "unisono_user_error"  # marks the file that a rank leaves for its launcher
_WAIT_FOR_LAUNCHER = 5.0  # seconds in which torchrun ends a rank after another one has failed


class UserError(ValueError):
    """A mistake in what the user typed, or in the data and files that it names.

    Its text names the option as the user typed it (`--data.caption`), the value, and what to do. The commands print the text
    without a traceback. Every other exception is a fault of the program and keeps its traceback.

    Example:
        raise UserError(f"--data.caption {name}: the table has no such column. It has {', '.join(columns)}")
    """

    run_directory: Path | None = None
    """Where the traceback goes: set by `note_run_directory`."""
    printed_by: int | None = None
    """The rank that prints the text, if all ranks know: set by start_ranks."""


def process_rank() -> int:
    """Return the rank of this process as its launcher tells it, before any check of what the launcher says. 0 without one."""
    texts = (os.environ.get(name, "") for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))
    return next((int(text) for text in texts if text.isdecimal()), 0)


@contextmanager
def note_run_directory(path: Path) -> Iterator[None]:
    """Make the command write the traceback of a UserError in the block into errors.log in `path`. A context manager."""
    try:
        yield
    except UserError as error:
        error.run_directory = path
        raise


@contextmanager
def end_with_message(command: str) -> Iterator[None]:
    """End the process with one message, and no traceback, if the block raises a UserError or is interrupted by Ctrl-C.

    Every command of the models runs in it. Of several ranks one prints the message. The traceback goes to errors.log in the
    run directory, if there is one, and to the terminal if the environment variable UNISONO_DEBUG is set.

    Raises: SystemExit with status 2 after a UserError, and 130 after Ctrl-C.

    Example:
        if __name__ == "__main__":
            with end_with_message("train"):
                main()
    """
    rank = process_rank()
    try:
        yield
    except UserError as error:
        if rank == (error.printed_by or 0):
            _log(error)
            _print(f"{command}: {error}")
            _leave_for_launcher(error)
        else:
            _leave_for_launcher(error)
            _wait_for_launcher()
        raise SystemExit(EXIT_CODE) from None
    except KeyboardInterrupt:
        if rank == 0:
            _print(f"{command}: interrupted")
        raise SystemExit(128 + signal.SIGINT) from None


def _print(text: str) -> None:
    """Print `text`, after the traceback if it is asked for."""
    stack = traceback.format_exc() if os.environ.get(DEBUG) else ""
    print(f"{stack}{text}", file=sys.stderr, flush=True)


def _log(error: UserError) -> None:
    if error.run_directory is not None:
        with suppress(OSError), (error.run_directory / LOG).open("a") as file:  # the mistake may be the directory itself
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{''.join(traceback.format_exception(error))}\n")


def _leave_for_launcher(error: UserError) -> None:
    """Write the file that torchrun quotes at the end of its report: the text instead of a traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text, timestamp = str(error), str(int(time.time()))
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": timestamp}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, ERROR_FILE_KEY: True}))


def _wait_for_launcher() -> None:
    """Let torchrun end this rank, which another one speaks for: its report lists each rank that fails by itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(_WAIT_FOR_LAUNCHER)
