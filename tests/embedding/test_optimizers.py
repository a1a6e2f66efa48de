"""Fused and unfused optimizers give, over several steps, what one process gives with the whole table and batch."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.embedding.reference import DIM, ROWS, layouts, local_gradient
from tests.embedding.test_collection import make_pair
from unisono.collectives import MismatchError
from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
)
from unisono.embedding.lookup import compiled
from unisono.embedding.optimizers import ParameterGradients

STEPS = 4


class PlainRowwiseAdagrad(torch.optim.Optimizer):
    """The formula of row-wise Adagrad, on whole tables."""

    def __init__(self, params, lr, eps=1e-8):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", p.new_zeros(len(p)))
                total += p.grad.square().mean(1)
                p -= group["lr"] * p.grad / (total.sqrt() + group["eps"])[:, None]


RULES = {
    "SGD": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), False),
    "RowwiseAdagrad": (RowwiseAdagrad(lr=0.1), lambda p: PlainRowwiseAdagrad(p, lr=0.1), False),
    "Adagrad": (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), False),
    "Adam": (Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
}


def draw_batches(size: int) -> list[list[torch.Tensor]]:
    """Draw bags of three ids for each step and rank; one rank has none."""
    draw = torch.Generator().manual_seed(3)
    return [[torch.randint(ROWS, ((2 + rank + step) % 4, 3), generator=draw) for rank in range(size)] for step in range(STEPS)]


def target(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train_whole(dense, optimizer, size, schedule=None):
    """Train on the sum of squared distances over the whole batch, which goes with grad_reduce="sum"."""
    for step, parts in enumerate(draw_batches(size)):
        ids = torch.cat(parts)
        optimizer.zero_grad()
        (dense(ids) - target(step, len(ids))).square().sum().backward()
        optimizer.step()
        if schedule:
            schedule.step()


def train_sharded(module, size, optimizer=None, schedule=None):
    for step, parts in enumerate(draw_batches(size)):
        rank, sizes = dist.get_rank(), [len(x) for x in parts]
        if optimizer:
            optimizer.zero_grad()
        own = target(step, sum(sizes)).split(sizes)[rank]
        (module(parts[rank]) - own).square().sum().backward()
        if optimizer:
            optimizer.step()
        if schedule:
            schedule.step()


def fused_matches(rule: str, kernels: str) -> None:
    size = dist.get_world_size()
    loaded = compiled.load() if kernels == "compiled" else compiled.Loaded(None, "a test")
    with mock.patch.object(compiled, "load", return_value=loaded):
        compare_fused(rule, size)


def compare_fused(rule: str, size: int) -> None:
    fused, plain, sparse = RULES[rule]
    for name, layout in layouts(size).items():
        torch.manual_seed(1)
        dense = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, sparse=sparse)
        module = ShardedEmbeddingBag.from_dense(dense, layout, optimizer=fused, grad_reduce="sum")
        optimizer = plain(dense.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        train_whole(dense, optimizer, size, schedule)
        train_sharded(module, size, schedule=torch.optim.lr_scheduler.StepLR(module.optimizer, 2))
        assert module.weight.grad is None
        torch.testing.assert_close(module.full_weight(), dense.weight.detach(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_fused_optimizer_matches_one_process(rule, size, kernels, ranks):
    ranks(fused_matches, rule, kernels, world_size=size)


def decay_matches() -> None:
    """If every step looks up every row, weight decay is that of torch."""
    size = dist.get_world_size()
    for layout in layouts(size).values():
        torch.manual_seed(1)
        dense = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        pairs = [
            (SGD(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
            (Adagrad(lr=0.1, weight_decay=0.3), lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.3)),
            (RowwiseAdagrad(lr=0.1, weight_decay=0.3), None),
        ]
        for rule, plain in pairs:
            module = ShardedEmbedding.from_dense(dense, layout, optimizer=rule, grad_reduce="sum")
            whole = nn.Embedding.from_pretrained(dense.weight.detach().clone(), freeze=False)
            total = torch.zeros(ROWS, dtype=torch.float64)
            optimizer = plain(whole.parameters()) if plain else None
            for _ in range(2):
                module(torch.arange(ROWS)).pow(3).sum().backward()
                whole.zero_grad()
                (whole(torch.arange(ROWS)).pow(3).sum() * size).backward()
                if optimizer:
                    optimizer.step()
                else:
                    with torch.no_grad():
                        grad = whole.weight.grad + 0.3 * whole.weight
                        total += grad.square().mean(1)
                        whole.weight -= 0.1 * grad / (total.sqrt() + 1e-8)[:, None]
            torch.testing.assert_close(module.full_weight(), whole.weight.detach())


def test_weight_decay_matches_torch(ranks):
    ranks(decay_matches, world_size=3)


def unfused_matches(sparse: bool) -> None:
    size = dist.get_world_size()
    makers = [lambda p: torch.optim.SGD(p, lr=0.1)]
    makers += [lambda p: torch.optim.SparseAdam(p, lr=0.1)] if sparse else [lambda p: torch.optim.Adam(p, lr=0.1)]
    for make in makers:
        for layout in layouts(size).values():
            torch.manual_seed(1)
            dense = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, sparse=sparse)
            module = ShardedEmbeddingBag.from_dense(dense, layout, grad_reduce="sum")
            train_whole(dense, make(dense.parameters()), size)
            train_sharded(module, size, make(module.parameters()))
            torch.testing.assert_close(module.full_weight(), dense.weight.detach())


@pytest.mark.parametrize("sparse", [True, False])
def test_torch_optimizer_on_the_shards_matches_one_process(sparse, ranks):
    ranks(unfused_matches, sparse, world_size=3)


def frozen_table_stays() -> None:
    tables = [Table("a", 7, 3), Table("b", 5, 3)]
    collection = EmbeddingCollection(tables, plan="row", optimizer=SGD(lr=1.0))
    collection.weight("a").requires_grad_(False)
    before = {name: collection.tables[name].full_weight() for name in "ab"}
    out = collection({"a": torch.tensor([1, 2]), "b": torch.tensor([1, 2])})
    (out["a"].sum() + out["b"].sum()).backward()
    assert torch.equal(collection.tables["a"].full_weight(), before["a"])
    assert not torch.equal(collection.tables["b"].full_weight(), before["b"])


def test_frozen_table_is_not_changed(ranks):
    ranks(frozen_table_stays, world_size=2)


# Features x and y look into table a, z into table b. For each step, the features that each rank has in its loss.
LOSSES = ["xyz xyz xyz", "x x x", "x xz x", "xyz xyz xyz", "z z z", "y x z", "xz xyz y"]
TWO_TABLES = [Table("a", ROWS, 3, features=["x", "y"]), Table("b", 7, 4, features=["z"], mode="mean")]


ROWS_OF = {"x": ROWS, "y": ROWS, "z": 7}


def draw_three_features(step: int, rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randint(rows, ((2 + rank + step) % 3, 2), generator=draw) for name, rows in ROWS_OF.items()}


def loss_of(found: dict[str, torch.Tensor], names: str) -> torch.Tensor:
    return sum((found[name].square().sum() for name in names), start=torch.zeros(()))


def train_whole_by_features(weights: dict[str, nn.Parameter], step_one: Any, sparse: bool, losses: list[str]) -> None:
    """One process: a feature is looked up for the whole batch if any rank has it in its loss."""
    for step, names in enumerate(losses):
        parts = [draw_three_features(step, rank) for rank in range(len(names.split()))]
        loss = torch.zeros((), dtype=torch.float64)
        for table in TWO_TABLES:
            for name in table.features:
                sizes = [len(part[name]) for part in parts]
                if name in names:
                    ids, weight = torch.cat([part[name] for part in parts]), weights[table.name]
                    found = nn.functional.embedding_bag(ids, weight, mode=table.mode, sparse=sparse).split(sizes)
                    loss = loss + sum(x.square().sum() for x, own in zip(found, names.split(), strict=True) if name in own)
        loss.backward()
        step_one()
        for weight in weights.values():
            weight.grad = None


def train_by_features(collection: EmbeddingCollection, losses: list[str], step_one: Any = lambda: None) -> None:
    rank = dist.get_rank()
    for step, names in enumerate(losses):
        loss_of(collection(draw_three_features(step, rank)), names.split()[rank]).backward()
        step_one()
        collection.zero_grad()


def decaying_sgd(weights: dict[str, nn.Parameter]) -> None:
    """SGD(lr=0.1, weight_decay=0.3) on the rows that were looked up."""
    with torch.no_grad():
        for weight in weights.values():
            if weight.grad is not None:
                rows = weight.grad.coalesce().indices()[0]
                weight[rows] -= 0.1 * (weight.grad.to_dense()[rows] + 0.3 * weight[rows])


def features_outside_the_loss(kind: str) -> None:
    """Zeros were made for them, so momentum and weight decay moved their rows; and Adam counted a step."""
    size = dist.get_world_size()
    for number, layout in enumerate(layouts(size).values()):
        torch.manual_seed(1)
        options = {"optimizer": Adam(lr=0.1)} if kind == "Adam" else {}
        options = {"optimizer": SGD(lr=0.1, weight_decay=0.3)} if kind == "decay" else options
        collection = EmbeddingCollection(
            TWO_TABLES,
            plan={"a": layout, "b": ("row", "table")[number % 2]},
            grad_reduce="sum",
            dtype=torch.float64,
            sparse=kind == "sparse",
            **options,
        )
        weights = {table.name: nn.Parameter(collection.full_weight(table.name)) for table in TWO_TABLES}
        if kind == "dense":
            optimizer = torch.optim.Adam(weights.values(), lr=0.1)
            train_by_features(collection, LOSSES, torch.optim.Adam(collection.parameters(), lr=0.1, foreach=False).step)
        elif kind == "sparse":
            optimizer = torch.optim.SparseAdam(weights.values(), lr=0.1)
            train_by_features(collection, LOSSES, torch.optim.SparseAdam(collection.parameters(), lr=0.1).step)
        else:
            optimizer = torch.optim.SparseAdam(weights.values(), lr=0.1)
            train_by_features(collection, LOSSES)
        step_one = (lambda weights=weights: decaying_sgd(weights)) if kind == "decay" else optimizer.step
        train_whole_by_features(weights, step_one, kind != "dense", LOSSES)
        for name, weight in weights.items():
            torch.testing.assert_close(collection.full_weight(name), weight.detach())


@pytest.mark.parametrize("kind", ["Adam", "decay", "dense", "sparse"])
def test_features_outside_the_loss_change_nothing(kind, ranks):
    ranks(features_outside_the_loss, kind, world_size=3)


def frozen_where_a_rank_holds_nothing() -> None:
    """torch.cat([]) raised on the ranks without a shard of the group, and the others waited for them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = ["xyz " * size, "xyz " * size, "xyz " * size, "xyz " * size]
    for plan in ("table", "row", "column", "replicated"):
        for rule in (Adam(lr=0.1), RowwiseAdagrad(lr=0.1, weight_decay=0.1)):
            torch.manual_seed(1)
            collection = EmbeddingCollection(TWO_TABLES, plan=plan, optimizer=rule, grad_reduce="sum", dtype=torch.float64)
            first = {name: collection.full_weight(name) for name in "ab"}
            collection.weight("b").requires_grad_(False)
            train_by_features(collection, names)
            assert torch.equal(collection.full_weight("b"), first["b"])
            collection.weight("a").requires_grad_(False)
            found = collection(draw_three_features(0, rank))
            assert not any(x.requires_grad for x in found.values())
            collection.requires_grad_(True)  # freezing between forward and backward, as in torch
            last = {name: collection.full_weight(name) for name in "ab"}
            loss = loss_of(collection(draw_three_features(0, rank)), "xyz")
            collection.requires_grad_(False)
            loss.backward()
            assert all(torch.equal(collection.full_weight(name), last[name]) for name in "ab")
            collection.requires_grad_(True)
            collection.weight("b").requires_grad_(rank > 0)
            with pytest.raises(MismatchError, match=r"rank 0: .*frozen: b"):
                collection(draw_three_features(0, rank))
            collection.requires_grad_(True)
            train_by_features(collection, names)
            if isinstance(rule, Adam):  # b has made as many steps as it was trained, like SparseAdam
                weights = {name: nn.Parameter(weight) for name, weight in first.items()}
                optimizer = torch.optim.SparseAdam(weights.values(), lr=0.1)
                train_whole_by_features(
                    weights, lambda w=weights, o=optimizer: (setattr(w["b"], "grad", None), o.step()), True, names
                )
                train_whole_by_features(weights, optimizer.step, True, names)
                for name, weight in weights.items():
                    torch.testing.assert_close(collection.full_weight(name), weight.detach())


