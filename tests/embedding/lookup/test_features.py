"""The features of a batch joined: compiled, by torch's operations, and as on a GPU, all the same."""

import copy
import importlib.util
import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from unisono.collectives import simulate_rank
from unisono.collectives.ledger.fake_values import known_values
from unisono.embedding import EmbeddingCollection, KeyedRagged, Layout, Ragged, RowwiseAdagrad, Table
from unisono.embedding.lookup import compiled, features, kernels
from unisono.embedding.lookup.features import JoinedFeatures, join_features
from unisono.embedding.lookup.input_dist import agree_on_requests
from unisono.embedding.lookup.kernels import Deduplicating, deduplicate
from unisono.embedding.lookup.storage import ShardStorage
from unisono.embedding.sharding.layouts import chunk, chunk_size
from unisono.embedding.sharding.table_groups import RowNumbering

PLAN = {
    "user": Layout.row(),
    "word": Layout.table(),
    "page": Layout.row(),
    "day": Layout.replicated(),
    "seen": Layout.table(),
    "norm": Layout.row(),
}
TABLES = [
    Table("user", 50, 4, padding_idx=3),
    Table("word", 40, 4, features=["title", "text"], mode="mean", padding_idx=0),
    Table("page", 30, 4, mode=None),
    Table("day", 7, 8, mode="max"),
    Table("seen", 9, 8, mode="mean"),
    Table("norm", 20, 4, max_norm=1.0, padding_idx=2),
]
ROWS = {feature: table.rows for table in TABLES for feature in table.features}


def make_storage() -> ShardStorage:
    return EmbeddingCollection(TABLES, plan=PLAN).engine.storage


def make_batch(bags: dict[str, int], dtype: torch.dtype = torch.int64, weights: bool = False) -> dict[str, Ragged]:
    torch.manual_seed(0)
    batch = {}
    for name, count in bags.items():
        lengths = torch.randint(4, (count,))
        values = torch.randint(min(ROWS[name], 6), (int(lengths.sum()),)).to(dtype)  # few ids: padding is among them
        own = torch.rand(len(values)) if weights and name in ("user", "norm") else None
        batch[name] = Ragged.from_lengths(values, lengths, own)
    return batch


def as_on_a_gpu(storage: ShardStorage, batch: features.Batch) -> JoinedFeatures | None:
    """join_features as it works on a device for which the host would have to wait; `checks` read."""
    with mock.patch.object(features, "is_on_host", return_value=False):
        joined = join_features(storage, batch)
    if joined is not None:
        assert joined.checks
        joined = joined if joined.are_valid(torch.cat([*joined.checks]).tolist()) else None
    return joined


def by_torch(storage: ShardStorage, batch: features.Batch) -> JoinedFeatures | None:
    with mock.patch.object(compiled, "handles", return_value=False):
        return join_features(storage, batch)


def assert_same(a: JoinedFeatures | None, b: JoinedFeatures | None) -> None:
    assert a is not None and b is not None and a.blocks.keys() == b.blocks.keys()
    for place, x in a.blocks.items():
        y = b.blocks[place]
        assert x.features == y.features and x.bag_counts == y.bag_counts and x.known_id_counts() == y.known_id_counts()
        pairs = [(getattr(x, name), getattr(y, name)) for name in ("rows", "lengths", "weights", "keep", "bags")]
        for one, other in [*pairs, (x.divisors(), y.divisors())]:
            assert (one is None) == (other is None)
            if isinstance(one, Tensor):
                assert torch.equal(one, other) and one.dtype == other.dtype


EVEN = dict.fromkeys(ROWS, 5)
UNEVEN = dict(zip(ROWS, (3, 0, 4, 1, 6, 2, 5), strict=True))


