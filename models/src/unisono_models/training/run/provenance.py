"""Where a run comes from: versions, commit, command, machine. A run keeps one such record for each time it was started."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from torch import distributed

from unisono_models.training.distributed.object_collectives import Json

PACKAGES = (
    "torch",
    "timm",
    "transformers",
    "tokenizers",
    "numpy",
    "unisono-collectives",
    "unisono-contrastive",
    "unisono-models",
)
# Variables that change how numbers are rounded: reproduce sets them again.
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)


def describe_start(*, world_size: int, hosts: Sequence[str]) -> Json:
    """What there is to know about this start of a run, as JSON. `hosts`: that of each rank."""
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
    """The versions of Python and of the packages that decide on the numbers, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a checkout on PYTHONPATH has no version but its commit
    return found


def git_state(folder: Path) -> Json:
    """{"commit": …, "dirty": …} of the checkout that `folder` belongs to, or None.

    A folder that git does not track, such as site-packages in an environment inside somebody's checkout, has none.
    """
    if not _git(folder, "ls-files", "--", "."):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return commit and {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None without git, and outside a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """The name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def device_name() -> str:
    """The name of the accelerator, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    if accelerator.type == "cuda":
        return torch.cuda.get_device_name()
    return accelerator.type
