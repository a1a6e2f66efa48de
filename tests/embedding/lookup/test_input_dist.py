"""What ranks request from each other: ids of any size."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.embedding import SGD, Layout, ShardedEmbeddingBag


def zero(rows: Tensor, generator: torch.Generator) -> None:
    rows.zero_()


def ids_above_two_to_the_24_keep_their_bits_beside_weights() -> None:
    """torch's ShardedTensor sent ids beside weights as float32. Row n of this table is n % 997."""
    rank, size = dist.get_rank(), dist.get_world_size()
    near = torch.arange(2**24 - 8, 2**24 + 8)
    everyones = [torch.tensor([9, 11, 7, 4, 15]) - r for r in range(size)]  # of `near`
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, -1.0])
    sums = torch.zeros(16).index_add_(0, torch.cat(everyones), weights.repeat(size))
    for plan, learned in (("row", True), ("row", False), (Layout.table(size - 1), False), ("column", False)):
        options = {"plan": plan, "optimizer": SGD(lr=1.0), "grad_reduce": "sum", "initialize": zero}
        module = ShardedEmbeddingBag(2**24 + 8, 1, mode="sum", **options)
        module.local.copy_(torch.arange(module.box.row, module.box.row_end)[:, None].fmod(997).expand(module.box.shape))
        ids, own_weights = near[everyones[rank]], weights.clone().requires_grad_(learned)
        out = module(ids, torch.tensor([0, 3]), own_weights)
        products = ids.fmod(997) * weights
        assert out.tolist() == [[float(products[:3].sum())], [float(products[3:].sum())]]
        out.sum().backward()
        assert torch.equal(module(near[:, None])[:, 0], near.fmod(997) - sums)
        assert not learned or torch.equal(own_weights.grad, ids.fmod(997).float())


REGRESSIONS = [
    ids_above_two_to_the_24_keep_their_bits_beside_weights,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_regression(body, size, ranks):
    ranks(body, world_size=size)