@pytest.mark.parametrize("bags", [EVEN, UNEVEN, dict.fromkeys(ROWS, 0)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_three_ways_are_the_same(bags, weights, dtype):
    storage, batch = make_storage(), make_batch(bags, dtype, weights)
    found = join_features(storage, batch)
    assert_same(found, by_torch(storage, batch))
    assert_same(found, as_on_a_gpu(storage, batch))
    if bags is not UNEVEN and not weights:
        keyed = KeyedRagged.from_dict(batch)
        assert_same(found, join_features(storage, keyed))
        assert_same(found, as_on_a_gpu(storage, keyed))


@pytest.mark.parametrize("bad", ["low id", "high id", "first offset", "last offset", "falling offsets", "far offsets"])
def test_bad_numbers_are_found(bad):
    storage, batch = make_storage(), make_batch(EVEN)
    values, offsets = batch["title"].values.clone(), batch["title"].offsets.clone()
    if bad in ("low id", "high id"):
        values[-1] = -1 if bad == "low id" else ROWS["title"]
    elif bad == "falling offsets":
        offsets[1:4] = torch.tensor([2, 1, 2])
    elif bad == "far offsets":
        offsets[2] += 2**32  # 32 bits would not show it
    else:
        offsets[0 if bad == "first offset" else -1] += 1
    batch["title"] = Ragged(values, offsets)
    for join in (join_features, by_torch, as_on_a_gpu):
        assert join(storage, batch) is None


@pytest.mark.parametrize("change", [(0, 1), (0, -9), (12, 3)])
def test_bad_lengths_are_found(change):
    storage, keyed = make_storage(), KeyedRagged.from_dict(make_batch(EVEN))
    lengths = keyed.lengths.clone()
    lengths[change[0]] += change[1]
    keyed = keyed._replace(lengths=lengths)
    for join in (join_features, as_on_a_gpu):
        assert join(storage, keyed) is None


def test_a_keyed_batch_in_order_is_not_copied():
    collection = EmbeddingCollection([Table("a", 9, 4), Table("b", 7, 4)], plan="row")
    keyed = KeyedRagged(("b", "a"), torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1]))
    order = features.FeatureOrder(collection.engine.storage, keyed.names, (False, False))
    flat = features._reorder(keyed, order)
    assert flat.ids is keyed.values and flat.lengths is keyed.lengths


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [7, 1000, 2**31 + 5, 2**33])
def test_rows_of_ids_at_the_edges_of_chunks(rows, chunks):
    """The compiled division by a product is exact."""
    size = chunk_size(rows, chunks)
    numbering = RowNumbering(size, tuple(k * 10**6 for k in range(-(-rows // size))))
    edges = {x for c in range(chunks) for edge in chunk(rows, chunks, c) for x in (edge - 1, edge, edge + 1)}
    ids = torch.tensor(sorted(x for x in edges if 0 <= x < rows))
    bags = Ragged.from_dense(ids)
    if compiled.load().library is None:
        pytest.skip("no C++ compiler")
    found = compiled.join([bags], [rows - 1], [numbering], [-1], torch.int64)
    assert found is not None and torch.equal(found[0], numbering.to_group_rows(ids, torch.int64))


def test_deduplicating_as_on_a_gpu():
    """The sort comes first, the unique numbers once the host knows how many they are."""
    torch.manual_seed(0)
    for count in (0, 1, 50):
        numbers = torch.randint(20, (count,), dtype=torch.int32)
        expected = deduplicate(numbers)
        with mock.patch.object(kernels, "is_on_host", return_value=False):
            started = Deduplicating(numbers)
        cuts = started.cuts([0, 7, 20]).tolist()
        found = started.finish(cuts[-1])
        for name in ("unique", "order", "starts", "counts", "inverse"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        assert cuts[1] == int((expected.unique < 7).sum())


def test_only_blocks_with_weights_have_weights():
    """A learned weight made the backward of a table without mode index its rows by bags; it crashed beside empty bags."""
    tables = [Table("a", 9, 4), Table("b", 9, 4, mode=None), Table("c", 9, 8)]
    collection = EmbeddingCollection(tables, plan="row")
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    batch = {
        "a": Ragged(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), weights),
        "b": Ragged.from_lists([[], [], [], [3]]),
        "c": Ragged.from_lists([[1]]),
    }
    for join in (join_features, as_on_a_gpu):
        joined = join(collection.engine.storage, batch)
        assert [block.weights is not None for block in joined.blocks.values()] == [True, False, False]
    found = collection(batch)
    (found["a"].sum() + found["b"].values.sum() + found["c"].sum()).backward()
    torch.testing.assert_close(weights.grad, collection.full_weight("a")[1:3].sum(1))


def test_an_id_of_a_table_without_rows_is_out_of_range():
    tables = [Table("a", 0, 4), Table("b", 9, 4)]
    storage = EmbeddingCollection(tables, plan="row").engine.storage
    batch = {"a": Ragged.from_lists([[0]]), "b": Ragged.from_lists([[1]])}
    assert all(join(storage, batch) is None for join in (join_features, by_torch, as_on_a_gpu))


def test_offsets_whose_differences_wrap_are_bad():
    storage, batch = make_storage(), make_batch(EVEN, torch.int32)
    count = batch["title"].values.numel()
    offsets = torch.tensor([0, 2**31 - 1, -(2**31), -1, 1, count], dtype=torch.int32)
    batch["title"] = Ragged(batch["title"].values, offsets)
    for join in (join_features, by_torch, as_on_a_gpu):
        assert join(storage, batch) is None
    with pytest.raises(ValueError, match="feature 'title': offsets must rise"):
        EmbeddingCollection(TABLES, plan=PLAN)(batch)


def test_no_tables():
    collection = EmbeddingCollection([])
    assert collection({}) == {}
    assert as_on_a_gpu_or_empty(collection.engine.storage) == {}


def as_on_a_gpu_or_empty(storage: ShardStorage) -> dict:
    with mock.patch.object(features, "is_on_host", return_value=False):
        joined = join_features(storage, {})
    return joined.blocks


def test_orders_are_few_and_not_copied():
    collection = EmbeddingCollection([Table(name, 9, 4) for name in "abcd"], plan="row")
    storage = collection.engine.storage
    for names in itertools.permutations("abcd"):
        collection({name: torch.tensor([1]) for name in names})
        collection(KeyedRagged(names, torch.arange(4), torch.ones(4, dtype=torch.int64)))
    assert len(storage.feature_orders) <= features._ORDERS
    assert not copy.deepcopy(collection).engine.storage.feature_orders


def test_the_default_device_does_not_matter():
    """A constant was made on the default device, and a compiled kernel got its pointer."""
    collection = EmbeddingCollection(TABLES, plan=PLAN)
    batch = make_batch(UNEVEN)
    expected = collection(batch)
    with torch.device("meta"):
        found = collection(batch)
        joined = as_on_a_gpu(collection.engine.storage, batch)
    assert joined is not None
    for name, x in expected.items():
        assert torch.equal(
            found[name].values if isinstance(x, Ragged) else found[name], x.values if isinstance(x, Ragged) else x
        )


def count_step(plan: str, tables: int, *, keyed: bool) -> tuple[int, int, int]:
    """Kernels and host waits of a step on a simulated GPU, and the waits of what remains to do after a prefetch."""
    with simulate_rank(4, 1) as ledger, known_values(ledger):
        collection = EmbeddingCollection(
            [Table(f"t{k}", 500, 16) for k in range(tables)], plan=plan, optimizer=RowwiseAdagrad(lr=0.1), device="cuda"
        )
        batch = {f"t{k}": Ragged.from_dense(torch.arange(12).view(6, 2) * (41 + 2 * k) % 500) for k in range(tables)}
        features = KeyedRagged.from_dict(batch) if keyed else batch
        if isinstance(features, KeyedRagged):
            features = features._replace(values=features.values.cuda(), lengths=features.lengths.cuda())
        else:
            features = {name: Ragged(x.values.cuda(), x.offsets.cuda()) for name, x in features.items()}
        for _ in range(2):  # the first step makes the constants of the order of features
            ledger.reset()
            torch.cat([*collection(features).values()]).sum().backward()
        kernels, waits = ledger.kernels, len(ledger.host_syncs)
        storage = collection.engine.storage
        requests = agree_on_requests(storage, features, storage.ranks)
        ledger.reset()
        found = collection.engine.finish(collection.engine.send(requests, storage.ranks))
        torch.cat([*found.values()]).sum().backward()
        return kernels, waits, len(ledger.host_syncs)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("plan", ["row", "table"])
def test_kernels_and_waits_do_not_grow_with_the_number_of_features(plan, keyed):
    few, many = count_step(plan, 8, keyed=keyed), count_step(plan, 24, keyed=keyed)
    assert few == many
    kernels, waits, waits_after_prefetch = many
    has_triton = importlib.util.find_spec("triton") is not None
    assert waits_after_prefetch == (0 if has_triton else 1)
    # A keyed batch on the owners' order tells the host nothing about its features: it waits for their numbers of ids, too.
    assert waits == 1 + waits_after_prefetch + (keyed and plan == "table")
    assert kernels <= (70 if has_triton else 90)
