"""Many tables in one collection: one exchange, any mixture of layouts, and what one process gives."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.embedding.reference import DIM, ROWS, embedding_bag, layouts, local_gradient
from unisono.collectives import MismatchError, count_bytes
from unisono.embedding import SGD, Adam, EmbeddingCollection, KeyedRagged, Layout, Ragged, RowwiseAdagrad, Table
from unisono.embedding.lookup import features, kernels

TABLES = [
    Table("user", 13, 4, features=["user"], mode="sum"),
    Table("item", 9, 4, features=["seen", "bought"], mode="mean"),
    Table("word", 7, 6, features=["title"], mode="max"),
    Table("shop", 5, 4, features=["shop"], mode=None, padding_idx=1),
    Table("city", 6, 3, features=["city"], mode="sum", max_norm=1.0),
    Table("tag", 8, 4, features=["tag"], mode="sum", scale_grad_by_freq=True),
]


def draw_features(rank: int, seed: int = 0) -> dict[str, Ragged]:
    """A different number of bags on each rank, none on rank 1."""
    draw = torch.Generator().manual_seed(10 * seed + rank)
    bags = [3, 0, 5, 2][rank]
    found = {}
    for table in TABLES:
        for feature in table.features:
            lengths = torch.randint(4, (bags,), generator=draw)
            found[feature] = Ragged.from_lengths(torch.randint(table.rows, (int(lengths.sum()),), generator=draw), lengths)
    return found


def look_up_whole(weights: dict[str, nn.Parameter], features: dict[str, Ragged]) -> dict[str, torch.Tensor]:
    found = {}
    for table in TABLES:
        options = {"max_norm": table.max_norm, "scale_grad_by_freq": table.scale_grad_by_freq}
        for name in table.features:
            ids, offsets, _ = features[name]
            if table.mode is None:
                found[name] = nn.functional.embedding(ids, weights[table.name], table.padding_idx, **options)
            else:
                found[name] = embedding_bag(
                    ids, weights[table.name], offsets, mode=table.mode, include_last_offset=True, **options
                )
    return found


def join(parts: list[Ragged]) -> Ragged:
    return Ragged.from_lengths(torch.cat([x.values for x in parts]), torch.cat([x.lengths() for x in parts]))


def upstream(name: str, rank: int, like: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank * 1000 + len(name))
    return torch.randn(like.shape, dtype=like.dtype, generator=draw)


def make(plan, **options) -> EmbeddingCollection:
    torch.manual_seed(5)
    return EmbeddingCollection(TABLES, plan=plan, grad_reduce="sum", dtype=torch.float64, **options)


def matches(plans: list, ahead: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for plan in plans:
        collection = make(plan, optimizer=SGD(lr=0.1))
        weights = {name: nn.Parameter(module.full_weight()) for name, module in collection.tables.items()}
        batches = [[draw_features(r, seed) for r in range(size)] for seed in range(3)]
        for step, parts in enumerate(batches):
            out = collection(parts[rank])
            if ahead and step + 1 < len(batches):
                collection.prefetch(batches[step + 1][rank])
            whole = look_up_whole(weights, {name: join([p[name] for p in parts]) for name in parts[0]})
            loss, whole_loss = 0, 0
            for name, found in out.items():
                rows = found.values if isinstance(found, Ragged) else found
                sizes = [p[name].values.numel() if isinstance(found, Ragged) else p[name].lengths().numel() for p in parts]
                expected = whole[name].split(sizes)
                torch.testing.assert_close(rows, expected[rank])
                loss = loss + (rows * upstream(name, rank, rows)).sum()
                whole_loss = whole_loss + sum((x * upstream(name, r, x)).sum() for r, x in enumerate(expected))
            loss.backward()
            whole_loss.backward()
            with torch.no_grad():
                for p in weights.values():
                    p -= 0.1 * p.grad
                    p.grad = None
        for name, p in weights.items():
            torch.testing.assert_close(collection.tables[name].full_weight(), p.detach())


def plans(size: int) -> list:
    every = list(layouts(size).values())
    return [
        "auto",
        "row",
        "column",
        "table",
        "replicated",
        {table.name: every[k % len(every)] for k, table in enumerate(TABLES)},
        {table.name: every[(2 * k + 3) % len(every)] for k, table in enumerate(TABLES)},
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collection_matches_one_process(size, ranks):
    ranks(matches, plans(size), False, world_size=size)


def matches_as_on_a_gpu(plans: list) -> None:
    """All steps as where the host would have to wait for numbers."""
    with (
        mock.patch.object(features, "is_on_host", return_value=False),
        mock.patch.object(kernels, "is_on_host", return_value=False),
    ):
        matches(plans, ahead=False)


@pytest.mark.parametrize("size", [1, 3])
def test_the_steps_of_a_gpu_match_one_process(size, ranks):
    ranks(matches_as_on_a_gpu, plans(size), world_size=size)


def keyed_features_give_the_same(plan: Any) -> None:
    """On a rank without bags, too."""
    rank = dist.get_rank()
    tables = [Table("a", 11, 4), Table("b", 7, 4, mode="mean", padding_idx=2), Table("c", 5, 2, mode=None), Table("d", 6, 4)]
    bags = 2 * rank
    lists = {table.name: [[(7 * k + j) % table.rows for j in range(k % 3)] for k in range(bags)] for table in tables}
    batch = {name: Ragged.from_lists(found) for name, found in lists.items()}
    results = []
    for given in (batch, KeyedRagged.from_dict(batch), KeyedRagged.from_dict({name: batch[name] for name in "cadb"})):
        torch.manual_seed(3)
        collection = EmbeddingCollection(tables, plan=plan, optimizer=RowwiseAdagrad(lr=0.1))
        for ahead in (False, True):
            if ahead:
                collection.prefetch(given)
            found = collection(given)
            assert [*found] == [*(given.names if isinstance(given, KeyedRagged) else given)]
            rows = [x.values if isinstance(x := found[name], Ragged) else x for name in batch]
            sum((x * torch.linspace(0, 1, x.numel()).view_as(x)).sum() for x in rows).backward()
        assert isinstance(found["c"], Ragged) and torch.equal(found["c"].offsets, batch["c"].offsets)
        results.append([*(x.detach() for x in rows), *(collection.full_weight(table.name) for table in tables)])
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "plan", ["row", "table", "column", {"a": "row", "b": "table", "c": "replicated", "d": "table"}], ids=str
)
def test_keyed_features_give_the_same(plan, ranks):
    ranks(keyed_features_give_the_same, plan, world_size=3)


def test_prefetched_batches_give_the_same(ranks):
    ranks(matches, ["row", "auto"], True, world_size=3)


def one_feature_looks_into_two_tables() -> None:
    """As in TorchRec, whose tests do so by default."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tables = [
        Table("a", ROWS, 3, features=["x", "y"]),
        Table("b", ROWS, 4, features=["x"], mode="mean"),
        Table("c", ROWS, 3, features=["x"], mode=None),
    ]
    parts = [{name: Ragged.from_lists([[3, r, 3], [], [r + k]][: r + 1]) for k, name in enumerate("xy")} for r in range(size)]
    for plan in ("auto", "row", "table"):
        torch.manual_seed(1)
        sample = parts[rank] if plan == "auto" else None
        collection = EmbeddingCollection(
            tables, plan=plan, sample=sample, optimizer=SGD(lr=0.1), grad_reduce="sum", dtype=torch.float64
        )
        weights = {table.name: nn.Parameter(collection.full_weight(table.name)) for table in tables}
        collection.prefetch(parts[rank])
        out = collection(parts[rank])
        assert list(out) == ["x@a", "x@b", "x@c", "y"] and isinstance(out["x@c"], Ragged)
        loss = torch.zeros((), dtype=torch.float64)
        for r, part in enumerate(parts):
            ids, offsets, _ = part["x"]
            found = {
                "x@a": nn.functional.embedding_bag(ids, weights["a"], offsets, mode="sum", include_last_offset=True),
                "x@b": nn.functional.embedding_bag(ids, weights["b"], offsets, mode="mean", include_last_offset=True),
                "x@c": weights["c"][ids],
                "y": nn.functional.embedding_bag(
                    *part["y"][:1], weights["a"], part["y"].offsets, mode="sum", include_last_offset=True
                ),
            }
            loss = loss + sum(x.square().sum() for x in found.values())
            for name in found if r == rank else ():
                torch.testing.assert_close(out[name].values if name == "x@c" else out[name], found[name])
        sum((x.values if isinstance(x, Ragged) else x).square().sum() for x in out.values()).backward()
        loss.backward()
        for name, weight in weights.items():
            torch.testing.assert_close(collection.full_weight(name), weight.detach() - 0.1 * weight.grad)
        with pytest.raises(KeyError, match="missing features: x; the features are x, y"):
            collection({"y": parts[rank]["y"]})


