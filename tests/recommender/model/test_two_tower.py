"""Two towers."""

import pytest
import torch

from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.loss import retrieval_loss
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower

FEATURES = (Feature("a", rows=7), Feature("b", "ids", rows=5))


def test_every_layer_of_the_towers_gets_a_gradient():
    """Not so if their last layer started from zero, as it does beside a factorization machine."""
    torch.manual_seed(1)  # with some weights all five units of a row are off, and its tower gives zeros
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
    with pytest.raises(ValueError, match=r"--model.items: c: not among the features of ids"):
        TwoTower(ModelConfig("two_tower", users=("a",), items=("c",)), tables)
