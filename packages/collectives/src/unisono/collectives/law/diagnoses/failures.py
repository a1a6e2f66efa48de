"""The case did not end: a rank raises, exits or hangs."""

import re
import sysconfig
from pathlib import Path

import torch

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding

_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
_OUR_FILES = re.compile(r"/unisono/(collectives|contrastive|dataparallel|embedding)/")


def skipped_collective(c: Comparison) -> Finding | None:
    """One rank calls a collective that another skips, so that it waits for ever."""
    if c.failure is None:
        return None
    reports = c.failure.reports
    hung = {report.rank: _stack_lines(report.detail) for report in reports if report.state == "hung"}
    waiting = {rank: line for rank, (line, in_collective) in hung.items() if line and in_collective}
    late = {r.rank: r.detail for r in reports if r.state == "raised" and _is_consequence(r.detail)}
    waiting |= {rank: line for rank, detail in late.items() if (line := _last_user_line(detail))}
    if not waiting or any(r.state == "died" or (r.state == "raised" and r.rank not in late) for r in reports):
        return None
    told = [f"rank {rank} waits at {line}" for rank, line in sorted(waiting.items())]
    told += [f"rank {rank} is at {line}" for rank, (line, _) in hung.items() if rank not in waiting]
    told += [f"rank {report.rank} went on without it" for report in reports if report.state == "returned"]
    return Finding(
        "skipped_collective",
        f"ranks do not make the same collective calls: {', '.join(told)}",
        "Every rank must make every call, in the same order: take it out of the `if`, and let a rank without rows or without "
        "this gradient take part with zeros (unisono.dataparallel.sync_gradients does). UNISONO_CHECK=1 names both lines",
    )


def unused_parameter(c: Comparison) -> Finding | None:
    """DDP waits for the gradient of a parameter that this rank's loss does not use."""
    text = _raised(c, "Expected to have finished reduction in the prior iteration")
    if text is None:
        return None
    return Finding(
        "unused_parameter",
        "a parameter gets no gradient on some rank, and DDP waits for it: the next forward raises",
        "Use DistributedDataParallel(…, find_unused_parameters=True), or unisono.dataparallel.sync_gradients, which counts a "
        "missing gradient as zeros; or let every rank's loss depend on all parameters (+ 0 * output.sum())",
        where=_last_user_line(text),
    )


def needs_gpu(c: Comparison) -> Finding | None:
    """The step asks for a device that is not there."""
    text = _raised(c, "Found no NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs", "NCCL")
    if text is None:
        return None
    return Finding(
        "needs_gpu",
        "the step needs a GPU, and the check runs on CPUs",
        "Take the device from the model, next(model.parameters()).device, and the backend from the group that is there",
        where=_last_user_line(text),
    )


def exits(c: Comparison) -> Finding | None:
    """A rank ends its process."""
    dead = [report for report in c.failure.reports if report.state == "died"] if c.failure else []
    stopped = _raised(c, "SystemExit")
    if not dead and stopped is None:
        return None
    reason = f"rank {dead[0].rank}: {dead[0].detail}" if dead else _last_line(stopped or "")
    return Finding(
        "exits",
        f"the step ends the process ({reason})",
        "Return from the step instead of sys.exit(); a signal is a crash: run the step alone",
    )


def raises_without_rows(c: Comparison) -> Finding | None:
    """The step cannot work on a rank that has no rows."""
    if c.failure is None or c.case.sizes is None:
        return None
    raised = [report for report in c.failure.reports if report.state == "raised"]
    if not raised or any(c.case.sizes[report.rank] for report in raised if not _is_consequence(report.detail)):
        return None
    return Finding(
        "raises_without_rows",
        f"the step raises on a rank that has no rows: {_last_line(raised[0].detail)}",
        "Let it compute with zero rows, with a loss that still depends on the parameters: unisono.collectives.global_mean "
        'does. If your ranks always have rows, check with splits=("even", "uneven")',
        where=_last_user_line(raised[0].detail),
    )


def raises(c: Comparison) -> Finding | None:
    """The step raises."""
    if c.failure is None:
        return None
    raised = [report for report in c.failure.reports if report.state == "raised"]
    first = next((report for report in raised if not _is_consequence(report.detail)), raised[0] if raised else None)
    if first is None:
        hung = ", ".join(str(report.rank) for report in c.failure.reports if report.state == "hung")
        return Finding("hangs", f"the step does not end on ranks {hung}", "Give it more time: timeout=…; or look at the stacks")
    return Finding(
        "raises",
        f"the step raises on rank {first.rank}: {_last_line(first.detail)}",
        "It works in one process with the whole batch: look for what depends on the rank or on the number of rows",
        where=_last_user_line(first.detail),
    )


def _raised(c: Comparison, *texts: str) -> str | None:
    details = [report.detail for report in c.failure.reports if report.state == "raised"] if c.failure else []
    return next((detail for detail in details if any(text in detail for text in texts)), None)


def _is_consequence(detail: str) -> bool:
    """A rank that waits for one that has failed loses its connection."""
    return any(text in detail for text in ("Connection closed by peer", "Connection reset", "Timed out", "Application timeout"))


def _last_line(detail: str) -> str:
    return detail.rstrip().rpartition("\n")[2]


def _last_user_line(detail: str) -> str:
    """Return the innermost line of a traceback that is in none of the libraries: "train.py:12 in step"."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', detail)
    return _user_place(list(reversed(lines)))


def _stack_lines(stack: str) -> tuple[str, bool]:
    """Return the user's line at which a hung rank is, and whether it waits there for other ranks."""
    main = re.split(r"hread 0x", stack)[-1]  # faulthandler shows the main thread last
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    line = _user_place(frames)
    inner = [path for path, number, name in frames[: next((k for k, f in enumerate(frames) if _user_place([f])), 0)]]
    return line, any("/torch/distributed/" in path or path.endswith("/torch/autograd/graph.py") for path in inner)


def _user_place(innermost_first: list[tuple[str, str, str]]) -> str:
    for path, line, function in innermost_first:
        if not path.startswith((*_LIBRARIES, "<")) and not _OUR_FILES.search(path):
            return f"{Path(path).name}:{line} in {function}"
    return ""


DIAGNOSES: list[Diagnosis] = [
    skipped_collective,
    unused_parameter,
    needs_gpu,
    exits,
    raises_without_rows,
    raises,
]
