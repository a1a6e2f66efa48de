"""Precision: large scales, losses near zero, logits far apart, 16-bit features, autocast."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.contrastive.loss_cases import CASES, close, differentiable, global_batch, gradients, matches_one_process
from unisono import contrastive
from unisono.contrastive import clip_loss, ntxent_loss, sigmoid_loss
from unisono.contrastive.tiled import tiles


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_scales_match_one_process(ranks, scale):
    for case in ("clip", "clip_ids", "clip_hard", "sigmoid", "ntxent"):
        ranks(matches_one_process, case, {}, "world", 1e-11, scale, world_size=2)


def with_a_shift_for_each_row_and_column():
    """GPUs always compute tiles this way. Here the limits make every tile seem to have lost digits."""
    limits_before = dict(tiles._EXPONENT_RANGES)
    tiles._EXPONENT_RANGES.update(
        {dtype: limits._replace(smallest_sum=math.inf, largest_gap=-1) for dtype, limits in limits_before.items()}
    )
    try:
        for case in CASES:
            matches_one_process(case, {"tile": 3})
    finally:
        tiles._EXPONENT_RANGES.update(limits_before)


def test_tiles_of_other_devices_match_one_process(ranks):
    ranks(with_a_shift_for_each_row_and_column, world_size=2)


def exact(x, y, scale):
    """The loss in 50 digits: log1p of the sum of the negatives relative to the positive."""
    from mpmath import exp, log1p, mp, mpf

    mp.dps = 50
    rows = [[mpf(v) for v in row] for row in (scale * (x @ y.T)).tolist()]
    n = len(rows)
    total = mpf(0)
    for i in range(n):
        total += log1p(sum(exp(rows[i][j] - rows[i][i]) for j in range(n) if j != i))
        total += log1p(sum(exp(rows[j][i] - rows[i][i]) for j in range(n) if j != i))
    return float(total / (2 * n))


@pytest.mark.parametrize("scale", [10.0, 30.0, 100.0])
def test_near_zero_loss_keeps_its_digits(scale):
    x = torch.eye(6, dtype=torch.float64)
    y = x.clone().requires_grad_()
    loss = clip_loss(x, y, scale)
    assert abs(loss.item() / exact(x, y.detach(), scale) - 1) < 1e-10
    # in each row, the gradient of the positive is minus the sum of those of 5 equal negatives
    negative = math.exp(-scale) / (1 + 5 * math.exp(-scale))
    expected = scale * negative / 6 * (1 - 6 * x)
    torch.testing.assert_close(torch.autograd.grad(loss, y)[0], expected, rtol=1e-10, atol=0)


def test_near_zero_loss_in_float32():
    x = torch.eye(6).requires_grad_()
    loss = clip_loss(x, torch.eye(6), 30.0)
    assert abs(loss.item() / exact(torch.eye(6).double(), torch.eye(6).double(), 30.0) - 1) < 1e-5
    assert torch.autograd.grad(loss, x)[0].count_nonzero() == 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [None, 3])
def test_logits_far_apart(dtype, tile):
    """Logits of one tile that are thousands apart neither overflow nor vanish."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
    y = torch.randn(8, 4, generator=generator, dtype=torch.float64) * torch.logspace(1, -2, 8, dtype=torch.float64)[:, None]
    x, y = x.to(dtype), y.to(dtype)
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    loss = clip_loss(a, b, 1.5, tile=tile)
    c, d = x.double().requires_grad_(), y.double().requires_grad_()
    logits, labels = 1.5 * c @ d.T, torch.arange(8)
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    close(loss.double(), expected, tolerance, "loss")
    for found, truth in zip(torch.autograd.grad(loss, [a, b]), torch.autograd.grad(expected, [c, d]), strict=True):
        close(found.double(), truth, tolerance, "gradient")


def all_losses(x, y):
    return {
        "clip": clip_loss(x, y, 20.0),
        "hard": clip_loss(x, y, 20.0, hardness=0.3),
        "sigmoid": sigmoid_loss(x, y, 20.0, -5.0),
        "ntxent": ntxent_loss(x, y, 0.05),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_features_lose_no_more_than_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(64, 32, generator=generator), dim=1).to(dtype) for _ in "xy")

    def run(compute):
        a, b = x.to(compute).requires_grad_(), y.to(compute).requires_grad_()
        return {name: (loss, *torch.autograd.grad(loss, [a, b])) for name, loss in all_losses(a, b).items()}

    truth, single, half = run(torch.float64), run(torch.float32), run(dtype)
    for name, exact_results in truth.items():
        assert half[name][0].dtype == torch.float32 and half[name][1].dtype == dtype
        error = {
            kind: (results[name][0].double() - exact_results[0]).abs() for kind, results in (("half", half), ("single", single))
        }
        assert error["half"] <= 2 * error["single"] + 1e-7 * exact_results[0], name
        for ours, theirs, best in zip(half[name][1:], single[name][1:], exact_results[1:], strict=True):
            rounded = (theirs.to(dtype).double() - best).abs().max()  # a 16-bit gradient has to be rounded in the end
            assert (ours.double() - best).abs().max() <= 2 * rounded, name


