"""A trained model as a folder: model.safetensors, config.json and vocabularies.json. It can be read on any number of ranks."""

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
from unisono_models.recommender.model.build import Model, build_model
from unisono_models.training.config.serialization import config_from_json, config_to_json

WEIGHTS_FILE, CONFIG_FILE, VOCABULARIES_FILE = "model.safetensors", "config.json", "vocabularies.json"
FILES = (WEIGHTS_FILE, CONFIG_FILE, VOCABULARIES_FILE)


@dataclass(frozen=True)
class ExportedModel:
    """A model, its features, and the vocabularies that give their values rows."""

    model: Model
    features: tuple[Feature, ...]
    vocabularies: dict[str, Vocabulary]


def full_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather all weights on the CPU, without the state of optimizers. All ranks call; the result is empty unless `keep`.

    Tables are gathered one after the other, so a rank that does not keep them holds one at a time.
    """
    weights: dict[str, Tensor] = {}
    collections = {name: x for name, x in model.named_modules() if isinstance(x, EmbeddingCollection)}
    for name, collection in collections.items():
        for table in collection.tables:
            full = collection.full_weight(table).detach()
            if keep:
                weights[f"{name}.tables.{table}.weight"] = full.cpu()
            del full
    for name, value in model.state_dict().items():
        if isinstance(value, Mapping):  # the state of an IdMap
            for key, x in value.items():
                full = x.full_tensor() if hasattr(x, "full_tensor") else x
                if keep:
                    weights[f"{name}/{key}"] = full.detach().cpu()
        elif keep and not any(name.startswith(f"{prefix}.") for prefix in collections):
            weights[name] = value.detach().cpu()
    return {name: value.contiguous() for name, value in weights.items()}


def dtype_of_weights(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of the tables and layers. (The state of an IdMap is int64.)"""
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
    """Write the files that `read_export` reads. One rank calls."""
    save_file(dict(weights), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {"model": config_to_json(model), "data": config_to_json(data), "features": [str(x) for x in features]}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    words = {name: vocabulary.values for name, vocabulary in vocabularies.items()}
    (folder / VOCABULARIES_FILE).write_text(json.dumps(words, ensure_ascii=False) + "\n", encoding="utf-8")


def read_export(folder: Path | str) -> ExportedModel:
    """Read the model that a run has exported, for prediction: in one process, or on all ranks together.

    Example:
        exported = read_export("runs/recommender-deepfm/export")
        movies = exported.vocabularies["item_id"]
    """
    folder = Path(folder)
    saved = json.loads((folder / CONFIG_FILE).read_text())
    config = config_from_json(ModelConfig, saved["model"])
    features = tuple(map(Feature.parse, saved["features"]))
    weights = load_file(folder / WEIGHTS_FILE)
    model = build_model(
        config,
        features,
        tables=TablesConfig(plan="row", optimizer="sgd"),
        data=config_from_json(DataConfig, saved["data"]),
        mapped=any("maps.map_" in name for name in weights),
        dtype=dtype_of_weights(weights),
    )
    load_weights(model, weights)
    return ExportedModel(model.eval(), features, read_vocabularies(folder))


def read_vocabularies(folder: Path) -> dict[str, Vocabulary]:
    """Read the vocabularies of an exported model: its values keep their rows, even if the data has changed since."""
    words = json.loads((folder / VOCABULARIES_FILE).read_text(encoding="utf-8"))
    return {name: Vocabulary(values) for name, values in words.items()}


def read_data_config(folder: Path) -> DataConfig:
    """Read which data an exported model was trained on, with the features as they were resolved then."""
    saved = json.loads((folder / CONFIG_FILE).read_text())
    return replace(config_from_json(DataConfig, saved["data"]), features=tuple(saved["features"]))


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load full weights into a model, whatever the layout of its tables. All ranks call."""
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
        raise ValueError(f"load_weights: these are weights of another model: {[*unexpected, *missing][:5]}")


def _is_optimizer_state(name: str) -> bool:
    return ".tables." in name and not name.endswith(".weight")
