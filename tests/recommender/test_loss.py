"""The losses of retrieval against their formulas, on many ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from unisono_models.recommender import loss
from unisono_models.recommender.loss import next_item_loss, retrieval_loss


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
    value = retrieval_loss(users, items, log_q, temperature=0.5, ids=ids)
    value.backward()
    return value.item(), users.grad / len(sizes), items.grad / len(sizes)


@pytest.mark.parametrize("sizes", [[9], [5, 4], [8, 0, 1], [3, 3, 0, 3]])
def test_retrieval_loss_obeys_the_law(ranks, sizes):
    users, items, log_q, ids = batch_of(9)
    expected = plain_loss(users, items, log_q, ids)
    expected.backward()
    found = ranks(share_of_loss, sizes, world_size=len(sizes))
    for value, _, _ in found:
        assert value == pytest.approx(expected.item(), rel=1e-12)
    for place, whole in ((1, users.grad), (2, items.grad)):
        torch.testing.assert_close(torch.cat([x[place] for x in found]), whole, rtol=1e-10, atol=1e-12)


def positions_of(count, items):
    """Outputs with gradients and their targets; vectors of items with gradients, and their ids, which have gaps."""
    draw = torch.Generator().manual_seed(count)
    hidden, vectors = (3 * torch.randn(rows, 4, generator=draw, dtype=torch.float64) for rows in (count, items))
    ids = 5 + 3 * torch.arange(items)
    return hidden.requires_grad_(), ids[torch.randint(items, (count,), generator=draw)], vectors.requires_grad_(), ids


def plain_next_item_loss(hidden, targets, items, ids):
    return F.cross_entropy(hidden @ items.T, torch.searchsorted(ids, targets))


@pytest.mark.parametrize("kept", [0, 10_000], ids=["recomputed", "kept"])
def test_next_item_loss_in_tiles_matches_its_formula(monkeypatch, kept):
    monkeypatch.setattr(loss, "_TILE", 3 * 11)
    monkeypatch.setattr(loss, "_KEPT", kept)
    found, expected = positions_of(10, 11), positions_of(10, 11)
    values = next_item_loss(*found[:3], ids=found[3]), plain_next_item_loss(*expected)
    torch.testing.assert_close(*values)
    for value in values:
        value.backward()
    torch.testing.assert_close(found[0].grad, expected[0].grad)
    torch.testing.assert_close(found[2].grad, expected[2].grad)


def share_of_next_item_loss(sizes, items):
    rank = dist.get_rank() if dist.is_initialized() else 0
    hidden, targets, vectors, ids = positions_of(sum(sizes), items)
    hidden, targets = (x.detach().split(sizes)[rank] for x in (hidden, targets))
    vectors, ids = (x.detach().tensor_split(len(sizes))[rank] for x in (vectors, ids))
    hidden.requires_grad_(), vectors.requires_grad_()
    value = next_item_loss(hidden, targets, vectors, ids=ids)
    value.backward()
    return value.item(), hidden.grad / len(sizes), vectors.grad / len(sizes)


@pytest.mark.parametrize(("sizes", "items"), [([9], 7), ([5, 4], 7), ([8, 0, 1], 2), ([3, 3, 0, 3], 7)])
def test_next_item_loss_obeys_the_law(ranks, sizes, items):
    """Also with fewer items than ranks, so that one has none."""
    whole = positions_of(9, items)
    expected = plain_next_item_loss(*whole)
    expected.backward()
    found = ranks(share_of_next_item_loss, sizes, items, world_size=len(sizes))
    for value, _, _ in found:
        assert value == pytest.approx(expected.item(), rel=1e-12)
    for place, full in ((1, whole[0].grad), (2, whole[2].grad)):
        torch.testing.assert_close(torch.cat([x[place] for x in found]), full, rtol=1e-10, atol=1e-12)