@pytest.mark.parametrize("size", [1, 3])
def test_one_feature_looks_into_two_tables(size, ranks):
    ranks(one_feature_looks_into_two_tables, world_size=size)


def same_first_weights() -> list[float]:
    found = []
    for plan in plans(dist.get_world_size()):
        torch.manual_seed(5 + dist.get_rank())  # that of rank 0 counts
        made = EmbeddingCollection(TABLES, plan=plan)
        found.append({name: module.full_weight() for name, module in made.tables.items()})
    for other in found[1:]:
        for name, weight in other.items():
            assert torch.equal(weight, found[0][name]), name
    assert found[0]["shop"][1].abs().sum() == 0
    return [float(weight.sum()) for weight in found[0].values()]


def test_first_weights_do_not_depend_on_plan_or_ranks(ranks):
    sums = [ranks(same_first_weights, world_size=size)[0] for size in (1, 2, 4)]
    assert sums[0] == sums[1] == sums[2]


def communicates_once() -> None:
    size = dist.get_world_size()
    collection = EmbeddingCollection([Table(f"t{k}", 20 + k, 4) for k in range(6)], plan="row", optimizer=SGD(lr=1.0))
    batch = {f"t{k}": torch.arange(20).view(10, 2) for k in range(6)}
    with count_bytes() as traffic:
        out = collection(batch)
    calls = traffic.calls
    assert calls == 3 * 2 * (size - 1), traffic  # sizes, row numbers, rows: to and from every other rank
    with count_bytes() as traffic:
        sum(x.sum() for x in out.values()).backward()
    assert traffic.calls == 2 * (size - 1), traffic


