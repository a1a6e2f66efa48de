"""A bad call on rank 1, by its name in a test module's table BAD: (a call that is bad if asked to be, what the error says)."""

import importlib

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import MismatchError, all_gather


def caught(module: str, name: str) -> str:
    """Runs on every rank: the error that it raised, the ranks being still in step."""
    bad_call = importlib.import_module(module).BAD[name][0]
    with pytest.raises(MismatchError) as error:
        bad_call(int(dist.get_rank() == 1))
    assert len(all_gather(torch.ones(1))) == dist.get_world_size()
    return str(error.value)
