"""Where a run comes from: versions, commit, command, machine. A run has one such record for each start."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from torch import distributed

from unisono_models.training.distributed.object_collectives import Json

DISTRIBUTION = "unisono-models"
# Environment variables that change how numbers are rounded. `reproduce` sets them again.
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)


def describe_start(*, world_size: int, hosts: Sequence[str]) -> Json:
    """Describe this start of a run, as JSON. `hosts`: the host of each rank."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "torchrun": distributed.is_available() and distributed.is_torchelastic_launched(),
        "world_size": world_size,
        "hosts": {host: list(hosts).count(host) for host in dict.fromkeys(hosts)},
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "device": device_name(), "system": platform.platform()},
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "versions": versions(),
        "git": git_state(Path(__file__).parent),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of this distribution, and of everything it depends on that is installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", DISTRIBUTION, *_dependencies()):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return found


def _dependencies() -> list[str]:
    """List what the installed distribution depends on, extras included. A checkout on PYTHONPATH has no such list."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    return list(dict.fromkeys(re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in wanted))


def git_state(folder: Path) -> Json:
    """Return {"commit": …, "dirty": …} of the checkout that `folder` belongs to, or None.

    It is None for a folder that git does not track, such as site-packages of an environment inside someone's checkout.
    """
    if not _git(folder, "ls-files", "--", "."):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return commit and {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None without git and outside of a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def device_name() -> str:
    """Return the name of the accelerator, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    if accelerator.type == "cuda":
        return torch.cuda.get_device_name()
    return accelerator.type
