"""The law on real GPUs with NCCL: one process for each GPU. Runs where there are at least two."""

import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.collectives.one_process import CASES, first_and_second, inputs_of, local_loss

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs and NCCL")


def all_cases(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    for name, case in CASES.items():
        inputs = inputs_of(case, size)
        whole = [x.clone().requires_grad_() for x in inputs]
        expected = case.reference(whole)
        losses = torch.stack([local_loss(y, r) for r, y in enumerate(expected)]).sum()
        first_expected, second_expected = first_and_second(losses, whole)
        mine = inputs[rank].cuda().requires_grad_()
        y = case(mine, None)
        first, second = first_and_second(local_loss(y.cpu(), rank), [mine])
        for got, want in ((y, expected[rank]), (first[0], first_expected[rank]), (second[0], second_expected[rank])):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    dist.destroy_process_group()


def test_law_on_gpus():
    with tempfile.TemporaryDirectory() as folder:
        size = min(torch.cuda.device_count(), 4)
        mp.spawn(all_cases, args=(size, str(Path(folder))), nprocs=size)
