"""Tables in host memory give the same bits as tables on the device, for any cache, and in checkpoints, too."""

import copy
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embedding.reference import DIM, ROWS, layouts
from tests.embedding.test_optimizers import RULES, train_sharded, train_whole
from unisono.collectives import MismatchError, simulate_rank
from unisono.collectives.ledger.fake_values import known_values
from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Layout,
    Ragged,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
    quantize,
)
from unisono.embedding.lookup.row_cache import RowCache

TABLES = [
    Table("plain", ROWS, DIM),
    Table("padded", 23, DIM, features=["padded", "more"], padding_idx=3),
    Table("mean", 9, 4, mode="mean", max_norm=0.5, padding_idx=0),
    Table("max", 17, 4, mode="max"),
    Table("rows", 6, DIM, mode=None, scale_grad_by_freq=True),
]
DECAYING = [
    SGD(lr=0.1, weight_decay=0.1),
    RowwiseAdagrad(lr=0.1, weight_decay=0.1),
    Adagrad(lr=0.1, weight_decay=0.1),
    Adam(lr=0.1, weight_decay=0.1),
]


def draw_features(step: int, rank: int) -> dict[str, Ragged]:
    """Bags of any length; one rank has none, another one in each step."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    found = {}
    for table in TABLES:
        for feature in table.features:
            bags = 0 if (rank + step) % 3 == 1 else 1 + rank
            lengths = torch.randint(5, (bags,), generator=draw)
            offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
            ids = torch.randint(table.rows, (int(offsets[-1]),), generator=draw)
            weights = torch.rand(len(ids), generator=draw, dtype=torch.float64) if feature == "plain" else None
            found[feature] = Ragged(ids, offsets, weights)
    return found


def make(layout: Layout, optimizer: Any = None, **options: Any) -> EmbeddingCollection:
    made = EmbeddingCollection(
        TABLES, plan={table.name: layout for table in TABLES}, optimizer=optimizer, dtype=torch.float64, **options
    )
    made.reset_parameters(seed=5)
    return made


def train(collection: EmbeddingCollection, steps: int = 4) -> list[Tensor]:
    found = []
    for step in range(steps):
        features = draw_features(step, dist.get_rank())
        if step == 2:
            collection.prefetch(features)
        outputs = [x.values if isinstance(x, Ragged) else x for x in collection(features).values()]
        found += outputs
        if step == 1:
            outputs = outputs[1:]  # a feature outside the loss
        sum((x * x).sum() for x in outputs).backward()
    return found


def entries(collection: nn.Module) -> dict[str, Tensor]:
    """This rank's part of everything in a checkpoint."""
    return {name: (x.to_local() if hasattr(x, "to_local") else x).clone() for name, x in collection.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


def same_bits(names: list[str], caches: list[float]) -> None:
    known = layouts(dist.get_world_size())
    for name in names:
        for rule, cache in zip(DECAYING, caches, strict=False):
            plain, cached = make(known[name], rule), make(known[name].in_host_memory(cache), rule)
            for a, b in zip(train(plain), train(cached), strict=True):
                assert torch.equal(a, b), (name, rule, cache)
            assert_same(entries(plain), entries(cached))


ROW = ["row", "row, turned"]
OTHERS = ["column", "column of rows", "table", "table of rows"]


@pytest.mark.parametrize("names", [ROW, OTHERS], ids=["row", "others"])
def test_training_gives_the_same_bits(ranks, world_size, names):
    ranks(same_bits, names, [4, 1, 0.3, 2], world_size=world_size)


def test_training_gives_the_same_bits_on_some_ranks(ranks):
    ranks(same_bits, ["row on some", "column on some"], [0.5, 1], world_size=3)


def matches_one_process(rule: str) -> None:
    size = dist.get_world_size()
    ours, optimizer, sparse = RULES[rule]
    for name in ("row", "column", "table"):
        torch.manual_seed(0)
        dense = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, sparse=sparse)
        layout = layouts(size)[name].in_host_memory(cache=2)
        module = ShardedEmbeddingBag.from_dense(dense, layout, optimizer=ours, grad_reduce="sum")
        train_sharded(module, size)
        train_whole(dense, optimizer(dense.parameters()), size)
        torch.testing.assert_close(module.full_weight(), dense.weight.detach())


@pytest.mark.parametrize("rule", RULES)
def test_training_matches_one_process(ranks, rule):
    ranks(matches_one_process, rule, world_size=3)


