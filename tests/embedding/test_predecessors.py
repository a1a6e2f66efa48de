"""Each known defect of the predecessors, by its place in notes/embedding.md, is right here.

ST is torch's ShardedTensor ops, DT DTensor's embedding, TR TorchRec, ASKED what their users ask for.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embedding.whole_table import WholeBag, layouts, local_gradient
from unisono.collectives import all_reduce
from unisono.embedding import (
    SGD,
    EmbeddingCollection,
    IdOutOfRange,
    Layout,
    Ragged,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
)

ROWS, DIM = 11, 5
Bags = list[list[int]]


def law(dense: Any, everyones: Sequence[Bags], *, steps: int = 1, sparse: bool = False) -> None:
    """`steps` steps of torch's SGD on all layouts against one process; `everyones` are the bags of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyones = everyones[:size]
    flat = [[number for bag in bags for number in bag] for bags in everyones]
    pooled = isinstance(dense, nn.EmbeddingBag)
    counts = [len(bags) if pooled else len(ids) for bags, ids in zip(everyones, flat, strict=True)]
    upstream = torch.randn(sum(counts), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def look_up(module: Any, bags: Bags, ids: list[int]) -> Tensor:
        given = torch.tensor(ids, dtype=torch.int64)
        return module(given, torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]) if pooled else module(given)

    for layout in layouts(size).values():
        whole = copy.deepcopy(dense)
        ours = (ShardedEmbeddingBag if pooled else ShardedEmbedding).from_dense(whole, layout, grad_reduce="sum", sparse=sparse)
        parameter = ours.weight
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (whole, ours)]
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = look_up(whole, [bag for bags in everyones for bag in bags], [number for ids in flat for number in ids])
            (expected * upstream).sum().backward()
            out = look_up(ours, everyones[rank], flat[rank])
            (out * upstream.split(counts)[rank]).sum().backward()
            torch.testing.assert_close(out, expected.split(counts)[rank])
            torch.testing.assert_close(local_gradient(ours), whole.weight.grad)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours.full_weight(), whole.weight.detach())
        assert ours.weight is parameter and parameter.is_leaf and parameter.requires_grad


