"""Build the model that a config describes, with its tables."""

from collections.abc import Mapping
from typing import TypeAlias

import torch

from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.batch import Ids
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.click_model import ClickModel, table_width
from unisono_models.recommender.model.sasrec import SASRec
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower

Model: TypeAlias = ClickModel | TwoTower | SASRec


def build_model(
    config: ModelConfig,
    features: tuple[Feature, ...],
    *,
    tables: TablesConfig,
    data: DataConfig,
    mapped: bool = False,
    sample: Mapping[str, Ids] | None = None,
    batch: int = 1024,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Model:
    """Build a model with new weights: the same on every rank if all have the same seed. All ranks call.

    A model that retrieves items has tables for the features that it names, a click model for all of them.

    Args: see EmbeddingTables.
    """
    used = {*config.users, *config.items} if config.retrieves else {feature.name for feature in features}
    chosen = [feature for feature in features if feature.kind != "number" and feature.name in used]
    embeddings = EmbeddingTables(
        chosen,
        width=config.dim if config.retrieves else table_width(config),
        init=config.init,
        config=tables,
        data=data,
        mapped=mapped,
        sample=None if sample is None else {feature.name: sample[feature.name] for feature in chosen},
        batch=batch,
        dtype=dtype,
        device=device,
    )
    if config.kind == "sasrec":
        return SASRec(config, embeddings)
    return TwoTower(config, embeddings) if config.kind == "two_tower" else ClickModel(config, features, embeddings)
