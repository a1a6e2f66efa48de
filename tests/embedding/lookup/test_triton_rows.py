"""Triton's operations on rows: right in its interpreter, small enough for the registers of a GPU, chosen with care."""

import re
from functools import cached_property
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="this torch comes without Triton")

from tests.collectives.triton_compiler import compiled_for
from tests.collectives.triton_interpreter import run_interpreted
from unisono.collectives import simulate_rank
from unisono.collectives.ledger.fake_values import known_values
from unisono.embedding import Adam, EmbeddingCollection, Ragged, RowwiseAdagrad, Table
from unisono.embedding.lookup import lookup, triton_choice, triton_kernels, triton_rows
from unisono.embedding.lookup.compiled import Step
from unisono.embedding.lookup.input_dist import IncomingRequest
from unisono.embedding.lookup.kernels import RowGradients, deduplicate, sum_bags
from unisono.embedding.optimizers import Rule

on_fake_cuda = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")


def test_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_triton.py"))


def launch_all(dtype: torch.dtype, width: int, rule: int) -> None:
    n = 5000
    numbers, bags = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    weight, weights, wide = torch.zeros(9, width, dtype=dtype), torch.zeros(n), torch.promote_types(dtype, torch.float32)
    unique, order, starts, count = triton_rows.deduplicate(numbers)
    triton_rows.sum_bags(weight, bags, order, starts, weights)
    triton_rows.sum_bags(weight, numbers, None, starts, None)
    states = [torch.zeros(9, *([] if rule == triton_kernels.ROWWISE_ADAGRAD else [width]), dtype=wide) for _ in "01"]
    step = Step(rule, 0.1, 0.01, 1e-8, (0.9, 0.99), width)
    of_positions = {"bags": bags, "order": order, "starts": starts, "count": count}
    triton_rows.update(step, weight, states, unique, slice(0, n), weight, **of_positions, weights=weights, divisors=starts)
    if rule in (triton_kernels.SGD, triton_kernels.ROWWISE_ADAGRAD):  # what may be missing; no kernel reads what is None
        states = states[:rule]
        step = step._replace(weight_decay=0.0)
        triton_rows.update(step, weight, states, unique, slice(0, n), weight, order=order, starts=starts)
        triton_rows.update(step, weight, states, unique, slice(0, 9), weight, squares=weights)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "width", "rule"),
    [("float32", 64, 1), ("float64", 24, 3), ("bfloat16", 128, 3), ("bfloat16", 2000, 1), ("float16", 7, 0)],
)
def test_kernels_fit_into_a_gpu(arch, dtype, width, rule):
    """Compiled without a GPU: a few registers, so that many programs run at once, and nothing that makes sums change."""
    with (
        triton_rows._place_unique_op.set_kernel_enabled("cpu", enabled=False),
        compiled_for(arch, triton_kernels) as usages,
    ):
        launch_all(getattr(torch, dtype), width, rule)
    names = {"count_unique_kernel", "place_unique_kernel", "chunk_sums_kernel", "sum_bags_kernel", "update_kernel"}
    assert {usage.kernel for usage in usages} == names
    for usage in usages:
        assert usage.spilled <= 16 and usage.registers <= 128 and usage.shared <= 16 * 2**10, usage[:4]
        found = re.findall(r"\b(?:atom|red|fma|div\.full|sqrt\.approx)\.", usage.ptx)
        assert not found, (usage[:4], found)


def choose(dtype: torch.dtype = torch.float32, rule: int | None = None, fake: bool = False):
    with FakeTensorMode() if fake else mock.MagicMock():
        rows = torch.empty(3, 4, dtype=dtype)
    return triton_choice.triton_rows(rows, None, dtype=dtype, rule=rule)


