"""The torch tiles of accelerators: right on CPU tensors against the reference, and counted on fake CUDA tensors."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.contrastive.loss_cases import CASES, LOSSES, far_apart_and_not_a_number, matches_one_process
from unisono.contrastive import clip_loss, sigmoid_loss
from unisono.contrastive.tiled import device_tiles, logit_statistics, sigmoid_sum
from unisono.contrastive.tiled.device_tiles import DeviceTiles
from unisono.contrastive.tiled.tiles import ColumnBlock, TilePlan


@contextmanager
def on_an_accelerator(tile_bytes=device_tiles.TILE_BYTES):
    """CPU tensors are computed by the tiles of accelerators, which never look at a device other than to multiply 16 bits."""
    with ExitStack() as stack:
        for module in (logit_statistics, sigmoid_sum):
            stack.enter_context(mock.patch.object(module, "block_kernels", DeviceTiles))
        stack.enter_context(mock.patch.object(device_tiles, "TILE_BYTES", tile_bytes))
        yield


def all_cases(exchange, tile):
    with on_an_accelerator():
        for case in CASES:
            matches_one_process(case, {"exchange": exchange, "tile": tile})


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_all_losses_match_one_process(ranks, world_size, exchange, tile):
    ranks(all_cases, exchange, tile, world_size=world_size)


@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_sigmoid_loss_matches_eager(weighted):
    """An op may not return two views of one storage."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in "xy")
    scale, bias = (torch.tensor(number, dtype=torch.float64).requires_grad_() for number in (3.0, -3.0))
    weights = torch.rand(8, generator=generator, dtype=torch.float64) if weighted else None

    def step():
        return sigmoid_loss(x, y, scale, bias, weights=weights)

    torch._dynamo.reset()
    with on_an_accelerator():
        found, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(), step()
        assert torch.equal(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss, [x, y, scale, bias]) for loss in (found, expected)))


def with_a_small_budget():
    with on_an_accelerator(tile_bytes=3 * 128 * 8):
        for case in ("clip", "clip_everything", "sigmoid_weights", "ntxent", "supcon"):
            matches_one_process(case, {} if "sigmoid" in case else {"logits": "recompute"}, scale=100.0, tolerance=1e-11)


def test_tiles_by_memory_match_one_process(ranks):
    ranks(with_a_small_budget, world_size=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_the_backward_rounds(dtype):
    """Slopes have 16 bits and more with "exact", 8 or 11 with "fast": measured before the gradients themselves are rounded."""
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(64, 32, generator=generator), dim=1).to(dtype) for _ in "xy")
    found: dict[str, dict[str, torch.Tensor]] = {}
    original = device_tiles._Products.finish

    def run(kind, x, y, precision):
        gradients = []

        def finish(self, lift):
            original(self, lift)
            gradients.extend([self._dx.double().clone(), self._dy.double().clone()])  # the caller multiplies them

        with mock.patch.object(device_tiles._Products, "finish", finish), on_an_accelerator():
            a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
            for name, loss in LOSSES.items():
                loss(a, b, precision).backward()
                found.setdefault(name, {})[kind] = torch.cat(gradients)
                gradients.clear()

    run("truth", x.double(), y.double(), "exact")
    run("exact", x, y, "exact")
    run("fast", x, y, "fast")
    for name, results in found.items():
        size = results["truth"].abs().max()
        exact = float((results["exact"] - results["truth"]).abs().max() / size)
        fast = float((results["fast"] - results["truth"]).abs().max() / size)
        assert exact < 2**-15, f"{name}: {exact:.2g}"
        assert 4 * exact < fast < (2**-7 if dtype == torch.bfloat16 else 2**-10), f"{name}: {fast:.2g}, exact {exact:.2g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaled_up_and_nearly_zero(dtype):
    """Slopes far below the range of float16 keep their digits, and so do those of a loss that GradScaler has scaled up."""
    for factor, scale in ((1.0, 40.0), (2.0**16, 40.0), (2.0**16, 5.0)):
        grads = []
        for kind in (dtype, torch.float64):
            x = torch.eye(64, dtype=kind).requires_grad_()
            with on_an_accelerator():
                grads.append(torch.autograd.grad(clip_loss(x, x.detach(), scale) * factor, x)[0].double())
        smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # of a float16 gradient
        torch.testing.assert_close(grads[0], grads[1], rtol=2**-7, atol=smallest)


def test_a_scale_of_16_bits_is_not_rounded_again():
    """The scale is multiplied by log2(e), in the dtype of the logits."""
    x = torch.linspace(-1, 1, 48).view(8, 6)
    scale = torch.tensor(3.0, dtype=torch.bfloat16)
    kernels = (DeviceTiles(x, each, None, 8, TilePlan()) for each in (scale, scale.float()))
    found, expected = (each.statistics(ColumnBlock(x, None, 0), keep=False) for each in kernels)
    assert torch.equal(found.rows, expected.rows) and torch.equal(found.diagonal, expected.diagonal)


def test_far_apart_and_not_a_number():
    with on_an_accelerator():
        far_apart_and_not_a_number()
