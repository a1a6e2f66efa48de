"""How a process learns which rank it is, from the variables of any launcher, and joins the other ranks.

torchrun and the env:// convention set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun and mpirun count the ranks in
variables of their own. Only srun also names the hosts, so only there the address can be derived.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

_PORTS = range(10_000, 30_000)  # below those that Linux gives to outgoing connections
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # Slurm numbers batch scripts and other steps that are not srun's from here on


@dataclass(frozen=True)
class LaunchEnv:
    """What a launcher tells a process: its rank, and where the ranks meet.

    `local_rank` and `local_world_size` count the ranks of this host. They are None if the launcher does not tell.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    master_addr: str
    master_port: int
    launcher: str  # "torchrun", "env", "openmpi", "pmi" or "slurm"

    @property
    def init_method(self) -> str:
        """The `init_method` of torch.distributed.init_process_group, which also needs rank and world_size."""
        if self.launcher in ("torchrun", "env"):
            return "env://"  # torchrun has a store of its own, which only this form uses
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv | None:
    """Return what the launcher of this process says in its environment variables, or None if there is one rank only.

    Understood are torchrun; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, from whatever sets them; a Slurm step (srun),
    whose address and port are derived unless they are given; Open MPI and other MPIs (PMI), if MASTER_ADDR and MASTER_PORT
    are given. `environ` is os.environ unless given. Nothing is changed, and nothing is sent.

    Raises ValueError, which names the variable and what to set, if the variables are incomplete or contradict each other. A
    process that others were meant to join never counts as one rank.

    Example:
        >>> from unisono.collectives import read_launch_env
        >>> read_launch_env({})
        >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> read_launch_env(variables).local_rank
        1
    """
    env = os.environ if environ is None else environ
    task = _find_task(env)
    if "RANK" in env or (task is None and "WORLD_SIZE" in env):
        return _read_convention(env, task)
    if task is None:
        _reject_forgotten_srun(env)
        return None
    return _from_task(env, task)


def init_distributed(*, backend: str | None = None, timeout: float = 600.0) -> torch.device:
    """Join the ranks that a launcher started, and return the device of this rank: its accelerator, or the CPU without one.

    Call it once, at the start of a script. It reads the variables of any launcher (see read_launch_env) and initialises
    torch.distributed. A process that nothing launched gets a group of one rank. So torch.distributed.get_rank() works in
    either case, and so does DDP. `backend`: gloo for CPU tensors and the accelerator's own for its tensors, unless given. A
    collective fails after `timeout` seconds.

    The group is destroyed at the exit of the process; without that, torch may abort there. If there is a group already, it
    stays as it is, and only the device is returned.

    Example:
        >>> import torch.distributed as dist
        >>> from unisono.collectives import init_distributed
        >>> device = init_distributed()
        >>> dist.get_rank(), dist.get_world_size()  # the second of two ranks gets (1, 2)
        (0, 1)
        >>> dist.destroy_process_group()  # a script needs no such line
    """
    if dist.is_initialized():
        return _device_of_group()
    env = read_launch_env()
    device = choose_device(env)
    limit = timedelta(seconds=timeout)
    backend = backend or choose_backend(device)
    if env is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
    else:
        try:
            dist.init_process_group(backend, env.init_method, limit, world_size=env.world_size, rank=env.rank)
        except (dist.DistError, TimeoutError) as error:
            raise RuntimeError(
                f"init_distributed: rank {env.rank} of {env.world_size} (by {env.launcher}) did not meet the other ranks at "
                f"{env.master_addr}:{env.master_port}: {error}"
            ) from error
    atexit.register(_destroy_group)
    return device


def choose_backend(device: torch.device) -> str:
    """Return the `backend` of torch.distributed.init_process_group for a rank on `device`: also for tensors on the CPU."""
    own = dist.get_default_backend_for_device(device)
    return "cpu:gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def choose_device(env: LaunchEnv | None) -> torch.device:
    """Return the device of this rank and make it the current one: its accelerator, or the CPU if there is none to share."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    if env is not None and env.world_size > 1 and dist.get_default_backend_for_device(accelerator.type) == "gloo":
        return torch.device("cpu")  # it has no backend of its own (mps), and gloo takes only CPU tensors
    count = torch.accelerator.device_count()
    local_rank = 0 if env is None else env.local_rank
    if local_rank is None and count > 1:
        raise ValueError(
            f"LOCAL_RANK is not set, so this rank cannot choose one of the {count} devices of type {accelerator.type}: set "
            "LOCAL_RANK to 0 for the first process of each host, 1 for the second, and so on"
        )
    index = local_rank or 0
    if count == 1 and env is not None and env.launcher != "torchrun":
        index = 0  # srun and others show each process its own device only
    if index >= count:
        raise ValueError(
            f"LOCAL_RANK is {index}, but this host has {count} device{'s' * (count > 1)} of type {accelerator.type}: start at "
            f"most {count} process{'es' * (count > 1)} on a host, or hide the devices to use CPUs"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


class _Task(NamedTuple):
    """A process as srun or mpirun counts it."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


# In this order: mpirun may start its own helpers by srun, whose variables its ranks then inherit.
_TASK_VARIABLES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}


