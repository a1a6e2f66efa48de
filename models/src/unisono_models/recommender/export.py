"""A trained model as a folder: weights as safetensors, all else as JSON; and back, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unisono.embedding import EmbeddingCollection
from unisono_models.recommender.config import DataConfig, ModelConfig, TablesConfig
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.data.ratings import Vocabulary
from unisono_models.recommender.model.click_model import ClickModel, table_width
from unisono_models.recommender.model.tables import EmbeddingTables
from unisono_models.recommender.model.two_tower import TwoTower
from unisono_models.training.config.serialization import config_from_json, config_to_json

FILES = ("model.safetensors", "config.json", "vocabularies.json")


@dataclass(frozen=True)
class ExportedModel:
    """A model with what it needs to be used: its features, and the vocabularies that give their values rows."""

    model: ClickModel | TwoTower
    features: tuple[Feature, ...]
    vocabularies: dict[str, Vocabulary]


def full_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """All weights whole, on the CPU, without the state of optimizers: nothing unless `keep`. All ranks call.

    Tables are gathered one after the other, so that a rank that keeps nothing holds one at a time.
    """
    found: dict[str, Tensor] = {}
    collections = {name: x for name, x in model.named_modules() if isinstance(x, EmbeddingCollection)}
    for name, collection in collections.items():
        for table in collection.tables:
            full = collection.full_weight(table).detach()
            found |= {f"{name}.tables.{table}.weight": full.cpu()} if keep else {}
            del full
    for name, value in model.state_dict().items():
        if isinstance(value, Mapping):  # of a map of ids
            whole = {f"{name}/{key}": _whole(x) for key, x in value.items()}
            found |= whole if keep else {}
        elif keep and not any(name.startswith(f"{prefix}.") for prefix in collections):
            found[name] = value.detach().cpu()
    return {name: value.contiguous() for name, value in found.items()}


def dtype_of_weights(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Of the tables and layers; the ids of maps are integers."""
    return next(weight.dtype for weight in weights.values() if weight.is_floating_point())


def write_export(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    model: ModelConfig,
    data: DataConfig,
    features: tuple[Feature, ...],
    vocabularies: Mapping[str, Vocabulary],
) -> None:
    """Write what `read_export` reads. One rank calls."""
    save_file(dict(weights), folder / FILES[0], metadata={"format": "pt"})
    about = {"model": config_to_json(model), "data": config_to_json(data), "features": [str(feature) for feature in features]}
    (folder / FILES[1]).write_text(json.dumps(about, indent=2) + "\n")
    words = {name: vocabulary.values for name, vocabulary in vocabularies.items()}
    (folder / FILES[2]).write_text(json.dumps(words, ensure_ascii=False) + "\n", encoding="utf-8")


def read_export(folder: Path | str) -> ExportedModel:
    """The model in a folder that a run has exported, for prediction. Alone or on all ranks together.

    Example:
        exported = read_export("runs/recommender-deepfm/export")
        movies = exported.vocabularies["item_id"]
    """
    folder = Path(folder)
    about = json.loads((folder / FILES[1]).read_text())
    config, data = config_from_json(ModelConfig, about["model"]), config_from_json(DataConfig, about["data"])
    features = tuple(map(Feature.parse, about["features"]))
    tower = config.kind == "two_tower"
    wanted = {*config.users, *config.items} if tower else {feature.name for feature in features}
    weights = load_file(folder / FILES[0])
    tables = EmbeddingTables(
        [feature for feature in features if feature.kind != "number" and feature.name in wanted],
        width=config.dim if tower else table_width(config),
        init=config.init,
        config=TablesConfig(plan="row", optimizer="sgd"),
        data=data,
        mapped=any("maps.map_" in name for name in weights),
        dtype=dtype_of_weights(weights),
    )
    model = TwoTower(config, tables) if tower else ClickModel(config, features, tables)
    load_weights(model, weights)
    return ExportedModel(model.eval(), features, read_vocabularies(folder))


def read_vocabularies(folder: Path) -> dict[str, Vocabulary]:
    """Those of an exported model: the rows that its values have, whatever the data has by now."""
    words = json.loads((folder / FILES[2]).read_text(encoding="utf-8"))
    return {name: Vocabulary(values) for name, values in words.items()}


def exported_data(folder: Path) -> DataConfig:
    """The data that an exported model was trained on, with its features as they were then."""
    about = json.loads((folder / FILES[1]).read_text())
    return replace(config_from_json(DataConfig, about["data"]), features=tuple(about["features"]))


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put whole weights into a model, however its tables are spread. All ranks call."""
    state: dict[str, Any] = {}
    for name, value in weights.items():
        key, slash, inner = name.partition("/")
        if slash:
            state.setdefault(key, {})[inner] = value
        else:
            state[name] = value
    model.to(dtype_of_weights(weights))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if not _is_optimizer_state(name)]:
        raise ValueError(f"load_weights: the weights are of another model: {[*unexpected, *missing][:5]}")


def _is_optimizer_state(name: str) -> bool:
    return ".tables." in name and not name.endswith(".weight")


def _whole(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu()