def test_all_tables_share_the_exchanges(ranks):
    ranks(communicates_once, world_size=3)


def rounds_on_the_wire(dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    tables = [Table("a", 50, 16), Table("b", 50, 16)]
    plan = {"a": "row", "b": Layout.table(1)}
    exact = EmbeddingCollection(tables, plan=plan)
    torch.manual_seed(0)
    rounded = EmbeddingCollection(tables, plan=plan, wire_dtype=dtype)
    batch = {"a": torch.arange(50).view(25, 2), "b": torch.arange(50).view(25, 2)}
    with count_bytes() as full:
        x = exact(batch)
    with count_bytes() as half:
        y = rounded(batch)
    rows = 4 * 16 * (25 + 25) if dist.get_rank() == 1 else 4 * 16 * 25
    assert full.sent - half.sent == rows / 2
    return max(float(((x[name] - y[name]).abs() / (x[name].abs() + 1)).max().detach()) for name in x)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_sixteen_bits_on_the_wire_halve_it_within_their_rounding(dtype, error, ranks):
    found = max(ranks(rounds_on_the_wire, dtype, world_size=2))
    assert 0 < found <= 2 * error


def test_readers_of_nested_and_dense_features():
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)], layout=torch.jagged)
    collection = EmbeddingCollection([Table("a", 5, 2)], plan="row")
    expected = collection({"a": Ragged.from_lists([[1, 2], []])})["a"]
    assert torch.equal(collection({"a": nested})["a"], expected)
    assert torch.equal(collection({"a": torch.tensor([[1, 2]])})["a"], expected[:1])