def rules_and_rounding() -> None:
    """A rule for each table; 16-bit rows are rounded by random bits that depend on the row, not on its place in the cache."""
    rules = {table.name: rule for table, rule in zip(TABLES, [*DECAYING, DECAYING[0]], strict=True)}
    for layout in (Layout.row(), Layout.column()):
        made = []
        for own in (layout, layout.in_host_memory(2)):
            options = {"optimizer": rules, "dtype": torch.bfloat16, "stochastic_rounding": True}
            made.append(EmbeddingCollection(TABLES, plan={table.name: own for table in TABLES}, **options))
            made[-1].reset_parameters(seed=5)
        for a, b in zip(*map(train, made), strict=True):
            assert torch.equal(a, b)
        assert_same(*map(entries, made))


def test_rules_by_table_and_stochastic_rounding(ranks):
    ranks(rules_and_rounding, world_size=2)


# Several look-ups before a backward: one evicts the rows of the other


def look_ups_in_flight() -> None:
    results = []
    for layout in (Layout.row(), Layout.row().in_host_memory(cache=2)):
        module = ShardedEmbedding(40, 3, plan=layout, optimizer=Adam(lr=0.1), dtype=torch.float64)
        module.reset_parameters(seed=1)
        ids = [torch.arange(k, 40, 7) + dist.get_rank() % 2 for k in range(4)]
        outs = [module(x % 40) for x in ids]
        with torch.no_grad():
            module(torch.arange(0, 40, 9))
        outs[1].square().sum().backward(retain_graph=True)
        (outs[0].square().sum() + outs[3].sum()).backward()
        outs[1].sum().backward()
        kept = module(ids[2] % 40)  # outs[2] has no backward
        results.append((module.full_weight(), module.states["mean"].clone(), kept))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_look_ups_evict_each_others_rows_before_their_backward(ranks, world_size):
    ranks(look_ups_in_flight, world_size=world_size)


# Checkpoints


def save(folder: Path, layout: Layout, steps: int) -> None:
    import torch.distributed.checkpoint as dcp

    collection = make(layout, Adagrad(lr=0.1))
    train(collection, steps)
    dcp.save(collection.state_dict(), checkpoint_id=folder / "saved")
    torch.save({name: collection.full_weight(name) for name in collection.tables}, folder / f"{dist.get_rank()}.pt")


def load(folder: Path, layout: Layout, in_place: bool) -> None:
    import torch.distributed.checkpoint as dcp

    collection = make(layout, Adagrad(lr=0.1))
    train(collection, 1)  # rows in the cache must not survive
    state = collection.state_dict()
    dcp.load(state, checkpoint_id=folder / "saved")
    if not in_place:
        collection.load_state_dict(state)
    expected = torch.load(folder / "0.pt")
    ids = {feature: torch.arange(table.rows)[:, None] for table in TABLES for feature in table.features}
    del ids["mean"]  # a look-up would renormalise it
    found = collection({**ids, "mean": torch.empty((0, 1), dtype=torch.int64)})
    for name in ("max", "rows"):
        values = found[name].values if isinstance(found[name], Ragged) else found[name]
        assert torch.equal(values, expected[name])
    for name, weight in expected.items():
        assert torch.equal(collection.full_weight(name), weight)
    sums = {name: x for name, x in collection.state_dict().items() if name.endswith("sum")}
    assert len(sums) == len(TABLES)
    dcp.save(sums, checkpoint_id=folder / f"sums of {layout}")


HOST = Layout.row().in_host_memory(cache=2)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((HOST, 3), (Layout.row(), 2)), ((Layout.table(1), 2), (HOST, 3)), ((HOST, 2), (Layout.column().in_host_memory(3), 4))],
    ids=["from host memory", "into host memory", "between"],
)
def test_checkpoints_load_in_other_memory_on_other_ranks(ranks, tmp_path, saved, loaded):
    ranks(save, tmp_path, saved[0], 3, world_size=saved[1])
    ranks(load, tmp_path, loaded[0], True, world_size=loaded[1])
    ranks(load, tmp_path, loaded[0], False, world_size=loaded[1])


# Files


