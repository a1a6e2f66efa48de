"""plan_tables: every plan fits, runs and is the same on all ranks; ranks are equally busy; the reported bytes are right."""

import random
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag

from unisono.collectives import MismatchError, all_gather, count_bytes
from unisono.embedding import SGD, Adagrad, Adam, EmbeddingCollection, Ragged, RowwiseAdagrad, Table, plan_tables
from unisono.embedding.sharding.cost import expect_demand, expect_unique, list_options, scale_unique, set_prices

RULES = [None, SGD(lr=1), RowwiseAdagrad(lr=1), Adagrad(lr=1), Adam(lr=1)]
KINDS = [
    {"mode": "sum"},
    {"mode": "mean", "padding_idx": 0},
    {"mode": "max"},
    {"mode": None},
    {"mode": "sum", "scale_grad_by_freq": True},
    {"mode": "mean", "max_norm": 1.0, "norm_type": float("inf")},
    {"mode": "sum", "max_norm": 1.0, "padding_idx": 0},
]


def held_by_rank(tables, plan, world_size, rule, dtype=torch.float32):
    """Bytes of real tensors: weights and states, or weights and gradients."""
    found = []
    for rank in range(world_size):
        boxes = [plan.layouts[t.name].box(rank=rank, rows=t.rows, dim=t.dim) for t in tables]
        weights = [torch.empty(box.shape, dtype=dtype, device="meta") for box in boxes]
        states = [x for w in weights for x in ([w] if rule is None else rule.states(w).values())]
        found.append(sum(x.numel() * x.dtype.itemsize for x in (*weights, *states)))
    return found


@st.composite
def some_tables(draw):
    shapes = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(KINDS)), max_size=6))
    return [
        Table(f"t{k}", max(rows, "padding_idx" in kind), dim, ids_per_bag=draw(st.sampled_from([0.0, 1.0, 7.5])), **kind)
        for k, (rows, dim, kind) in enumerate(shapes)
    ]


@settings(max_examples=100, deadline=None)
@given(some_tables(), st.integers(1, 9), st.none() | st.integers(0, 6000), st.sampled_from(RULES), st.sampled_from([0, 3, 50]))
def test_every_plan_fits_and_can_run(tables, world_size, cap, rule, batch_size):
    def plan_within(bytes_):
        return plan_tables(tables, world_size, batch_size=batch_size, memory_per_rank=bytes_, optimizer=rule)

    try:
        plan = plan_within(cap)
    except ValueError as error:
        least = int(re.search(r"memory_per_rank must be at least (\d+)", str(error))[1])
        assert cap is not None and least > cap
        plan, cap = plan_within(least), least
    held = held_by_rank(tables, plan, world_size, rule)
    assert list(plan.memory) == held
    assert cap is None or max(held, default=0) <= cap
    for table in tables:
        layout = plan.layouts[table.name]
        assert layout == layout.assign_ranks(world_size)
        assert not (table.norm_type == float("inf") and layout.kind == "column")
        boxes = [layout.box(rank=rank, rows=table.rows, dim=table.dim).shape for rank in range(world_size)]
        assert sum(rows * dim for rows, dim in boxes) == table.rows * table.dim
        if table.mode in ("max", None) or table.scale_grad_by_freq or (table.max_norm and table.padding_idx is not None):
            assert layout.answers != "bags"
    backwards = plan_tables(tables[::-1], world_size, batch_size=batch_size, memory_per_rank=cap, optimizer=rule)
    assert backwards.layouts == plan.layouts


def draw_bags(table, rank):
    draw = torch.Generator().manual_seed(hash((table.rows, table.dim, rank)) % 2**31)
    bags = 12 + 5 * rank
    lengths = torch.randint(0, 5, (bags,), generator=draw) if table.rows else torch.zeros(bags, dtype=torch.int64)
    return Ragged.from_lengths(torch.randint(max(table.rows, 1), (int(lengths.sum()),), generator=draw), lengths)


