"""Every layout, at one to four ranks, gives what torch.nn gives with the whole batch: values, gradients, tables."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.embedding.whole_table import DIM, ROWS, layouts, local_gradient, run_bag, run_embedding
from unisono.embedding import Layout, ShardedEmbedding, ShardedEmbeddingBag

BAGS = {
    "sum": {},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "mean of ranks": {"grad_reduce": "mean"},
    "int32": {"int": torch.int32},
    "weights": {"weights": "fixed"},
    "learned weights": {"weights": "learned"},
    "learned weights, padding": {"weights": "learned", "options": {"padding_idx": 3}},
    "weights, padding": {"weights": "fixed", "options": {"padding_idx": 3}},
    "mean, padding": {"mode": "mean", "options": {"padding_idx": 3}},
    "max, padding": {"mode": "max", "options": {"padding_idx": -2}},
    "max norm": {"options": {"max_norm": 1.5}},
    "max norm, mean, padding": {"mode": "mean", "options": {"max_norm": 1.5, "padding_idx": 3, "norm_type": 1.0}},
    "max norm, weights, padding": {"weights": "learned", "options": {"max_norm": 1.5, "padding_idx": 3, "norm_type": 3.0}},
    "largest norm": {"options": {"max_norm": 0.9, "norm_type": float("inf")}},
    "by frequency": {"options": {"scale_grad_by_freq": True}},
    "by frequency, mean, padding": {"mode": "mean", "options": {"scale_grad_by_freq": True, "padding_idx": 3}},
    "sparse": {"sparse": True},
    "all empty": {"lengths": [[]]},
    "empty bags only": {"lengths": [[0, 0], []]},
}
EMBEDDINGS = {
    "plain": {},
    "padding": {"options": {"padding_idx": 3}},
    "max norm": {"options": {"max_norm": 1.2}},
    "max norm, padding": {"options": {"max_norm": 1.2, "padding_idx": 3}},
    "by frequency": {"options": {"scale_grad_by_freq": True, "padding_idx": 3}},
    "sparse": {"sparse": True, "options": {"padding_idx": 3}},
    "upper rows only": {"low": 6},
}


def run_all_bags(layout):
    for case in BAGS.values():
        run_bag(case, layout)


def run_all_embeddings(layout):
    for case in EMBEDDINGS.values():
        run_embedding(case, layout)


PLACES = [(size, layout) for size in (1, 2, 3, 4) for layout in layouts(size)]


@pytest.mark.parametrize(("size", "layout"), PLACES)
def test_bag_matches_one_process(size, layout, ranks):
    ranks(run_all_bags, layout, world_size=size)


@pytest.mark.parametrize(("size", "layout"), PLACES)
def test_embedding_matches_one_process(size, layout, ranks):
    ranks(run_all_embeddings, layout, world_size=size)


def part_of_the_world() -> None:
    """Three of four ranks, in torch's order of the group; one of them with nothing."""
    group, sizes = dist.new_group([0, 2, 3]), [2, 0, 3]
    if dist.get_rank() == 1:
        return
    torch.manual_seed(1)
    parts = [torch.randint(ROWS, (size, 3)) for size in sizes]
    for plan in ("row", Layout.row([2, 0, 1]), "column", Layout.column([1, 2]), "table", "replicated"):
        dense = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64)
        module = ShardedEmbeddingBag.from_dense(dense, plan, group=group, grad_reduce="sum")
        expected = dense(torch.cat(parts))
        expected.square().sum().backward()
        out = module(parts[group.rank()])
        out.square().sum().backward()
        torch.testing.assert_close(out, expected.split(sizes)[group.rank()])
        torch.testing.assert_close(local_gradient(module), dense.weight.grad)
        before = module.full_weight()
        module.load_state_dict(module.state_dict())
        assert torch.equal(module.full_weight(), before)


def test_part_of_the_world_matches_one_process(ranks):
    ranks(part_of_the_world, world_size=4)


def second_derivative() -> None:
    module = ShardedEmbedding(ROWS, DIM, plan="replicated")
    (grad,) = torch.autograd.grad(module(torch.arange(3)).square().sum(), module.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_second_derivatives_raise_and_are_not_wrong(ranks):
    ranks(second_derivative, world_size=2)
