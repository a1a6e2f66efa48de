"""count_bytes counts all collectives of torch.distributed, on real ranks and in backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import all_gather, count_bytes
from unisono.collectives.testing import run_ranks


def counts_torchs_own() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(6, 5)
    with count_bytes() as traffic:
        dist.all_reduce(x)
        dist.all_gather_single(torch.zeros(6 * size, 5), x)
        dist.reduce_scatter_single(torch.zeros(2, 5), x)
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.zeros(6, 5), x)
        dist.gather(x, [torch.zeros(6, 5) for _ in range(size)] if rank == 0 else None)
        dist.scatter(x, [torch.zeros(6, 5) for _ in range(size)] if rank == 0 else None)
        dist.reduce(x, 0)
        dist.all_gather([torch.zeros(6, 5) for _ in range(size)], x)
        dist.barrier()
    whole = x.numel() * 4
    sent = {name: op.sent for name, op in traffic.by_op.items()}
    assert sent == {
        "all_reduce": 2 * whole * 2 // 3,
        "all_gather": 2 * whole * 2,
        "reduce_scatter": whole * 2 // 3,
        "broadcast": whole * 2 if rank == 0 else 0,
        "all_to_all": whole * 2 // 3,
        "gather": 0 if rank == 0 else whole,
        "scatter": whole * 2 if rank == 0 else 0,
        "reduce": 0 if rank == 0 else whole,
    }
    totals = torch.tensor([traffic.sent, traffic.received])
    dist.all_reduce(totals)
    assert totals[0] == totals[1], "what is sent is received"
    assert f"{traffic.sent:,}" in str(traffic) and "all_to_all" in str(traffic)


def test_counts_torchs_own_collectives():
    run_ranks(counts_torchs_own, world_size=3)


def counts_ddp() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    for step in range(2):
        with count_bytes() as traffic:
            model(torch.ones(2, 8)).sum().backward()
        assert step == 0 or traffic.by_op["all_reduce"].sent == (8 * 4 + 4) * 4


def test_counts_ddps_gradient_sync():
    run_ranks(counts_ddp, world_size=2)


def nested() -> None:
    with count_bytes() as outer:
        all_gather(torch.ones(4), sizes=[4, 4])
        with count_bytes() as inner:
            all_gather(torch.ones(4), sizes=[4, 4])
    assert inner.sent == 16 and outer.sent == 32


def test_counters_nest():
    run_ranks(nested, world_size=2)


def uneven_all_gather_sends_the_payload() -> None:
    """The all_gather of x-clip padded every rank to the longest."""
    rows = (70, 10, 10)
    x = torch.zeros(rows[dist.get_rank()], 4)
    with count_bytes() as traffic:
        all_gather(x, sizes=rows)
    assert traffic.sent == 2 * x.numel() * 4 and traffic.received == (90 - len(x)) * 16


def test_uneven_all_gather_sends_the_payload():
    run_ranks(uneven_all_gather_sends_the_payload, world_size=3)
