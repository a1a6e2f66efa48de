"""Train a model on this machine: torchrun, whose failure report does not bury the message about a mistake."""

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from unisono_models.training.errors import ERROR_FILE_KEY, EXIT_CODE, UserError

_LOGGERS = ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent")  # they say which rank is ended


def main(args: Sequence[str]) -> int:
    """`MODEL [--nproc N] [RECIPE] [--field VALUE …]`: train MODEL by torchrun, on every device of this machine by default.

    The command line is checked before any rank starts. Returns the exit status of `launch`.
    """
    model, nproc, options = _parse(args)
    importlib.import_module(f"unisono_models.{model}.recipes").RECIPES.choose(options)
    ranks = ["--standalone", "--nproc-per-node", str(_count_ranks(nproc))]
    return launch([*ranks, "-m", f"unisono_models.{model}", "train", *options])


def launch(args: Sequence[str]) -> int:
    """Run torchrun with its own arguments `args`, in this process. After a mistake or a signal it prints nothing.

    Returns: the exit status. 0; 1 after a fault of a rank, with torchrun's report; 2 after a mistake of the user, which a rank
    has printed; 128 + N after signal N, on which the ranks have stopped and saved.
    """
    log = _HeldLog()
    try:
        run(parse_args(args))
    except ChildFailedError as error:
        if all(ERROR_FILE_KEY in failure.error_file_data for failure in error.failures.values()):
            return EXIT_CODE
        log.release()
        print(error, file=sys.stderr)
        return 1
    except SignalException as end:
        return 128 + end.sigval
    return 0


class _HeldLog(logging.Filter):
    """Holds back what torchrun logs when it ends its ranks, until it is known to matter."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []
        self._loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in _LOGGERS]
        for logger in self._loggers:
            logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        self._records.append(record)
        return False

    def release(self) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)
        for record in self._records:
            logging.getLogger(record.name).handle(record)


def _parse(args: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the model, what --nproc says, and the rest of the command line."""
    model, *rest = args or [""]
    if not re.fullmatch(r"[a-z_]+", model) or importlib.util.find_spec(f"unisono_models.{model}.train") is None:
        raise UserError(f"there is no model {model!r}")
    nproc, options = "", []
    for arg in (left := iter(rest)):
        name, equals, value = arg.partition("=")
        if name == "--nproc":
            nproc = value if equals else next(left, "nothing")
        else:
            options.append(arg)
    return model, nproc, options


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
