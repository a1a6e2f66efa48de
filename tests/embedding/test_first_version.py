"""Defects that fresh eyes found in the first version of this package."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.embedding.whole_table import DIM, ROWS, layouts
from unisono.collectives import checked
from unisono.embedding import (
    EmbeddingCollection,
    Layout,
    Ragged,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
)
from unisono.embedding.lookup import input_dist, kernels
from unisono.embedding.optimizers import ParameterGradients
from unisono.embedding.sharding.layouts import LAYOUTS
from unisono.embedding.sharding.table_groups import RowNumbering


def make(plan: str, **options: Any) -> EmbeddingCollection:
    return EmbeddingCollection([Table("a", ROWS, 3), Table("b", 7, DIM, mode="mean")], plan=plan, **options)


def a_copy_looks_up_in_its_own_parameter() -> None:
    """Averages of models (EMA) are copies; lookups in a copy went on reading what its parameter had been."""
    batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    for plan in ("row", "table", "replicated"):
        for options in ({}, {"sparse": True}, {"optimizer": RowwiseAdagrad(lr=0.1)}):
            first = make(plan, **options)
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
    single = copy.deepcopy(ShardedEmbedding(ROWS, DIM, plan="table"))
    nn.init.constant_(single.weight, 7.0)
    assert bool((single(torch.tensor([10])) == 7).all())


def weights_drawn_anew_after_from_dense() -> None:
    torch.manual_seed(0)
    for module in (
        ShardedEmbedding.from_dense(nn.Embedding(ROWS, DIM)),
        ShardedEmbeddingBag.from_dense(nn.EmbeddingBag(ROWS, DIM, padding_idx=3)),
    ):
        module.reset_parameters(seed=1)
        again = ShardedEmbedding(ROWS, DIM, padding_idx=module.table.padding_idx)
        again.reset_parameters(seed=1)
        assert torch.equal(module.full_weight(), again.full_weight())


def int32_ids_in_a_family_of_more_rows_than_int32_counts() -> None:
    assert RowNumbering(1, (2**31,)).to_group_rows(torch.tensor([5], dtype=torch.int32), torch.int64).tolist() == [2**31 + 5]


def a_layout_by_its_kind_alone() -> None:
    torch.manual_seed(0)
    whole = nn.EmbeddingBag(ROWS, DIM)
    for layout in LAYOUTS.values():
        ids = torch.tensor([[1, 10, dist.get_rank()]])
        torch.testing.assert_close(ShardedEmbeddingBag.from_dense(whole, layout())(ids), whole(ids))


def max_norm_of_sixteen_bits_in_columns() -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, 6, max_norm=1.0, dtype=torch.bfloat16)
    ids = torch.arange(ROWS)
    for layout in layouts(dist.get_world_size()).values():
        ours = ShardedEmbedding.from_dense(dense, layout)
        torch.testing.assert_close(ours(ids), copy.deepcopy(dense)(ids), rtol=2**-7, atol=2**-9)


def ranks_without_a_part_of_a_table_send_the_same_dtype() -> None:
    plan = Layout.column([2, 1])
    with checked():
        for options in ({"max_norm": 0.5}, {"optimizer": RowwiseAdagrad(lr=0.1)}):
            module = ShardedEmbedding(ROWS, DIM, plan=plan, dtype=torch.float64, **options)
            module(torch.tensor([1, 10, dist.get_rank()])).sum().backward()


def nothing_lies_on_the_cpu_by_itself() -> None:
    """Seen on meta, since there is no GPU here: bags alone, no rows, and still all tensors of a request on one device."""
    engine, seen = ShardedEmbeddingBag(ROWS, DIM, plan="table", device="meta").engine, []
    ids = torch.zeros(2, dtype=torch.int64, device="meta")

    def group_equal(keys: torch.Tensor) -> kernels.Groups:
        seen.append(keys.device)
        return kernels.group_equal(torch.empty(0, dtype=keys.dtype))  # its like on meta does not exist

    with mock.patch.object(input_dist, "group_equal", group_equal):
        askings = [(input_dist.FeatureIds("weight", 0, ids, ids, None, None), True)]
        input_dist.make_request(engine.storage.groups[0], askings, engine.storage.row_numberings)
    assert seen == [ids.device]


def one_feature_by_its_name() -> None:
    assert Table("a", ROWS, DIM, features="user").features == ("user",)


def a_parameter_with_other_memory_is_followed() -> None:
    """Another Parameter, `.data =` (of which torch takes no notice in a DTensor) and pickle left look-ups in the old one."""
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
    module = ShardedEmbedding(ROWS, DIM, plan="row")
    module(torch.arange(ROWS)).sum().backward()
    grad = module.weight.grad
    assert module.float().weight.grad is grad
    assert module.double().weight.grad.dtype == torch.float64


def a_second_backward_raises() -> None:
    for optimizer in (None, RowwiseAdagrad(lr=0.1)):
        loss = ShardedEmbedding(ROWS, DIM, optimizer=optimizer)(torch.arange(3)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def prefetch_is_taken_by_all_or_none() -> None:
    collection = make("row")
    batch = {"a": torch.tensor([1, 9]), "b": torch.tensor([0, 4])}
    other = {"a": torch.tensor([2]), "b": torch.tensor([3])}
    collection.prefetch(batch)
    assert collection._prefetcher.take(dict(batch)) is not None  # the same tensors in another dict
    collection.prefetch(batch)
    out = collection(batch if dist.get_rank() else other)  # this hung
    assert len(out["a"]) == (2 if dist.get_rank() else 1)
    collection.prefetch({"a": torch.tensor([ROWS]), "b": torch.tensor([3])})
    collection.prefetch(batch)  # the error of a batch that nobody wants any more is nobody's
    assert len(collection(batch)["a"]) == 2
    weights = torch.ones(2, requires_grad=True)
    weighted = make("table")
    features = batch | {"a": Ragged(torch.tensor([1, 9]), torch.tensor([0, 2]), weights)}
    with torch.no_grad():
        weighted.prefetch(features)
    weighted(features)["a"].sum().backward()
    assert weights.grad is not None


def strict_loading_is_strict() -> None:
    module = ShardedEmbedding(ROWS, DIM)
    with pytest.raises(RuntimeError, match="Unexpected"):
        module.load_state_dict({**module.state_dict(), "bogus": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="to_empty"):
        ShardedEmbedding(ROWS, DIM, device="meta").load_state_dict(module.state_dict(), assign=True)


def frozen_tables_get_no_gradient() -> None:
    """A dense one was made and thrown away, of the largest tables most likely."""
    collection = make("row")
    collection.weight("a").requires_grad_(False)
    out = collection({"a": torch.tensor([1]), "b": torch.tensor([0])})
    with mock.patch.object(ParameterGradients, "_gradient", autospec=True, return_value=None) as made:
        (out["a"].sum() + out["b"].sum()).backward()
    assert [call.args[2] is None for call in made.call_args_list] == [True, False]


DEFECTS = [
    a_copy_looks_up_in_its_own_parameter,
    weights_drawn_anew_after_from_dense,
    int32_ids_in_a_family_of_more_rows_than_int32_counts,
    a_layout_by_its_kind_alone,
    max_norm_of_sixteen_bits_in_columns,
    ranks_without_a_part_of_a_table_send_the_same_dtype,
    nothing_lies_on_the_cpu_by_itself,
    one_feature_by_its_name,
    a_parameter_with_other_memory_is_followed,
    conversions_keep_gradients,
    a_second_backward_raises,
    prefetch_is_taken_by_all_or_none,
    strict_loading_is_strict,
    frozen_tables_get_no_gradient,
]


@pytest.mark.parametrize("body", DEFECTS, ids=lambda body: body.__name__)
def test_defect(body, ranks):
    ranks(body, world_size=3)