def test_reader_of_keyed_jagged_tensors():
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="TorchRec is not installed")
    keyed = sparse.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 0, 1]))
    found = Ragged.from_keyed_jagged(keyed)
    assert found["a"].values.tolist() == [1, 2] and found["b"].offsets.tolist() == [0, 0, 1]


def test_results_may_be_changed_in_place():
    collection = EmbeddingCollection([Table("a", 5, 2), Table("b", 5, 2)], plan={"a": "row", "b": "table"})
    for x in collection({"a": torch.tensor([1]), "b": torch.tensor([2])}).values():
        x.relu_().sum()


def reset_rows() -> None:
    collection = EmbeddingCollection([Table("a", 9, 2)], plan="row", optimizer=SGD(lr=1.0))
    collection.reset_rows("a", torch.tensor([0, 8]))
    weight = collection.tables["a"].full_weight()
    assert (weight == 0).all(1).tolist() == [True, *[False] * 7, True]


def test_rows_can_be_reset_wherever_they_lie(ranks):
    ranks(reset_rows, world_size=2)


def make_two_tables(plan: Any, **options: Any) -> EmbeddingCollection:
    tables = [Table("a", ROWS, 3), Table("b", 7, DIM, padding_idx=2, max_norm=0.5)]
    return EmbeddingCollection(tables, plan=plan, grad_reduce="sum", dtype=torch.float64, **options)


def make_pair(plan: str, **options: Any) -> EmbeddingCollection:
    return EmbeddingCollection([Table("a", ROWS, 3), Table("b", 7, DIM, mode="mean")], plan=plan, **options)


def padding_and_max_norm_in_a_collection() -> None:
    """TorchRec has neither padding_idx nor max_norm."""
    for plan in ("row", "column", "table", "replicated"):
        module = make_two_tables(plan)
        before = module.tables["b"].full_weight()
        out = module({"a": torch.tensor([3]), "b": torch.tensor([[2, 4, 2]])})["b"]
        out.sum().backward()
        after = module.tables["b"].full_weight()
        assert not before[2].any() and float(before[4].norm()) > 0.5
        torch.testing.assert_close(after[4].norm(), torch.tensor(0.5, dtype=torch.float64))
        torch.testing.assert_close(out[0], after[4])
        assert local_gradient(module.tables["b"]).any(1).tolist() == [k == 4 for k in range(7)]


def fewer_tables_than_ranks_and_tables_on_some_ranks_only() -> None:
    """Other libraries need a table for each rank."""
    rank = dist.get_rank()
    for plan in ({"a": Layout.table(2), "b": Layout.table(2)}, {"a": Layout.row([2, 0]), "b": Layout.table(0)}):
        module = make_two_tables(plan)
        assert rank != 1 or not any(table.local.numel() for table in module.tables.values())
        out = module({"a": torch.tensor([rank, 3]), "b": torch.tensor([0, 1])})
        assert torch.equal(out["a"], module.tables["a"].full_weight()[[rank, 3]])


def test_one_feature_by_its_name():
    """features="user" made a feature of each letter."""
    assert Table("a", ROWS, DIM, features="user").features == ("user",)


