"""A rule for each table, and one step for all gradients since zero_grad: on many ranks as in one process."""

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.flop_counter import FlopCounterMode

from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    GradScaler,
    Layout,
    RowwiseAdagrad,
    Table,
    clip_grad_norm_,
)
from unisono.embedding.lookup import compiled

TABLES = [Table("a", 23, 4), Table("b", 11, 6, ["b", "b2"], padding_idx=2), Table("c", 9, 3, mode="max")]
RULES = {
    "a": RowwiseAdagrad(lr=0.3, weight_decay=0.1),
    "b": Adam(lr=0.2),
    "c": Adagrad(lr=0.1, initial_accumulator_value=0.5),
}
PLANS: dict[str, Any] = {"row": "row", "column": "column", "mixed": {"a": "table", "b": "column", "c": "replicated"}}


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(step: int) -> dict[str, Tensor]:
    """Seven samples. The table c is not looked up in every step."""
    draw = torch.Generator().manual_seed(step)
    rows = {"a": 23, "b": 11, "b2": 11, "c": 9}
    return {name: torch.randint(0, n, (7, 3), generator=draw) for name, n in rows.items()}


def mine(whole: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """This rank's samples: an uneven split, with empty ranks."""
    rank, world = rank_and_world()
    cuts = [0, *sorted((3 * step + 5 * r) % 8 for r in range(1, world)), 7]
    return {name: x[cuts[rank] : cuts[rank + 1]] for name, x in whole.items()}


def loss_of(collection: EmbeddingCollection, step: int) -> Tensor:
    """A sum over the samples of all ranks, if gradients are summed."""
    found = collection(mine(batch(step), step))
    weights = {name: torch.linspace(1, 2, x.shape[1], dtype=x.dtype) for name, x in found.items()}
    used = [name for name in found if name != "c" or step % 2]
    return sum((found[name] * weights[name]).square().sum() + 0 * found[name].sum() for name in used)


def make(plan: Any, *, dtype: torch.dtype = torch.float64, **options: Any) -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(TABLES, plan=plan, grad_reduce="sum", dtype=dtype, **options)


def weights_of(collection: EmbeddingCollection) -> dict[str, Tensor]:
    return {table.name: collection.full_weight(table.name) for table in TABLES}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(plan: Any, *, micro_batches: int = 1, max_norm: float | None = None, sparse: bool = True) -> dict[str, Tensor]:
    collection = make(plan, optimizer=RULES, sparse=sparse)
    optimizer = collection.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(4):
        optimizer.zero_grad()
        for k in range(micro_batches):
            loss_of(collection, 4 * k + step).backward()
        if max_norm is not None:
            clip_grad_norm_(collection, max_norm)
        optimizer.step()
        schedule.step()
    return weights_of(collection)


def one_backward_both_ways(plan: Any, options: dict[str, Any]) -> None:
    """Check that a step in the backward and a step after it leave the same bits."""
    for rules in (RULES, SGD(lr=0.1, weight_decay=0.1)):
        fused, collection = (make(plan, optimizer=rules, sparse=sparse, **options) for sparse in (False, True))
        for step in range(4):
            loss_of(fused, step).backward()
            collection.optimizer.zero_grad()
            loss_of(collection, step).backward()
            kept = {name: x.grad.clone() for name, x in collection.named_parameters() if x.grad is not None}
            collection.optimizer.step()
            for name, x in collection.named_parameters():
                assert x.grad is None or torch.equal(x.grad._values(), kept[name]._values()), "a step leaves gradients alone"
        state, other = fused.state_dict(), collection.state_dict()
        assert list(state) == list(other), "checkpoints of both have the same entries"
        for name, value in state.items():
            local, found = (getattr(x, "_local_tensor", x) for x in (value, other[name]))
            assert torch.equal(local, found), name
        fused.load_state_dict(other)


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_step_after_one_backward_has_the_bits_of_a_step_in_it(ranks, kernels):
    for options in ({}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}):
        with_kernels(kernels, "table", options)
    ranks(with_kernels, kernels, "row", {"dtype": torch.float32}, world_size=3)
    ranks(with_kernels, kernels, "column", {"dtype": torch.float32}, world_size=3)
    ranks(with_kernels, kernels, "column", {"dtype": torch.bfloat16, "stochastic_rounding": True}, world_size=2)


