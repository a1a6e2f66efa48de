"""The table in the README for users of torch and TorchRec: every row is run as it stands there."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono.embedding
from unisono.embedding import EmbeddingCollection, Layout, Plan, Ragged, ShardedEmbedding, Table

README = Path(__file__).parents[2] / "packages/embedding/README.md"
IDS, OFFSETS = torch.tensor([1, 5, 2, 5]), torch.tensor([0, 3])


def rows() -> list[tuple[str, str]]:
    """The first two cells of each row of the table."""
    section = README.read_text().partition("## Coming from torch or TorchRec")[2].partition("\n## ")[0]
    return [(a.strip(), b.strip()) for a, b in re.findall(r"^\| (.*?) \| (.*?) \|", section, flags=re.MULTILINE)][1:]


def code(cell: str) -> str:
    return re.findall(r"`(.*?)`", cell)[0]


def run(cell: str, **names: Any) -> Any:
    """Evaluate the code in a cell."""
    return eval(code(cell), vars(unisono.embedding) | {"torch": torch, "nn": nn, "copy": copy} | names)


def module() -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(11, 4, mode="sum", dtype=torch.float64, sparse=True)


def same_shapes(theirs: str, ours: str) -> None:
    assert run(ours, ids=IDS, offsets=OFFSETS).shape == run(theirs, ids=IDS, offsets=OFFSETS).shape


def same_rows(theirs: str, ours: str) -> None:
    dense = module()
    assert torch.equal(run(ours, module=dense)(IDS, OFFSETS), run(theirs, module=dense)(IDS, OFFSETS))


def same_training(theirs: str, ours: str) -> None:
    dense = module()
    sharded, optimizer = run(ours, module=copy.deepcopy(dense)), run(theirs, module=dense)
    for _ in range(3):
        optimizer.zero_grad()
        dense(IDS, OFFSETS).square().sum().backward()
        optimizer.step()
        sharded(IDS, OFFSETS).square().sum().backward()
    torch.testing.assert_close(sharded.full_weight(), dense.weight.detach())


def same_norm(theirs: str, ours: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 1))
    sharded = nn.Sequential(ShardedEmbedding.from_dense(model[0], Layout.table(0)), copy.deepcopy(model[1]))
    for made in (model, sharded):
        made(IDS).square().sum().backward()
    torch.testing.assert_close(run(ours, model=sharded), run(theirs, model=model))


def a_table(theirs: str, ours: str) -> None:
    table = run(ours)
    assert (table.name, table.rows, table.dim, table.features, table.mode) == ("a", 11, 4, ("x",), "sum")


def a_table_without_pooling(theirs: str, ours: str) -> None:
    assert isinstance(EmbeddingCollection([run(ours)])({"x": IDS})["x"], Ragged)


def keyed() -> SimpleNamespace:
    """A stand-in for a KeyedJaggedTensor with the keys x and y."""

    def jagged(values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(values=lambda: values, offsets=lambda: torch.tensor([0, 3, 4]), weights_or_none=lambda: None)

    return SimpleNamespace(to_dict=lambda: {"x": jagged(IDS), "y": jagged(IDS + 1)})


def a_collection(theirs: str, ours: str) -> None:
    found = run(ours, tables=[Table("a", 11, 4, ["x"]), Table("b", 11, 3, ["x"])], features=keyed())
    assert {name: tuple(x.shape) for name, x in found.items()} == {"x@a": (2, 4), "x@b": (2, 3)}
    with pytest.raises(KeyError, match="'z' is no key; the keys are"):
        Ragged.from_keyed_jagged(keyed(), names=["z"])


def one_tensor(theirs: str, ours: str) -> None:
    pooled = EmbeddingCollection([Table("a", 11, 4, ["x"]), Table("b", 11, 3, ["y"])])({"x": IDS, "y": IDS})
    assert torch.equal(run(ours, pooled=pooled), torch.cat([pooled["x"], pooled["y"]], 1))


def a_fused_optimizer(theirs: str, ours: str) -> None:
    collection = run(ours, tables=[Table("a", 11, 4)])
    before = collection.full_weight("a")
    collection({"a": IDS})["a"].sum().backward()
    assert (collection.full_weight("a") != before).any(1).nonzero().flatten().tolist() == [1, 2, 5]


def a_cache(theirs: str, ours: str) -> None:
    collection = run(ours, tables=[Table("a", 11, 4)])
    assert collection.cache_stats()["a"].slots == 2
    assert torch.equal(collection({"a": IDS})["a"], collection.full_weight("a")[IDS])


def a_quantized_copy(theirs: str, ours: str) -> None:
    collection = EmbeddingCollection([Table("a", 11, 4)])
    found, expected = run(ours, collection=collection)({"a": IDS})["a"], collection({"a": IDS})["a"]
    assert 0 < (found - expected).abs().max() < 0.02


def beside_ddp_on_ranks(ours: str) -> None:
    table = ShardedEmbedding(11, 4, plan="row")
    ddp = run(ours, model=nn.Sequential(table, nn.Linear(4, 1)), DistributedDataParallel=DistributedDataParallel)
    ddp(IDS + dist.get_rank()).sum().backward()
    assert table.weight.grad is not None


def a_plan(theirs: str, ours: str) -> None:
    plan = run(ours, tables=[Table("a", 11, 4)])
    assert isinstance(plan, Plan) and len(plan.memory) == 8 and "a" in str(plan)


ROWS = {
    "`ShardedEmbedding(11, 4)(ids)`": same_shapes,
    '`ShardedEmbeddingBag(11, 4, mode="sum")(ids, offsets)`': same_shapes,
    '`ShardedEmbeddingBag.from_dense(module, plan="row")`': same_rows,
    "`ShardedEmbeddingBag.from_dense(module, optimizer=Adam(lr=0.1))`": same_training,
    "`clip_grad_norm_(model.parameters(), 1.0)`": same_norm,
    '`Table("a", 11, 4, features=["x"])`': a_table,
    '`Table("a", 11, 4, features=["x"], mode=None)`': a_table_without_pooling,
    '`EmbeddingCollection(tables)(Ragged.from_keyed_jagged(features, names=["x"]))`': a_collection,
    "`torch.cat(list(pooled.values()), dim=1)`": one_tensor,
    "`EmbeddingCollection(tables, optimizer=RowwiseAdagrad(lr=0.1))`": a_fused_optimizer,
    "`EmbeddingCollection(tables, plan=Layout.row().in_host_memory(cache=0.1), optimizer=SGD(lr=0.1))`": a_cache,
    "`quantize(collection)`": a_quantized_copy,
    "`DistributedDataParallel(exclude_from_ddp(model))`": beside_ddp_on_ranks,
    "`plan_tables(tables, 8, batch_size=512)`": a_plan,
}


def test_every_row_of_the_readme_has_a_test():
    assert [ours for _, ours in rows()] == list(ROWS)


@pytest.mark.parametrize(("theirs", "ours"), rows(), ids=[code(ours) for _, ours in rows()])
def test_row_of_the_readme(theirs, ours, ranks):
    if ROWS[ours] is beside_ddp_on_ranks:
        ranks(beside_ddp_on_ranks, ours, world_size=2)
    else:
        ROWS[ours](theirs, ours)
