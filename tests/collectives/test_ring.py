"""Ring visits every rank's block once, returns contributions to its owner and sends no more than needed; average_gradient."""

import pytest
import torch
import torch.distributed as dist

from tests.collectives.one_process import SKEWED, group_named
from unisono.collectives import Ring, all_reduce, average_gradient, count_bytes, global_mean
from unisono.collectives.groups import resolve_group
from unisono.collectives.testing import gradcheck, gradgradcheck


def goes_round(group_name, with_sizes):
    group, members = group_named(group_name)
    if not members:
        return
    ranks, sizes = resolve_group(group), SKEWED[: len(members)]
    generator = torch.Generator().manual_seed(0)
    everyone = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    labels = [torch.arange(n) + 10 * r for r, n in enumerate(sizes)]
    ring = Ring([everyone[ranks.rank], labels[ranks.rank]], sizes=sizes if with_sizes else None, group=group)
    seen = []
    for owner, (block, label) in ring:
        seen.append(owner)
        torch.testing.assert_close(block, everyone[owner], rtol=0, atol=0)
        torch.testing.assert_close(label, labels[owner], rtol=0, atol=0)
        ring.add(block * (ranks.rank + 1))
    assert seen == [(ranks.rank - step) % ranks.size for step in range(ranks.size)]
    total = everyone[ranks.rank] * sum(range(1, ranks.size + 1))
    torch.testing.assert_close(ring.total(), total, rtol=1e-14, atol=0)


@pytest.mark.parametrize("with_sizes", [True, False])
def test_every_block_comes_by_and_contributions_come_home(ranks, world_size, with_sizes):
    ranks(goes_round, "world", with_sizes, world_size=world_size)


@pytest.mark.parametrize("group", ["without rank 0", "mesh dimension", "1-D mesh"])
def test_rings_of_groups(ranks, group):
    ranks(goes_round, group, True, world_size=4)


def combines(dtype):
    x = torch.full((2,), dist.get_rank() + 1).to(dtype)
    ring = Ring([x], sizes=[2] * dist.get_world_size())
    for _, (block,) in ring:
        ring.add(block * (dist.get_rank() + 1), torch.maximum)
    torch.testing.assert_close(ring.total(), x * dist.get_world_size())


def test_combine_and_dtypes(ranks):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        ranks(combines, dtype, world_size=3)


def bytes_sent():
    x = torch.ones(8, 4)
    with count_bytes() as traffic:
        ring = Ring([x], sizes=[8] * dist.get_world_size())
        for _, (block,) in ring:
            ring.add(block.clone())
        ring.total()
    return traffic.sent


def test_blocks_go_once_round_and_contributions_come_back(ranks):
    block = 8 * 4 * 4
    assert ranks(bytes_sent, world_size=4) == [3 * block + 4 * block] * 4


def nothing_added():
    ring = Ring([torch.ones(1)])
    for _ in ring:
        pass
    with pytest.raises(RuntimeError, match="nothing was added"):
        ring.total()


def test_total_without_add(ranks):
    ranks(nothing_added, world_size=2)


def averages():
    rank, world = dist.get_rank(), dist.get_world_size()
    for shape in ((), (3,)):
        x = torch.full(shape, 0.1, requires_grad=True)
        y = average_gradient(x)
        assert torch.equal(y, x), "to the bit"
        ((rank + 1) * y).sum().backward()
        torch.testing.assert_close(x.grad, torch.full(shape, (world + 1) / 2))


def test_average_gradient(ranks, world_size):
    ranks(averages, world_size=world_size)


def averages_second():
    """With the same value on every rank and the rank's own loss: the gradient of the mean loss, twice."""
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def loss(x):
        same = average_gradient(all_reduce(x, "avg"))
        return (dist.get_rank() + 1) * same**3

    gradcheck(loss, x)
    gradgradcheck(loss, x)


def test_average_gradient_has_second_derivatives(ranks):
    ranks(averages_second, world_size=2)


def infinite():
    x = torch.tensor([torch.inf])
    assert global_mean(x, grad_reduce="sum") == torch.inf


def test_a_mean_of_infinity_is_infinity(ranks):
    ranks(infinite, world_size=2)


def empty_neighbours():
    sizes = (2, 0, 0, 3)
    for _ in range(3):
        x = torch.full((sizes[dist.get_rank()], 1), float(dist.get_rank()))
        ring = Ring([x], sizes=sizes)
        for owner, (block,) in ring:
            assert len(block) == sizes[owner]
            ring.add(block + 1)
        assert torch.equal(ring.total(), (x + 1) * 4)


def test_ranks_without_anything_to_send_stay_in_turn(ranks):
    ranks(empty_neighbours, world_size=4)
