"""clip_grad_norm_ over tables in all layouts beside a dense model gives the norm and the gradients of one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.embedding.reference import layouts
from tests.embedding.test_data_parallel import BAGS, Whole
from tests.embedding.test_data_parallel import Model as TwoTables
from unisono.collectives import MismatchError, global_mean
from unisono.embedding import SGD, EmbeddingCollection, Table, clip_grad_norm_, exclude_from_ddp, sharded_parameters

NORM_TYPES = [2.0, float("inf"), 1.0, 3.0]


class Model(nn.Module):
    """One table for each layout, and a dense model."""

    def __init__(self, tables: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(4)
        self.top = nn.Linear(4 * len(names), 1, dtype=torch.float64)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.top(torch.cat(list(self.tables(features).values()), 1)).squeeze(1)


class WholeTables(nn.Module):
    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        made = {}
        for name, module in collection.tables.items():
            weight = module.full_weight()
            made[name] = nn.EmbeddingBag(*weight.shape, mode="sum", _weight=weight)
        self.bags = nn.ModuleDict(made)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self.bags[name](ids) for name, ids in features.items()}


def make(sparse: bool, **options: Any) -> tuple[Model, Model, list[dict[str, torch.Tensor]]]:
    """Return the model on the ranks, in one process, and the batch of each rank: different numbers of bags, none on rank 3."""
    size = dist.get_world_size()
    plan = {f"t{k}": layout for k, layout in enumerate(layouts(size).values())}
    tables = [Table(name, 5 + k, 4) for k, name in enumerate(plan)]
    torch.manual_seed(2)
    collection = EmbeddingCollection(tables, plan=plan, sparse=sparse, dtype=torch.float64, **options)
    draw = torch.Generator().manual_seed(8)
    parts = [{t.name: torch.randint(t.rows, (BAGS[rank], 2), generator=draw) for t in tables} for rank in range(size)]
    return Model(collection, list(plan)), Model(WholeTables(collection), list(plan)), parts


def backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    global_mean(model(batch).square()).backward()


def gradients(model: Model) -> dict[str, torch.Tensor]:
    found = {"top": model.top.weight.grad, "bias": model.top.bias.grad}
    for name, module in model.tables.tables.items():
        grad = module.weight.grad
        grad = grad._local_tensor if isinstance(grad, DTensor) else grad
        found[name] = module._gather((grad.to_dense() if grad.is_sparse else grad).reshape(module.box.shape))
    return found


def clips_like_one_process(sparse: bool) -> None:
    rank = dist.get_rank()
    model, whole, parts = make(sparse)
    ddp = DistributedDataParallel(exclude_from_ddp(model))
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for norm_type in NORM_TYPES:
        for max_norm in (0.01, 1e6, float("inf")):
            model.zero_grad()
            whole.zero_grad()
            for _ in range(2):  # a sum of two sparse gradients is not coalesced
                backward(ddp, parts[rank])
                whole(joined).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            norm = clip_grad_norm_(ddp if norm_type == 1 else ddp.parameters(), max_norm, norm_type=norm_type)
            torch.testing.assert_close(norm, expected)
            for name, grad in gradients(model).items():
                dense = {"top": whole.top.weight, "bias": whole.top.bias}.get(name)
                wanted = whole.tables.bags[name].weight if dense is None else dense
                torch.testing.assert_close(grad, wanted.grad)


@pytest.mark.parametrize(("sparse", "size"), [(False, 4), (True, 3), (False, 1)])
def test_clipping_matches_one_process(sparse, size, ranks):
    ranks(clips_like_one_process, sparse, world_size=size)


def trains_like_one_process(kind: str, plan: str) -> list[float]:
    """Each rank saw another norm, and DDP's dense weights drifted apart."""
    rank = dist.get_rank()
    torch.manual_seed(2)
    collection = EmbeddingCollection(TWO, plan=plan, dtype=torch.float64)
    whole = TwoTables(Whole({name: collection.full_weight(name) for name in "ab"}))
    model = TwoTables(collection)
    if kind == "fsdp":
        fully_shard(model, ignored_params=set(sharded_parameters(model).values()))
    else:
        model = DistributedDataParallel(exclude_from_ddp(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        parts = [{t.name: torch.randint(t.rows, (n, 2), generator=draw) for t in TWO} for n in BAGS[: dist.get_world_size()]]
        whole_optimizer.zero_grad()
        whole({name: torch.cat([part[name] for part in parts]) for name in "ab"}).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        whole_optimizer.step()
        optimizer.zero_grad()
        backward(model, parts[rank])
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
        optimizer.step()
    for name, bag in whole.tables.bags.items():
        torch.testing.assert_close(collection.full_weight(name), bag.weight.detach())
    tops = [p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters() if "top" in name]
    for p, wanted in zip(tops, whole.top.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), wanted.detach())
    return [float(p.sum().detach()) for p in tops]


TWO = [Table("a", 11, 4), Table("b", 6, 4, mode="mean")]


@pytest.mark.parametrize(("kind", "plan"), [("ddp", "auto"), ("ddp", "table"), ("fsdp", "row"), ("fsdp", "table")])
def test_dense_weights_stay_the_same_on_all_ranks(kind, plan, ranks):
    found = ranks(trains_like_one_process, kind, plan, world_size=3)
    assert found[0] == found[1] == found[2]


def torch_refuses(sparse: bool) -> None:
    """torch's own function took this rank's part for the whole, silently."""
    for plan in ("table", "row", {"a": "table", "b": "replicated"}):
        collection = EmbeddingCollection(TWO, plan=plan, sparse=sparse)
        for _ in range(2):
            sum(x.square().sum() for x in collection({"a": torch.tensor([3]), "b": torch.tensor([3])}).values()).backward()
        for parameters in ([*collection.parameters()], [*collection.parameters(), *used_linear().parameters()]):
            if plan == "row" and not sparse and len(parameters) == 2:
                nn.utils.clip_grad_norm_(parameters, 1.0)  # DTensors only: right
                continue
            with pytest.raises(
                (TypeError, RuntimeError), match=r"call unisono\.embedding\.clip_grad_norm_|mixed torch\.Tensor and DTensor"
            ):
                nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.1, momentum=0 if sparse else 0.9, foreach=False)
        optimizer.step()  # the gradients are plain tensors to it, and its state is made of such
        for parameter, state in optimizer.state.items():
            assert isinstance(parameter, DTensor) or type(state["momentum_buffer"]) is torch.Tensor
        copy.deepcopy(collection).double()


