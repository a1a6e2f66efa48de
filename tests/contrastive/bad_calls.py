"""Check that a bad call on rank 1 raises the same error on all ranks.

A test module has a table BAD: name -> (function that makes a bad call if its argument is 1, text of the error).
"""

import importlib

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import MismatchError, all_gather


def error_of_a_bad_call(module: str, name: str) -> str:
    """Runs on every rank. Returns the error, after a collective that shows that the ranks are still in step."""
    make_call = importlib.import_module(module).BAD[name][0]
    with pytest.raises(MismatchError) as error:
        make_call(int(dist.get_rank() == 1))
    assert len(all_gather(torch.ones(1))) == dist.get_world_size()
    return str(error.value)
