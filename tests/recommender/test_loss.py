"""The retrieval loss against its formula, on many ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from unisono_models.recommender.loss import retrieval_loss


def batch_of(rows):
    """Users and items with gradients, the logarithms of frequencies, and ids of which some are the same."""
    draw = torch.Generator().manual_seed(rows)
    users, items = (torch.randn(rows, 4, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ids = torch.randint(0, max(rows // 2, 1), (rows,), generator=draw)
    return users, items, torch.linspace(-3, -1, max(rows, 1), dtype=torch.float64)[ids], ids


def plain_loss(users, items, log_q, ids):
    logits = users @ items.T / 0.5 - log_q
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    return F.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(ids)))


def test_retrieval_loss_matches_its_formula():
    users, items, log_q, ids = batch_of(9)
    assert len(ids.unique()) < 9
    torch.testing.assert_close(
        retrieval_loss(users, items, log_q, temperature=0.5, ids=ids), plain_loss(users, items, log_q, ids)
    )


def share_of_loss(sizes):

    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = batch_of(sum(sizes))
    users, items, log_q, ids = (x.detach().split(sizes)[rank] for x in whole)
    users.requires_grad_(), items.requires_grad_()
    loss = retrieval_loss(users, items, log_q, temperature=0.5, ids=ids)
    loss.backward()
    return loss.item(), users.grad / len(sizes), items.grad / len(sizes)


@pytest.mark.parametrize("sizes", [[9], [5, 4], [8, 0, 1], [3, 3, 0, 3]])
def test_retrieval_loss_obeys_the_law(ranks, sizes):
    users, items, log_q, ids = batch_of(9)
    expected = plain_loss(users, items, log_q, ids)
    expected.backward()
    found = ranks(share_of_loss, sizes, world_size=len(sizes))
    for loss, _, _ in found:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    for place, whole in ((1, users.grad), (2, items.grad)):
        torch.testing.assert_close(torch.cat([x[place] for x in found]), whole, rtol=1e-10, atol=1e-12)
