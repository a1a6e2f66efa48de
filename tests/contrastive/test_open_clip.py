"""The losses of open_clip on the same ranks: the same values, and the same gradients where theirs are exact."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from unisono.contrastive import ClipLoss, SigmoidLoss, clip_loss, sigmoid_loss

FOUND = importlib.util.find_spec("open_clip")
pytestmark = pytest.mark.skipif(FOUND is None, reason="open_clip is installed with the newest torch only")


def open_clip_losses():
    """Import loss.py alone, because the whole package takes 15 seconds."""
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(FOUND.submodule_search_locations[0]) / "loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def features():
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = (F.normalize(torch.randn(4, 8, generator=generator, dtype=torch.float64), dim=1) for _ in "xy")
    leaves = x, y, torch.tensor(10.0, dtype=torch.float64), torch.tensor(-3.0, dtype=torch.float64)
    return [leaf.requires_grad_() for leaf in leaves]


def averaged(grads):
    """Average the gradients of scale and bias, as DDP would; those of the features stay."""
    for grad in grads[2:]:
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= dist.get_world_size()
    return grads


def agrees_with_open_clip(kind, exchange):
    rank, world = dist.get_rank(), dist.get_world_size()
    theirs = open_clip_losses()
    x, y, scale, bias = features()
    inputs = [x, y, scale] if kind != "siglip" else [x, y, scale, bias]
    if kind == "siglip":
        loss = theirs.SigLipLoss(rank=rank, world_size=world)(x, y, scale, bias)
    else:
        loss = theirs.ClipLoss(local_loss=kind == "local", gather_with_grad=True, rank=rank, world_size=world)(x, y, scale)
    expected = averaged(torch.autograd.grad(loss, inputs))
    value = loss.detach().clone()
    if kind != "global":  # their value differs from rank to rank; the mean over ranks is the loss
        dist.all_reduce(value)
        value /= world

    ours = sigmoid_loss(x, y, scale, bias, exchange=exchange) if kind == "siglip" else clip_loss(x, y, scale, exchange=exchange)
    torch.testing.assert_close(ours.detach(), value, rtol=1e-12, atol=0)
    for grad, other in zip(averaged(torch.autograd.grad(ours, inputs)), expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("kind", ["global", "local", "siglip"])
def test_agrees_with_open_clip(ranks, kind, exchange):
    for world_size in (1, 2, 3):
        ranks(agrees_with_open_clip, kind, exchange, world_size=world_size)


def without_gradient_through_the_gather():
    """The default of open_clip, gather_with_grad=False, gives 1/W of the gradient under DDP."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, scale, _ = features()
    loss = open_clip_losses().ClipLoss(rank=rank, world_size=world)(x, y, scale)
    theirs = torch.autograd.grad(loss, x)[0]
    ours = torch.autograd.grad(clip_loss(x, y, scale), x)[0]
    torch.testing.assert_close(theirs * world, ours, rtol=1e-10, atol=1e-13)


def test_the_default_of_open_clip_gives_a_fraction_of_the_gradient(ranks):
    ranks(without_gradient_through_the_gather, world_size=3)


def calls_of_its_training_loop(kind):
    """open_clip_train calls loss(**model_out, output_dict=True) and adds up the values of the dict."""
    rank, world = dist.get_rank(), dist.get_world_size()
    theirs = open_clip_losses()
    x, y, scale, bias = features()
    model_out = {"image_features": x, "text_features": y, "logit_scale": scale, "logit_bias": bias}
    if kind == "siglip":
        losses = theirs.SigLipLoss(rank=rank, world_size=world), SigmoidLoss()
    else:
        losses = theirs.ClipLoss(gather_with_grad=True, rank=rank, world_size=world), ClipLoss()
    expected, found = ([loss(**model_out, output_dict=True), loss(x, y, scale, bias)] for loss in losses)
    assert found[0].keys() == expected[0].keys() == {"contrastive_loss"}
    leaves = [x, y, scale, bias]
    for value, truth in zip(
        (found[0]["contrastive_loss"], found[1]), (expected[0]["contrastive_loss"], expected[1]), strict=True
    ):
        grads = torch.autograd.grad(truth, leaves)
        if kind == "siglip":  # their value differs from rank to rank
            truth = truth.detach().clone()
            dist.all_reduce(truth)
            truth /= world
        torch.testing.assert_close(value.detach(), truth.detach(), rtol=1e-12, atol=0)
        for grad, other in zip(averaged(torch.autograd.grad(value, leaves)), averaged(grads), strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-13)
    if kind == "clip":
        torch.testing.assert_close(losses[1](x, y, scale), losses[0](x, y, scale), rtol=1e-12, atol=0)
    assert all(p.grad is None for p in losses[1].parameters()), "the scale of the model is used, not that of the loss"


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_its_training_loop_can_call_our_modules(ranks, kind):
    ranks(calls_of_its_training_loop, kind, world_size=2)