def mapped_files(folder: Path) -> None:
    plain = make(Layout.row(), Adam(lr=0.1))
    own = folder / str(dist.get_rank())
    own.mkdir()
    mapped = make(Layout.row().in_host_memory(cache=2, directory=str(own)), Adam(lr=0.1))
    names = [x for x in Path("/proc/self/maps").read_text().splitlines() if str(own) in x]
    assert len(names) == 12 and all(x.endswith("(deleted)") for x in names)  # four groups: weight, mean and square
    assert not list(own.iterdir())
    for a, b in zip(train(plain), train(mapped), strict=True):
        assert torch.equal(a, b)
    assert_same(entries(plain), entries(mapped))
    assert_same(entries(plain.float()), entries(mapped.float()))
    assert_same(entries(plain), entries(copy.deepcopy(mapped)))
    bad = "/nowhere" if dist.get_rank() == 1 else str(own)
    with pytest.raises(MismatchError, match=r"rank 1.*No such file or directory"):
        make(Layout.row().in_host_memory(directory=bad), Adam(lr=0.1))


def test_rows_in_a_memory_mapped_file(ranks, tmp_path):
    ranks(mapped_files, tmp_path, world_size=2)


def other_directories_on_other_ranks(folder: Path) -> list[int]:
    """On rank 0 all tables have one directory, on rank 1 each has its own: the table groups are the same."""
    rank = dist.get_rank()
    names = [str(folder / name) for name in (("x", "x") if rank == 0 else ("y", "z"))]
    plan = {table: HOST.in_host_memory(2, directory=name) for table, name in zip("ab", names, strict=True)}
    plan["c"] = HOST
    module = EmbeddingCollection([Table(name, 12, 2) for name in "cab"], plan=plan, optimizer=SGD(lr=0.1))
    assert len(module.engine.storage.groups) == 1
    found = module({name: torch.arange(12) for name in "abc"})
    for name in "abc":
        assert torch.equal(found[name], module.full_weight(name))
    maps = Path("/proc/self/maps").read_text()
    return [maps.count(str(folder / name)) for name in "xyz"]


def test_ranks_may_have_other_directories(ranks, tmp_path):
    for name in "xyz":
        (tmp_path / name).mkdir()
    assert ranks(other_directories_on_other_ranks, tmp_path, world_size=2) == [[1, 0, 0], [0, 1, 0]]


def one_rank_has_no_room() -> None:
    with pytest.raises(MismatchError, match=r"(?s)rank 1.*no rows in host memory.*alloc"):
        EmbeddingCollection([Table("a", 10**13, 8)], plan=Layout.table(1).in_host_memory(10), optimizer=SGD(lr=0.1))


def test_all_ranks_raise_if_one_has_no_room(ranks):
    ranks(one_rank_has_no_room, world_size=2)


# What users do with the weight


def users_change_the_weight() -> None:
    rank = dist.get_rank()
    plain, cached = make(Layout.row(), Adam(lr=0.1)), make(HOST, Adam(lr=0.1))
    for module in (plain, cached):
        train(module, 2)
        module.reset_rows("plain", torch.tensor([0, 5, 10, 5]))
        module.reset_rows("padded", torch.empty(0, dtype=torch.int64))
        train(module, 2)
        with torch.no_grad():
            module.weight("max").mul_(2)
            module.tables["rows"].local.add_(1)
        train(module, 2)
        module.weight("mean").requires_grad_(False)
        train(module, 2)
    assert_same(entries(plain), entries(cached))
    made = copy.deepcopy(cached)
    buffer = io.BytesIO()
    torch.save(made.tables["plain"].state_dict(), buffer)
    train(made, 1)
    train(plain, 1)
    assert_same(entries(plain), entries(made))
    assert made.weight("plain").to_local().data_ptr() != cached.weight("plain").to_local().data_ptr()
    larger = EmbeddingCollection([Table(t.name, 2 * t.rows, t.dim) for t in TABLES], plan=HOST, dtype=torch.float64)
    larger.copy_rows(made)
    for table in TABLES:
        assert torch.equal(larger.full_weight(table.name)[: table.rows], plain.full_weight(table.name))
    ids = draw_features(0, rank)
    for a, b in zip(quantize(plain)(ids).values(), quantize(made)(ids).values(), strict=True):
        assert torch.equal(a.values, b.values) if isinstance(a, Ragged) else torch.equal(a, b)


def test_users_read_and_change_the_weight(ranks):
    ranks(users_change_the_weight, world_size=2)


def test_reset_rows_keeps_the_other_rows_in_the_cache():
    module = EmbeddingCollection([Table("a", 10, 2)], plan=Layout.row().in_host_memory(5), optimizer=SGD(lr=0.1))
    module({"a": torch.arange(5)})["a"].sum().backward()
    module.reset_rows("a", torch.tensor([3, 9]))
    assert module.cache_stats()["a"].rows == 4
    assert not module.full_weight("a")[[3, 9]].any() and module.full_weight("a")[:3].all()