def used_linear() -> nn.Linear:
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    return layer


@pytest.mark.parametrize("sparse", [False, True])
def test_the_function_of_torch_refuses_on_all_ranks(sparse, ranks):
    ranks(torch_refuses, sparse, world_size=3)


def rejects() -> None:
    rank = dist.get_rank()
    model, _, parts = make(False)
    backward(model, parts[rank])
    with pytest.raises(MismatchError, match=r"must be the same on all ranks, but their norms are \["):
        clip_grad_norm_(model, 1.0)  # without DDP
    tables = model.tables
    clip_grad_norm_(tables, 1.0)
    with pytest.raises(MismatchError, match=r"a bad call on rank 1(.|\n)*max_norm=-1.0 must be"):
        clip_grad_norm_(tables, -1 if rank == 1 else 1)
    with pytest.raises(MismatchError, match=r"a bad call on ranks 0-1(.|\n)*norm_type=nan must be"):
        clip_grad_norm_(tables, 1, norm_type=float("nan"))
    with pytest.raises(MismatchError, match="All ranks must clip the same parameters"):
        clip_grad_norm_([*tables.parameters()][rank:], 1.0)
    if rank == 1:
        tables.tables["t0"].weight.grad.to_local().fill_(float("nan"))
    before = float(clip_grad_norm_(tables, 1.0, error_if_nonfinite=False))
    assert before != before
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan, and error_if_nonfinite=True"):
        clip_grad_norm_(tables, 1.0, error_if_nonfinite=True)
    top = model.top
    top.bias.grad = torch.full((1,), float("nan") if rank else 0.0, dtype=torch.float64)
    with pytest.raises(MismatchError, match=r"their norms are \[0\.0, nan\]"):  # not rank 0's alone
        clip_grad_norm_([tables.tables["t0"].weight, top.bias], 1.0)
    fully_shard(top)
    top.zero_grad()
    global_mean(top(torch.ones(2, top.in_features, dtype=torch.float64)).squeeze(1)).backward()
    with pytest.raises(MismatchError, match=r"a bad call on rank 1(.|\n)*max_norm=-1.0 must be"):  # FSDP's norm communicates
        clip_grad_norm_(model, -1 if rank == 1 else 1)
    fused, _, _ = make(False, optimizer=SGD(lr=0.1))
    assert float(clip_grad_norm_(fused.tables, 1.0)) == 0


def test_bad_calls_raise_on_all_ranks(ranks):
    ranks(rejects, world_size=2)


@pytest.mark.parametrize("arguments", [(), ("inf",), (1.0, True), (2.0, False, True), (2.0, False, False)])
def test_without_tables_it_is_the_function_of_torch(arguments):
    ours, theirs = used_linear(), nn.Linear(2, 1)
    ours.phase, theirs.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2) * 1j)
    ours.phase.grad = torch.tensor([3 + 4j, 0])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        q.grad = p.grad.clone()
    assert torch.equal(clip_grad_norm_(ours, 0.1, *arguments), nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, *arguments))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_without_gradients_the_norm_is_zero_and_bad_arguments_raise():
    ours = used_linear()
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(nn.Linear(1, 1).weight, 1.0) == 0
    with pytest.raises(ValueError, match="clip_grad_norm_: max_norm=nan must be"):
        clip_grad_norm_(ours, float("nan"))
    with pytest.raises(ValueError, match="clip_grad_norm_: parameters: expected a module or Tensors, got str"):
        clip_grad_norm_(["weight"], 1.0)
    used_up = ours.parameters()
    assert len(list(used_up)) == 2
    with pytest.warns(UserWarning, match="a generator that is used up"):
        clip_grad_norm_(used_up, 1.0)
