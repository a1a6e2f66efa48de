"""A checkpoint knows tables, not layouts: saved at one number of ranks and plan, loaded at another, bit for bit."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from tests.embedding.reference import DIM, ROWS, layouts
from tests.embedding.test_collection import make_two_tables
from unisono.collectives import all_reduce
from unisono.embedding import (
    Adagrad,
    Adam,
    EmbeddingCollection,
    Layout,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
)

RULES = {
    "RowwiseAdagrad": RowwiseAdagrad(lr=0.1),
    "Adagrad": Adagrad(lr=0.1),
    "Adam": Adam(lr=0.1),
    "by table": {"a": RowwiseAdagrad(lr=0.1), "b": Adam(lr=0.1), "c": Adagrad(lr=0.2)},
}
TABLES = [Table("a", ROWS, DIM), Table("b", 7, 4, mode="mean"), Table("c", 3, DIM)]


def make(plan, rule: str) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, plan=plan, optimizer=RULES[rule], dtype=torch.float64)


def train(collection: EmbeddingCollection, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)  # the same batch on all ranks, so that their number does not matter
    batch = {t.name: torch.randint(t.rows, (4, 2), generator=draw) for t in TABLES}
    sum(x.square().mean() for x in collection(batch).values()).backward()


def whole(collection: EmbeddingCollection) -> dict[str, torch.Tensor]:
    """Gather weights and states of all tables."""
    found = {}
    for name, module in collection.tables.items():
        found[f"{name}.weight"] = collection.full_weight(name)
        for key, value in module.states.items():
            if value.ndim == 2:
                found[f"{name}.{key}"] = module._gather(value)
    return found


def save(folder: str, plan, rule: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    collection = make(plan, rule)
    for step in range(3):
        train(collection, step)
    dcp.save(collection.state_dict(), checkpoint_id=folder)
    saved = whole(collection)
    train(collection, 9)
    return saved | {f"next {key}": value for key, value in whole(collection).items()}


def load(folder: str, plans: list, rule: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for plan in plans:
        torch.manual_seed(2)
        collection = make(plan, rule)
        state = collection.state_dict()
        assert all(isinstance(x, DTensor) for x in state.values() if x.ndim)
        dcp.load(state, checkpoint_id=folder)
        collection.load_state_dict(state)
        loaded = whole(collection)
        train(collection, 9)
        found.append(loaded | {f"next {key}": value for key, value in whole(collection).items()})
    return found


def plans(size: int) -> list:
    every = list(layouts(size).values())
    return [
        "row",
        "column",
        "table",
        "replicated",
        {t.name: every[(3 * k + 1) % len(every)] for k, t in enumerate(TABLES)},
    ]


@pytest.mark.parametrize(
    ("rule", "size", "plan"), [("RowwiseAdagrad", 2, "row"), ("Adagrad", 4, "column"), ("Adam", 3, "table")]
)
def test_checkpoint_moves_between_ranks_and_plans(rule, size, plan, ranks):
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(save, folder, plan, rule, world_size=size)[0]
        for other in (1, 2, 3, 4):
            for loaded in ranks(load, folder, plans(other), rule, world_size=other)[0]:
                assert saved.keys() == loaded.keys()
                for key, value in saved.items():
                    if key.startswith("next"):  # sums over columns and rows may round differently
                        torch.testing.assert_close(loaded[key], value)
                    else:
                        assert torch.equal(loaded[key], value), key


def dense_weights_load() -> None:
    size = dist.get_world_size()
    torch.manual_seed(0)
    for make_dense, kind in ((nn.EmbeddingBag, ShardedEmbeddingBag), (nn.Embedding, ShardedEmbedding)):
        dense = make_dense(ROWS, DIM)
        for layout in layouts(size).values():
            for sparse in (False, True):
                module = kind(ROWS, DIM, plan=layout, sparse=sparse)
                assert set(module.state_dict()) == set(dense.state_dict()) == {"weight"}
                module.load_state_dict(dense.state_dict())
                assert torch.equal(module.full_weight(), dense.weight)
                assert torch.equal(module.to_dense().weight, dense.weight)
                with pytest.raises(RuntimeError, match=r"weight.*has shape \(11, 5\), got \(12, 5\)"):
                    module.load_state_dict({"weight": torch.zeros(12, 5)})


def test_weights_of_one_process_load_directly(ranks):
    ranks(dense_weights_load, world_size=4)


def weight_is_a_dtensor() -> None:
    size = dist.get_world_size()
    for name in ("row", "row, turned", "column", "column of rows"):
        torch.manual_seed(0)
        dense = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        module = ShardedEmbedding.from_dense(dense, layouts(size)[name])
        weight = module.weight
        assert isinstance(weight, DTensor) and weight.shape == (ROWS, DIM)
        full = dense.weight.detach()
        torch.testing.assert_close(weight.full_tensor(), full)
        torch.testing.assert_close(torch.softmax(weight, 1).full_tensor(), torch.softmax(full, 1))
        torch.testing.assert_close(torch.linalg.vector_norm(weight).full_tensor(), torch.linalg.vector_norm(full))
        torch.testing.assert_close(weight.view(ROWS, DIM).full_tensor(), full)
        with torch.no_grad():
            weight.clamp_(-0.5, 0.5).mul_(2)
        torch.testing.assert_close(module.full_weight(), full.clamp(-0.5, 0.5) * 2)
        assert torch.equal(module(torch.arange(ROWS)), module.full_weight())
        module(torch.arange(ROWS)).square().sum().backward()
        total = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        expected = torch.linalg.vector_norm(2 * module.full_weight())
        torch.testing.assert_close(total.full_tensor() if isinstance(total, DTensor) else total, expected)


def test_ordinary_operations_work_on_the_shards(ranks):
    ranks(weight_is_a_dtensor, world_size=4)


def inside_a_model() -> None:
    model = nn.ModuleDict({"tables": make("row", "Adam"), "top": nn.Linear(2, 2)})
    state = get_model_state_dict(model)
    assert {"tables.tables.a.weight", "tables.tables.a.mean", "tables.tables.b.square", "top.weight"} <= set(state)
    before = whole(model["tables"])
    train(model["tables"], 1)
    assert not torch.equal(whole(model["tables"])["a.weight"], before["a.weight"])
    other = nn.ModuleDict({"tables": make("row", "Adam"), "top": nn.Linear(2, 2)})
    set_model_state_dict(other, get_model_state_dict(model))
    for key, value in whole(model["tables"]).items():
        assert torch.equal(whole(other["tables"])[key], value), key
    assert int(other["tables"].tables["a"].step) == 1


def test_state_of_a_model_has_the_tables_by_name(ranks):
    ranks(inside_a_model, world_size=2)


def moves_and_stays_itself() -> None:
    collection = EmbeddingCollection(TABLES, plan="row", optimizer=Adam(lr=0.1))
    weight = collection.weight("a")
    before = whole(collection)["a.weight"]
    collection.to(torch.float64)
    assert collection.weight("a") is weight and weight.dtype == torch.float64
    assert torch.equal(whole(collection)["a.weight"], before.double())
    train(collection, 0)
    assert not torch.equal(whole(collection)["a.weight"], before.double())
    lazy = EmbeddingCollection(TABLES, plan="row", optimizer=Adam(lr=0.1), device="meta")
    lazy.to_empty(device="cpu")
    lazy.reset_parameters(seed=3)
    collection.to(torch.float32).reset_parameters(seed=3)
    assert torch.equal(whole(lazy)["a.weight"], whole(collection)["a.weight"])


def test_collection_can_be_moved_and_made_on_meta(ranks):
    ranks(moves_and_stays_itself, world_size=2)


def strict_loading_is_strict() -> None:
    """Unknown keys and tables on meta were accepted."""
    module = ShardedEmbedding(ROWS, DIM)
    with pytest.raises(RuntimeError, match="Unexpected"):
        module.load_state_dict({**module.state_dict(), "bogus": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="to_empty"):
        ShardedEmbedding(ROWS, DIM, device="meta").load_state_dict(module.state_dict(), assign=True)


def a_checkpoint_loads_into_any_other_layout() -> None:
    """In TorchRec resharding a checkpoint is left to the user. From row to each other layout in turn, and back to row."""
    first = make_two_tables("row", optimizer=RowwiseAdagrad(lr=0.1))
    for _ in range(2):
        sum(x.sum() for x in first({"a": torch.tensor([3, 9]), "b": torch.tensor([0, 1])}).values()).backward()
    last = first
    for layout in [*layouts(dist.get_world_size()).values(), Layout.row()]:
        loaded = make_two_tables({"a": layout, "b": layout}, optimizer=RowwiseAdagrad(lr=0.1))
        loaded.load_state_dict(last.state_dict())
        last = loaded
    for name in ("a", "b"):
        assert torch.equal(last.tables[name].local, first.tables[name].local)
        assert torch.equal(last.tables[name].states["sum"], first.tables[name].states["sum"])
        assert last.tables[name].full_weight().isfinite().all() and all_reduce(last.tables[name].states["sum"].sum()) > 0


REGRESSIONS = [
    strict_loading_is_strict,
    a_checkpoint_loads_into_any_other_layout,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
def test_regression(body, ranks):
    ranks(body, world_size=3)
