"""Any table, layout, split and option that hypothesis can think of gives what torch.nn gives with the whole batch."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.embedding.reference import embedding_bag, local_gradient
from unisono.collectives.testing import run_ranks
from unisono.embedding import (
    SGD,
    EmbeddingCollection,
    Layout,
    Ragged,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
)
from unisono.embedding.lookup import kernels, output_dist

settled = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


@st.composite
def layouts(draw: Any, size: int) -> Layout:
    """Draw a layout of any kind, on any ranks in any order."""
    order = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
    answers = draw(st.sampled_from([None, "rows"]))
    return draw(
        st.sampled_from(
            [
                Layout.row(order),
                Layout.column(order, answers=answers),
                Layout.table(order[0], answers=answers),
                Layout.replicated(),
            ]
        )
    )


@st.composite
def tables(draw: Any, size: int, most_features: int) -> dict[str, Any]:
    """Draw a table; many are alike, so that they form groups."""
    mode = draw(st.sampled_from(["sum", "sum", "mean", "max", None]))
    rows = draw(st.integers(1, 9))
    by_frequency = mode != "max" and draw(st.sampled_from([False, False, True]))
    features = 1 if by_frequency else most_features  # torch counts the ids of one call, which is one feature
    max_norm = draw(st.sampled_from([None, None, 1.0]))
    norm_type = draw(st.sampled_from([float("inf"), 2.0, 3.5])) if max_norm else 2.0
    dim = draw(st.sampled_from([4, 4, 4, 1, 5]))
    if mode == "max":  # other rows would often be 1.0 but for the last bit, which then says which of them is the largest
        norm_type, dim = 2.0, 4
    bags = st.lists(st.sampled_from([3, 1, 0, 4, 2]), max_size=4)
    return {
        "rows": rows,
        "dim": dim,
        "mode": mode,
        "layout": draw(layouts(size)),
        "padding_idx": draw(st.none() | st.integers(-rows, rows - 1)),
        "max_norm": max_norm,
        "norm_type": norm_type,
        "scale_grad_by_freq": by_frequency,
        "weights": draw(st.sampled_from(["learned", "fixed", "none"])) if mode == "sum" else "none",
        "lengths": draw(st.lists(st.lists(bags, min_size=size, max_size=size), min_size=1, max_size=features)),
    }


@st.composite
def cases(draw: Any, most_tables: int) -> dict[str, Any]:
    size = draw(st.sampled_from([3, 2, 4, 1]))
    return {
        "tables": draw(st.lists(tables(size, 1 if most_tables == 1 else 2), min_size=1, max_size=most_tables)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "ints": draw(st.lists(st.sampled_from([torch.int64, torch.int32]), min_size=size, max_size=size)),
        "form": draw(st.sampled_from(["offsets", "last offset", "matrix"])),
        "sparse": draw(st.booleans()),
        "fused": draw(st.booleans()),
        "grad_reduce": draw(st.sampled_from(["mean", "sum"])),
        "block": draw(st.sampled_from([1, 3, 4096])),  # of rows or ids that are taken at a time
        "seed": draw(st.integers(0, 99)),
    }


def draw_bags(case: dict[str, Any], spec: dict[str, Any], feature: int, rank: int) -> Ragged:
    lengths = spec["lengths"][feature][rank]
    if case["form"] == "matrix":
        lengths = [max([0, *lengths])] * len(lengths)
    draw = torch.Generator().manual_seed(1000 * case["seed"] + 100 * spec["dim"] + 10 * feature + rank)
    ids = torch.randint(spec["rows"], (sum(lengths),), generator=draw, dtype=case["ints"][rank])
    weights = torch.randn(len(ids), generator=draw, dtype=case["dtype"]) if spec["weights"] != "none" else None
    return Ragged.from_lengths(ids, torch.tensor(lengths, dtype=torch.int64), weights)


def join(parts: list[Ragged]) -> Ragged:
    weights = None if parts[0].weights is None else torch.cat([part.weights for part in parts])
    lengths = torch.cat([part.lengths() for part in parts])
    return Ragged.from_lengths(torch.cat([part.values.to(torch.int64) for part in parts]), lengths, weights)


def look_up_whole(spec: dict[str, Any], weight: Tensor, bags: Ragged) -> Tensor:
    """Look up with torch, in one process."""
    options = {key: spec[key] for key in OPTIONS}
    if spec["mode"] is None:
        return nn.functional.embedding(bags.values, weight, **options)
    options |= {"mode": spec["mode"], "per_sample_weights": bags.weights, "include_last_offset": True}
    return embedding_bag(bags.values, weight, bags.offsets, **options)


class Expected:
    """What this rank must get for one feature. `weight` gets the gradient and the changes of the whole table."""

    def __init__(self, case: dict[str, Any], spec: dict[str, Any], feature: int, weight: Tensor) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        parts = [draw_bags(case, spec, feature, r) for r in range(size)]
        whole, self.mine = join(parts), parts[rank]
        learned = spec["weights"] == "learned"
        if learned:
            for bags in (whole, self.mine):
                bags.weights.requires_grad_()
        out = look_up_whole(spec, weight, whole)
        upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(case["seed"]))
        (out * upstream).sum().backward()
        counts = [part.values.numel() if spec["mode"] is None else part.lengths().numel() for part in parts]
        self.out, self.upstream = out.detach().split(counts)[rank], upstream.split(counts)[rank]
        self.weight_gradient = whole.weights.grad.split([part.values.numel() for part in parts])[rank] if learned else None

    def compare(self, out: Tensor) -> None:
        close(out, self.out)
        if self.weight_gradient is not None:
            close(self.mine.weights.grad, self.weight_gradient)


def close(found: Tensor, expected: Tensor) -> None:
    exact = expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-11 if exact else 1e-4, atol=1e-12 if exact else 1e-5)


def call(module: ShardedEmbedding | ShardedEmbeddingBag, bags: Ragged, form: str) -> Tensor:
    """Call the module with the arguments in one of their forms."""
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
    options = {key: spec[key] for key in OPTIONS}
    ours = {"grad_reduce": case["grad_reduce"], "sparse": case["sparse"]}
    if spec["mode"] is None:
        dense: Any = nn.Embedding(spec["rows"], spec["dim"], dtype=case["dtype"], **options)
        module: Any = ShardedEmbedding.from_dense(dense, spec["layout"], **ours)
    else:
        options |= {"mode": spec["mode"], "include_last_offset": case["form"] == "last offset"}
        dense = nn.EmbeddingBag(spec["rows"], spec["dim"], dtype=case["dtype"], **options)
        module = ShardedEmbeddingBag.from_dense(dense, spec["layout"], **ours)
    nn.init.normal_(dense.weight)  # the padding, too
    module.set_weight(dense.weight)
    expected = Expected(case, spec, 0, dense.weight)
    with mock.patch.object(kernels, "_BLOCK", case["block"]), mock.patch.object(output_dist, "_BLOCK", case["block"]):
        out = call(module, expected.mine, case["form"])
        (out * expected.upstream).sum().backward()
    expected.compare(out)
    close(local_gradient(module), dense.weight.grad / (dist.get_world_size() if case["grad_reduce"] == "mean" else 1))
    close(module.full_weight(), dense.weight.detach())  # max_norm changes it


@settings(max_examples=80, **settled)
@given(case=cases(most_tables=1))
def test_one_table_matches_one_process(case):
    run_ranks(one_table, case, world_size=len(case["ints"]))


def many_tables(case: dict[str, Any]) -> None:
    specs = {f"t{k}": spec for k, spec in enumerate(case["tables"])}
    names = {name: [f"{name} {k}" for k in range(len(spec["lengths"]))] for name, spec in specs.items()}
    keys = ("rows", "dim", "mode", *OPTIONS)
    collection = EmbeddingCollection(
        [Table(name, features=names[name], **{key: spec[key] for key in keys}) for name, spec in specs.items()],
        plan={name: spec["layout"] for name, spec in specs.items()},
        optimizer=SGD(lr=0.5) if case["fused"] else None,
        sparse=case["sparse"] and not case["fused"],
        grad_reduce=case["grad_reduce"],
        dtype=case["dtype"],
    )
    torch.manual_seed(case["seed"])
    weights = {name: torch.randn(spec["rows"], spec["dim"], dtype=case["dtype"]) for name, spec in specs.items()}
    for name, module in collection.tables.items():
        module.set_weight(weights[name].requires_grad_())
    expected = {
        feature: Expected(case, spec, k, weights[name]) for name, spec in specs.items() for k, feature in enumerate(names[name])
    }
    with mock.patch.object(kernels, "_BLOCK", case["block"]), mock.patch.object(output_dist, "_BLOCK", case["block"]):
        out = collection({feature: x.mine for feature, x in expected.items()})
        rows = {feature: x.values if isinstance(x, Ragged) else x for feature, x in out.items()}
        sum((rows[feature] * x.upstream).sum() for feature, x in expected.items()).backward()
    for feature, x in expected.items():
        x.compare(rows[feature])
    for name, module in collection.tables.items():
        gradient = weights[name].grad / (dist.get_world_size() if case["grad_reduce"] == "mean" else 1)
        if not case["fused"]:
            close(local_gradient(module), gradient)
        close(module.full_weight(), weights[name].detach() - 0.5 * gradient * case["fused"])


@settings(max_examples=80, **settled)
@given(case=cases(most_tables=4))
def test_many_tables_match_one_process(case):
    run_ranks(many_tables, case, world_size=len(case["ints"]))
