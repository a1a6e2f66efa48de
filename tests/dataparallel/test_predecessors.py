"""Each known defect of torch.nn.parallel (notes/dataparallel.md) is right here."""

import contextvars
import copy
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.func import functional_call

from unisono.dataparallel import ReplicaSet, broadcast, gather, parallel_apply, reduce_add, scatter
from unisono.dataparallel.replicas.replicate import ModuleTemplate

CPUS = ["cpu"] * 4


@dataclass
class Output:
    logits: Tensor
    loss: Tensor
    cache: Any = None


def test_cpu_tensors_are_taken():
    x = torch.arange(4.0)
    assert torch.equal(gather(scatter(x, CPUS), "cpu"), x)
    assert torch.equal(reduce_add(broadcast([x], CPUS), "cpu")[0], 4 * x)


def test_from_the_cpu_to_any_accelerator_and_back_to_a_torch_device(pretend):
    x = torch.arange(9.0)
    parts = scatter(x, [torch.device("pretend", k) for k in range(4)])
    assert torch.equal(gather(parts, torch.device("cpu")), x)


def test_no_rows_vanish_when_leaves_differ_in_length():
    nine, two = torch.arange(9), torch.arange(2)
    parts = scatter((nine, two), CPUS)
    assert len(parts) == 4 and [len(a) for a, _ in parts] == [3, 2, 2, 2] and [len(b) for _, b in parts] == [1, 1, 0, 0]
    back = gather(parts, "cpu")
    assert torch.equal(back[0], nine) and torch.equal(back[1], two)


def test_nine_rows_use_all_four_devices():
    assert [len(part) for part in scatter(torch.arange(9), CPUS)] == [3, 2, 2, 2]


class Flagged(nn.Module):
    def forward(self, x: Tensor, flag: bool, *, scale: Tensor | None = None) -> Tensor:
        y = x if flag else -x
        return y if scale is None else y * scale


def test_one_row_and_a_flag_give_no_replica_without_input():
    replicas = ReplicaSet(Flagged(), CPUS)
    assert replicas(torch.ones(1), True).tolist() == [1]
    # arguments and keyword arguments are split alike
    assert replicas(torch.ones(3), False, scale=torch.arange(3.0)).tolist() == [0, -1, -2]


def test_none_beside_a_tensor_is_an_error_and_not_none():
    with pytest.raises(TypeError, match="NoneType, Tensor"):
        gather([None, torch.ones(2)], "cpu")


def test_texts_and_numbers_are_gathered():
    assert gather(["a", "b"], "cpu") == ["a", "b"] and gather([3, 3], "cpu") == 3


def test_dataclasses_and_default_dicts_and_scalars():
    parts = [Output(torch.ones(k + 1, 2), torch.tensor(float(k))) for k in range(3)]
    whole = gather(parts, "cpu")
    assert whole.logits.shape == (6, 2) and whole.loss.tolist() == [0, 1, 2] and whole.cache is None
    again = scatter(Output(torch.arange(4), torch.tensor(1.0)), CPUS[:2])
    assert again[1].logits.tolist() == [2, 3] and again[1].loss == 1.0
    table = gather([defaultdict(list, x=torch.ones(1)), defaultdict(list, x=torch.ones(2))], "cpu")
    assert isinstance(table, defaultdict) and table["x"].shape == (3,) and table["new"] == []


def test_complex_along_the_last_dimension():
    x = torch.randn(2, 5, dtype=torch.complex64)
    assert torch.equal(gather(scatter(x, CPUS, dim=-1), "cpu", dim=-1), x)


def test_parallel_apply_keeps_inference_mode_context_variables_and_dispatch_modes():
    text = contextvars.ContextVar("text", default="lost")
    text.set("kept")
    with torch.inference_mode():
        assert (
            parallel_apply([lambda: (torch.is_inference_mode_enabled(), text.get())] * 2, [()] * 2, CPUS[:2])
            == [(True, "kept")] * 2
        )
    with FakeTensorMode():
        assert all(isinstance(x, FakeTensor) for x in parallel_apply([partial(torch.ones, 2)] * 2, [()] * 2, CPUS[:2]))


def leave(error: BaseException) -> None:
    raise error


def test_an_exit_in_a_replica_is_not_a_key_error():
    with pytest.raises(BaseExceptionGroup) as caught:
        parallel_apply([leave] * 2, [SystemExit(2), SystemExit(2)], CPUS[:2])
    assert isinstance(caught.value.exceptions[0], SystemExit)


def test_the_sum_of_one_input_is_no_alias():
    x = torch.ones(2)
    reduce_add([[x]], "cpu")[0].add_(1)
    assert x.tolist() == [1, 1]


def test_a_module_shared_by_threads_is_a_race_and_skeletons_are_none():
    """functional_call puts tensors into the one module: threads overwrite each other's. Every replica has its own."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(5, 3)
    states = [{name: p.detach() * (k + 1) for name, p in module.named_parameters()} for k in range(4)]
    expected = [functional_call(module, state, (x,)) for state in states]
    skeletons = [ModuleTemplate(module) for _ in states]
    everyone = threading.Barrier(4, timeout=30)  # all have put theirs in before any goes on

    def call(module: nn.Module) -> Tensor:
        everyone.wait()
        return module(x)

    def fill(skeleton: ModuleTemplate, state: dict[str, Tensor]) -> Tensor:
        return skeleton.call({id(p): state[name] for name, p in module.named_parameters()}, call)

    found = parallel_apply([partial(fill, s) for s in skeletons], states, CPUS)
    torch.testing.assert_close(found, expected)
    shared = copy.deepcopy(module)

    def wait(*_: object) -> None:
        everyone.wait()

    shared.register_forward_pre_hook(wait)
    shared.register_forward_hook(wait)
    found = parallel_apply([partial(functional_call, shared)] * 4, [(state, (x,)) for state in states], CPUS)
    assert sum(map(torch.allclose, found, expected)) <= 1  # what was put in last served all