def test_pickle_conversion_and_meta_device():
    torch.manual_seed(0)
    module = ShardedEmbedding(20, 3, plan=Layout.row().in_host_memory(cache=4), optimizer=RowwiseAdagrad(lr=0.1))
    module(torch.arange(9)).square().sum().backward()
    expected = module.full_weight()
    module(torch.arange(4)).sum().backward()
    changed = module.full_weight()
    assert not torch.equal(expected, changed)
    module(torch.arange(6)).sum()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.arange(20)), changed)
    loaded(torch.arange(20)).sum().backward()
    assert torch.equal(module.full_weight(), changed)
    module.double()
    assert module.full_weight().dtype == module.states["sum"].dtype == torch.float64
    assert torch.equal(module(torch.arange(20)), changed.double())
    meta = ShardedEmbedding(10**9, 8, plan=Layout.row().in_host_memory(), optimizer=Adam(lr=0.1), device="meta")
    assert meta.weight.is_meta and meta.states["mean"].shape == (10**9, 8)
    small = ShardedEmbedding(20, 3, plan=module.layout, optimizer=RowwiseAdagrad(lr=0.1), device="meta").to_empty(device="cpu")
    small.reset_parameters(seed=3)
    plain = ShardedEmbedding(20, 3, optimizer=RowwiseAdagrad(lr=0.1))
    plain.reset_parameters(seed=3)
    assert torch.equal(small(torch.arange(20)), plain(torch.arange(20)))


def test_conversion_between_forward_and_backward():
    results = []
    for layout in (Layout.row(), Layout.row().in_host_memory(8)):
        module = ShardedEmbedding(40, 4, plan=layout, optimizer=SGD(lr=1.0))
        module.reset_parameters(seed=1)
        found = module(torch.arange(5))
        module.double().float()
        assert module.engine.storage.shards[0].cache is None or module.engine.storage.shards[0].cache.generation > 1
        found.sum().backward()
        results.append(module.full_weight())
    assert torch.equal(*results)
    assert module.cache_stats()["weight"][2:4] == (0, 10)  # fetched twice: the statistics go on


def test_conversion_keeps_the_rows_where_they_are():
    module = ShardedEmbedding(20, 3, plan=HOST, optimizer=Adam(lr=0.1))
    (shard,) = module.engine.storage.shards
    rows, cache = module.weight.data_ptr(), shard.cache
    module.engine.storage._convert_cache(shard, cache)  # as for another device, which this test has not
    assert shard.cache is not cache and shard.cache.store["weight"].data_ptr() == rows
    made = shard.cache
    assert module.to(torch.float32).weight.data_ptr() == rows and shard.cache is made


# Errors


def test_errors():
    with pytest.raises(ValueError, match=r"cache=1\.5 must be a number of rows"):
        Layout.row().in_host_memory(1.5)
    with pytest.raises(ValueError, match="cache=True must be"):
        Layout.row().in_host_memory(True)
    with pytest.raises(ValueError, match=r"a replicated table cannot be in host memory; choose Layout.row\(\)"):
        ShardedEmbedding(9, 2, plan=Layout.replicated().in_host_memory())
    for options in ({}, {"sparse": True}):
        module = ShardedEmbedding(9, 2, plan=Layout.row().in_host_memory(), **options)
        with pytest.raises(RuntimeError, match=r"ShardedEmbedding: table 'weight' is in host memory.*optimizer=RowwiseAdagrad"):
            module(torch.arange(3))
        with torch.no_grad():
            assert torch.equal(module(torch.arange(9)), module.full_weight())
        module.weight.requires_grad_(False)
        assert torch.equal(module(torch.arange(9)), module.full_weight())


# The cache itself


def test_the_least_recently_used_rows_leave():
    store = {"weight": torch.arange(10.0)[:, None], "sum": torch.arange(10.0) * 10}
    cache = RowCache(store, 3, torch.device("cpu"))
    for rows, hits, misses in [([0, 1, 2], 0, 3), ([1], 1, 3), ([2, 5], 2, 4), ([1, 2, 5], 5, 4), ([0], 5, 5)]:
        cache.fetch(torch.tensor(rows))
        assert (cache.hits, cache.misses) == (hits, misses)
        places = cache.places(torch.tensor(rows))
        assert cache.weight[places, 0].tolist() == rows and cache.state["sum"][places].tolist() == [10 * x for x in rows]
    cache.weight.add_(100)  # not marked as changed, so nothing is written back
    cache.fetch(torch.tensor([3, 4, 6, 7]))  # one more than fit in
    assert cache.stats()[:2] == (4, 4) and store["weight"].flatten().tolist() == list(range(10))
    cache.weight.add_(100)
    cache.is_dirty = True
    cache.fetch(torch.tensor([0, 3]))
    assert cache.evictions == 2 + 3 + 1
    cache.release()
    assert sorted(store["weight"].flatten().tolist()) == [0, 1, 2, 5, 8, 9, 103, 104, 106, 107]
    assert cache.stats().rows == 0 and cache.stats().hit_rate == 6 / 16


