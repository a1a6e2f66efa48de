"""A trained model in one process: programs of torch.export give the scores of the model."""

import pytest
import torch

from unisono.embedding import Ragged
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.click_model import ClickModel, table_width
from unisono_models.recommender.model.serving import export_programs, save_programs, served_ids
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower

FEATURES = (Feature("user", rows=20), Feature("item", rows=30), Feature("genres", "ids", rows=9), Feature("age", "number"))


def make_model(kind, *, mapped=False):
    torch.manual_seed(0)
    config = ModelConfig(kind, dim=6, hidden=(8,), init=0.5, users=("user",), items=("item", "genres"))
    tables = EmbeddingTables(
        [feature for feature in FEATURES if feature.kind != "number"],
        width=6 if kind == "two_tower" else table_width(config),
        init=0.5,
        config=TablesConfig(plan="row"),
        data=DataConfig(),
        mapped=mapped,
    )
    return TwoTower(config, tables) if kind == "two_tower" else ClickModel(config, FEATURES, tables)


def make_batch(rows):
    number = torch.arange(rows)
    bags = Ragged.from_lists([list(range(i % 4)) for i in range(rows)])
    ids = {"user": number * 7 % 20, "item": number * 11 % 30, "genres": bags}
    return Batch(ids, torch.linspace(-1, 1, rows)[:, None], torch.zeros(rows), number)


@pytest.mark.parametrize("kind", ["lr", "fm", "deepfm", "dcn", "dlrm"])
def test_programs_of_click_models_give_their_probabilities(kind, tmp_path):
    model = make_model(kind).eval()
    expected = {rows: torch.sigmoid(model(make_batch(rows))) for rows in (5, 1, 0)}
    model.tables.convert_for_inference(None)
    (path,) = save_programs(export_programs(model, FEATURES), tmp_path)
    program = torch.export.load(path).module()
    for rows, scores in expected.items():
        batch = make_batch(rows)
        torch.testing.assert_close(program(served_ids(batch.ids), batch.numbers), scores)


@pytest.mark.parametrize("bits", [4, 8])
def test_programs_of_quantized_towers_give_their_vectors(bits, tmp_path):
    model, batch = make_model("two_tower").eval(), make_batch(7)
    whole = [vectors.detach() for vectors in model(batch)]
    model.tables.convert_for_inference(bits)
    expected = model(batch)
    for path, side in zip(save_programs(export_programs(model, FEATURES), tmp_path), ("users", "items"), strict=True):
        assert path.name == f"{side}.pt2"
        names = getattr(model.config, side)
        found = torch.export.load(path).module()(served_ids({name: batch.ids[name] for name in names}))
        torch.testing.assert_close(found, expected[side == "items"])
        assert 0 < float((found.detach() - whole[side == "items"]).abs().max()) < {4: 0.3, 8: 0.02}[bits]


def test_programs_of_mapped_ids_know_the_ids_of_training(tmp_path):
    model, batch = make_model("fm", mapped=True), make_batch(7)
    strange = Batch({**batch.ids, "user": batch.ids["user"] * 10**15 - 5}, batch.numbers, batch.labels, batch.index)
    model(strange)
    unknown = Batch({**strange.ids, "item": batch.ids["item"] + 10**9}, batch.numbers, batch.labels, batch.index)
    expected = [torch.sigmoid(model.eval()(each)) for each in (strange, unknown)]
    model.tables.convert_for_inference(None)
    (path,) = save_programs(export_programs(model, FEATURES), tmp_path)
    program = torch.export.load(path).module()
    for each, scores in zip((strange, unknown), expected, strict=True):
        torch.testing.assert_close(program(served_ids(each.ids), each.numbers), scores)
    assert not torch.allclose(*expected)
