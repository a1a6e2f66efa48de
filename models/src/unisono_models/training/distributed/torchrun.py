"""Train a model by torchrun, but let it end as a command should: its report does not bury the message about a mistake."""

import argparse
import importlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from unisono_models.training.distributed.rendezvous import call_within
from unisono_models.training.errors import ERROR_FILE_KEY, EXIT_CODE, UserError

_MODELS = Path(__file__).parents[2]
_LOGGERS = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")  # they say which rank is ended
_NOTE_AFTER = 15.0  # seconds without ranks after which a line says that other hosts are missing
_ANSWER_SECONDS = 10.0  # for a store to answer
_END_SECONDS = 15.0  # for torchrun to end after its ranks: it waits for minutes for a store that it does not reach


def main(args: Sequence[str]) -> int:
    """`[--torchrun-option …] MODEL [--nproc N] [RECIPE] [--field VALUE …]`: train MODEL by torchrun.

    Without options of torchrun it trains on this machine, on every device by default. The command line is checked before any
    rank starts. Returns the exit status of `launch`.
    """
    place = next((place for place in range(len(args)) if _names_model(args, place)), None)
    if place is None:
        raise UserError(f"there is no model {args[0] if args else ''!r}: take clip, gan or recommender")
    torchrun_options, model = list(args[:place]), args[place]
    nproc, options = _split_nproc(args[place + 1 :])
    importlib.import_module(f"unisono_models.{model}.recipes").RECIPES.choose(options)
    if not torchrun_options:
        torchrun_options = ["--standalone"]
    if nproc or not any(option.startswith(("--nproc-per-node", "--nproc_per_node")) for option in torchrun_options):
        torchrun_options += ["--nproc-per-node", str(_count_ranks(nproc))]
    return launch([*torchrun_options, "-m", f"unisono_models.{model}", "train", *options])


def launch(args: Sequence[str]) -> int:
    """Run torchrun with its own arguments `args`, in this process. After a mistake or a signal it prints nothing.

    Of several hosts it says when the others do not come, and ends when it loses them.

    Returns: the exit status. 0; 1 after a fault of a rank, with torchrun's report; 2 after a mistake of the user, which a rank
    has printed; 128 + N after signal N, on which the ranks have stopped and saved.

    Raises: UserError if the hosts do not meet.
    """
    parsed = parse_args(args)
    where = _meeting_point(parsed)
    if where:
        _check_for_stranger(where)
        note = f"waiting for the other hosts of --nnodes {parsed.nnodes} at {where}"
        _start_timer(_NOTE_AFTER, lambda: _child_states() or print(note, file=sys.stderr, flush=True))
    log = _HeldLog(ends_after_failure=bool(where) and parsed.max_restarts == 0)
    try:
        run(parsed)
    except ChildFailedError as error:
        if all(ERROR_FILE_KEY in failure.error_file_data for failure in error.failures.values()):
            return EXIT_CODE
        log.release()
        print(error, file=sys.stderr)
        return 1
    except SignalException as end:
        return 128 + end.sigval
    except (RendezvousError, dist.DistError) as error:
        if not where:
            raise
        raise UserError(f"the hosts of --nnodes {parsed.nnodes} did not meet at {where}: {error}") from error
    return 0


class _HeldLog(logging.Filter):
    """Holds back what torchrun logs when it ends its ranks, until it is known to matter."""

    def __init__(self, *, ends_after_failure: bool) -> None:
        super().__init__()
        self._ends_after_failure = ends_after_failure
        self._records: list[logging.LogRecord] = []
        self._loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in _LOGGERS]
        for logger in self._loggers:
            logger.addFilter(self)
        if ends_after_failure:
            threading.Thread(target=self._watch, daemon=True).start()

    def filter(self, record: logging.LogRecord) -> bool:
        self._records.append(record)
        if self._ends_after_failure and str(record.msg).startswith("failed (exitcode"):
            _start_timer(_END_SECONDS, self._end)
        return False

    def release(self) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)
        for record in self._records:
            logging.getLogger(record.name).handle(record)

    def _watch(self) -> None:
        """End this process if its main thread does not collect ranks that have ended: it does so ten times a second."""
        since = time.monotonic()
        while True:
            time.sleep(1.0)
            if "Z" not in _child_states():
                since = time.monotonic()
            elif time.monotonic() - since > _END_SECONDS:
                self._end()

    def _end(self) -> None:
        """End this process, whose main thread waits for the store of a host that is gone."""
        self.release()
        print("launch: the ranks of this host have ended, and the other hosts do not answer", file=sys.stderr, flush=True)
        os._exit(1)


def _start_timer(seconds: float, call: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _child_states() -> str:
    """Return a letter for each process that this one has started, "Z" for one that has ended. "?" where that is unknown."""
    try:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return "?"
    states = ""
    for child in children:
        with suppress(OSError):  # it has ended just now
            states += Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    return states


def _meeting_point(parsed: argparse.Namespace) -> str:
    """Return HOST:PORT where torchrun's hosts meet, or an empty text if there is one host."""
    if parse_min_max_nnodes(parsed.nnodes)[1] == 1:
        return ""
    return str(parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or 29500}")


def _check_for_stranger(where: str) -> None:
    """Raise a UserError if another program uses the port. torchrun would wait for its answer for minutes."""
    host, port = parse_rendezvous_endpoint(where, default_port=29400)
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError:
        return  # nobody is there yet: one of the hosts will be
    try:
        limit = timedelta(seconds=_ANSWER_SECONDS)
        call_within(_ANSWER_SECONDS, lambda: TCPStore(host, port, None, False, limit, wait_for_workers=False))
    except TimeoutError:
        raise UserError(f"{where}: another program uses this port. Give torchrun a free one, the same on all hosts") from None


def _names_model(args: Sequence[str], place: int) -> bool:
    """Return whether args[place] is a model. It could also be the name that torchrun's options before it give to a job."""
    is_value = place > 0 and args[place - 1] in ("--rdzv-id", "--rdzv_id", "--role")
    is_name = re.fullmatch(r"[a-z_]+", args[place]) is not None
    return is_name and not is_value and (_MODELS / args[place] / "train.py").is_file()


def _split_nproc(given: Sequence[str]) -> tuple[str, list[str]]:
    """Return what --nproc says, and the other arguments."""
    nproc, options = "", []
    for arg in (left := iter(given)):
        name, equals, value = arg.partition("=")
        if name == "--nproc":
            nproc = value if equals else next(left, "nothing")
        else:
            options.append(arg)
    return nproc, options


def _count_ranks(nproc: str) -> int:
    devices = torch.accelerator.device_count()
    if nproc and not re.fullmatch(r"[1-9][0-9]*", nproc):
        raise UserError(f"--nproc needs a number of ranks, not {nproc}")
    if devices and int(nproc or 0) > devices:
        raise UserError(
            f"--nproc {nproc}: this machine has {devices} devices, one for each rank. Give at most {devices}, or hide the "
            "devices to train on its CPU (CUDA_VISIBLE_DEVICES= ./scripts/train …)"
        )
    return int(nproc or devices or 2)