def run_step(shapes, tight):
    """Compare outputs and updated tables with torch's own functions on whole tables and batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tables = [Table(f"t{k}", rows, dim, **kind) for k, (rows, dim, kind) in enumerate(shapes)]
    batches = [{t.name: draw_bags(t, r) for t in tables} for r in range(size)]
    cap = None
    if tight:
        with pytest.raises(ValueError, match="must be at least") as caught:
            plan_tables(tables, size, memory_per_rank=0, dtype=torch.float64, optimizer=SGD(lr=1))
        cap = int(re.search(r"memory_per_rank must be at least (\d+)", str(caught.value))[1])
    options = {"optimizer": SGD(lr=1.0), "dtype": torch.float64, "grad_reduce": "sum"}
    collection = EmbeddingCollection(tables, sample=batches[rank], batch_size=12, memory_per_rank=cap, **options)
    weights = {t.name: collection.tables[t.name].full_weight().requires_grad_() for t in tables}
    outputs = collection(batches[rank])
    loss, expected_loss = 0.0, 0.0
    for table in tables:
        found = outputs[table.name]
        found = found if table.mode else found.values
        each = []
        for batch in batches:
            ids, offsets, _ = batch[table.name]
            if table.mode:
                padding = {"padding_idx": table.padding_idx}
                starts = offsets[:-1]
                each.append(embedding_bag(ids, weights[table.name], starts, mode=table.mode, **padding) if len(ids) else None)
            else:
                each.append(weights[table.name][ids])
        torch.testing.assert_close(found, torch.zeros_like(found) if each[rank] is None else each[rank])
        loss = loss + found.square().sum()
        expected_loss = expected_loss + sum(x.square().sum() for x in each if x is not None)
    loss.backward()
    expected_loss.backward()
    for name, weight in weights.items():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(collection.tables[name].full_weight(), (weight - gradient).detach())
    return {name: str(layout) for name, layout in collection.plan.layouts.items()}


@pytest.mark.parametrize("tight", [False, True])
def test_plan_matches_one_process(tight, ranks):
    shapes = [(0, 3, {}), (1, 1, {}), (2, 5, KINDS[1]), (30, 1, KINDS[2]), (17, 4, KINDS[3]), (3, 40, {}), (300, 6, {})]
    found = ranks(run_step, shapes, tight, world_size=2)
    assert found[0] == found[1]
    assert tight <= ("row" in found[0].values())
    ranks(run_step, shapes[-1:], tight, world_size=3)


def click_tables():
    """26 tables of 100,000 to 500,000 rows, 1 to 10 ids a bag, of which two fifths are different."""
    draw = torch.Generator().manual_seed(0)
    tables, sample = [], {}
    for k in range(26):
        table = Table(f"t{k}", 100_000 + 16_000 * (7 * k % 26), 64)
        ids = torch.rand(2048 * (k % 10 + 1), generator=draw).pow(8).mul(table.rows).long()
        tables.append(table)
        sample[table.name] = Ragged.from_dense(ids.view(2048, -1))
    return tables, sample


def test_click_tables_lie_whole_and_even():
    tables, sample = click_tables()
    plan = plan_tables(tables, 2, batch_size=2048, sample=sample, optimizer=RowwiseAdagrad(lr=1))
    assert {layout.kind for layout in plan.layouts.values()} == {"table"}
    for table in tables:
        unique = len(sample[table.name].values.unique())
        if unique > 2048 or unique < 1024:
            assert plan.layouts[table.name].answers == ("bags" if unique > 2048 else "rows")
    assert max(plan.load) < 1.05 * min(plan.load)
    ids = [sum(len(sample[n].values) for n, x in plan.layouts.items() if x.owners == (rank,)) for rank in (0, 1)]
    assert max(ids) < 1.2 * min(ids)
    assert max(plan.memory) < 1.2 * min(plan.memory)
    summed = 2 * 2048 * 26 * 64 * 4 / 2  # of a plan that sums all bags, without its ids
    assert sum(plan.sent) / 2 < summed + 4 * sum(x.values.numel() + 2048 for x in sample.values()) / 2
    half = plan_tables(tables, 2, batch_size=2048, sample=sample, wire_dtype=torch.bfloat16)
    assert sum(half.sent) < 0.6 * sum(plan.sent)
    assert {str(x) for x in plan_tables(tables, 1, sample=sample).layouts.values()} == {"table on 0"}


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_plan_is_no_busier_than_simple_ones(world_size):
    draw = random.Random(world_size)
    prices = set_prices(world_size, optimizer=None, dtype=torch.float32, wire_dtype=None)
    for _ in range(8):
        shapes = [(int(10 ** draw.uniform(2, 7)), 2 ** draw.randint(3, 8)) for _ in range(draw.randint(1, 30))]
        tables = [Table(f"t{k}", *shape, ids_per_bag=10 ** draw.uniform(0, 2)) for k, shape in enumerate(shapes)]
        options = [list_options(table, expect_demand(table, 1024), prices) for table in tables]
        by_rows, whole, busy = torch.zeros(world_size), 0, torch.zeros(world_size)
        for k, found in enumerate(options):
            row = next(option for option in found if option.layout.kind == "row")
            one = next(option for option in found if option.layout.kind == "table")
            by_rows += row.load_of_all + row.load
            whole += one.load_of_all
            busy[k % world_size] += float(one.load)
        plan = plan_tables(tables, world_size)
        load = torch.zeros(world_size)
        for table, found in zip(tables, options, strict=True):
            layout = plan.layouts[table.name]
            owners = list(layout.owners)
            chosen = next(
                x
                for x in found
                if (x.layout.kind, len(x.load)) == (layout.kind, len(owners)) and layout.answers in (None, x.answers)
            )
            load += chosen.load_of_all
            load[owners] += chosen.load
        torch.testing.assert_close(torch.tensor(plan.load, dtype=torch.float32), load)
        assert max(plan.load) <= 1.1 * float(min(by_rows.max(), whole + busy.max()))


def test_each_table_takes_the_memory_of_its_own_rule():
    tables = [Table("a", 1000, 8), Table("b", 500, 16)]
    plan = plan_tables(tables, 1, optimizer={"a": RowwiseAdagrad(lr=1), "b": Adam(lr=1)})
    assert [t.memory for t in plan.tables] == [1000 * (8 * 4 + 4), 500 * 16 * 3 * 4]
    with pytest.raises(ValueError, match="plan_tables: optimizer has no rule for table 'b'"):
        plan_tables(tables, 1, optimizer={"a": SGD(lr=1)})


def test_estimates_of_different_ids():
    assert expect_unique(5, 0) == 0
    assert expect_unique(5, 1) == 1
    assert expect_unique(10, 10**12) == pytest.approx(10)
    draws = torch.randint(500, (200, 800), generator=torch.Generator().manual_seed(0))
    assert expect_unique(800, 500) == pytest.approx(sum(len(x.unique()) for x in draws) / 200, rel=0.01)
    ids = torch.rand(40_000, generator=torch.Generator().manual_seed(0)).pow(8).mul(100_000).long()
    for part, scale, tolerance in ((40_000, 0.1, 0.03), (10_000, 4, 0.1), (10_000, 0.5, 0.03)):
        counts = ids[:part].unique(return_counts=True)[1].double()
        assert scale_unique(counts, scale, 100_000) == pytest.approx(len(ids[: int(part * scale)].unique()), rel=tolerance)
    assert scale_unique(torch.ones(10, dtype=torch.float64), 100, 50) == 50


def count_traffic():
    tables = [Table("few", 50, 4), Table("many", 4000, 4, features=["a", "b"]), Table("wide", 9000, 8, mode=None)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows = {"few": 50, "a": 4000, "b": 4000, "wide": 9000}
    batch = {name: Ragged.from_dense(torch.randint(n, (256, 8), generator=draw)) for name, n in rows.items()}
    collection = EmbeddingCollection(tables, sample=batch, batch_size=256, optimizer=SGD(lr=1.0))
    with count_bytes() as traffic:
        found = collection(batch)
        sum((x.values if isinstance(x, Ragged) else x).sum() for x in found.values()).backward()
    return sum(all_gather(torch.tensor([traffic.sent])).tolist()), sum(collection.plan.sent)


def test_bytes_are_those_that_travel(ranks):
    for size in (2, 3):
        sent, planned = ranks(count_traffic, world_size=size)[0]
        assert planned == pytest.approx(sent, rel=0.01)


def plan_on_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    tables = [Table("a", 1000, 8), Table("b", 500, 8)]
    samples = [Ragged.from_lists([[0] * 9] * 40), Ragged.from_dense(torch.arange(800).view(100, 8)), Ragged.from_lists([])]
    sample = {"a": samples[rank], "b": samples[rank]}
    plan = plan_tables(tables, size, batch_size=64, sample=sample)
    for bad in ({"a": samples[0]}, {"a": samples[0], "b": Ragged(torch.rand(3), torch.tensor([0, 3]))}):
        with pytest.raises(MismatchError, match=r"a bad call on rank 1(.|\n)*feature 'b'"):
            plan_tables(tables, size, sample=bad if rank == 1 else sample)
    with pytest.raises(MismatchError, match="the ranks disagree"):
        plan_tables(tables, size, sample=sample, batch_size=1 + rank)
    names = "ab" if rank else "ba"  # the order of a dict does not matter
    plan_tables(tables, size, sample=sample, optimizer={name: SGD(lr=ord(name)) for name in names})
    if rank == 0:  # for other ranks than those of the group: nothing is communicated
        plan_tables(tables, 512, sample=sample)
        plan_tables(tables, size)
    return plan


def test_ranks_with_different_samples_have_one_plan(ranks):
    first, *others = ranks(plan_on_ranks, world_size=3)
    assert all(plan == first for plan in others)


@pytest.mark.parametrize(
    ("shapes", "world_size"),
    [
        ([], 3),
        ([(0, 8, {})], 2),
        ([(100, 2, {})], 8),
        ([(1000, 64, {})], 4),
        ([(1000, 64, {}), (10, 64, KINDS[2])], 16),
        ([(3, 8, {}), (2, 8, KINDS[3])], 64),
        ([(10**9, 128, {})] * 3 + [(100, 128, {})] * 20, 4096),
    ],
)
def test_unusual_plans_are_explained(shapes, world_size):
    tables = [Table(f"t{k}", rows, dim, ids_per_bag=3, **kind) for k, (rows, dim, kind) in enumerate(shapes)]
    plan = plan_tables(tables, world_size)
    assert len(plan.memory) == len(plan.load) == len(plan.sent) == world_size
    total = 8 * sum(table.rows * table.dim for table in tables)  # weights and gradients
    assert sum(plan.memory) == total
    assert max(plan.memory) <= max(1.6 * total / world_size, 8 * 100 * 128)
    for text in (str(plan), plan.to_markdown()):
        for table in tables:
            assert re.search(rf"\b{table.name}\b.*{table.rows:,} x {table.dim}.*\b(rows|bags)\b", text)
        assert ("most" if world_size > 16 else f"rank {world_size - 1}") in text


def test_norm_that_needs_whole_rows_forbids_columns():
    kinds = [
        plan_tables([Table("t", 10**6, 64, ids_per_bag=50, max_norm=1.0, norm_type=norm)], 2).layouts["t"].kind
        for norm in (2.0, float("inf"))
    ]
    assert kinds[0] == "column" != kinds[1]


def test_plan_refuses_what_does_not_fit():
    tables = [Table("small", 10, 4), Table("large", 1000, 4)]
    with pytest.raises(
        ValueError, match=r"need 15\.8 KiB.*4 x memory_per_rank=1000 is 3\.9 KiB.*'large' with 15\.6.*must be at least 4040"
    ):
        plan_tables(tables, 4, memory_per_rank=1000, optimizer=SGD(lr=1))
    pieces = [Table(f"t{k}", 1, 16, **KINDS[5]) for k in range(8)]  # cannot be cut: two on each of four ranks
    with pytest.raises(ValueError, match="memory_per_rank must be at least 128"):
        plan_tables(pieces, 4, memory_per_rank=127, optimizer=SGD(lr=1))
    for bad in ({"world_size": 0}, {"world_size": 2, "batch_size": -1}, {"world_size": 2, "tables": tables * 2}):
        with pytest.raises(ValueError, match="plan_tables: needs"):
            plan_tables(**{"tables": tables, **bad})
    with pytest.raises(ValueError, match="sample has no feature 'small'"):
        plan_tables(tables, 2, sample={})


def test_rows_say_what_the_text_says():
    plan = plan_tables([Table("user", 1000, 8), Table("word", 50, 4)], 2, batch_size=64)
    tables, ranks = plan.to_rows()
    assert [row["table"] for row in tables] == ["user", "word"] and [row["2 ranks"] for row in ranks] == ["rank 0", "rank 1"]
    assert all(value in str(plan) for row in [*tables, *ranks] for value in row.values())


def bad_arguments_on_rank_1() -> None:
    rank = dist.get_rank()
    sample = {"a": Ragged.from_lists([[1]])}
    for bad, text in [
        ({"optimizer": Adam}, "optimizer=Adam: expected one of"),
        ({"optimizer": Adam, "sample": sample}, "optimizer=Adam: expected one of"),
        ({"optimizer": None}, "host_memory_per_rank=1000000 needs an optimizer without sparse=True: optimizer=None"),
        ({"sparse": True}, "host_memory_per_rank=1000000 needs an optimizer without sparse=True: .* sparse=True"),
    ]:
        options = {"optimizer": Adam(lr=0.1), **({"sample": sample} if "sample" in bad else {}), **(bad if rank == 1 else {})}
        with pytest.raises(MismatchError, match=f"rank 1: {text}"):  # too little memory for rank 1, whose rule is not known
            EmbeddingCollection(
                [Table("a", 4000, 4)], memory_per_rank=50_000, host_memory_per_rank=10**6, batch_size=16, **options
            )


def test_all_ranks_raise_if_one_has_arguments_that_cannot_be_planned(ranks):
    ranks(bad_arguments_on_rank_1, world_size=2)


def test_tables_that_do_not_fit_stay_in_host_memory():
    tables = [Table("rare", 5_000, 16), Table("often", 5_000, 16, ids_per_bag=20), Table("small", 10, 16)]
    rule = Adagrad(lr=1)
    whole = 8 * 16 * 5_000

    def plan_within(cap, host=10 * whole, world_size=1, **options):
        return plan_tables(
            tables, world_size, batch_size=64, memory_per_rank=cap, host_memory_per_rank=host, optimizer=rule, **options
        )

    assert plan_within(3 * whole).host_memory == (0,)
    plan = plan_within(2 * whole)
    assert {name: str(layout) for name, layout in plan.layouts.items()} == {
        "rare": "table on 0, in host memory, cache 50 %",
        "often": "table on 0",
        "small": "table on 0",
    }
    assert plan.host_memory == (whole,) and [table.host_memory for table in plan.tables] == [whole, 0, 0]
    lines = str(plan).splitlines()
    assert re.search(r"rare .* in host memory, cache 50 % .* the tables do not fit on the devices; 64 bags", lines[1])
    assert re.search(r"1 rank +memory +host memory +sent +load", lines[-2])
    assert "host memory" not in str(plan_within(3 * whole))
    caches = []
    for cap in (2 * whole, whole + 70_000, whole, whole // 2, whole // 3):
        plan = plan_within(cap)
        module = EmbeddingCollection(tables, plan=plan, optimizer=rule, device="meta")
        shards = module.engine.storage.shards
        on_device = [x for s in shards for x in ((s.weight, *s.state.values()) if s.cache is None else vars(s.cache).values())]
        on_device += [x for s in shards if s.cache for x in (s.cache.weight, *s.cache.state.values())]
        used = sum(x.nbytes for x in on_device if isinstance(x, torch.Tensor))
        assert used <= plan.memory[0] <= cap  # less at first, if the cache will grow for a batch
        assert used > 0.99 * plan.memory[0] or plan.layouts["rare"].host_memory.cache < 0.5
        caches.append([layout.host_memory.cache for layout in plan.layouts.values() if layout.host_memory])
    assert caches == [[0.5], [0.05], [0.2, 0.2], [0.1, 0.1], [0.01, 0.01]]
    rows = plan_within(whole, world_size=4)
    assert rows.host_memory == (0,) * 4 and 0 < max(plan_within(whole // 3, world_size=4).host_memory) <= whole // 2
    with pytest.raises(ValueError, match=rf"host_memory_per_rank=9 is not enough .* it must be at least {whole}"):
        plan_within(2 * whole, host=9)
    with pytest.raises(ValueError, match="or host_memory_per_rank say how much"):
        plan_within(whole, host=None)
    with pytest.raises(ValueError, match="memory_per_rank must be at least") as error:
        plan_within(1000)
    least = int(re.search(r"memory_per_rank must be at least (\d+)", str(error.value))[1])
    assert least < whole // 3 and max(plan_within(least).memory) <= least
