"""Parameters are views of a rank's storage: after copies, conversions and new parameters, too."""

import copy

import pytest
import torch
from torch import nn

from tests.embedding.reference import DIM, ROWS
from tests.embedding.test_collection import make_pair
from unisono.embedding import EmbeddingCollection, RowwiseAdagrad, ShardedEmbedding, Table


def a_copy_looks_up_in_its_own_parameter() -> None:
    """Averages of models (EMA) are copies; a copy went on reading the rows of the original."""
    batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    for plan in ("row", "table", "replicated"):
        for options in ({}, {"sparse": True}, {"optimizer": RowwiseAdagrad(lr=0.1)}):
            first = make_pair(plan, **options)
            before = first.tables["a"].full_weight()
            if plan == "row":
                first.prefetch(batch)
            made = copy.deepcopy(nn.Sequential(first))[0]
            with torch.no_grad():
                made.weight("a").fill_(7.0)
            assert bool((made(batch)["a"] == 7).all())
            sum(x.sum() for x in made(batch).values()).backward()
            assert torch.equal(first.tables["a"].full_weight(), before)
            assert first.optimizer is None or first.optimizer is not made.optimizer
    tables = EmbeddingCollection([Table("a", ROWS, DIM), Table("b", 7, DIM)], plan="row", optimizer=RowwiseAdagrad(lr=0.1))
    made = copy.deepcopy(tables)  # torch cannot copy the second table's DTensor, which lies behind the first in one memory
    assert all(torch.equal(made.full_weight(name), tables.full_weight(name)) for name in "ab")
    assert made.optimizer.param_groups[0]["params"][1] is made.weight("b")
    single = copy.deepcopy(ShardedEmbedding(ROWS, DIM, plan="table"))
    nn.init.constant_(single.weight, 7.0)
    assert bool((single(torch.tensor([10])) == 7).all())


def a_parameter_with_other_memory_is_followed() -> None:
    """After `module.weight = Parameter(...)`, `.data =` or pickle, look-ups went on reading the old memory."""
    ids, expected = torch.arange(ROWS), torch.ones(ROWS, DIM)
    for plan in ("row", "replicated"):
        module = ShardedEmbedding(ROWS, DIM, plan=plan)
        ones = torch.ones_like(module.local)
        if plan == "replicated":
            module.weight.data = ones.clone()
            assert torch.equal(module(ids), expected)
        module.weight = nn.Parameter(module.shape_as(2 * ones))
        assert torch.equal(module(ids), 2 * expected)
        module.local.mul_(2)
        assert torch.equal(module(ids), 4 * expected)


def conversions_keep_gradients() -> None:
    """Conversions of the module lost the gradient."""
    module = ShardedEmbedding(ROWS, DIM, plan="row")
    module(torch.arange(ROWS)).sum().backward()
    grad = module.weight.grad
    assert module.float().weight.grad is grad
    assert module.double().weight.grad.dtype == torch.float64


REGRESSIONS = [
    a_copy_looks_up_in_its_own_parameter,
    a_parameter_with_other_memory_is_followed,
    conversions_keep_gradients,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
def test_regression(body, ranks):
    ranks(body, world_size=3)