def bag(**options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return WholeBag(ROWS, DIM, dtype=torch.float64, **{"mode": "sum", **options})


def embedding(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, DIM, dtype=torch.float64, **options)


UPPER: list[Bags] = [[[6, 10], [7]], [[9, 9, 8]], [[10], [6, 8, 7]]]
MIXED: list[Bags] = [[[0, 3, 3], [], [10]], [[5, 3]], [[3], [3, 3, 9, 1], []]]


def st_01_row_max_norm_when_a_rank_has_no_masked_id() -> None:
    law(bag(max_norm=1.0), UPPER)
    law(embedding(max_norm=1.0), UPPER)


def st_02_mean_with_padding() -> None:
    law(bag(mode="mean", padding_idx=3), MIXED)


def st_03_mean_of_an_empty_bag() -> None:
    law(bag(mode="mean"), [[[], [4]], [[]], [[], [], [2, 3]]])


def st_04_gradient_of_max() -> None:
    law(bag(mode="max"), MIXED)
    ties = bag(mode="max")
    ties.weight.data.round_()  # many rows with the same largest number: the first of the bag gets the gradient
    law(ties, MIXED)


def zero(rows: Tensor, draw: torch.Generator) -> None:
    rows.zero_()


def st_05_weights_and_ids_above_two_to_the_24() -> None:
    """Around 2^24, where float32 ends to know neighbours. Row n of the table is n % 997."""
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


def st_06_max_norm_keeps_the_parameter_over_steps() -> None:
    law(bag(max_norm=1.0), MIXED, steps=3)
    law(embedding(max_norm=1.0, norm_type=1.0), MIXED, steps=3)


def st_07_more_bags_than_ids_and_no_ids() -> None:
    for mode in ("sum", "mean", "max"):
        law(bag(mode=mode), [[[], [], [2], []], [], [[], []]])
        law(bag(mode=mode), [[[], []], [], [[]]])
        law(bag(mode=mode), [[], [], []])
    law(embedding(), [[], [[1]], []])


def st_08_ragged_ids_across_ranks() -> None:
    law(bag(), [[[1] * 40, [2, 3]], [[4]], [[5, 6], *[[7]] * 9]])


def st_09_the_error_has_numbers_and_the_right_ones() -> None:
    for layout in layouts(dist.get_world_size()).values():
        module = ShardedEmbeddingBag(ROWS, DIM, plan=layout)
        with pytest.raises(IdOutOfRange, match=r"id 11 at position 1 .* has 11 rows, 0 to 10"):
            module(torch.tensor([[10, 11]]))


class NewTensors(TorchDispatchMode):
    """The largest number of elements that any operation gave which are not those of `known` tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known, self.largest = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
        return out


def st_10_nothing_of_the_size_of_a_shard_is_made() -> None:
    """Neither a copy of the shard, nor its norms, nor, with a fused optimizer, its gradient."""
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


def dt_01_a_rank_has_the_gradient_of_its_rows_only() -> None:
    module = ShardedEmbedding(ROWS, DIM, plan="row")
    module(torch.tensor([0, 5, 10])).sum().backward()
    assert module.weight.grad.to_local().shape == module.box.shape and module.box.shape[0] < ROWS


def dt_02_ids_out_of_range_are_no_zeros() -> None:
    for layout in layouts(dist.get_world_size()).values():
        with pytest.raises(IndexError):
            ShardedEmbedding(ROWS, DIM, plan=layout)(torch.tensor([ROWS]))


def dt_03_the_output_is_read_twice_and_the_table_twice() -> None:
    whole, rank = embedding(), dist.get_rank()
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


def dt_04_gradients_scaled_by_frequency() -> None:
    law(embedding(scale_grad_by_freq=True), MIXED)
    law(bag(scale_grad_by_freq=True), MIXED)


def dt_05_max_norm_and_sparse() -> None:
    law(embedding(max_norm=1.0, padding_idx=3), MIXED, sparse=True, steps=2)


def tr_01_gradients_are_divided_only_if_asked() -> None:
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


def collection(plan: Any, **options: Any) -> EmbeddingCollection:
    tables = [Table("a", ROWS, 3), Table("b", 7, DIM, padding_idx=2, max_norm=0.5)]
    return EmbeddingCollection(tables, plan=plan, grad_reduce="sum", dtype=torch.float64, **options)


def tr_02_weights_get_their_gradient_if_they_want_it() -> None:
    ids, offsets = torch.tensor([1, 4, dist.get_rank()]), torch.tensor([0, 2, 3])
    for layout in layouts(dist.get_world_size()).values():
        for learned in (True, False):
            module = collection({"a": layout, "b": "table"}, optimizer=SGD(lr=0.0))
            weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=learned)
            out = module({"a": Ragged(ids, offsets, weights), "b": ids})["a"]
            (out * torch.tensor([[1.0], [10.0]], dtype=torch.float64)).sum().backward()
            sums = module.tables["a"].full_weight()[ids].sum(1) * torch.tensor([1.0, 1.0, 10.0], dtype=torch.float64)
            torch.testing.assert_close(weights.grad, sums if learned else None)


def tr_03_ids_999_and_minus_5_are_errors() -> None:
    for plan in ("row", "column", "table", "replicated"):
        for number in (999, -5):
            with pytest.raises(IndexError, match=f"id {number} .*feature 'a' .*table 'a' has 11 rows"):
                collection(plan)({"a": torch.tensor([3, number]), "b": torch.tensor([0, 1])})


def tr_04_padding_and_max_norm_in_a_collection() -> None:
    for plan in ("row", "column", "table", "replicated"):
        module = collection(plan)
        before = module.tables["b"].full_weight()
        out = module({"a": torch.tensor([3]), "b": torch.tensor([[2, 4, 2]])})["b"]
        out.sum().backward()
        after = module.tables["b"].full_weight()
        assert not before[2].any() and float(before[4].norm()) > 0.5
        torch.testing.assert_close(after[4].norm(), torch.tensor(0.5, dtype=torch.float64))
        torch.testing.assert_close(out[0], after[4])
        assert local_gradient(module.tables["b"]).any(1).tolist() == [k == 4 for k in range(7)]


def tr_05_a_checkpoint_loads_into_any_other_layout() -> None:
    """From row to each other layout in turn, and back to row."""
    first = collection("row", optimizer=RowwiseAdagrad(lr=0.1))
    for _ in range(2):
        sum(x.sum() for x in first({"a": torch.tensor([3, 9]), "b": torch.tensor([0, 1])}).values()).backward()
    last = first
    for layout in [*layouts(dist.get_world_size()).values(), Layout.row()]:
        loaded = collection({"a": layout, "b": layout}, optimizer=RowwiseAdagrad(lr=0.1))
        loaded.load_state_dict(last.state_dict())
        last = loaded
    for name in ("a", "b"):
        assert torch.equal(last.tables[name].local, first.tables[name].local)
        assert torch.equal(last.tables[name].states["sum"], first.tables[name].states["sum"])
        assert last.tables[name].full_weight().isfinite().all() and all_reduce(last.tables[name].states["sum"].sum()) > 0


def asked_01_fewer_tables_than_ranks_and_tables_on_some_ranks_only() -> None:
    rank = dist.get_rank()
    for plan in ({"a": Layout.table(2), "b": Layout.table(2)}, {"a": Layout.row([2, 0]), "b": Layout.table(0)}):
        module = collection(plan)
        assert rank != 1 or not any(table.local.numel() for table in module.tables.values())
        out = module({"a": torch.tensor([rank, 3]), "b": torch.tensor([0, 1])})
        assert torch.equal(out["a"], module.tables["a"].full_weight()[[rank, 3]])


def asked_02_tables_of_a_part_of_the_ranks() -> None:
    group = dist.new_group([2, 0], sort_ranks=False)
    if dist.get_rank() == 1:
        return
    whole, rank = embedding(), dist.get_rank(group)
    everyones = [torch.tensor([1, 8]), torch.tensor([[8, 8, 3]])]
    for layout in layouts(2).values():
        ours = ShardedEmbedding.from_dense(whole, layout, group=group, grad_reduce="sum")
        out = ours(everyones[rank])
        (out * (rank + 1)).sum().backward()
        torch.testing.assert_close(out, whole(everyones[rank]))
        counts = torch.tensor([0.0, 1, 0, 2, 0, 0, 0, 0, 5, 0, 0], dtype=torch.float64)
        torch.testing.assert_close(local_gradient(ours), counts[:, None].expand(ROWS, DIM))


DEFECTS = {name: body for name, body in globals().items() if name.startswith(("st_", "dt_", "tr_", "asked_"))}


@pytest.mark.parametrize("name", DEFECTS)
def test_defect(name, ranks):
    if name.startswith("st_"):
        ranks(DEFECTS[name], world_size=1)
    ranks(DEFECTS[name], world_size=3)


def test_all_numbered_defects_of_sharded_tensor_are_here():
    assert sorted(int(name.split("_")[1]) for name in DEFECTS if name.startswith("st_")) == list(range(1, 11))
