"""The loss modules: initial values, bounds, state, and that they pass all arguments on."""

import copy

import pytest
import torch
import torch.distributed as dist

from unisono.contrastive import ClipLoss, NTXentLoss, SigmoidLoss, SupConLoss, clip_loss, ntxent_loss, sigmoid_loss, supcon_loss

X = torch.nn.functional.normalize(torch.arange(1.0, 13).reshape(4, 3).sin(), dim=1)
Y = torch.nn.functional.normalize(torch.arange(1.0, 13).reshape(4, 3).cos(), dim=1)
IDS = torch.tensor([0, 1, 1, 2])


def test_initial_values_are_those_of_clip_and_siglip():
    assert ClipLoss().scale.item() == pytest.approx(1 / 0.07)
    sigmoid = SigmoidLoss()
    assert (sigmoid.scale.item(), sigmoid.bias.item()) == pytest.approx((10, -10))
    assert dict(ClipLoss().state_dict()).keys() == {"log_scale"} and sigmoid.state_dict().keys() == {"log_scale", "bias"}
    assert list(NTXentLoss().parameters()) == [] and len(list(SupConLoss(learned=True).parameters())) == 1


def test_modules_call_their_functions():
    options = {"same_id": "masked", "label_smoothing": 0.1}
    assert torch.equal(ClipLoss(**options)(X, Y, ids=IDS), clip_loss(X, Y, ClipLoss().scale, ids=IDS, **options))
    sigmoid = SigmoidLoss(same_id="masked")
    assert torch.equal(sigmoid(X, Y, ids=IDS), sigmoid_loss(X, Y, sigmoid.scale, sigmoid.bias, ids=IDS, same_id="masked"))
    assert torch.equal(NTXentLoss(temperature=0.2)(X, Y), ntxent_loss(X, Y, 0.2))
    torch.testing.assert_close(SupConLoss(temperature=0.2, learned=True)(X, IDS), supcon_loss(X, IDS, 0.2))


def test_a_model_may_own_the_scale_and_the_bias():
    """As in open_clip, by position or by name. A softmax does not depend on a bias, whose gradient is zero rather than None."""
    scale, bias = torch.tensor([20.0], requires_grad=True), torch.tensor([-3.0], requires_grad=True)
    clip, sigmoid = ClipLoss(label_smoothing=0.1), SigmoidLoss()
    assert torch.equal(clip(X, Y, scale, ids=IDS), clip_loss(X, Y, scale, ids=IDS, label_smoothing=0.1))
    assert torch.equal(sigmoid(X, Y, scale, bias), sigmoid_loss(X, Y, scale, bias))
    assert torch.equal(sigmoid(X, Y, logit_bias=bias), sigmoid_loss(X, Y, sigmoid.scale, bias))
    found = clip(image_features=X, text_features=Y, logit_scale=scale, logit_bias=bias, output_dict=True)
    assert torch.equal(found["contrastive_loss"], clip_loss(X, Y, scale, label_smoothing=0.1))
    found["contrastive_loss"].backward()
    assert bias.grad.tolist() == [0] and scale.grad.item() != 0 and clip.log_scale.grad is None


@pytest.mark.parametrize("make", [ClipLoss, lambda: SigmoidLoss(max_scale=100.0)])
def test_the_scale_stays_below_its_bound_and_can_come_back(make):
    module = make()
    with torch.no_grad():
        module.log_scale.fill_(9.0)
    assert module.scale.item() == pytest.approx(100)
    module.scale.sum().backward()
    assert module.log_scale.grad.item() == pytest.approx(100), "a gradient that leads back passes"
    module.log_scale.grad = None
    (-module.scale).sum().backward()
    assert module.log_scale.grad.item() == 0, "a gradient that leads further out does not"


def test_copies_and_state():
    module = ClipLoss(decoupled=True)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.log_scale.add_(0.5)
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(X, Y), module(X, Y))
    assert "decoupled=True" in repr(module) and "max_scale=100.0" in repr(module)
    assert "learned=True" in repr(SupConLoss(learned=True, tile=64).to("meta"))


def with_a_group():
    module = ClipLoss(group=dist.group.WORLD)
    twin = copy.deepcopy(module)
    assert twin.options["group"] is module.options["group"] and twin.log_scale is not module.log_scale


def test_copies_keep_the_group(ranks):
    ranks(with_a_group, world_size=2)


def test_views_of_a_sample_share_its_label():
    views = torch.stack([X, Y], 1)
    expected = supcon_loss(torch.cat([X, Y]), IDS.repeat(2), 0.3, weights=torch.arange(1.0, 5).repeat(2))
    torch.testing.assert_close(supcon_loss(views, IDS, 0.3, weights=torch.arange(1.0, 5)), expected)


@pytest.mark.parametrize("logits", ["keep", "recompute"])
def test_logits_kept_or_not_are_the_same(logits):
    x = X.clone().requires_grad_()
    for options in ({}, {"ids": IDS}, {"hardness": 0.5}):
        expected = torch.autograd.grad(clip_loss(x, Y, 20.0, **options), x)[0]
        found = torch.autograd.grad(clip_loss(x, Y, 20.0, logits=logits, **options), x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_backward_frees_the_kept_logits():
    x = X.clone().requires_grad_()
    loss = clip_loss(x, Y, 20.0, logits="keep")
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