def test_autocast_does_not_touch_the_logits():
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(32, 16, generator=generator), dim=1).requires_grad_() for _ in "xy")
    expected = all_losses(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        found = all_losses(x, y)
        mixed = clip_loss(x.to(torch.bfloat16), y, 20.0)
        found_grads = {name: torch.autograd.grad(loss, x)[0] for name, loss in found.items()}
    for name, loss in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], loss, rtol=0, atol=0)
        torch.testing.assert_close(found_grads[name], torch.autograd.grad(loss, x)[0], rtol=0, atol=0)
    assert mixed.dtype == torch.float32


def test_nan_is_not_hidden():
    x = torch.eye(4).clone()
    x[1, 2] = torch.nan
    x.requires_grad_()
    for loss in all_losses(x, torch.eye(4)).values():
        assert loss.isnan()
        assert torch.autograd.grad(loss, x)[0].isnan().any()


def test_one_pair_alone_and_none_at_all():
    x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"decoupled": True}, {"hardness": 0.5}, {"ids": torch.tensor([3])}):
        loss = clip_loss(x, x, 2.0, **options)
        assert loss == 0 and torch.autograd.grad(loss, x)[0].abs().max() == 0
    nothing = torch.empty(0, 3, dtype=torch.float64, requires_grad=True)
    assert clip_loss(nothing, nothing, 2.0).isnan(), "the mean of no rows is NaN, as in torch"


def bits_are_the_same_on_every_rank():
    batch = differentiable(global_batch(8))
    start = 2 * dist.get_rank()
    mine = {
        name: t if t.ndim == 0 else t.detach()[start : start + 2].requires_grad_(t.requires_grad) for name, t in batch.items()
    }
    results = {}
    for name, case in CASES.items():
        loss = case(mine, getattr(contrastive, case.function))
        grads = gradients(loss, mine)
        results[name] = [loss.item(), *(grads[shared].item() for shared in ("scale", "temperature", "bias"))]
    return results


def test_value_and_shared_gradients_are_the_same_bits_on_every_rank(ranks):
    first, *others = ranks(bits_are_the_same_on_every_rank, world_size=4)
    assert all(other == first for other in others)


def test_a_loss_scaled_up_has_no_nan():
    """Regression: GradScaler's factor on logits 110 apart made the weights of a tile overflow float32."""
    x = torch.tensor([[110.0, 0.0], [110.0, 0.0], [0.0, 0.001]], requires_grad=True)
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    plain = torch.autograd.grad(clip_loss(x, y, 1.0, direction="x_to_y"), x)[0]
    for factor in (2.0**16, 2.0**24):
        scaled = torch.autograd.grad(clip_loss(x, y, 1.0, direction="x_to_y") * factor, x)[0]
        torch.testing.assert_close(scaled / factor, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_scale_is_rounded_no_further(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in "xy")
    scale = torch.tensor(14.3, dtype=dtype)
    for function in (lambda s: clip_loss(x, y, s), lambda s: sigmoid_loss(x, y, s, -1.0), lambda s: ntxent_loss(x, y, s)):
        found, expected = function(scale), function(float(scale))
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        for a, b in zip(torch.autograd.grad(found, [x, y]), torch.autograd.grad(expected, [x, y]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_16_bit_gradients_are_rounded_after_the_factor():
    """Regression: gradients too small for float16 were rounded to 0 before GradScaler's factor made them large."""
    x = torch.eye(64, dtype=torch.float16).requires_grad_()
    grad = torch.autograd.grad(sigmoid_loss(x, x.detach(), 40.0, -20.0) * 2.0**16, x)[0]
    wide = torch.eye(64, dtype=torch.float64).requires_grad_()
    truth = torch.autograd.grad(sigmoid_loss(wide, wide.detach(), 40.0, -20.0) * 2.0**16, wide)[0]
    torch.testing.assert_close(grad.double(), truth, rtol=1e-3, atol=1e-8)