def test_frozen_tables_where_a_rank_holds_nothing(ranks):
    ranks(frozen_where_a_rank_holds_nothing, world_size=3)


def learning_rates_differ() -> None:
    """Each rank applied its own, silently."""
    table = ShardedEmbedding(ROWS, DIM, optimizer=SGD(lr=0.1))
    table.optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(MismatchError, match=r"rank 1: .*lr=1.1"):
        table(torch.tensor([1]))
    with torch.no_grad():
        table(torch.tensor([1]))


def test_different_learning_rates_on_ranks_are_rejected(ranks):
    ranks(learning_rates_differ, world_size=2)


def checkpoint_tools_leave_no_gradient() -> None:
    """get_state_dict gives every parameter a gradient of zeros, and zero_grad of the fused optimizer left them there."""
    collection = EmbeddingCollection(TWO_TABLES, plan="auto", optimizer=Adam(lr=0.1))
    before = {name: collection.full_weight(name) for name in "ab"}
    get_state_dict(collection, collection.optimizer)
    assert all(parameter.grad is None for parameter in collection.parameters())
    assert all(torch.equal(collection.full_weight(name), before[name]) for name in "ab")
    assert collection.optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoint_tools_leave_no_gradient(ranks):
    ranks(checkpoint_tools_leave_no_gradient, world_size=2)


