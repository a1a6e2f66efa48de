"""The Triton tiles: right in Triton's interpreter, small enough for the registers of a GPU, and chosen with care."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="this torch comes without Triton")

from tests.collectives import triton_compiler
from tests.collectives.triton_interpreter import run_interpreted
from unisono.contrastive.tiled import triton_choice, triton_kernels, triton_tiles
from unisono.contrastive.tiled.block_kernels import LogsAndGrads
from unisono.contrastive.tiled.device_tiles import allow_tf32
from unisono.contrastive.tiled.tiles import ColumnBlock, LogSumExp, TilePlan
from unisono.contrastive.tiled.triton_tiles import TritonTiles


def test_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_triton.py"))


@contextmanager
def compiled_for(arch):
    """Launches of the Triton tiles compile for sm_`arch`, with the tiles that they have there."""
    blocks = triton_tiles.tile_blocks
    here = lambda dtype, rows, wide, *_: blocks(dtype, rows, wide, (arch // 10, 0))  # noqa: E731
    with triton_compiler.compiled_for(arch, triton_kernels) as usages, mock.patch.object(triton_tiles, "tile_blocks", here):
        yield usages


SHARED_MEMORY = {80: 163 * 2**10, 90: 227 * 2**10}  # of one block of threads
SPILLED = 16  # bytes of a thread that may lie in memory instead of registers
PLANS = {
    "plain": TilePlan(),
    "everything": TilePlan(
        (LogSumExp(1.5, "other"), LogSumExp(0.5, "other"), LogSumExp(1.0, "same")),
        excluded_diagonals=(0, 8, -8),
        same_id_sums=True,
    ),
}


def launch_all(plan: TilePlan, dtype: torch.dtype) -> None:
    x, y = (torch.zeros(rows, 256, dtype=dtype) for rows in (256, 512))
    ids = torch.zeros(512, dtype=torch.int64)
    kernels, block = TritonTiles(x, torch.ones(()), ids[:256], 256, plan), ColumnBlock(y, ids, 0)
    found = kernels.statistics(block, keep=False)
    columns = kernels.join_ranks(found.columns.T.unsqueeze(0))
    if plan == PLANS["plain"]:
        kernels.softmax_losses(found.rows, columns[:, :256], found.diagonal, wants_slopes=True)
    dx, dy = (torch.zeros(t.shape) for t in (x, y))
    by_column = LogsAndGrads(*torch.zeros(512, 2 * plan.width).T.split(plan.width))
    kernels.gradients(
        block, LogsAndGrads(found.rows, found.rows.float()), by_column, dx[:, 0], kept=(), dx=dx, accumulate=False, dy=dy
    )
    kernels.sum_of_products(dx)
    weights = None if plan == PLANS["plain"] else (torch.zeros(256), torch.zeros(512))
    kernels.sigmoid(block, torch.ones(()), weights, masked=False, dx=dx, accumulate=False, dy=dy)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("dtype", "plan"), [("bfloat16", "plain"), ("bfloat16", "everything"), ("float32", "plain")])
def test_kernels_fit_into_a_gpu(arch, dtype, plan):
    """Compiled without a GPU. 16-bit features are multiplied by tensor cores, those of 32 bits without TF32."""
    with compiled_for(arch) as usages:
        launch_all(PLANS[plan], getattr(torch, dtype))
    assert len({usage.kernel for usage in usages}) == (8 if plan == "plain" else 7)
    for usage in usages:
        assert usage.shared <= SHARED_MEMORY[arch] and usage.spilled <= SPILLED, usage[:4]
        if usage.kernel in ("statistics_kernel", "slopes_kernel", "sigmoid_kernel", "products_kernel"):
            tensor_cores = ("wgmma" if arch == 90 else "mma.sync") in usage.ptx
            assert tensor_cores == (dtype == "bfloat16"), usage[:4]


def test_fast_allows_tf32_for_the_products_alone(monkeypatch):
    """Logits of other digits than those of the forward would not belong to its log-sum-exps."""

    features_on_cuda = SimpleNamespace(dtype=torch.float32, is_cuda=True)
    monkeypatch.setattr(triton_tiles, "allow_tf32", lambda precision, _: allow_tf32(precision, features_on_cuda))
    before = torch.backends.cuda.matmul.fp32_precision
    with compiled_for(80) as usages:
        launch_all(TilePlan(precision="fast"), torch.float32)
    for usage in usages:
        assert ("mma.sync" in usage.ptx) == (usage.kernel == "products_kernel"), usage[:4]
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.fixture
def fp32_precision():
    """A setting that makes torch.get_float32_matmul_precision() raise."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_a_program_may_set_fp32_precision(fp32_precision, first_use):
    calls = first_use("")
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert choose(torch.float32) is TritonTiles
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert choose(torch.float32) is TritonTiles and len(calls) == 2  # other digits, another comparison
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with compiled_for(80) as usages:
        launch_all(PLANS["plain"], torch.float32)
    assert "statistics_kernel" in {usage.kernel for usage in usages if "mma.sync" in usage.ptx}


