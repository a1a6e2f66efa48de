"""A bad call on one rank raises the same error on all ranks, and none of them hangs."""

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import MismatchError, checked, count_bytes
from unisono.contrastive import (
    ClipLoss,
    SigmoidLoss,
    SupConLoss,
    clip_loss,
    multi_tower_loss,
    ntxent_loss,
    retrieval_metrics,
    sigmoid_loss,
    supcon_loss,
)

X = torch.eye(3, 4)
IDS = torch.arange(3)

# what rank 1 calls while the others call clip_loss(X, X, 2.0), and a part of the error
BAD = {
    "shapes": (lambda: clip_loss(X, X[:2], 2.0), "x and y must have the same shape"),
    "width": (lambda: clip_loss(X[:, :3], X[:, :3], 2.0), "every dimension but 0 must be the same"),
    "ndim": (lambda: clip_loss(X[0], X[0], 2.0), "expected floating point features of shape (rows, width), got float32[4]"),
    "dtype": (lambda: clip_loss(X.long(), X.long(), 2.0), "got int64[3, 4]"),
    "type": (lambda: clip_loss(X.tolist(), X, 2.0), "x: expected a Tensor, got list"),
    "scale": (lambda: clip_loss(X, X, -1.0), "scale=-1.0 must be positive"),
    "scale tensor": (lambda: clip_loss(X, X, torch.zeros(())), "scale=0.0 must be positive"),
    "scale shape": (lambda: clip_loss(X, X, torch.ones(3)), "scale: expected one number, got float32[3]"),
    "ids length": (lambda: clip_loss(X, X, 2.0, ids=IDS[:2]), "ids: expected 3 integers, one for each row, got int64[2]"),
    "ids dtype": (lambda: clip_loss(X, X, 2.0, ids=IDS.float()), "got float32[3]"),
    "weights": (lambda: clip_loss(X, X, 2.0, weights=torch.ones(2)), "weights: expected 3 floating point numbers"),
    "negatives": (lambda: clip_loss(X, X, 2.0, negatives=torch.ones(2, 3)), "negatives: expected features of shape (rows, 4)"),
    "negative ids": (lambda: clip_loss(X, X, 2.0, ids=IDS, negatives=X), "ids and negative_ids go together"),
    "negative ids type": (
        lambda: clip_loss(X, X, 2.0, ids=IDS, negatives=X, negative_ids=[1, 2, 3]),
        "negative_ids: expected 3",
    ),
    "exchange": (lambda: clip_loss(X, X, 2.0, exchange="star"), "exchange='star' is not one of"),
    "smoothing": (lambda: clip_loss(X, X, 2.0, label_smoothing=1.5), "label_smoothing=1.5 must be in [0, 1)"),
    "bias": (lambda: sigmoid_loss(X, X, 2.0, torch.ones(2)), "bias: expected one number, got float32[2]"),
    "labels": (lambda: supcon_loss(X[:, None], [1, 2, 3], 0.1), "labels: expected 3 integers, one for each row, got list"),
    "learned scale": (lambda: clip_loss(X, X, torch.ones((), requires_grad=True)), "a gradient for scale: True"),
    "other loss": (lambda: sigmoid_loss(X, X, 2.0, 0.0), "All ranks must make the same call"),
    "other option": (lambda: clip_loss(X, X, 2.0, label_smoothing=0.5), "label_smoothing=0.5"),
    "other ids": (lambda: clip_loss(X, X, 2.0, ids=IDS), "ids=True"),
}


def one_rank_is_wrong(name):
    call, text = BAD[name]
    with pytest.raises(MismatchError) as caught:
        call() if dist.get_rank() == 1 else clip_loss(X, X, 2.0)
    assert text in str(caught.value) and "rank 1" in str(caught.value), str(caught.value)
    assert clip_loss(X, X, 2.0) > 0, "the next call works"
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise_the_same_error(ranks, name):
    assert len(set(ranks(one_rank_is_wrong, name, world_size=3))) == 1


def not_finite(function, value):
    x = X.clone()
    if dist.get_rank() == 1:
        x[2, 1] = value
    call = {"clip": lambda: clip_loss(x, X, 2.0), "sigmoid": lambda: sigmoid_loss(X, x, 2.0, -1.0)}[function]
    assert not call().isfinite(), "without checked() it raises no error"
    with checked(), pytest.raises(MismatchError, match=r"has (nan|inf) at \(2, 1\); 1 values are not finite"):
        call()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", ["clip", "sigmoid"])
def test_checked_finds_what_is_not_finite(ranks, function, value):
    ranks(not_finite, function, value, world_size=2)


def scales_differ():
    with checked(), pytest.raises(MismatchError, match=r"scale=3\.0"):
        clip_loss(X, X, 2.0 + dist.get_rank())


def test_checked_finds_different_scales(ranks):
    ranks(scales_differ, world_size=2)