def with_kernels(kernels: str, plan: Any, options: dict[str, Any]) -> None:
    loaded = compiled.load() if kernels == "compiled" else compiled.Loaded(None, "a test")
    with mock.patch.object(compiled, "load", return_value=loaded):
        one_backward_both_ways(plan, options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("micro_batches", "max_norm", "sparse"), [(1, None, False), (3, None, True), (2, 0.5, True)])
def test_steps_match_one_process(ranks, plan, micro_batches, max_norm, sparse):
    expected = train("replicated", micro_batches=micro_batches, max_norm=max_norm, sparse=sparse)
    for world in (2, 3) if sparse else (4,):
        for found in ranks(train_by_name, plan, micro_batches, max_norm, sparse, world_size=world):
            assert_same(found, expected)


def train_by_name(plan: str, micro_batches: int, max_norm: float | None, sparse: bool) -> dict[str, Tensor]:
    return train(PLANS[plan], micro_batches=micro_batches, max_norm=max_norm, sparse=sparse)


def train_with_other_kernels_on_rank_0() -> dict[str, Tensor]:
    """A mode of torch, which sees each operation, keeps rank 0 from the compiled kernels."""
    collection = make("replicated", optimizer=RULES, sparse=True, dtype=torch.float32)
    with FlopCounterMode(display=False) if dist.get_rank() == 0 else nullcontext():
        for step in range(4):
            collection.optimizer.zero_grad()
            loss_of(collection, step).backward()
            collection.optimizer.step()
    return weights_of(collection)


def test_copies_keep_the_same_bits_if_ranks_choose_other_kernels(ranks):
    first, second = ranks(train_with_other_kernels_on_rank_0, world_size=2)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def test_micro_batches_are_one_step():
    """Two halves of a batch give what the whole batch gives in one backward."""
    results = []
    for parts in ([slice(0, 7)], [slice(0, 3), slice(3, 3), slice(3, 7)]):
        collection = make("row", optimizer=RULES, sparse=True)
        optimizer = collection.optimizer
        for step in range(3):
            optimizer.zero_grad()
            for part in parts:
                found = collection({name: x[part] for name, x in batch(step).items()})
                sum(x.square().sum() for x in found.values()).backward()
            optimizer.step()
        results.append(weights_of(collection))
    assert_same(results[1], results[0])


def test_each_table_has_its_rule():
    for sparse in (False, True):
        together = train("row", sparse=sparse)
        for name, rule in RULES.items():
            assert_same({name: together[name]}, {name: train_with(rule)[name]})


def test_equal_rules_share_a_param_group():
    collection = make("row", optimizer={"a": SGD(lr=0.1), "b": Adam(lr=0.2), "c": SGD(lr=0.1)})
    groups = collection.optimizer.param_groups
    assert [(group["tables"], group["lr"]) for group in groups] == [(["a", "c"], 0.1), (["b"], 0.2)]
    assert [id(x) for x in groups[0]["params"]] == [id(collection.weight(name)) for name in "ac"]
    groups[0]["lr"] = 0.0
    before = weights_of(collection)
    loss_of(collection, 1).backward()
    after = weights_of(collection)
    assert [torch.equal(before[name], after[name]) for name in "abc"] == [True, False, True]
    other = make("row", optimizer={"a": SGD(lr=0.1), "b": Adam(lr=0.2), "c": SGD(lr=0.1)})
    other.optimizer.load_state_dict(collection.optimizer.state_dict())
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.0, 0.2]


def train_with(rule: Any) -> dict[str, Tensor]:
    collection = make("row", optimizer=rule)
    assert collection.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(collection.optimizer, step_size=2, gamma=0.5)
    for step in range(4):
        loss_of(collection, step).backward()
        schedule.step()
    return weights_of(collection)


def scaled(plan: str, bad_step: int) -> tuple[dict[str, Tensor], float]:
    collection = make(PLANS[plan], optimizer={**RULES, "b": SGD(lr=0.1)}, sparse=True)
    optimizer, scaler = collection.optimizer, GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(collection, step)
        if step == bad_step:  # one row of one table, which lies on one rank, gets an infinite gradient
            looked_up = batch(step)["a"][0, 0]
            infinite = torch.where(torch.arange(7) == 0, float("inf"), 0.0).double()
            ids = torch.full((7,), int(looked_up))
            part = mine({"a": ids, "b": ids % 11, "b2": ids % 11, "c": ids % 9, "w": infinite}, step)
            loss = loss + (collection({name: part[name] for name in ("a", "b", "b2", "c")})["a"].sum(1) * part["w"]).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(collection, 5.0)
        scaler.step(optimizer)
        scaler.update()
    return weights_of(collection), scaler.get_scale()


