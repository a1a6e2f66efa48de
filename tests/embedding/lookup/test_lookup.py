"""The owner's side: renormalised rows, gradients and memory, against one process on every layout."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embedding.reference import DIM, MIXED, ROWS, UPPER_ROWS, compare_training, layouts, make_bag, make_embedding
from unisono.collectives import checked
from unisono.embedding import Layout, RowwiseAdagrad, ShardedEmbedding, ShardedEmbeddingBag


def max_norm_keeps_all_rows_if_a_rank_has_no_other_ids() -> None:
    """torch's ShardedTensor dropped a row if a rank looked up ids of its own shard only."""
    compare_training(make_bag(max_norm=1.0), UPPER_ROWS)
    compare_training(make_embedding(max_norm=1.0), UPPER_ROWS)


def max_norm_keeps_the_parameter_over_steps() -> None:
    """torch's ShardedTensor replaced the parameter, so the gradient was wrong and the second step raised."""
    compare_training(make_bag(max_norm=1.0), MIXED, steps=3)
    compare_training(make_embedding(max_norm=1.0, norm_type=1.0), MIXED, steps=3)


class NewTensors(TorchDispatchMode):
    """Measures the largest new tensor that any operation makes, except views of `known` tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known, self.largest = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
        return out


def nothing_of_the_size_of_a_shard_is_made() -> None:
    """torch's ShardedTensor copied the shard in each step, and computed the norms of all its rows."""
    for layout in layouts(dist.get_world_size()).values():
        for max_norm in (None, 1.0):
            options = {"plan": layout, "max_norm": max_norm, "optimizer": RowwiseAdagrad(lr=0.1)}
            modules: list[Any] = [ShardedEmbedding(6000, 4, **options), ShardedEmbeddingBag(6000, 4, mode="sum", **options)]
            for module in modules:
                module(torch.tensor([[1]]))  # what is made once
                with NewTensors([module.local, *module.states.values()]) as made:
                    module(torch.tensor([[1, 4000, 1], [5999, 2, dist.get_rank()]])).sum().backward()
                assert 0 < made.largest < 100, made.largest
            bare = ShardedEmbedding(6000, 4, plan=layout, max_norm=max_norm)
            with NewTensors([bare.local]) as made:
                bare(torch.tensor([1, 4000, 5999]))
            assert 0 < made.largest < 100, made.largest


def gradients_are_scaled_by_frequency() -> None:
    """DTensor's embedding gets scale_grad_by_freq wrong."""
    compare_training(make_embedding(scale_grad_by_freq=True), MIXED)
    compare_training(make_bag(scale_grad_by_freq=True), MIXED)


def max_norm_and_sparse_go_together() -> None:
    """DTensor's embedding implements neither max_norm nor sparse."""
    compare_training(make_embedding(max_norm=1.0, padding_idx=3), MIXED, sparse=True, steps=2)


def max_norm_of_sixteen_bits_in_columns() -> None:
    """The norm over chunks of columns was wrong for 16-bit weights."""
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, 6, max_norm=1.0, dtype=torch.bfloat16)
    ids = torch.arange(ROWS)
    for layout in layouts(dist.get_world_size()).values():
        ours = ShardedEmbedding.from_dense(dense, layout)
        torch.testing.assert_close(ours(ids), copy.deepcopy(dense)(ids), rtol=2**-7, atol=2**-9)


def ranks_without_a_part_of_a_table_send_the_same_dtype() -> None:
    """A rank without columns of the table took part in their exchange with another dtype."""
    plan = Layout.column([2, 1])
    with checked():
        for options in ({"max_norm": 0.5}, {"optimizer": RowwiseAdagrad(lr=0.1)}):
            module = ShardedEmbedding(ROWS, DIM, plan=plan, dtype=torch.float64, **options)
            module(torch.tensor([1, 10, dist.get_rank()])).sum().backward()


REGRESSIONS = [
    max_norm_keeps_all_rows_if_a_rank_has_no_other_ids,
    max_norm_keeps_the_parameter_over_steps,
    nothing_of_the_size_of_a_shard_is_made,
    gradients_are_scaled_by_frequency,
    max_norm_and_sparse_go_together,
    max_norm_of_sixteen_bits_in_columns,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_regression(body, size, ranks):
    ranks(body, world_size=size)


def test_ranks_without_a_part_of_a_table_send_the_same_dtype(ranks):
    ranks(ranks_without_a_part_of_a_table_send_the_same_dtype, world_size=3)
