"""The training of the recommender for the simulation: real tables and heads, and ids that are drawn at random."""

from dataclasses import replace

import torch

from unisono.embedding import Ragged
from unisono_models.recommender.config import Config
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.dataset import Datasets, InMemoryDataset
from unisono_models.recommender.data.features import Feature, parse_features
from unisono_models.recommender.loss import build_training_module
from unisono_models.recommender.protocols import apply_protocol
from unisono_models.recommender.train import check_settings, make_optimizer, train_step
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import parallelize, parameter_dtype
from unisono_models.training.errors import UserError
from unisono_models.training.phases import phase
from unisono_models.training.simulate.training import SimulatedTraining, draw_integers, largest_share

_BAG = 2  # ids of a row, for features that are bags
_ROWS = {  # of the tables that MovieLens needs, for which its files are not read
    "ml-1m": {"user_id": 6041, "item_id": 3707, "age": 8, "gender": 3, "occupation": 22, "genre": 19, "release_year": 82},
    "ml-100k": {"user_id": 944, "item_id": 1683, "age": 62, "gender": 3, "occupation": 22, "class": 20, "release_year": 73},
}


def build_training(config: Config, ranks: Ranks) -> SimulatedTraining:
    """Build the tables and the model, and a step on this rank's share of the batch, as train.py does."""
    config = apply_protocol(config)
    check_settings(config)
    dtype, device = parameter_dtype(config.parallel), ranks.device
    features = _known_features(config)
    if config.model.kind == "two_tower" and not (config.model.users and config.model.items):
        raise UserError("--model.users and --model.items: the simulation reads no data, so name the features of both towers")
    rows = largest_share(config.data.batch, ranks.world_size)
    batch = _draw_batch(features, rows)
    sequences = config.model.kind == "sasrec"
    if sequences:
        config = replace(config, model=replace(config.model, items=(config.data.item,)))
        batch = replace(
            batch, ids={**batch.ids, config.data.item: _draw_bags(_item_rows(config, features), rows, config.model.length + 1)}
        )
    none = InMemoryDataset(None, torch.empty(0), batch=1, seed=0)  # type: ignore[arg-type]  # there are no ratings
    mapped = config.data.ids == "mapped" and config.data.format in ("criteo", "parquet")
    datasets = Datasets(features, none, none, none, sample=None if mapped else batch, mapped=mapped, config=config.data)
    log_q = items = None
    if config.model.kind == "two_tower":
        log_q = torch.zeros(_item_rows(config, features), dtype=dtype, device=device)
    elif sequences:
        items = torch.arange(1, _item_rows(config, features), device=device)
    module = build_training_module(config, datasets, dtype=dtype, device=device, log_q=log_q, items=items).train()
    dense = list(module.dense_parameters())
    model = parallelize(module, config.parallel, ranks) if dense else module
    optimizers = {"dense": make_optimizer(module, config.optimizer)} if dense else {}

    def step() -> object:
        with phase("data"):
            moved = batch.to(device, dtype)
        return train_step(model, module, optimizers, moved, config, ranks, step=0)

    shards = [shard for shard in module.tables.collection.engine.storage.shards if shard is not None]
    tables = [x for shard in shards for x in (shard.weight, *shard.state.values())]
    notes = ["ids are drawn uniformly from their tables: real ids repeat more often, and then fewer rows travel"]
    if any(x.kind == "ids" for x in features):
        notes.append(f"a bag has {_BAG} ids")
    if config.tables.prefetch:
        notes.append("--tables.prefetch moves the exchange of ids beside the step before: it is counted here all the same")
    return SimulatedTraining(module, list(optimizers.values()), step, tables, tuple(notes))


def _known_features(config: Config) -> tuple[Feature, ...]:
    known = _ROWS.get(config.data.source, {})
    found = []
    for feature in parse_features(config.data.features):
        rows = feature.rows or known.get(feature.name, 0)
        feature = feature.with_default_kind("number" if feature.name.startswith("I") and not rows else "id")
        if feature.kind != "number" and not rows:
            raise UserError(
                f"--data.features: {feature.name}: the simulation reads no data, so give its number of rows: "
                f"{feature.name}:{feature.kind}:ROWS"
            )
        found.append(feature if feature.kind == "number" else replace(feature, rows=rows))
    if not found:
        raise UserError(
            f"--data.source {config.data.source}: the simulation reads no data, so name the columns and the rows of their "
            "tables, such as --data.features user:id:100000 item:id:20000"
        )
    return tuple(found)


def _item_rows(config: Config, features: tuple[Feature, ...]) -> int:
    return next((x.rows for x in features if x.name == config.model.items[0]), 0)


def _draw_bags(table_rows: int, bags: int, size: int) -> Ragged:
    return Ragged.from_lengths(draw_integers(0, table_rows, bags * size), torch.full((bags,), size, dtype=torch.int64))


def _draw_batch(features: tuple[Feature, ...], rows: int) -> Batch:
    ids: dict[str, Ids] = {}
    for x in features:
        if x.kind == "ids":
            ids[x.name] = _draw_bags(x.rows, rows, _BAG)
        elif x.kind != "number":
            ids[x.name] = draw_integers(0, x.rows, rows)
    numbers = sum(x.kind == "number" for x in features)
    return Batch(ids, torch.zeros(rows, numbers), torch.zeros(rows), torch.arange(rows))
