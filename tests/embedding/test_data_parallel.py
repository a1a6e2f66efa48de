"""Tables beside a dense model in DDP or FSDP2: a step of the whole gives the weights of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import global_mean
from unisono.embedding import SGD, EmbeddingCollection, Table, exclude_from_ddp, sharded_parameters

TABLES = [Table("a", 11, 4), Table("b", 6, 4, mode="mean")]
BAGS = [3, 1, 2, 0]


class Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(4)
        self.top = nn.Sequential(nn.Linear(8, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 1, dtype=torch.float64))

    def forward(self, features):
        found = self.tables(features)
        return self.top(torch.cat([found["a"], found["b"]], 1)).squeeze(1)


class Whole(nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {t.name: nn.EmbeddingBag(t.rows, t.dim, mode=t.mode, _weight=weights[t.name].clone()) for t in TABLES}
        )

    def forward(self, features):
        return {name: bag(features[name]) for name, bag in self.bags.items()}


def draw(size: int) -> list[dict[str, torch.Tensor]]:
    seeds = torch.Generator().manual_seed(8)
    return [{t.name: torch.randint(t.rows, (BAGS[rank], 2), generator=seeds) for t in TABLES} for rank in range(size)]


def beside(kind: str, plan, fused: bool, compiled: bool = False) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    rule = SGD(lr=0.1) if fused else None
    collection = EmbeddingCollection(TABLES, plan=plan, optimizer=rule, dtype=torch.float64)
    whole = Model(Whole({name: module.full_weight() for name, module in collection.tables.items()}))
    model = Model(collection)
    if kind == "ddp":
        model = DistributedDataParallel(exclude_from_ddp(model))
    elif kind == "fsdp":
        fully_shard(model, ignored_params=set(sharded_parameters(model).values()))
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        parts = draw(size)
        joined = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        whole_optimizer.zero_grad()
        whole(joined).square().mean().backward()
        whole_optimizer.step()
        optimizer.zero_grad()
        global_mean(model(parts[rank]).square()).backward()
        optimizer.step()
    for name, bag in whole.tables.bags.items():
        torch.testing.assert_close(collection.tables[name].full_weight(), bag.weight.detach())
    tops = [p for name, p in model.named_parameters() if "top" in name]
    for p, expected in zip(tops, whole.top.parameters(), strict=True):
        torch.testing.assert_close((p.full_tensor() if isinstance(p, DTensor) else p).detach(), expected.detach())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("plan", "fused"), [("row", True), ("column", False), ("auto", True), ("replicated", False)])
def test_dense_model_beside_tables_matches_one_process(kind, plan, fused, ranks):
    ranks(beside, kind, plan, fused, world_size=3)


def test_dense_part_compiles_around_the_tables(ranks):
    ranks(beside, "ddp", "row", True, True, world_size=2, timeout=120)
