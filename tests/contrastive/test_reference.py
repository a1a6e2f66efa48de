"""The reference formulas against torch's own cross entropies, so that the specification itself is checked."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contrastive.loss_cases import global_batch
from unisono.contrastive import reference

BATCH = global_batch(9)
X, Y, SCALE, IDS, WEIGHTS = (BATCH[name] for name in ("x", "y", "scale", "ids", "weights"))
LOGITS = SCALE * X @ Y.T
EYE = torch.eye(9, dtype=torch.bool)
SAME = IDS.unsqueeze(1) == IDS


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def both_ways(logits: Tensor, target: Tensor, **options) -> Tensor:
    return (F.cross_entropy(logits, target, **options) + F.cross_entropy(logits.T, target, **options)) / 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_the_cross_entropy_of_both_directions(smoothing):
    expected = both_ways(LOGITS, torch.arange(9), label_smoothing=smoothing)
    close(reference.clip_loss(X, Y, SCALE, label_smoothing=smoothing), expected)


def test_clip_loss_of_the_same_ids():
    assert SAME.sum() > 9, "some ids are there twice"
    close(reference.clip_loss(X, Y, SCALE, ids=IDS), both_ways(LOGITS, SAME.double() / SAME.sum(1, keepdim=True)))
    masked = LOGITS.masked_fill(SAME & ~EYE, -torch.inf)
    close(reference.clip_loss(X, Y, SCALE, ids=IDS, same_id="masked"), both_ways(masked, torch.arange(9)))


def test_clip_loss_with_negatives_and_weights():
    logits = SCALE * X @ torch.cat([Y, BATCH["negatives"]]).T
    losses = F.cross_entropy(logits, torch.arange(9), reduction="none")
    found = reference.clip_loss(X, Y, SCALE, negatives=BATCH["negatives"], weights=WEIGHTS, direction="x_to_y")
    close(found, (losses * WEIGHTS).sum() / WEIGHTS.sum())


def test_clip_loss_decoupled_and_with_hard_negatives():
    others = LOGITS.masked_fill(EYE, -torch.inf)
    decoupled = others.logsumexp(1) - LOGITS.diag()
    close(reference.clip_loss(X, Y, SCALE, decoupled=True, direction="x_to_y"), decoupled.mean())
    hard = 8 * (F.softmax(0.5 * others, 1) * others.exp()).sum(1)  # the weights of the 8 negatives have a mean of 1
    expected = (hard + LOGITS.diag().exp()).log() - LOGITS.diag()
    close(reference.clip_loss(X, Y, SCALE, hardness=0.5, direction="x_to_y"), expected.mean())


def test_sigmoid_loss_is_the_binary_cross_entropy():
    weights = (WEIGHTS.unsqueeze(1) + WEIGHTS) / 2
    for same_id, target, mask in (("positive", SAME, 1), ("masked", EYE, EYE | ~SAME)):
        losses = F.binary_cross_entropy_with_logits(LOGITS - 1.5, target.double(), reduction="none")
        found = reference.sigmoid_loss(X, Y, SCALE, -1.5, ids=IDS, same_id=same_id, weights=WEIGHTS)
        close(found, (losses * weights * mask).sum() / WEIGHTS.sum())


def test_supcon_loss_is_a_cross_entropy_and_ntxent_loss_a_case_of_it():
    z, labels = torch.cat([X, Y]), torch.arange(9).repeat(2)
    logits = (z @ z.T / 0.3).masked_fill(torch.eye(18, dtype=torch.bool), -1e300)
    target = (labels.unsqueeze(1) == labels).fill_diagonal_(False).double()
    expected = F.cross_entropy(logits, target, reduction="none")
    close(reference.supcon_loss(z, labels, 0.3), expected.mean())
    close(reference.ntxent_loss(X, Y, 0.3), expected.mean())
    weights = WEIGHTS.repeat(2)
    close(reference.ntxent_loss(X, Y, 0.3, weights=WEIGHTS), (expected * weights).sum() / weights.sum())