def test_a_cache_that_grew_in_inference_mode_can_be_trained():
    module = ShardedEmbedding(20, 3, plan=Layout.row().in_host_memory(cache=1), optimizer=SGD(lr=0.1))
    with torch.inference_mode():
        module(torch.arange(7))
    before = module(torch.arange(20))
    before.sum().backward()
    assert module.cache_stats()["weight"].slots == 20
    torch.testing.assert_close(module.full_weight(), before.detach() - 0.1)


@pytest.mark.parametrize("read", [ShardedEmbedding.full_weight, ShardedEmbedding.state_dict])
def test_a_cache_that_was_emptied_in_inference_mode_can_be_trained(read):
    module = ShardedEmbedding(20, 3, plan=HOST, optimizer=SGD(lr=0.1))
    module(torch.arange(7)).sum().backward()
    with torch.inference_mode():
        read(module)
    before = module(torch.arange(20))
    before.sum().backward()
    torch.testing.assert_close(module.full_weight(), before.detach() - 0.1)


def test_a_frozen_table_stays_in_the_cache_beside_one_that_is_trained():
    tables = [Table("frozen", 20, 3), Table("trained", 20, 3)]
    module = EmbeddingCollection(tables, plan={"frozen": Layout.table().in_host_memory(9), "trained": Layout.table()})
    module.weight("frozen").requires_grad_(False)
    for _ in range(2):
        sum(x.sum() for x in module({"frozen": torch.arange(5), "trained": torch.arange(5)}).values()).backward()
    assert module.cache_stats()["frozen"][1:4] == (5, 5, 5)
    assert list(module.cache_stats()) == ["frozen"]
    assert module.weight("trained").grad is not None and module.weight("frozen").grad is None


# A GPU that is not there


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.device.type != args[0].device.type:
            if out.device.type == "cuda":
                self.to_device += out.nbytes
            else:
                self.to_host += out.nbytes
        return out


def steps_on_a_gpu(layout: Layout, batches: list[list[int]]) -> list[tuple[list[str], int, int]]:
    """For each step on a simulated GPU: what the host waits for, and the bytes that go to the device and to the host."""
    found = []
    with simulate_rank(1) as ledger, known_values(ledger):
        tables = [Table("a", 1000, 16), Table("b", 1000, 16)]
        module = EmbeddingCollection(tables, plan=layout, optimizer=RowwiseAdagrad(lr=0.1), device="cuda")
        for batch in batches:
            ids = {name: torch.tensor(batch, device="cuda") for name in "ab"}
            ledger.reset()
            with Copies() as copies:
                sum(x.sum() for x in module(ids).values()).backward()
            found.append(([sync.op for sync in ledger.host_syncs], copies.to_device, copies.to_host))
        assert layout.host_memory is None or module.weight("a").device.type == "cpu"
        assert module.engine.storage.shards[0].weight.device.type == "cuda"
    return found


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_a_step_on_a_gpu_waits_for_three_numbers_at_most_and_copies_only_what_is_missing():
    batches = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5, 6], [3, 4, 7, 8]]
    without = steps_on_a_gpu(Layout.table(), batches)
    found = steps_on_a_gpu(Layout.table().in_host_memory(cache=6), batches)
    row, number = 4 * 16 + 4, 8  # the bytes of a row with its state, and of a row number
    expected = [(new * row, new * number + out * (number + row)) for new, out in [(8, 0), (0, 0), (4, 0), (4, 4)]]
    for (waits, *bytes_copied), (waits_before, *bytes_before), bytes_more in zip(found, without, expected, strict=True):
        expected_waits = ["item", "masked_select", *["copy to the CPU"] * (bytes_more[0] > 0)]
        assert Counter(waits) - Counter(waits_before) == Counter(expected_waits)
        assert tuple(a - b for a, b in zip(bytes_copied, bytes_before, strict=True)) == bytes_more
