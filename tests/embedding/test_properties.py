"""Any table, layout, split of the batch and option that hypothesis can think of gives what torch.nn gives with the whole batch."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.embedding.whole_table import local_gradient
from unisono.collectives.testing import run_ranks
from unisono.embedding import SGD, EmbeddingCollection, Layout, Ragged, ShardedEmbedding, ShardedEmbeddingBag, Table, grouping, pooling

relaxed = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def layouts(draw: Any, size: int) -> Layout:
    """Of any kind, on any ranks in any order."""
    order = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
    columns = draw(st.sampled_from([n for n in range(1, len(order) + 1) if len(order) % n == 0]))
    answers = draw(st.sampled_from([None, "rows"]))
    return draw(
        st.sampled_from(
            [
                Layout.row(order),
                Layout.column(order, answers=answers),
                Layout.table(order[0], answers=answers),
                Layout.grid([order[k : k + columns] for k in range(0, len(order), columns)]),
                Layout.replicated(),
            ]
        )
    )


@st.composite
def tables(draw: Any, size: int) -> dict[str, Any]:
    mode = draw(st.sampled_from(["sum", "mean", "max", None]))
    rows = draw(st.integers(1, 9))
    return {
        "rows": rows,
        "dim": draw(st.integers(1, 5)),
        "mode": mode,
        "layout": draw(layouts(size)),
        "padding_idx": draw(st.none() | st.integers(-rows, rows - 1)),
        "max_norm": draw(st.sampled_from([None, None, 0.7, 1.5])),
        "norm_type": draw(st.sampled_from([2.0, 1.0, 3.5, float("inf")])),
        "scale_grad_by_freq": mode != "max" and draw(st.booleans()),
        "weights": draw(st.sampled_from(["none", "fixed", "learned"])) if mode == "sum" else "none",
    }


@st.composite
def cases(draw: Any, most_tables: int) -> dict[str, Any]:
    size = draw(st.sampled_from([1, 2, 3, 4]))
    bags = st.lists(st.integers(0, 4), max_size=4)
    each = draw(st.lists(tables(size), min_size=1, max_size=most_tables))
    return {
        "tables": each,
        "lengths": [draw(st.lists(bags, min_size=size, max_size=size)) for _ in each],
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "ints": draw(st.lists(st.sampled_from([torch.int64, torch.int32]), min_size=size, max_size=size)),
        "form": draw(st.sampled_from(["offsets", "last offset", "matrix"])),
        "sparse": draw(st.booleans()),
        "fused": draw(st.booleans()),
        "grad_reduce": draw(st.sampled_from(["mean", "sum"])),
        "block": draw(st.sampled_from([1, 3, 4096])),  # of rows or ids that are taken at a time
        "seed": draw(st.integers(0, 99)),
    }


def draw_bags(case: dict[str, Any], table: int, rank: int) -> Ragged:
    spec, lengths = case["tables"][table], case["lengths"][table][rank]
    if case["form"] == "matrix":
        lengths = [max([0, *lengths])] * len(lengths)
    draw = torch.Generator().manual_seed(1000 * case["seed"] + 10 * table + rank)
    ids = torch.randint(spec["rows"], (sum(lengths),), generator=draw, dtype=case["ints"][rank])
    weights = torch.randn(len(ids), generator=draw, dtype=case["dtype"]) if spec["weights"] != "none" else None
    return Ragged.from_lengths(ids, torch.tensor(lengths, dtype=torch.int64), weights)


def join(parts: list[Ragged]) -> Ragged:
    weights = None if parts[0].weights is None else torch.cat([part.weights for part in parts])
    lengths = torch.cat([part.lengths() for part in parts])
    return Ragged.from_lengths(torch.cat([part.values.to(torch.int64) for part in parts]), lengths, weights)


def look_up_whole(spec: dict[str, Any], weight: Tensor, bags: Ragged) -> Tensor:
    """By torch, in one process."""
    options = {key: spec[key] for key in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")}
    if spec["mode"] is None:
        return nn.functional.embedding(bags.values, weight, **options)
    return nn.functional.embedding_bag(
        bags.values, weight, bags.offsets, mode=spec["mode"], per_sample_weights=bags.weights, include_last_offset=True, **options
    )


class Whole:
    """What all ranks must get for one table: values, gradients, the table itself."""

    def __init__(self, case: dict[str, Any], table: int, weight: Tensor) -> None:
        spec, size = case["tables"][table], dist.get_world_size()
        self.parts = [draw_bags(case, table, rank) for rank in range(size)]
        bags = join(self.parts)
        self.learned = spec["weights"] == "learned"
        if self.learned:
            bags.weights.requires_grad_()
        self.weight = weight.clone().requires_grad_()
        out = look_up_whole(spec, self.weight, bags)
        upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(case["seed"]))
        (out * upstream).sum().backward()
        self.gradient = self.weight.grad / (size if case["grad_reduce"] == "mean" else 1)
        counts = [part.values.numel() if spec["mode"] is None else part.lengths().numel() for part in self.parts]
        rank = dist.get_rank()
        self.out, self.upstream = out.detach().split(counts)[rank], upstream.split(counts)[rank]
        ids = [part.values.numel() for part in self.parts]
        self.weight_gradient = bags.weights.grad.split(ids)[rank] if self.learned else None

    def mine(self) -> Ragged:
        bags = self.parts[dist.get_rank()]
        if self.learned:
            bags.weights.requires_grad_()
        return bags


def close(found: Tensor, expected: Tensor) -> None:
    exact = expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-7 if exact else 1e-4, atol=1e-9 if exact else 1e-5)


def small_blocks(case: dict[str, Any]) -> Any:
    return mock.patch.multiple(grouping, _BLOCK=case["block"]), mock.patch.multiple(pooling, _BLOCK=case["block"])


def call(module: ShardedEmbedding | ShardedEmbeddingBag, bags: Ragged, form: str) -> Tensor:
    """As each form of arguments has it."""
    if isinstance(module, ShardedEmbedding):
        return module(bags.values)
    if form == "matrix":
        n = bags.lengths().numel()
        shape = (n, bags.values.numel() // n if n else 2)
        return module(bags.values.view(shape), None, None if bags.weights is None else bags.weights.view(shape))
    offsets = bags.offsets.to(bags.values.dtype)
    return module(bags.values, offsets if form == "last offset" else offsets[:-1], bags.weights)


def one_table(case: dict[str, Any]) -> None:
    (spec,) = case["tables"]
    torch.manual_seed(case["seed"])
    options = {key: spec[key] for key in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")}
    ours = {"grad_reduce": case["grad_reduce"], "sparse": case["sparse"]}
    if spec["mode"] is None:
        dense: Any = nn.Embedding(spec["rows"], spec["dim"], dtype=case["dtype"], **options)
        module: Any = ShardedEmbedding.from_dense(dense, spec["layout"], **ours)
    else:
        options |= {"mode": spec["mode"], "include_last_offset": case["form"] == "last offset"}
        dense = nn.EmbeddingBag(spec["rows"], spec["dim"], dtype=case["dtype"], **options)
        module = ShardedEmbeddingBag.from_dense(dense, spec["layout"], **ours)
    whole = Whole(case, 0, dense.weight.detach())
    bags = whole.mine()
    first, second = small_blocks(case)
    with first, second:
        out = call(module, bags, case["form"])
        (out * whole.upstream).sum().backward()
    close(out, whole.out)
    close(local_gradient(module), whole.gradient)
    close(module.full_weight(), whole.weight.detach())  # max_norm changes it
    if whole.learned:
        close(bags.weights.grad, whole.weight_gradient)


@relaxed
@given(case=cases(most_tables=1))
def test_one_table_matches_one_process(case):
    run_ranks(one_table, case, world_size=len(case["ints"]))


def many_tables(case: dict[str, Any]) -> None:
    made = [
        Table(f"t{k}", mode=spec["mode"], **{key: spec[key] for key in KEYS}) for k, spec in enumerate(case["tables"])
    ]
    collection = EmbeddingCollection(
        made,
        plan={f"t{k}": spec["layout"] for k, spec in enumerate(case["tables"])},
        optimizer=SGD(lr=0.5) if case["fused"] else None,
        sparse=case["sparse"] and not case["fused"],
        grad_reduce=case["grad_reduce"],
        dtype=case["dtype"],
    )
    wholes = {f"t{k}": Whole(case, k, collection.tables[f"t{k}"].full_weight()) for k in range(len(made))}
    batch = {name: whole.mine() for name, whole in wholes.items()}
    first, second = small_blocks(case)
    with first, second:
        out = {name: x.values if isinstance(x, Ragged) else x for name, x in collection(batch).items()}
        sum((out[name] * whole.upstream).sum() for name, whole in wholes.items()).backward()
    for name, whole in wholes.items():
        close(out[name], whole.out)
        module, after = collection.tables[name], whole.weight.detach()
        if case["fused"]:
            after = after - 0.5 * whole.gradient
        else:
            close(local_gradient(module), whole.gradient)
        close(module.full_weight(), after)
        if whole.learned:
            close(batch[name].weights.grad, whole.weight_gradient)


KEYS = ("rows", "dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


@relaxed
@given(case=cases(most_tables=4))
def test_many_tables_match_one_process(case):
    run_ranks(many_tables, case, world_size=len(case["ints"]))
