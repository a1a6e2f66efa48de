"""SASRec: what its outputs depend on, and what it knows of users when it is tested."""

import pytest
import torch

from tests.recommender.data.test_sequences import ALONE, split_ratings
from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.loss import TrainingModule
from unisono_models.recommender.model.build import build_model

LENGTH = 5


def make_model(*, name="item", rows=30):
    torch.manual_seed(0)
    config = ModelConfig("sasrec", dim=6, hidden=(8, 7), init=0.5, dropout=0.0, length=LENGTH, items=(name,))
    tables = TablesConfig(plan="row")
    return build_model(config, (Feature(name, rows=rows),), tables=tables, data=DataConfig(), dtype=torch.float64).double()


def encode(model, sequences):
    ids = Ragged.from_lists(sequences)
    return model.encode(model.encode_items({"item": ids.values}), ids.lengths()).detach()


def test_outputs_depend_on_earlier_items_alone():
    model = make_model().eval()
    whole = encode(model, [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10]])
    later = encode(model, [[1, 2, 3, 11], [12], [6, 7, 8, 9, 10]])
    earlier = encode(model, [[1, 13, 3, 4]])
    assert torch.equal(whole[:3], later[:3]) and torch.equal(whole[5:], later[5:])
    assert (whole[3:5] != later[3:5]).any(1).all()
    assert (earlier[1:] != whole[1:4]).any(1).all() and torch.equal(earlier[0], whole[0])
    torch.testing.assert_close(encode(model, [[5]]), whole[4:5])  # nor on the others of the batch


def test_users_are_known_by_their_last_items():
    model = make_model().eval()
    users = model.encode_users({"item": Ragged.from_lists([[20, 21, 1, 2, 3, 4, 5], [], [6, 7]])})
    expected = encode(model, [[1, 2, 3, 4, 5], [6, 7]])
    torch.testing.assert_close(users, torch.stack([expected[4], torch.zeros(6).double(), expected[6]]))
    assert model.encode_users({"item": Ragged.from_lists([])}).shape == (0, 6)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_shows_only_earlier_items(tmp_path, split, monkeypatch):
    datasets = split_ratings(tmp_path / "a.csv", [8, 2])
    model = make_model(rows=len(datasets.ratings.vocabularies["item"]))
    shown = []
    original = type(model).encode_users
    monkeypatch.setattr(type(model), "encode_users", lambda self, ids: shown.append(ids["item"]) or original(self, ids))
    module = TrainingModule(model, seed=0, items=datasets.items)
    all_items = Evaluator(module, datasets, ALONE, dtype=torch.float64, repeats=True)(split)
    new_items = Evaluator(module, datasets, ALONE, dtype=torch.float64)(split)
    assert all_items[f"{split}/users"] == 5 and new_items[f"{split}/recall@50"] <= all_items[f"{split}/recall@50"] == 1
    names = datasets.ratings.vocabularies["item"]
    histories = [[names.value(int(item)) for item in bag] for bag in shown[0].values.split(shown[0].lengths().tolist())]
    expected = [[f"m{(user + step) % 9}" for step in range(8)] + ["m8"] * (split == "test") for user in range(5)]
    assert histories == expected