REGRESSIONS = [
    padding_and_max_norm_in_a_collection,
    fewer_tables_than_ranks_and_tables_on_some_ranks_only,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
def test_regression(body, ranks):
    ranks(body, world_size=3)


STACKED = [
    Table("user", 13, 4),
    Table("item", 9, 4, features=["seen", "bought"], mode="mean", padding_idx=2),
    Table("tag", 8, 4, mode="max"),
]


def draw_stacked(rank: int, seed: int) -> dict[str, Ragged]:
    draw = torch.Generator().manual_seed(10 * seed + rank)
    found = {}
    for name in ("seen", "tag", "user", "bought"):
        lengths = torch.randint(4, ([3, 0, 5, 2][rank],), generator=draw)
        found[name] = Ragged.from_lengths(torch.randint(8, (int(lengths.sum()),), generator=draw), lengths)
    return found


def stack_matches(plan: Any, ahead: bool) -> None:
    """Stacked outputs and the steps that follow from them are those of torch.stack."""
    rank = dist.get_rank()
    found = []
    for stack in (True, False):
        torch.manual_seed(5)
        collection = EmbeddingCollection(STACKED, plan=plan, optimizer=RowwiseAdagrad(lr=0.1), dtype=torch.float64)
        batches = [draw_stacked(rank, seed) for seed in range(3)]
        for step, batch in enumerate(batches):
            out = collection(batch, stack=True) if stack else torch.stack(list(collection(batch).values()), 1)
            if ahead and step + 1 < len(batches):
                collection.prefetch(batches[step + 1])
            factors = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(rank))
            (out * factors).sum().backward()
            found.append(out.detach())
        found += [collection.full_weight(table.name) for table in STACKED]
    half = len(found) // 2
    for a, b in zip(found[:half], found[half:], strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "plan", ["row", "table", "column", "replicated", {"user": "row", "item": "table", "tag": "column"}], ids=str
)
def test_stack_matches_torch_stack(plan, ranks):
    ranks(stack_matches, plan, plan == "table", world_size=3)


def stack_rejects() -> None:
    """A bad stack on one rank raises on all, also after a prefetch."""
    collection = EmbeddingCollection([Table("a", 5, 4), Table("b", 5, 4)], plan="row")
    batch = {"a": torch.arange(3), "b": torch.arange(2 if dist.get_rank() == 1 else 3)}
    for ahead in (False, True):
        if ahead:
            collection.prefetch(batch)
        with pytest.raises(MismatchError, match=r"numbers of bags: \{'a': 3, 'b': 2\}"):
            collection(batch, stack=True)
    assert collection(batch)["a"].shape == (3, 4)
    wide = EmbeddingCollection([Table("a", 5, 4), Table("b", 5, 6)], plan="row")
    with pytest.raises(MismatchError, match=r"different widths: \[4, 6\]"):
        wide(batch, stack=True)
    rows = EmbeddingCollection([Table("a", 5, 4), Table("b", 5, 4, mode=None)], plan="row")
    with pytest.raises(MismatchError, match="table 'b' has no mode"):
        rows(batch, stack=True)


def test_stack_rejects_outputs_of_different_shapes(ranks):
    ranks(stack_rejects, world_size=2)


def grows(plans: tuple[str, str], optimizer: Any) -> dict[str, Tensor]:
    """Train small tables, copy them into larger ones, and train on."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ids = torch.arange(12).tensor_split(world)[rank]
    made = []
    for plan, rows in zip((plans[0], *plans), (12, 12, 31), strict=True):
        torch.manual_seed(rows)
        tables = [Table("a", rows, 4), Table("b", rows - 1, 3)]
        made.append(EmbeddingCollection(tables, plan=plan, optimizer=optimizer, grad_reduce="sum", dtype=torch.float64))
    twin, small, large = made
    before = large.full_weight("a")[12:]
    for collection in (twin, twin, twin, twin, small, small, None, large, large):
        if collection is None:
            large.copy_rows(small)
            continue
        found = collection({"a": ids * 5 % 12, "b": ids * 7 % 11})
        (found["a"].square().sum() + found["b"].sum()).backward()
    assert torch.equal(large.full_weight("a")[12:], before), "new rows keep their initial weights"
    with pytest.raises(ValueError, match=r"table 'a' of shape \(31, 4\) does not fit in \(12, 4\)"):
        small.copy_rows(large)
    found = {name: large.full_weight(name)[:rows] for name, rows in (("a", 12), ("b", 11))}
    for name, rows in found.items():  # as if the tables had not grown
        torch.testing.assert_close(rows, twin.full_weight(name), rtol=1e-12, atol=1e-12)
    return found


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowwiseAdagrad(lr=0.1)], ids=lambda rule: type(rule).__name__)
def test_rows_are_copied_into_larger_tables_with_their_state(ranks, optimizer):
    expected = grows(("table", "row"), optimizer)
    assert (expected["a"] != expected["a"][0]).any()
    for plans in (("row", "row"), ("column", "table"), ("table", "column")):
        for found in ranks(grows, plans, optimizer, world_size=3):
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)