def half_precision_state() -> None:
    module = ShardedEmbedding(5, 4, optimizer=Adagrad(lr=0.1), dtype=torch.bfloat16)
    assert module.states["sum"].dtype == torch.float32
    before = module.full_weight()
    module(torch.tensor([1, 4])).sum().backward()
    changed = (module.full_weight() != before).any(1)
    assert changed.tolist() == [False, True, False, False, True]


def test_sixteen_bit_weights_have_wide_state(ranks):
    ranks(half_precision_state, world_size=2)


def frozen_tables_get_no_gradient() -> None:
    """A dense gradient was made and thrown away, which mattered for large tables."""
    collection = make_pair("row")
    collection.weight("a").requires_grad_(False)
    out = collection({"a": torch.tensor([1]), "b": torch.tensor([0])})
    with mock.patch.object(ParameterGradients, "_gradient", autospec=True, return_value=None) as made:
        (out["a"].sum() + out["b"].sum()).backward()
    assert [call.args[2] is None for call in made.call_args_list] == [True, False]


def test_frozen_tables_get_no_gradient(ranks):
    ranks(frozen_tables_get_no_gradient, world_size=3)


def penalised_loss(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A loss for each sample, and the square of its gradient by the sample's rows: a gradient penalty."""
    losses = (rows.sin() * rows.cumsum(-1)).flatten(1).sum(1) * (1 + ids.sum(1) % 3)
    (gradient,) = torch.autograd.grad(losses.sum(), rows, create_graph=True)
    return (losses + gradient.square().flatten(1).sum(1)).sum()


def gradient_penalty_matches() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(ROWS, (7, 2), generator=torch.Generator().manual_seed(5))
    own = ids.split([7 - 3 * (size - 1), *[3] * (size - 1)] if size < 3 else [3, 0, 4])[rank]
    for name, layout in layouts(size).items():
        for options in ({}, {"sparse": True}, {"optimizer": SGD(lr=1.0)}):
            torch.manual_seed(1)
            dense = nn.Embedding(ROWS, DIM, dtype=torch.float64)
            module = ShardedEmbedding.from_dense(dense, layout, grad_reduce="sum", **options)
            penalised_loss(dense(ids), ids).backward()
            penalised_loss(module(own), own).backward()
            found = dense.weight.detach() - module.full_weight() if "optimizer" in options else local_gradient(module)
            torch.testing.assert_close(found, dense.weight.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradient_penalty_matches_one_process(size, ranks):
    ranks(gradient_penalty_matches, world_size=size)


def test_second_derivatives_by_the_weights_are_rejected():
    module = ShardedEmbedding(ROWS, DIM)
    (gradient,) = torch.autograd.grad(module(torch.tensor([1, 2])).square().sum(), module.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
