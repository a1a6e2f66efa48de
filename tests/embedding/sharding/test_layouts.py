"""Layouts: by name or by class, on given ranks or on all, and a new one in one class."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.embedding.reference import DIM, ROWS, local_gradient
from unisono.embedding import EmbeddingCollection, Layout, ShardedEmbedding, ShardedEmbeddingBag, Table
from unisono.embedding.sharding.cost import Demand, list_options, set_prices
from unisono.embedding.sharding.layouts import LAYOUTS, RowLayout, TableLayout


def every_layout_has_default_ranks() -> None:
    """A layout without ranks failed for some kinds."""
    torch.manual_seed(0)
    whole = nn.EmbeddingBag(ROWS, DIM)
    for name, layout in LAYOUTS.items():
        ids = torch.tensor([[1, 10, dist.get_rank()]])
        torch.testing.assert_close(ShardedEmbeddingBag.from_dense(whole, layout())(ids), whole(ids))
        torch.testing.assert_close(ShardedEmbeddingBag.from_dense(whole, name)(ids), whole(ids))


def test_every_layout_has_default_ranks(ranks):
    ranks(every_layout_has_default_ranks, world_size=3)


class PairLayout(Layout):
    """The example of the module's docstring: chunks of rows on two ranks only."""

    kind = "pair"
    cut_dim = 0

    @classmethod
    def chunk_counts(cls, table, world_size):
        return [2] if world_size > 1 else []

    def default_ranks(self, world_size):
        return (0, min(1, world_size - 1))


def a_new_layout_needs_one_class() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.dict(LAYOUTS, {"pair": PairLayout}):
        torch.manual_seed(0)
        whole = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        ours = ShardedEmbedding.from_dense(whole, "pair", grad_reduce="sum")
        assert ours.box.shape == ((6, DIM), (5, DIM), (0, DIM))[rank]
        ids = [torch.tensor([1, 10, 5 * r]) for r in range(size)]
        torch.testing.assert_close(ours(ids[rank]), whole(ids[rank]))
        ours(ids[rank]).square().sum().backward()
        whole(torch.cat(ids)).square().sum().backward()
        torch.testing.assert_close(local_gradient(ours), whole.weight.grad)
        ours.load_state_dict(ours.state_dict())
        assert torch.equal(ours.full_weight(), whole.weight)
        EmbeddingCollection([Table("a", ROWS, DIM)], plan="pair")({"a": ids[rank]})
        prices = set_prices(size, optimizer=None, dtype=torch.float32, wire_dtype=None)
        options = list_options(Table("a", ROWS, DIM), Demand(ids=9, bags=9, unique=5), prices)
        (pair,) = (option for option in options if option.layout is PairLayout)
        assert pair.place([2, 0]).box(rank=0, rows=ROWS, dim=DIM).shape == (5, DIM)
        assert pair.memory.tolist() == [6 * DIM * 8, 5 * DIM * 8]  # weights and gradients


def test_a_new_layout_needs_one_class(ranks):
    ranks(a_new_layout_needs_one_class, world_size=3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ShardedEmbedding(5, 2, plan="rows"), "ShardedEmbedding: plan='rows' is neither a Layout nor one of 'row',"),
        (lambda: ShardedEmbedding(5, 2, plan="grid"), "plan='grid' is gone, .* choose one of 'row', 'column', "),
        (lambda: ShardedEmbedding(5, 2, plan=Layout.row([0, 1])), r"ranks=\(0, 1\) must be different ranks below 1"),
        (lambda: ShardedEmbedding(5, 2, plan=Layout.column([0, 0])), "must be different ranks below 1"),
        (lambda: ShardedEmbedding(5, 2, plan=Layout.table(3)), "must be different ranks below 1"),
        (lambda: ShardedEmbedding(5, 2, plan=Layout.row([])), "must have one rank at least"),
        (lambda: ShardedEmbedding(5, 2, plan=Layout.table(answers="sums")), "answers='sums' is neither 'rows' nor 'bags'"),
        (
            lambda: ShardedEmbedding(5, 2, plan=RowLayout(answers="bags")),
            "answers='bags' needs all rows of the table on one",
        ),
        (lambda: ShardedEmbedding(5, 2, plan=TableLayout((0, 1))), "does not fit kind='table', which lies on one rank"),
    ],
)
def test_bad_layouts(call, text):
    with pytest.raises(ValueError, match=text):
        call()
