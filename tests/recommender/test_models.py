"""The models against their formulas, and their losses on many ranks."""

import pytest
import torch
import torch.nn.functional as F

from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.loss import retrieval_loss
from unisono_models.recommender.model.click_model import HEADS, ClickModel, table_width
from unisono_models.recommender.model.heads import HeadInputs, HeadShape
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower

FEATURES = (Feature("a", rows=7), Feature("n", "number"), Feature("b", "ids", rows=5))
FIELDS, DIM = 4, 3


def inputs(numbers=2):
    draw = torch.Generator().manual_seed(0)
    shapes = ((5, FIELDS, DIM), (5, FIELDS), (5, numbers))
    return HeadInputs(*(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes))


def head_of(kind, numbers=2, **settings):
    torch.manual_seed(1)
    return HEADS[kind](
        HeadShape(FIELDS, DIM, numbers, ModelConfig(kind, dropout=0.0, input_dropout=0.0, hidden=(6, 5), **settings))
    ).double()


def pairs(vectors):
    return [vectors[:, i] * vectors[:, j] for i in range(vectors.shape[1]) for j in range(i)]


def test_machines_are_their_formulas():
    x = inputs()
    bias = 0.25
    for kind in ("lr", "fm", "deepfm"):
        head = head_of(kind)
        with torch.no_grad():
            next(p for name, p in head.named_parameters() if name.endswith("bias") and p.ndim == 0).fill_(bias)
        expected = x.weights.sum(1) + bias
        if kind != "lr":
            expected = expected + sum(pairs(x.vectors)).sum(1)
        if kind == "deepfm":
            layers = [layer for layer in head.deep if isinstance(layer, torch.nn.Linear)]
            torch.nn.init.normal_(layers[2].weight)
            expected = expected + layers[2](layers[1](layers[0](x.vectors.flatten(1)).relu()).relu()).squeeze(1)
        torch.testing.assert_close(head(x), expected)


def test_crosses_are_their_formula():
    x, head = inputs(), head_of("dcn", crosses=2)
    torch.nn.init.normal_(head.out.weight)
    vectors = x.vectors
    first = crossed = vectors.flatten(1)
    others = torch.stack([sum(vectors[:, j] for j in range(FIELDS) if j != i) / 2 for i in range(FIELDS)], 1).flatten(1)
    for number, layer in enumerate(head.crosses):
        product = crossed @ layer.linear.weight.T + layer.linear.bias + (others if number == 0 else 0)
        crossed = first * product + crossed
    deep = head.deep[2](head.deep[0](first).relu()).relu()
    learned = (torch.cat([crossed, deep], 1) @ head.out.weight.T).squeeze(1)
    torch.testing.assert_close(head(x), learned + crossed.sum(1) + x.weights.sum(1))


@pytest.mark.parametrize("kind", ["deepfm", "dcn"])
def test_deep_models_start_as_factorization_machines(kind):
    """But for the sum of the vectors, which dcn has besides, and small random crosses."""
    x, head = inputs(), head_of(kind, crosses=1)
    expected = sum(pairs(x.vectors)).sum(1) + x.weights.sum(1) + (x.vectors.sum((1, 2)) if kind == "dcn" else 0)
    assert (head(x) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("numbers", [0, 2])
def test_dlrm_is_its_formula(numbers):
    x, head = inputs(numbers), head_of("dlrm", numbers, bottom=(4,))
    torch.nn.init.normal_(head.top[-1].weight)
    vectors, beside = x.vectors, x.vectors.flatten(1)
    if numbers:
        beside = head.bottom(x.numbers)
        vectors = torch.cat([beside[:, None], vectors], 1)
    dots = torch.stack([product.sum(1) for product in pairs(vectors)], 1)
    torch.testing.assert_close(head(x), head.top(torch.cat([beside, dots], 1)).squeeze(1) + x.weights.sum(1))


@pytest.mark.parametrize("kind", HEADS)
def test_every_parameter_learns_and_no_rows_are_fine(kind):
    """DDP refuses parameters without gradients; a rank may have no rows."""
    config = ModelConfig(kind, dim=4, hidden=(5,), dropout=0.1)
    tables = EmbeddingTables(
        [f for f in FEATURES if f.rows], width=table_width(config), init=0.1, config=TablesConfig(), data=DataConfig()
    )
    model = ClickModel(config, FEATURES, tables).eval()
    for rows in (3, 0):
        ids = {"a": torch.arange(rows), "b": Ragged.from_lists([[1, 2], [], [4]][:rows])}
        logits = model(Batch(ids, torch.ones(rows, 1), torch.ones(rows), torch.arange(rows)))
        assert logits.shape == (rows,)
        logits.sum().backward()
        dense = {name: p for name, p in model.named_parameters() if not name.startswith("tables.")}
        if kind in ("lr", "fm", "deepfm", "dcn"):
            assert "numbers" in dense
        assert all(p.grad is not None for p in dense.values()), kind


def test_towers_with_layers_learn_in_all_of_them():
    """Not so if their last layer started from zero, as it does beside a factorization machine."""
    config = ModelConfig("two_tower", dim=4, hidden=(5,), dropout=0.0, input_dropout=0.0, users=("a",), items=("b",))
    tables = EmbeddingTables([f for f in FEATURES if f.rows], width=4, init=0.1, config=TablesConfig(), data=DataConfig())
    model, before = TwoTower(config, tables), tables.collection.full_weight("table_a")
    ids = {"a": torch.arange(3), "b": Ragged.from_lists([[1, 2], [0], [4]])}
    users, items = model(Batch(ids, torch.ones(3, 0), torch.ones(3), torch.arange(3)))
    torch.testing.assert_close(users.norm(dim=1), torch.ones(3))
    retrieval_loss(users, items, torch.zeros(3), temperature=0.5, ids=torch.arange(3)).backward()
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    assert len(dense) == 8 and all(p.grad.abs().max() > 0 for p in dense)
    assert (tables.collection.full_weight("table_a") != before).any()
    with pytest.raises(ValueError, match=r"model.items: \['c'\]: not among the features of ids"):
        TwoTower(ModelConfig("two_tower", users=("a",), items=("c",)), tables)


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


def test_retrieval_loss_is_its_formula():
    users, items, log_q, ids = batch_of(9)
    assert len(ids.unique()) < 9
    torch.testing.assert_close(
        retrieval_loss(users, items, log_q, temperature=0.5, ids=ids), plain_loss(users, items, log_q, ids)
    )


def share_of_loss(sizes):
    import torch.distributed as dist

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
