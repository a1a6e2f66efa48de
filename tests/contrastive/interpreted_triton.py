"""Tests of the Triton kernels on CPU tensors. test_triton_tiles.py runs them in a process that has Triton's interpreter."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.contrastive.loss_cases import CASES, close, far_apart_and_not_a_number, matches_one_process
from tests.contrastive.triton_interpreter import on_triton
from unisono.contrastive import clip_loss, sigmoid_loss
from unisono.contrastive.tiled import triton_tiles
from unisono.contrastive.tiled.block_kernels import LogsAndGrads
from unisono.contrastive.tiled.device_tiles import DeviceTiles
from unisono.contrastive.tiled.tiles import ColumnBlock, LogSumExp, TilePlan
from unisono.contrastive.tiled.triton_choice import largest_difference
from unisono.contrastive.tiled.triton_tiles import TritonTiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about -inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = torch.linspace(0.5, 2, 60, dtype=torch.float64).view(20, 3)

# Whole losses on several ranks, against the reference in one process.


def matches(cases, exchange, sizes, dtype, tolerance):
    with on_triton(slope_bytes=2000):
        for case in cases:
            matches_one_process(case, {"exchange": exchange}, sizes=sizes, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(("sizes", "exchange"), [((12, 7), "ring"), ((17, 0, 5), "gather")])
def test_all_losses_match_one_process(ranks, sizes, exchange):
    ranks(matches, list(CASES), exchange, sizes, torch.float32, 2e-5, world_size=len(sizes), timeout=300)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_losses_of_16_bits_match_one_process(ranks, dtype, tolerance):
    """The gradients are rounded to the dtype of the features at the end."""
    cases = ["clip", "clip_everything", "sigmoid_ids_masked_weights", "ntxent", "supcon"]
    ranks(matches, cases, "gather", (17, 5), dtype, tolerance, world_size=2, timeout=300)


# One block of columns, against the torch tiles with the same numbers in float64.

PLANS = {
    "plain": TilePlan(),
    "rows only": TilePlan(columns=False, diagonal=False),
    "two views": TilePlan(excluded_diagonals=(0, 9, -9), columns=False),
    "nothing excluded": TilePlan(excluded_diagonals=()),
    "factors": TilePlan((LogSumExp(1.5), LogSumExp(0.5))),
    "ids": TilePlan((LogSumExp(1.5, "other"), LogSumExp(0.5, "same"), LogSumExp(1.0, "all")), same_id_sums=True),
    "ids of rows": TilePlan((LogSumExp(1.0, "other"),), columns=False, same_id_sums=True, diagonal=False),
}


def kernels_and_block(kind, plan, dtype, rows, columns, width, own_start, scale=0.3):
    generator = torch.Generator().manual_seed(rows + columns)
    x, y = (torch.randn(n, width, generator=generator).to(torch.float16).to(dtype) for n in (rows, columns))
    ids = torch.randint(6, (columns,), generator=generator)
    row_ids = torch.randint(6, (rows,), generator=generator)
    scale = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=torch.float64)
    return kind(x, scale, row_ids, min(rows, columns), plan), ColumnBlock(y, ids, own_start)


def results_of(kind, plan, dtype, shape, own_start, accumulate):
    kernels, block = kernels_and_block(kind, plan, dtype, *shape, own_start)
    found = kernels.statistics(block, keep=False)
    generator = torch.Generator().manual_seed(0)

    def side(logs):
        logs = logs.to(kernels.dtype)
        return LogsAndGrads(logs, torch.randn(logs.shape, generator=generator).to(kernels.dtype))

    rows = side(found.rows)
    columns = None if found.columns is None else side(found.columns)
    diagonal_grads = None if found.diagonal is None else rows.grads[0] + 1
    dx, dy = torch.full(kernels.x.shape, 0.25, dtype=kernels.dtype), torch.empty(block.y.shape, dtype=kernels.dtype)
    kernels.gradients(block, rows, columns, diagonal_grads, kept=(), dx=dx, accumulate=accumulate, dy=dy)
    return {"rows": found.rows, "columns": found.columns, "diagonal": found.diagonal, "dx": dx, "dy": dy}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("shape", "own_start"), [((35, 56, 20), 15), ((16, 32, 32), None), ((0, 20, 8), 0), ((18, 0, 8), 0)])
def test_a_block_matches_the_torch_tiles(plan, shape, own_start):
    if shape[1] < shape[0] and PLANS[plan].diagonal:
        own_start = None  # partners are there or not
    accumulate = shape[0] % 2 == 0
    with on_triton(slope_bytes=3000):
        found = results_of(TritonTiles, PLANS[plan], torch.float32, shape, own_start, accumulate)
    expected = results_of(DeviceTiles, PLANS[plan], torch.float64, shape, own_start, accumulate)
    for name, truth in expected.items():
        assert (found[name] is None) == (truth is None), name
        if truth is not None:
            empty = truth == -torch.inf
            assert (found[name] == -torch.inf).eq(empty).all(), name
            close(found[name].double().masked_fill(empty, 0), truth.masked_fill(empty, 0), 2e-5, name)


@pytest.mark.parametrize("accumulate", [False, True])
def test_few_rows_and_many_columns(accumulate):
    """The columns are cut into parts, each of which has a gradient of x of its own, to be added up."""
    shape = 10, 150, 12
    with on_triton(), mock.patch.object(triton_tiles, "_products_op", wraps=triton_tiles._products_op) as products:
        found = results_of(TritonTiles, PLANS["plain"], torch.float32, shape, 70, accumulate)
    assert products.call_args.args[4].shape == (2, 10, 12)
    expected = results_of(DeviceTiles, PLANS["plain"], torch.float64, shape, 70, accumulate)
    for name in ("dx", "dy"):
        close(found[name].double(), expected[name], 2e-5, name)


def test_without_a_gradient_of_y():
    x, y = torch.randn(20, 5), torch.randn(20, 5)
    grads = []
    for needed in (False, True):
        a = x.clone().requires_grad_()
        with on_triton():
            grads.append(torch.autograd.grad(clip_loss(a, y.clone().requires_grad_(needed), 3.0), a)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_sigmoid_block_matches_the_torch_tiles(masked, weighted):
    plan = TilePlan(same_id_sums=True)
    for shape, own_start, wants_grad in (((35, 56, 20), 15, True), ((20, 20, 16), None, False), ((0, 20, 8), 0, True)):
        results = []
        for kind, dtype in ((TritonTiles, torch.float32), (DeviceTiles, torch.float64)):
            kernels, block = kernels_and_block(kind, plan, dtype, *shape, own_start)
            weights = [torch.linspace(0.5, 2, n, dtype=torch.float64) for n in shape[:2]] if weighted else None
            dx, dy = (torch.ones(t.shape, dtype=kernels.dtype) if wants_grad else None for t in (kernels.x, block.y))
            with on_triton(slope_bytes=3000):
                found = kernels.sigmoid(block, torch.tensor(-2.0), weights, masked=masked, dx=dx, accumulate=True, dy=dy)
            results.append([*found, dx, dy])
        for number, (found, truth) in enumerate(zip(*results, strict=True)):
            assert (found is None) == (truth is None)
            if truth is not None:
                close(found.double(), truth.double(), 2e-5, f"{number} of {shape}")


@pytest.mark.parametrize("weights", [WEIGHTS[:, 0], WEIGHTS[0, 0].expand(20)])
def test_weights_that_are_not_contiguous(weights):
    """float64 weights are not copied to another dtype; the kernels read them one after the other."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 16, generator=generator).requires_grad_() for _ in "xy")
    with on_triton():
        found, expected = (sigmoid_loss(x, y, 5.0, -5.0, weights=each) for each in (weights, weights.contiguous()))
        torch.testing.assert_close(*(torch.autograd.grad(loss, [x, y]) for loss in (found, expected)), rtol=0, atol=0)
    assert torch.equal(found, expected)