def dtypes_of_ids_and_weights_differ():
    """These dtypes may differ between ranks, because all ranks send one dtype."""
    ids, weights = (
        IDS.to([torch.int32, torch.int64][dist.get_rank()]),
        torch.ones(3, dtype=[torch.float32, torch.float64][dist.get_rank()]),
    )
    for exchange in ("gather", "ring"):
        results = [
            clip_loss(X, X, 2.0, ids=ids, weights=weights, exchange=exchange),
            sigmoid_loss(X, X, 2.0, -1.0, ids=ids, weights=weights, exchange=exchange),
            supcon_loss(X, ids, 0.5, weights=weights, exchange=exchange),
        ]
        assert all(loss.isfinite() for loss in results)


def test_dtypes_of_ids_and_weights_may_differ(ranks):
    ranks(dtypes_of_ids_and_weights_differ, world_size=2)


def with_sizes():
    rows = 1 + dist.get_rank()
    x = X[:rows]
    assert clip_loss(x, x, 2.0, sizes=(1, 2)) == clip_loss(x, x, 2.0)
    with checked(), pytest.raises(MismatchError, match=r"sizes=\(2, 2\) expects 2 rows on this rank, but x has shape \(1, 4\)"):
        clip_loss(x, x, 2.0, sizes=(2, 2))


def test_sizes_given(ranks):
    ranks(with_sizes, world_size=2)


def with_equal_sizes():
    """No message but those of the losses themselves, and checked() finds ranks that break the promise."""
    losses = [
        lambda x, n, **options: clip_loss(x[:n], x[:n], 2.0, **options),
        lambda x, n, **options: clip_loss(x[:n], x[:n], 2.0, ids=IDS[:n], **options),
        lambda x, n, **options: sigmoid_loss(x[:n], x[:n], 2.0, -1.0, **options),
        lambda x, n, **options: ntxent_loss(x[:n], x[:n], 0.5, **options),
        lambda x, n, **options: supcon_loss(x[:n], IDS[:n], 0.5, **options),
        lambda x, n, **options: supcon_loss(x[:n, None], IDS[:n], 0.5, **options),
        lambda x, n, **options: retrieval_metrics(x[:n].detach(), x[:n].detach(), **options)["x_to_y/recall@1"],
    ]
    rank, size = dist.get_rank(), dist.get_world_size()
    for loss in losses:
        found = []
        for sizes in ([2] * size, "equal"):
            x = (X + rank).requires_grad_()
            with count_bytes() as traffic:
                value = loss(x, 2, sizes=sizes)
            gradient = torch.autograd.grad(value, x)[0] if isinstance(value, torch.Tensor) else None
            found.append((value, gradient, traffic.calls))
        (value, gradient, calls), (given, expected, expected_calls) = found
        assert value == given and calls == expected_calls
        assert gradient is None or torch.equal(gradient, expected)
        with checked(), pytest.raises(MismatchError, match="the ranks disagree"):
            loss(X, 1 + rank, sizes="equal")
    with pytest.raises(ValueError, match="sizes='even' must be a sequence of lengths, one for each rank, or 'equal'"):
        supcon_loss(X[:, None], IDS, 0.5, sizes="even")


def test_equal_sizes_promised(ranks):
    ranks(with_equal_sizes, world_size=2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: clip_loss(X, X, 2.0, exchange="star"), "clip_loss: exchange='star' is not one of 'auto', 'gather', 'ring'"),
        (lambda: clip_loss(X, X, 2.0, grad_reduce="avg"), "clip_loss: grad_reduce='avg' is not one of 'mean', 'sum'"),
        (lambda: clip_loss(X, X, 2.0, tile=0), "clip_loss: tile=0 must be a positive"),
        (lambda: clip_loss(X, X, 2.0, same_id="drop"), "clip_loss: same_id='drop' is not one of"),
        (lambda: clip_loss(X, X, 2.0, label_smoothing=1.0), r"clip_loss: label_smoothing=1.0 must be in \[0, 1\)"),
        (lambda: clip_loss(X, X, 2.0, hardness=-1), "clip_loss: hardness=-1 must not be negative"),
        (lambda: sigmoid_loss(X, X, 2.0, torch.ones(2)), "sigmoid_loss: bias: expected one number"),
        (lambda: ntxent_loss(X, X, 0.0), "ntxent_loss: temperature=0.0 must be positive"),
        (lambda: supcon_loss(X, IDS[:1], 0.1), "supcon_loss: labels: expected 3 integers"),
        (lambda: multi_tower_loss([X], 2.0), "multi_tower_loss: towers: expected two or more, got 1"),
        (lambda: ClipLoss(init_scale=200.0), "ClipLoss: the initial scale 200.0 must be positive and at most 100.0"),
        (lambda: SigmoidLoss(init_scale=0.0), "SigmoidLoss: the initial scale 0.0"),
        (lambda: SupConLoss(temperature=-1.0), "SupConLoss: temperature=-1.0"),
        (lambda: ClipLoss(smoothing=0.1), "ClipLoss: smoothing is not an option of clip_loss"),
        (lambda: SupConLoss(smoothing=0.1), "SupConLoss: smoothing is not an option of supcon_loss"),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(ValueError, match=text):
        call()