def test_all_that_may_be_missing_compiles(monkeypatch):
    """A constant scale, one row, no own columns, no statistics of columns, no gradient of y: no kernel reads what is None."""
    monkeypatch.setattr(triton_tiles, "_number_or_tensor", lambda scalar, x, times: (float(scalar) * times, False))
    x, y = (torch.zeros(rows, 40, dtype=torch.float16) for rows in (1, 30))
    ids = torch.zeros(30, dtype=torch.int64)
    dx = torch.zeros(x.shape)
    for plan in (TilePlan(columns=False, excluded_diagonals=()), TilePlan(same_id_sums=True)):
        kernels, block = TritonTiles(x, torch.ones(()), ids[:1], 1, plan), ColumnBlock(y, ids, None)
        with compiled_for(90) as usages:
            found = kernels.statistics(block, keep=False)
            columns = None if found.columns is None else LogsAndGrads(found.columns, found.columns)
            rows = LogsAndGrads(found.rows, found.rows)
            kernels.gradients(block, rows, columns, None, kept=(), dx=dx, accumulate=True, dy=None)
            kernels.sigmoid(block, torch.ones(()), None, masked=True, dx=None, accumulate=False, dy=None)
            if columns is None:
                kernels.softmax_losses(found.rows, None, found.rows[0], wants_slopes=True)
        assert len(usages) == (6 if columns is None else 5)


def choose(dtype=torch.bfloat16, plan=PLANS["plain"], fake=False):
    return triton_choice.triton_tiles(torch.device("cuda", 0), dtype, plan, fake)


@pytest.fixture
def first_use(monkeypatch):
    """No device has been used yet; comparing both tiles gives `answer`."""
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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("UNISONO_TRITON", raising=False)
    return set_answer


def test_the_first_use_compares_once(first_use):
    calls = first_use("")
    for _ in range(3):
        assert choose() is choose(torch.float16) is TritonTiles
    assert len(calls) == 2  # one for each dtype


def test_the_comparison_is_hidden_from_modes(first_use, monkeypatch):
    """A mode of the caller, such as a ledger or a profiler, sees neither its kernels nor its waits."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    first_use("")
    monkeypatch.setattr(triton_choice, "largest_difference", lambda *_: str(torch.ones(2).tolist()) * 0)
    with Watch():
        assert choose() is TritonTiles
    assert not seen


def test_fake_tensors_are_not_compared(first_use):
    calls = first_use("nonsense")
    assert choose(fake=True) is TritonTiles and not calls


def test_kernels_that_differ_are_not_used(first_use):
    first_use("the gradient of x differs by 3 of 4")
    with pytest.warns(UserWarning, match="torch computes the tiles of torch.bfloat16.*the gradient of x differs by 3 of 4"):
        assert choose() is None
    assert choose() is None  # and no second warning, which pytest would raise


def test_kernels_that_do_not_compile_are_not_used(first_use):
    first_use(RuntimeError("no ptxas"))
    with pytest.warns(UserWarning, match="RuntimeError: no ptxas"):
        assert choose() is None


def test_what_takes_the_torch_tiles(first_use, monkeypatch):
    calls = first_use("")
    assert choose(torch.float64) is None
    assert choose(plan=TilePlan(excluded_diagonals=(0, 1, 2, 3))) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() is None
    monkeypatch.setenv("UNISONO_TRITON", "0")
    assert choose() is None and not calls
    monkeypatch.setenv("UNISONO_TRITON", "")
    assert choose() is TritonTiles
