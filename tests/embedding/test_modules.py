"""Every layout, at one to four ranks, gives what torch.nn gives with the whole batch: values, gradients, tables."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.embedding.reference import DIM, ROWS, layouts, local_gradient, make_embedding, run_bag, run_embedding
from unisono.embedding import Layout, RowwiseAdagrad, ShardedEmbedding, ShardedEmbeddingBag

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


def from_dense_can_draw_weights_anew() -> None:
    """reset_parameters() after from_dense drew nothing."""
    torch.manual_seed(0)
    for module in (
        ShardedEmbedding.from_dense(nn.Embedding(ROWS, DIM)),
        ShardedEmbeddingBag.from_dense(nn.EmbeddingBag(ROWS, DIM, padding_idx=3)),
    ):
        module.reset_parameters(seed=1)
        again = ShardedEmbedding(ROWS, DIM, padding_idx=module.table.padding_idx)
        again.reset_parameters(seed=1)
        assert torch.equal(module.full_weight(), again.full_weight())


def a_second_backward_raises() -> None:
    """It did not raise."""
    for optimizer in (None, RowwiseAdagrad(lr=0.1)):
        loss = ShardedEmbedding(ROWS, DIM, optimizer=optimizer)(torch.arange(3)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def output_and_table_are_read_twice() -> None:
    """DTensor's embedding failed an assertion if the output was used twice."""
    whole, rank = make_embedding(), dist.get_rank()
    everyones = [torch.tensor([1, 1 + r, 9]) for r in range(dist.get_world_size())]
    for layout in layouts(dist.get_world_size()).values():
        ours = ShardedEmbedding.from_dense(whole, layout, grad_reduce="sum")
        whole.weight.grad = None
        for module, batches in ((whole, everyones), (ours, [everyones[rank]])):
            for ids in batches:
                once, again = module(ids), module(ids.flip(0))
                loss = once.square().sum() + (once * again).sum() + once.sum()
                loss.backward(retain_graph=True)
                loss.backward()
        torch.testing.assert_close(local_gradient(ours), whole.weight.grad)


def a_group_of_some_ranks_in_another_order() -> None:
    """ShardedTensor has no tables on some ranks only."""
    group = dist.new_group([2, 0], sort_ranks=False)
    if dist.get_rank() == 1:
        return
    whole, rank = make_embedding(), dist.get_rank(group)
    everyones = [torch.tensor([1, 8]), torch.tensor([[8, 8, 3]])]
    for layout in layouts(2).values():
        ours = ShardedEmbedding.from_dense(whole, layout, group=group, grad_reduce="sum")
        out = ours(everyones[rank])
        (out * (rank + 1)).sum().backward()
        torch.testing.assert_close(out, whole(everyones[rank]))
        counts = torch.tensor([0.0, 1, 0, 2, 0, 0, 0, 0, 5, 0, 0], dtype=torch.float64)
        torch.testing.assert_close(local_gradient(ours), counts[:, None].expand(ROWS, DIM))


def gradients_are_divided_only_by_grad_reduce_mean() -> None:
    """TorchRec divides gradients by the world size by default."""
    size = dist.get_world_size()
    for layout in layouts(size).values():
        grads = []
        for reduce in ("sum", "mean"):
            module = ShardedEmbedding(ROWS, DIM, plan=layout, grad_reduce=reduce)
            module(torch.tensor([4, 4])).sum().backward()
            grads.append(local_gradient(module))
        assert torch.equal(grads[0][4], torch.full((DIM,), 2.0 * size)) and torch.equal(
            grads[0].count_nonzero(), torch.tensor(DIM)
        )
        torch.testing.assert_close(grads[1] * size, grads[0])


def a_rank_has_the_gradient_of_its_rows_only() -> None:
    """DTensor gave every rank a gradient of the whole table."""
    module = ShardedEmbedding(ROWS, DIM, plan="row")
    module(torch.tensor([0, 5, 10])).sum().backward()
    assert module.weight.grad.to_local().shape == module.box.shape and module.box.shape[0] < ROWS


REGRESSIONS = [
    from_dense_can_draw_weights_anew,
    a_second_backward_raises,
    output_and_table_are_read_twice,
    a_group_of_some_ranks_in_another_order,
    gradients_are_divided_only_by_grad_reduce_mean,
    a_rank_has_the_gradient_of_its_rows_only,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
def test_regression(body, ranks):
    ranks(body, world_size=3)
