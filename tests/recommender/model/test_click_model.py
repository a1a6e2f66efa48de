"""Click models and their heads against their formulas."""

import pytest
import torch

from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.click_model import ClickModel, table_width
from unisono_models.recommender.model.heads import HEADS, HeadInputs, HeadShape
from unisono_models.recommender.model.tables import EmbeddingTables

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


def test_lr_fm_and_deepfm_match_their_formulas():
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


def test_dcn_matches_its_formula():
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
def test_deepfm_and_dcn_start_as_factorization_machines(kind):
    """Except for the sum of the vectors, which dcn adds, and small random crosses."""
    x, head = inputs(), head_of(kind, crosses=1)
    expected = sum(pairs(x.vectors)).sum(1) + x.weights.sum(1) + (x.vectors.sum((1, 2)) if kind == "dcn" else 0)
    assert (head(x) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("numbers", [0, 2])
def test_dlrm_matches_its_formula(numbers):
    x, head = inputs(numbers), head_of("dlrm", numbers, bottom=(4,))
    torch.nn.init.normal_(head.top[-1].weight)
    vectors, beside = x.vectors, x.vectors.flatten(1)
    if numbers:
        beside = head.bottom(x.numbers)
        vectors = torch.cat([beside[:, None], vectors], 1)
    dots = torch.stack([product.sum(1) for product in pairs(vectors)], 1)
    torch.testing.assert_close(head(x), head.top(torch.cat([beside, dots], 1)).squeeze(1) + x.weights.sum(1))


@pytest.mark.parametrize("kind", HEADS)
def test_every_parameter_gets_a_gradient_with_and_without_rows(kind):
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
