"""Ranks notice that they do not see the same run directory."""

from pathlib import Path

import torch
import torch.distributed as dist

from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.shared_directory import check_directory_is_shared
from unisono_models.training.errors import UserError


def check(folders):
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        check_directory_is_shared(Path(folders[rank]), Ranks(rank, size, rank, torch.device("cpu")), patience=0.5)
    except UserError as error:
        return str(error)
    return ""


def test_a_directory_that_some_hosts_do_not_see_is_refused_on_all_ranks(ranks, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"  # the same path, on the disks of two hosts
    here.mkdir()
    there.mkdir()
    assert ranks(check, [str(here)] * 3, world_size=3) == [""] * 3
    for elsewhere in (there, tmp_path / "absent"):
        errors = ranks(check, [str(here), str(elsewhere), str(elsewhere)], world_size=3)
        assert all("is not the same on all hosts: rank 1, 2 on " in error for error in errors), errors
        assert all(error.endswith("Set --run.dir to a directory on a file system that all hosts share") for error in errors)
    assert not list(here.iterdir())
