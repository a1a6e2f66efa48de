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
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
    grouping,
    requests,
)
from unisono.embedding.families import Address


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
    assert Address(1, (2**31,)).keys(torch.tensor([5], dtype=torch.int32), torch.int64).tolist() == [2**31 + 5]


def a_layout_by_its_kind_alone() -> None:
    torch.manual_seed(0)
    whole = nn.EmbeddingBag(ROWS, DIM)
    for kind in ("row", "column", "table", "grid", "replicated"):
        ids = torch.tensor([[1, 10, dist.get_rank()]])
        torch.testing.assert_close(ShardedEmbeddingBag.from_dense(whole, Layout(kind))(ids), whole(ids))


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

    def group(keys: torch.Tensor) -> grouping.Groups:
        seen.append(keys.device)
        return grouping.group(torch.empty(0, dtype=keys.dtype))  # its like on meta does not exist

    with mock.patch.object(requests, "group", group):
        askings = [(requests.Asking("weight", 0, ids, ids, None, None), True)]
        requests.make_request(engine.families[0], askings, engine.addresses)
    assert seen == [ids.device]


def one_feature_by_its_name() -> None:
    assert Table("a", ROWS, DIM, features="user").features == ("user",)


DEFECTS = [
    a_copy_looks_up_in_its_own_parameter,
    weights_drawn_anew_after_from_dense,
    int32_ids_in_a_family_of_more_rows_than_int32_counts,
    a_layout_by_its_kind_alone,
    max_norm_of_sixteen_bits_in_columns,
    ranks_without_a_part_of_a_table_send_the_same_dtype,
    nothing_lies_on_the_cpu_by_itself,
    one_feature_by_its_name,
]


@pytest.mark.parametrize("body", DEFECTS, ids=lambda body: body.__name__)
def test_defect(body, ranks):
    ranks(body, world_size=3)