@pytest.mark.parametrize("plan", ["row", "mixed"])
def test_all_ranks_skip_a_step_with_infinite_gradients(ranks, plan):
    expected, scale = scaled("row", bad_step=1)
    assert scale == 4.0 and all(x.isfinite().all() for x in expected.values())
    for found, other in ranks(scaled, plan, 1, world_size=3):
        assert other == scale
        assert_same(found, expected)


def scaled_by_a_fused_optimizer() -> tuple[list[Tensor], float]:
    """The gradient of the second step is infinite on one rank."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.Adam([weight], lr=0.1, fused=True), GradScaler("cpu", init_scale=8.0)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if step == 1 and rank_and_world()[0] == rank_and_world()[1] - 1:
            weight.grad[1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        history.append(weight.detach().clone())
    return history, scaler.get_scale()


def test_all_ranks_skip_a_step_of_an_optimizer_that_unscales_for_itself(ranks):
    expected, scale = scaled_by_a_fused_optimizer()
    assert scale == 4.0 and torch.equal(expected[0], expected[1]) and not torch.equal(expected[1], expected[2])
    for found, other in ranks(scaled_by_a_fused_optimizer, world_size=2):
        assert other == scale and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_that_are_reset_lose_their_state():
    collection = make("row", optimizer=RULES, sparse=True)
    optimizer = collection.optimizer
    loss_of(collection, 1).backward()
    optimizer.step()
    collection.reset_rows("a", torch.arange(23))
    assert not collection.tables["a"].states["sum"].any() and not collection.weight("a").any()


def reset_and_train(plan: str) -> None:
    """Tables that are drawn anew train as new tables do: nothing is left of the old states, on any rank."""
    trained, fresh = (make(PLANS[plan], optimizer=RULES, sparse=True) for _ in range(2))
    optimizers = [trained.optimizer, fresh.optimizer]
    for step in range(3):
        loss_of(trained, step).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    for collection, optimizer in zip((trained, fresh), optimizers, strict=True):
        collection.reset_parameters(seed=5)
        loss_of(collection, 1).backward()
        optimizer.step()
    expected = fresh.state_dict()
    for name, value in trained.state_dict().items():
        local, other = (getattr(x, "_local_tensor", x) for x in (value, expected[name]))
        assert torch.equal(local, other), name


def test_drawing_weights_anew_resets_the_states(ranks):
    reset_and_train("row")
    ranks(reset_and_train, "mixed", world_size=2)


def test_copy_keeps_the_states():
    collection = make("row", optimizer=RULES, sparse=True)
    optimizer = collection.optimizer
    loss_of(collection, 1).backward()
    optimizer.step()
    twin, its_optimizer = copy.deepcopy((collection, optimizer))
    state = twin.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in collection.state_dict().items())
    for made, steps in ((collection, optimizer), (twin, its_optimizer)):
        steps.zero_grad()
        loss_of(made, 3).backward()
        steps.step()
    assert_same(weights_of(twin), weights_of(collection))
    twin.reset_rows("a", torch.arange(23))
    assert not twin.tables["a"].states["sum"].any() and collection.tables["a"].states["sum"].any()


@pytest.mark.parametrize("plan", ["row", Layout.row().in_host_memory(2)], ids=["device", "host"])
def test_a_pickled_collection_loads_states(plan):
    trained, fresh = (make(plan, optimizer=RULES) for _ in range(2))
    loss_of(trained, 0).backward()
    with torch.no_grad():
        fresh.weight("a").data = torch.ones_like(fresh.weight("a"))  # other memory, which no look-up has seen
    fresh = pickle.loads(pickle.dumps(fresh))
    assert bool((fresh.full_weight("a") == 1).all())
    fresh.load_state_dict({name: x.clone() for name, x in trained.state_dict().items()})
    for collection in (trained, fresh):
        loss_of(collection, 1).backward()
    for name, x in trained.state_dict().items():
        assert torch.equal(x, fresh.state_dict()[name]), name


def test_a_learning_rate_and_a_weight_decay_count_from_the_forward():
    collection, other = (make("row", optimizer=SGD(lr=0.1, weight_decay=0.1)) for _ in range(2))
    loss = loss_of(collection, 0)
    collection.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0)
    loss.backward()
    loss_of(other, 0).backward()
    assert_same(weights_of(collection), weights_of(other))


def test_kernels_with_stochastic_rounding():
    options = {"optimizer": SGD(lr=0.1), "stochastic_rounding": True}
    assert make("row", dtype=torch.bfloat16, **options).kernels == "torch: stochastic_rounding=True"
    assert make("row", dtype=torch.float32, **options).kernels == make("row", dtype=torch.float32).kernels


def test_rows_are_not_copied_between_rules_whose_states_differ():
    rules = [{name: RowwiseAdagrad(lr=0.1) for name in RULES}, {name: RowwiseAdagrad(lr=0.1) for name in RULES}]
    last = [*RULES][-1]
    rules[1][last] = Adagrad(lr=0.1)
    one, two = (make("row", optimizer=rule) for rule in rules)
    two.reset_parameters(seed=1)
    for larger, smaller in ((one, two), (two, one)):
        before = weights_of(larger)
        names = [type(x.tables[last].rule).__name__ for x in (smaller, larger)]
        with pytest.raises(ValueError, match=rf"copy_rows: table '{last}': the state 'sum' of {names[0]}.* of {names[1]}"):
            larger.copy_rows(smaller)
        assert all(torch.equal(x, before[name]) for name, x in weights_of(larger).items())


def test_other_memory_keeps_the_states():
    collection = make("row", optimizer=RULES, sparse=True)
    optimizer = collection.optimizer
    collection.weight("b").data = torch.ones(11, 6, dtype=torch.float64)
    loss_of(collection, 1).backward()
    optimizer.step()
    assert int(collection.tables["b"].states["step"]) == 1


def test_moved_tables_keep_optimizer_and_states():
    moved, made = make("row", optimizer=RULES, sparse=True), make("row", optimizer=RULES, sparse=True, dtype=torch.float32)
    moved.float()
    made.load_state_dict(moved.state_dict())
    for collection in (moved, made):
        for step in range(2):
            loss_of(collection, step).backward()
            collection.optimizer.step()
            collection.optimizer.zero_grad()
    state = made.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in moved.state_dict().items())


def test_larger_tables_take_rows_with_their_states():
    collection = make("row", optimizer=RULES)
    larger = EmbeddingCollection(
        [replace(table, rows=table.rows + 5) for table in TABLES], plan="row", optimizer=RULES, dtype=torch.float64
    )
    loss_of(collection, 1).backward()
    larger.copy_rows(collection)
    state = larger.state_dict()
    for name, value in collection.state_dict().items():
        assert torch.equal(state[name][: len(value)] if value.ndim else state[name], value), name


def checkpoint_tools_change_nothing() -> None:
    """get_state_dict makes a step with dense gradients of zeros, unless the optimizer has a state."""
    collection = make("row", optimizer=RULES, sparse=True)
    loss_of(collection, 1).backward()
    collection.optimizer.step()
    collection.optimizer.zero_grad()
    before = {name: getattr(x, "_local_tensor", x).clone() for name, x in collection.state_dict().items()}
    saved = get_optimizer_state_dict(collection, collection.optimizer)
    collection.optimizer.param_groups[0]["lr"] = 7.0
    set_optimizer_state_dict(collection, collection.optimizer, saved)
    assert collection.optimizer.param_groups[0]["lr"] == 0.3
    for name, value in collection.state_dict().items():
        assert torch.equal(getattr(value, "_local_tensor", value), before[name]), name


def test_checkpoint_tools_change_nothing(ranks):
    checkpoint_tools_change_nothing()
    ranks(checkpoint_tools_change_nothing, world_size=2)


def test_a_dense_gradient_is_rejected():
    collection = make("row", optimizer=RULES, sparse=True)
    collection.weight("b").square().sum().backward()
    with pytest.raises(TypeError, match="the gradient of table 'b' is dense"):
        collection.optimizer.step()
