"""Any launcher: its variables are read, contradictions are refused in a sentence, and plain processes join each other."""

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import init_distributed, read_launch_env
from unisono.collectives.launch import LaunchEnv, choose_device

CONVENTION = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],login1",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ADDRESS = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
BATCH_STEP = {"SLURM_STEP_ID": str(0xFFFFFFFB)}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (CONVENTION, LaunchEnv(1, 4, None, None, "node7", 29500, "env")),
        (CONVENTION | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, LaunchEnv(1, 4, 0, 2, "node7", 29500, "env")),
        (CONVENTION | {"MASTER_ADDR": "127.0.0.1"}, LaunchEnv(1, 4, 1, 4, "127.0.0.1", 29500, "env")),
        (
            CONVENTION | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            LaunchEnv(1, 4, 1, 2, "node7", 29500, "torchrun"),
        ),
        # a wrapper around srun or mpirun: the local rank is theirs if they mean the same ranks
        (CONVENTION | STEP | {"RANK": "3"}, LaunchEnv(3, 4, 1, None, "node7", 29500, "env")),
        (CONVENTION | STEP, LaunchEnv(1, 4, None, None, "node7", 29500, "env")),
        (CONVENTION | MPI | {"RANK": "2"}, LaunchEnv(2, 4, 0, 2, "node7", 29500, "env")),
        # processes that a batch script started by hand all inherit its SLURM_LOCALID
        (CONVENTION | STEP | BATCH_STEP | {"RANK": "3"}, LaunchEnv(3, 4, None, None, "node7", 29500, "env")),
        (STEP, LaunchEnv(3, 4, 1, None, "gpu07", 14_000 - 21, "slurm")),
        (STEP | {"SLURM_STEP_NODELIST": "a[3-4]-ib[0,2],b"}, LaunchEnv(3, 4, 1, None, "a3-ib0", 13_979, "slurm")),
        (STEP | ADDRESS | {"WORLD_SIZE": "4"}, LaunchEnv(3, 4, 1, None, "node7", 29500, "slurm")),
        (STEP | {"MASTER_ADDR": "node7"}, LaunchEnv(3, 4, 1, None, "node7", 13_979, "slurm")),
        (STEP | {"MASTER_PORT": "29500"}, LaunchEnv(3, 4, 1, None, "gpu07", 29500, "slurm")),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchEnv(3, 4, 1, None, "gpu07", 13_979, "slurm")),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None),
        (MPI | ADDRESS, LaunchEnv(2, 4, 0, 2, "node7", 29500, "openmpi")),
        # mpirun in a Slurm job starts its helpers by srun: one for each host
        (
            MPI | ADDRESS | STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            LaunchEnv(2, 4, 0, 2, "node7", 29500, "openmpi"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"} | ADDRESS, LaunchEnv(1, 2, 0, None, "node7", 29500, "pmi")),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        (CONVENTION | {"WORLD_SIZE": "1", "RANK": "0"}, LaunchEnv(0, 1, None, None, "node7", 29500, "env")),
        ({"SLURM_JOB_ID": "41", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    ],
)
def test_variables_of_launchers(variables, expected):
    assert read_launch_env(variables) == expected


def without(name, variables=CONVENTION):
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (without("RANK"), "WORLD_SIZE is set, but RANK is not: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every"),
        (without("WORLD_SIZE"), "RANK is set, but WORLD_SIZE is not"),
        (without("MASTER_ADDR"), "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: set it to the host of rank 0"),
        (without("MASTER_PORT"), "but MASTER_PORT is not: set it to a free port of node7, the same on all ranks"),
        (CONVENTION | {"RANK": "4"}, "RANK='4' must be an integer, at least 0 and less than 4: ranks count from 0"),
        (CONVENTION | {"RANK": "-1"}, "RANK='-1' must be an integer"),
        (CONVENTION | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be an integer, at least 1"),
        (CONVENTION | {"WORLD_SIZE": ""}, "WORLD_SIZE='' must be an integer"),
        (CONVENTION | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000' must be an integer, at least 1 and less than 65536"),
        (CONVENTION | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x' must be an integer"),
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK='3' must be an integer, at least 0 and less than 1"),
        (MPI, "OMPI_COMM_WORLD_RANK is set, but MASTER_ADDR is not: set it to the host of rank 0"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set, but PMI_SIZE is not"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but slurm started 4 processes"),
        (without("SLURM_STEP_NODELIST", STEP), "SLURM_PROCID is set, but MASTER_ADDR is not"),
        (STEP | BATCH_STEP | {"SLURM_PROCID": "0"}, "SLURM_NTASKS is 4, but srun did not start this process"),
        ({"SLURM_JOB_ID": "41", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "start it with srun"),
    ],
)
def test_half_a_convention_is_refused_in_a_sentence(variables, sentence):
    with pytest.raises(ValueError) as error:
        read_launch_env(variables)
    assert sentence in str(error.value)


SCRIPT = """
import torch, torch.distributed as dist
from unisono.collectives import all_gather, init_distributed
device = init_distributed(timeout=40)
assert device == init_distributed()  # a second call changes nothing
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(device))  # torch aborts at exit if it is left alone
print(dist.get_rank(), dist.get_world_size(), all_gather(torch.full((1 + dist.get_rank(),), dist.get_rank())).tolist())
"""


def start(variables, script=SCRIPT):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI_"))}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command, env=kept | {"OMP_NUM_THREADS": "1"} | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_plain_processes_of_any_launcher_join_each_other():
    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    step = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port()}
    pairs = [
        [start(by_hand | {"RANK": str(rank)}) for rank in range(2)],
        [start(step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)],
    ]
    for pair in pairs:
        for rank, process in enumerate(pair):
            printed, errors = process.communicate(timeout=60)
            assert (process.returncode, printed) == (0, f"{rank} 2 [0, 1, 1]\n"), errors


def test_a_rank_that_nobody_joins_says_where_it_waited():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    script = "from unisono.collectives import init_distributed; init_distributed(timeout=1)"
    errors = start(variables, script).communicate(timeout=60)[1]
    assert "init_distributed: rank 0 of 2 (by env) did not meet the other ranks at 127.0.0.1:" in errors


@pytest.mark.parametrize(
    ("launcher", "local_rank", "count", "index"),
    [("slurm", 1, 1, 0), ("slurm", 1, 4, 1), ("env", None, 1, 0), ("torchrun", 1, 1, None), ("env", None, 4, None)],
)
def test_each_rank_gets_a_device_that_it_sees(monkeypatch, launcher, local_rank, count, index):
    """srun --gpus-per-task=1 shows each process one device: ranks other than the first of a host raised."""
    monkeypatch.setattr(torch, "accelerator", accelerator := mock.Mock())
    accelerator.current_accelerator.return_value = torch.device("cuda")
    accelerator.device_count.return_value = count
    env = LaunchEnv(1, 2, local_rank, None, "node7", 29500, launcher)
    if index is None:
        with pytest.raises(ValueError, match=f"LOCAL_RANK is .* {count} device"):
            choose_device(env)
    else:
        assert choose_device(env) == torch.device("cuda", index)
        accelerator.set_device_index.assert_called_with(index)


def keeps_the_group():
    group = dist.group.WORLD
    assert init_distributed() == torch.device("cpu")
    assert dist.group.WORLD is group


def test_a_group_that_exists_stays(ranks):
    ranks(keeps_the_group, world_size=2)