def _find_task(env: Mapping[str, str]) -> _Task | None:
    tasks = [_read_task(env, launcher) for launcher, names in _TASK_VARIABLES.items() if names[0] in env]
    found = [task for task in tasks if task is not None]
    if len(found) > 1 and found[-1].launcher == "slurm" and found[0][1:3] == found[-1][1:3]:
        return found[-1]  # srun itself sets the variables of an MPI, too
    return found[0] if found else None


def _read_task(env: Mapping[str, str], launcher: str) -> _Task | None:
    rank, size, local_rank, local_size = _TASK_VARIABLES[launcher]
    if launcher == "slurm" and not _in_srun_step(env):
        return None
    if launcher == "slurm" and size not in env:
        size = "SLURM_NTASKS"
    count = _integer(env, size, least=1, needed_by=rank)
    return _Task(
        launcher,
        _integer(env, rank, below=count),
        count,
        _integer(env, local_rank) if local_rank in env else None,
        _integer(env, local_size, least=1) if local_size in env else None,
    )


def _in_srun_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process. A batch script has SLURM_PROCID, too, but it runs once for the whole job."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _reject_forgotten_srun(env: Mapping[str, str]) -> None:
    tasks = env.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in env and tasks.isdecimal() and int(tasks) > 1:
        raise ValueError(
            f"SLURM_NTASKS is {tasks}, but srun did not start this process, so it would run alone: start it with srun (or "
            "torchrun) for all tasks, or with `env -u SLURM_NTASKS` to run on one rank"
        )


def _read_convention(env: Mapping[str, str], task: _Task | None) -> LaunchEnv | None:
    """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    size = _integer(env, "WORLD_SIZE", least=1, needed_by="RANK")
    if size == 1 and "MASTER_ADDR" not in env and env.get("RANK", "0").strip() == "0":
        return None  # one rank needs no address
    rank = _integer(env, "RANK", below=size, needed_by="WORLD_SIZE")
    address, port = _meeting_point(env, "RANK and WORLD_SIZE are set")
    local_rank, local_size = None, None
    if "LOCAL_RANK" in env:
        local_rank = _integer(env, "LOCAL_RANK")
    elif task is not None and (task.rank, task.size) == (rank, size):
        local_rank, local_size = task.local_rank, task.local_size
    elif address in ("localhost", "::1") or address.startswith("127."):  # then all ranks are on this host
        local_rank, local_size = rank, size
    if "LOCAL_WORLD_SIZE" in env:
        local_size = _integer(env, "LOCAL_WORLD_SIZE", least=1)
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "env"
    return LaunchEnv(rank, size, local_rank, local_size, address, port, launcher)


def _from_task(env: Mapping[str, str], task: _Task) -> LaunchEnv | None:
    if "WORLD_SIZE" in env and _integer(env, "WORLD_SIZE") != task.size:
        raise ValueError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but {task.launcher} started {task.size} processes: start as many, or unset it"
        )
    if task.size == 1 and "MASTER_ADDR" not in env:
        return None
    derived = _slurm_meeting_point(env) if task.launcher == "slurm" else {}
    address, port = _meeting_point({**derived, **env}, f"{_TASK_VARIABLES[task.launcher][0]} is set")
    return LaunchEnv(task.rank, task.size, task.local_rank, task.local_size, address, port, task.launcher)


def _meeting_point(env: Mapping[str, str], reason: str) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, which must be set."""
    if not env.get("MASTER_ADDR"):
        raise ValueError(f"{reason}, but MASTER_ADDR is not: set it to the host of rank 0, the same on all ranks")
    if not env.get("MASTER_PORT"):
        raise ValueError(
            f"{reason}, but MASTER_PORT is not: set it to a free port of {env['MASTER_ADDR']}, the same on all ranks"
        )
    return env["MASTER_ADDR"], _integer(env, "MASTER_PORT", least=1, below=1 << 16)


def _slurm_meeting_point(env: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR, the first host of the step, where rank 0 runs, and a MASTER_PORT that other steps do not choose."""
    hosts = next((env[name] for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") if env.get(name)), "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    address = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")  # node[01-03,07] is node01
    job = env.get("SLURM_JOB_ID", "")
    number = 97 * int(job if job.isdecimal() else 0) + int(env["SLURM_STEP_ID"])
    return {"MASTER_ADDR": address, "MASTER_PORT": str(_PORTS[number % len(_PORTS)])}


def _integer(env: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None, needed_by: str = "") -> int:
    if name not in env:
        raise ValueError(
            f"{needed_by} is set, but {name} is not: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or "
            f"unset {needed_by} to run on one rank"
        )
    text = env[name].strip()
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        limit = f" and less than {below}" if below is not None else ""
        hint = ": ranks count from 0 to WORLD_SIZE - 1" if name == "RANK" else ""
        raise ValueError(f"{name}={env[name]!r} must be an integer, at least {least}{limit}{hint}")
    return int(text)


def _device_of_group() -> torch.device:
    """Return the accelerator that this rank uses if the default group serves it, otherwise the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type not in _served_devices():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _served_devices() -> set[str]:
    group = dist.group.WORLD
    return set() if group is None else {device.type for device in group._device_types}


def _destroy_group() -> None:
    failed = getattr(sys, "last_value", None) is not None
    if failed and _served_devices() != {"cpu"}:
        return  # the other ranks may never come, and the backend of an accelerator could wait for them
    if dist.is_initialized():
        dist.destroy_process_group()
