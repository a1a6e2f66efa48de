"""Joining a process group, or running without one."""

import pytest
import torch
import torch.distributed as dist

from unisono_models.training.distributed.launch import Ranks, shard_chunks, shard_range, start_ranks
from unisono_models.training.errors import UserError


def test_without_torchrun_there_is_one_rank_and_no_group():
    with start_ranks() as ranks:
        assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.first) == (0, 1, 0, True)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "MASTER_ADDR is not: set it to the host of rank 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, "SLURM_NTASKS is 2, but srun did not start this process"),
    ],
)
def test_a_process_that_others_were_meant_to_join_does_not_train_alone(monkeypatch, variables, words):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words) as caught, start_ranks():
        pass
    assert caught.value.printed_by == int(variables.get("RANK", "0"))  # on whichever rank


def in_a_group_that_exists():
    with start_ranks() as ranks:
        assert (ranks.rank, ranks.world_size) == (dist.get_rank(), dist.get_world_size())
        assert ranks.first == (ranks.rank == 0)
    assert dist.is_initialized()  # it is not ours to end
    with pytest.raises(ValueError, match="as it is"), start_ranks():
        raise ValueError("as it is")
    assert dist.is_initialized()


def test_the_number_of_ranks_is_good_english():
    assert [Ranks(0, size, 0, torch.device("cpu")).described for size in (1, 2)] == ["1 rank", "2 ranks"]


def test_a_group_that_exists_is_used_and_left_alone(ranks):
    ranks(in_a_group_that_exists, world_size=2)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 100])
def test_shares_of_rows_are_those_of_tensor_split(count, world_size):
    expected = [part.tolist() for part in torch.arange(count).tensor_split(world_size)]
    assert [list(shard_range(count, rank, world_size)) for rank in range(world_size)] == expected
    for rows in (1, 3, 100):
        chunks = [shard_chunks(count, rank, world_size, rows) for rank in range(world_size)]
        assert len({len(parts) for parts in chunks}) == 1 and max(len(part) for parts in chunks for part in parts) <= rows
        assert [[row for part in parts for row in part] for parts in chunks] == expected