def test_a_scale_that_is_a_constant():
    """A number on the CPU gives what a tensor on the device gives. Here both are on the CPU, so the op is told otherwise."""
    results = []
    for constant in (False, True):
        kernels, block = kernels_and_block(TritonTiles, PLANS["plain"], torch.float32, 20, 30, 12, 4)
        with on_triton(), pytest.MonkeyPatch.context() as patch:
            if constant:
                patch.setattr(triton_tiles, "_number_or_tensor", lambda scalar, x, times: (float(scalar) * times, False))
            found = kernels.statistics(block, keep=False)
            sigmoid = kernels.sigmoid(block, torch.tensor(-2.0), None, masked=False, dx=None, accumulate=False, dy=None)
            results.append([found.rows, found.columns, found.diagonal, sigmoid.total])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_the_backward_rounds(dtype):
    """Slopes have 16 bits and more with "exact", 8 or 11 with "fast": measured before the gradients themselves are rounded."""
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(40, 32, generator=generator), dim=1).to(dtype) for _ in "xy")
    found: dict[str, torch.Tensor] = {}
    for kind, precision in ((TritonTiles, "exact"), (TritonTiles, "fast"), (DeviceTiles, "truth")):
        as_dtype = torch.float64 if precision == "truth" else dtype
        plan = TilePlan(precision="fast" if precision == "fast" else "exact")
        kernels = kind(x.to(as_dtype), torch.tensor(20.0), None, 40, plan)
        block = ColumnBlock(y.to(as_dtype), None, 0)
        with on_triton():
            logs = kernels.statistics(block, keep=False)
            grads = torch.ones(1, 40) / 80
            dx, dy = (torch.empty(40, 32, dtype=kernels.dtype) for _ in "xy")
            both = LogsAndGrads(logs.rows, grads), LogsAndGrads(logs.columns, grads)
            kernels.gradients(block, *both, -2 * grads[0], kept=(), dx=dx, accumulate=False, dy=dy)
        found[precision] = torch.cat([dx, dy]).double()
    size = found["truth"].abs().max()
    exact, fast = (float((found[name] - found["truth"]).abs().max() / size) for name in ("exact", "fast"))
    assert exact < 2**-15, f"{exact:.2g}"
    assert 4 * exact < fast < (2**-7 if dtype == torch.bfloat16 else 2**-10), f"{fast:.2g}, exact {exact:.2g}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_up_and_nearly_zero(dtype):
    """Slopes far below the range of float16 keep their digits, and so do those of a loss that GradScaler has scaled up."""
    for factor, scale in ((1.0, 40.0), (2.0**16, 5.0)):
        x = torch.eye(20, dtype=dtype).requires_grad_()
        with on_triton():
            grad = torch.autograd.grad(clip_loss(x, x.detach(), scale) * factor, x)[0].double()
        wide = torch.eye(20, dtype=torch.float64).requires_grad_()
        expected = torch.autograd.grad(clip_loss(wide, wide.detach(), scale) * factor, wide)[0]
        smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # of a float16 gradient
        torch.testing.assert_close(grad, expected, rtol=2**-7, atol=smallest)


