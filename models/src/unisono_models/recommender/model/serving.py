"""A trained model for one process: with whole or quantized tables, and as programs that need neither this code nor ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes

from unisono.embedding import Ragged
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.build import Model
from unisono_models.recommender.model.click_model import ClickModel
from unisono_models.recommender.model.sasrec import SASRec
from unisono_models.recommender.model.two_tower import TwoTower

ServedIds = dict[str, Tensor | tuple[Tensor, Tensor]]
"""By feature: (rows,) for the kind "id", (values, offsets) for the kind "ids"."""


class ServedClickModel(nn.Module):
    """forward: ids, and (rows, numbers) if the model has such features, to (rows,) probabilities of a click."""

    def __init__(self, model: ClickModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: ServedIds, numbers: Tensor) -> Tensor:
        none = numbers.new_empty(0)
        return torch.sigmoid(self.model(Batch(_as_ids(ids), numbers, labels=none, index=none)))


class ServedTower(nn.Module):
    """forward: the ids of users, or of items, to (rows, dim) vectors; the dot product of two is their score.

    A SASRec takes the items of each user, in order of time, instead of the ids of users.
    """

    def __init__(self, model: TwoTower | SASRec, side: Literal["users", "items"]) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, ids: ServedIds) -> Tensor:
        if self.side == "items":
            return self.model.encode_items(_as_ids(ids))
        if isinstance(self.model, TwoTower):
            return self.model.encode_users(_as_ids(ids))
        # Two more users without items: torch's attention would make a program that refuses a batch of one row, or of none.
        name = self.model.config.items[0]
        items, offsets = ids[name]
        bags = Ragged(items, torch.cat([offsets, offsets[-1:], offsets[-1:]]))
        return self.model.encode_users({name: bags})[:-2]


def _as_ids(ids: ServedIds) -> dict[str, Ids]:
    return {name: Ragged(*x) if isinstance(x, tuple) else x for name, x in ids.items()}


def served_ids(ids: Mapping[str, Ids]) -> ServedIds:
    """The ids of a batch as programs take them."""
    return {name: (x.values, x.offsets) if isinstance(x, Ragged) else x for name, x in ids.items()}


def export_programs(model: Model, features: tuple[Feature, ...]) -> dict[str, ExportedProgram]:
    """Export a model, after `convert_for_inference` of its tables: "model", or "users" and "items" of a model that retrieves.

    A program takes any number of rows. It does not say which id is out of range, as the tables do.
    """
    kinds = {feature.name: feature.kind for feature in features if feature.kind != "number"}
    if isinstance(model, ClickModel):
        numbers = torch.zeros(2, sum(feature.kind == "number" for feature in features))
        return {"model": _export(ServedClickModel(model), kinds, numbers.to(next(model.parameters()).dtype))}
    by_user = {name: kinds[name] for name in model.config.users}
    if isinstance(model, SASRec):
        by_user = {model.config.items[0]: "ids"}
    return {
        "users": _export(ServedTower(model, "users"), by_user),
        "items": _export(ServedTower(model, "items"), {name: kinds[name] for name in model.config.items}),
    }


def save_programs(programs: Mapping[str, ExportedProgram], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.pt2" for name in programs]
    for path, program in zip(paths, programs.values(), strict=True):
        torch.export.save(program, path)
    return paths


def _export(module: nn.Module, kinds: Mapping[str, str], *numbers: Tensor) -> ExportedProgram:
    ids: ServedIds = {}
    for number, (name, kind) in enumerate(kinds.items()):
        # Two rows. The numbers of ids in bags must differ: export takes lengths for the same that are the same here.
        bags = torch.zeros(number + 5, dtype=torch.int64), torch.tensor([0, 1, number + 5])
        ids[name] = bags if kind == "ids" else torch.zeros(2, dtype=torch.int64)
    any_rows = {0: Dim.AUTO}
    shapes = {name: (any_rows, any_rows) if isinstance(x, tuple) else any_rows for name, x in ids.items()}
    # Without this setting a program would refuse a batch of one row.
    with torch.no_grad(), symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(module.eval(), (ids, *numbers), dynamic_shapes=(shapes, *(any_rows for _ in numbers)))