@pytest.fixture
def first_use(monkeypatch):
    """No device has been used yet; comparing with torch gives `answer`. CPU tensors stand for those of a GPU."""
    calls = []

    def set_answer(answer):
        def compare(*args):
            calls.append(args)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(triton_choice, "largest_difference", compare)
        return calls

    monkeypatch.setattr(triton_choice, "_problems", {})
    monkeypatch.setattr(triton_choice, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("UNISONO_TRITON", raising=False)
    return set_answer


def test_the_first_use_compares_once(first_use):
    calls = first_use("")
    for _ in range(2):
        assert choose() is choose(torch.bfloat16) is choose(rule=1) is triton_rows
    assert len(calls) == 3  # for each dtype and rule
    assert choose(torch.float64, fake=True) is triton_rows and len(calls) == 3
    assert triton_choice.why_not(torch.device("cpu"), torch.float32) == ""


@pytest.mark.parametrize("answer", ["a sum differs by 3 of 4", RuntimeError("no ptxas")])
def test_kernels_that_differ_or_do_not_compile_are_not_used(first_use, answer):
    first_use(answer)
    with pytest.warns(UserWarning, match=f"torch computes on rows of torch.float32 on cpu.*{answer}"):
        assert choose() is None
    assert choose() is None  # and no second warning, which pytest would raise
    assert str(answer) in triton_choice.why_not(torch.device("cpu"), torch.float32)


def test_what_takes_torch_operations(first_use, monkeypatch):
    calls = first_use("")
    rows = torch.empty(4, 4)
    assert triton_choice.triton_rows(rows.T[:2], dtype=torch.float32) is None
    assert triton_choice.triton_rows(rows, torch.empty(3, device="meta"), dtype=torch.float32) is None
    assert triton_choice.triton_rows(torch.empty(3, dtype=torch.float8_e5m2), dtype=torch.float8_e5m2) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() is None
    monkeypatch.setenv("UNISONO_TRITON", "0")
    assert choose() is None and not calls
    monkeypatch.setenv("UNISONO_TRITON", "")
    assert choose() is triton_rows


@on_fake_cuda
def test_kernels_says_what_computes(monkeypatch):
    monkeypatch.delenv("UNISONO_TRITON", raising=False)

    def kernels(**options) -> str:
        with simulate_rank(2):
            return EmbeddingCollection([Table("t", 4, 2)], plan="row", device="cuda", **options).kernels

    assert kernels() == kernels(dtype=torch.bfloat16) == "triton"
    monkeypatch.setenv("UNISONO_TRITON", "0")
    assert kernels() == "torch: UNISONO_TRITON=0"


TABLES = [
    Table("bags", 500, 64, mode="mean"),
    Table("rows", 300, 64),
    Table("wide", 300, 32, scale_grad_by_freq=True),
    Table("frequent", 200, 32),
]


def waits_of_the_owner(triton: str, rule: Rule, plan: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Kernels, and host waits, of grouping the requested rows and of the owner's backward."""
    monkeypatch.setenv("UNISONO_TRITON", triton)
    kernels, waits = 0, []

    def counted(function):
        def call(*args):
            nonlocal kernels
            before = ledger.kernels, len(ledger.host_syncs)
            result = function(*args)
            kernels += ledger.kernels - before[0]
            waits.extend(map(str, ledger.host_syncs[before[1] :]))
            return result

        return call

    with simulate_rank(4, 1) as ledger, known_values(ledger), monkeypatch.context() as patch:
        group = cached_property(counted(lambda request: (deduplicate(request.rows, may_pad=True), request.bags)[0]))
        group.__set_name__(IncomingRequest, "dedup")
        patch.setattr(IncomingRequest, "dedup", group)
        patch.setattr(lookup, "_consume_gradients", counted(lookup._consume_gradients))
        collection = EmbeddingCollection(TABLES, plan=plan, optimizer=rule, device="cuda")
        ids = torch.arange(600, device="cuda") % 200
        offsets = torch.arange(0, 601, 3, device="cuda")
        pooled = collection({table.name: Ragged(ids, offsets) for table in TABLES})
        torch.autograd.backward(list(pooled.values()), list(pooled.values()))
    return kernels, waits


@on_fake_cuda
@pytest.mark.parametrize(
    ("rule", "plan"), [(RowwiseAdagrad(lr=0.1), "row"), (Adam(lr=0.1, weight_decay=0.1), "table")], ids=str
)
def test_the_owner_does_not_wait_for_the_device(rule, plan, monkeypatch):
    kernels, waits = waits_of_the_owner("", rule, plan, monkeypatch)
    by_torch, waits_by_torch = waits_of_the_owner("0", rule, plan, monkeypatch)
    assert not waits and waits_by_torch, waits
    assert 0 < kernels < by_torch / 2, (kernels, by_torch)


@on_fake_cuda
def test_what_an_update_costs(monkeypatch):
    """Each gradient is read once; each row and its state are read and written once, at most as many as there are positions."""
    monkeypatch.delenv("UNISONO_TRITON", raising=False)
    with simulate_rank(2) as ledger:
        weight, grads, total = (torch.zeros(*shape, device="cuda") for shape in ((900, 64), (500, 64), (900,)))
        dedup = deduplicate(torch.zeros(500, dtype=torch.int32, device="cuda"), may_pad=True)
        ledger.reset()
        assert RowGradients(dedup.unique, grads, dedup).update(Step(1, 0.1), weight, [total], slice(0, 500))
        assert ledger.kernels == 1 and not ledger.host_syncs
        integers = 500 * (4 + 8 + 8) + 8
        assert ledger.bytes_touched == 500 * 64 * 4 + 2 * 500 * (64 * 4 + 4) + integers
        index = torch.zeros(2000, dtype=torch.int64, device="cuda")
        ledger.reset()
        out = sum_bags(weight, index, dedup.starts)
        assert out.shape == (500, 64) and ledger.kernels == 2  # so many positions may be one bag