def test_far_apart_and_not_a_number():
    with on_triton():
        far_apart_and_not_a_number()


def test_tiles_far_apart():
    """Logits of different tiles are thousands of bits apart: each row and each column has its own maximum in each tile."""
    x = torch.cat([torch.full((20, 4), 40.0), torch.full((20, 4), -35.0)])
    x += torch.arange(40.0).unsqueeze(1) / 8
    with on_triton():
        found = TritonTiles(x, torch.tensor(1.0), None, 40, TilePlan()).statistics(ColumnBlock(x, None, 0), keep=False)
    logits = (x.double() @ x.double().T).fill_diagonal_(-torch.inf) * torch.log2(torch.tensor(torch.e, dtype=torch.float64))
    for dim, logs in ((1, found.rows[0]), (0, found.columns[0])):
        top = logits.amax(dim, keepdim=True)
        expected = (logits - top).exp2().sum(dim).log2() + top.squeeze(dim)
        torch.testing.assert_close(logs, expected, rtol=1e-6, atol=1e-3)


def test_the_comparison_of_the_first_use():
    """It accepts these kernels with the tiles of a GPU, and rejects kernels that are a little off."""
    device, plan = torch.device("cpu"), TilePlan()
    with on_triton(small=False):
        assert largest_difference(TritonTiles, device, torch.bfloat16, plan) == ""

        class Off(TritonTiles):
            def gradients(self, *args, dx, **kwargs):
                super().gradients(*args, dx=dx, **kwargs)
                dx[3] *= 1.01

        assert "gradient of x" in largest_difference(Off, device, torch.bfloat16, plan)


def test_the_comparison_runs_the_kernels_of_a_plain_loss():
    """They have larger tiles, and no mask for the width."""

    class Off(TritonTiles):
        def gradients(self, *args, dx, **kwargs):
            super().gradients(*args, dx=dx, **kwargs)
            if self.plan.log_sum_exps == TilePlan().log_sum_exps and not self.plan.needs_ids:
                dx[3] *= 1.01

    with on_triton(small=False), mock.patch.object(triton_tiles, "_dot_options", wraps=triton_tiles._dot_options) as options:
        assert "gradient of x" in largest_difference(Off, torch.device("cpu"), torch.bfloat16, TilePlan())
    calls = [call.args for call in options.call_args_list]
    assert {x.shape[1] % blocks.width == 0 for x, blocks in calls} == {False, True}
    assert {blocks.columns for _, blocks in calls} == {64, 128}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_comparison_is_the_same_for_any_default_dtype(default):
    torch.set_default_dtype(default)
    try:
        with on_triton(small=False):
            assert largest_difference(TritonTiles, torch.device("cpu"), torch.bfloat16, TilePlan()) == ""
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_ops_say_what_they_change():
    parts = torch.randn(3, 10, 2, dtype=torch.float64)
    arguments = parts, torch.empty(2, 10, dtype=torch.float64), 1
    torch.library.opcheck(triton_tiles._join_ranks_op, arguments, test_utils=("test_schema", "test_faketensor"))
