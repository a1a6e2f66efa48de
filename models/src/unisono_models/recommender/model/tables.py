"""The embedding tables of a model, sharded over ranks, as the config describes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.embedding import SGD, Adagrad, Adam, EmbeddingCollection, IdMap, Ragged, RowwiseAdagrad, Table
from unisono.embedding.optimizers import Rule
from unisono_models.recommender.config import DataConfig, TablesConfig
from unisono_models.recommender.data.batch import Ids
from unisono_models.recommender.data.features import Feature
from unisono_models.training.errors import UserError

WIRE_DTYPES = {"full": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS: dict[str, type[Rule]] = {
    "adam": Adam,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "sgd": SGD,
}


class EmbeddingTables(nn.Module):
    """One table for each feature of ids, in one collection, so that all features of a batch are exchanged together.

    forward: ids by feature to vectors by feature, (rows, width) each.

    Args:
        width: The width of all tables.
        init: The standard deviation of the initial rows.
        mapped: Ids get rows when they are seen (see IdMap), as `data` says.
        sample: The ids of a batch, from which the planner counts.
        batch: The rows of a batch on one rank, for the planner.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        *,
        width: int,
        init: float,
        config: TablesConfig,
        data: DataConfig,
        mapped: bool = False,
        sample: Mapping[str, Ids] | None = None,
        batch: int = 1024,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not features:
            raise UserError("--data.features: at least one has to be of ids: a recommender looks up embeddings")
        if unsized := [feature.name for feature in features if not feature.rows]:
            raise UserError(f"--data.features: {', '.join(unsized)}: click logs need a number of rows: NAME:id:ROWS")

        def initialize(rows: Tensor, random: torch.Generator) -> None:
            rows.normal_(0, init, generator=random)

        self.features = tuple(features)
        self.maps = nn.ModuleDict({f"map_{f.name}": _make_id_map(f.rows, data, device) for f in features if mapped})
        self.collection = EmbeddingCollection(
            [
                Table(
                    f"table_{f.name}",
                    f.rows,
                    width,
                    [f.name],
                    mode="mean" if f.kind == "ids" else "sum",
                    initialize=initialize,
                )
                for f in features
            ],
            plan=config.plan,
            optimizer=OPTIMIZERS[config.optimizer](lr=config.lr, weight_decay=config.weight_decay),
            batch_size=batch,
            sample=None if mapped else sample,
            memory_per_rank=None if config.memory_gb is None else int(config.memory_gb * 2**30),
            wire_dtype=WIRE_DTYPES[config.wire],
            device=device,
            dtype=dtype,
        )

    def forward(self, ids: Mapping[str, Ids], *, frozen: bool = False) -> dict[str, Tensor]:
        """Look up ids.

        Args:
            ids: The ids of all features, or of some of them.
            frozen: Change nothing: the tables get no gradient, and new ids no rows.
        """
        rows = self._map_ids(ids, frozen)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            found: dict[str, Any] = self.collection({**self._empty_ids(ids), **rows})
        return {name: found[name] for name in ids}

    def stack(self, ids: Mapping[str, Ids], *, frozen: bool = False) -> Tensor:
        """Look up the ids of all features: (rows, features, width), in the order of `features`. `frozen`: as in forward."""
        rows = self._map_ids({feature.name: ids[feature.name] for feature in self.features}, frozen)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            found: Tensor = self.collection(rows, stack=True)
        return found

    def prefetch(self, ids: Mapping[str, Ids]) -> None:
        """Begin to look up the next batch. Mapped ids do not know their rows yet, so nothing is done for them."""
        if not self.maps:
            self.collection.prefetch(ids)

    def _empty_ids(self, ids: Mapping[str, Ids]) -> dict[str, Ids]:
        """No ids for the features that are not looked up: the collection needs all of them."""
        device = self.collection.weight(f"table_{self.features[0].name}").device
        return {f.name: torch.empty(0, dtype=torch.int64, device=device) for f in self.features if f.name not in ids}

    def _map_ids(self, ids: Mapping[str, Ids], frozen: bool) -> Mapping[str, Ids]:
        return {name: self._map_feature(name, x, frozen) for name, x in ids.items()} if self.maps else ids

    def _map_feature(self, name: str, ids: Ids, frozen: bool) -> Ids:
        id_map = self.maps[f"map_{name}"]
        assert isinstance(id_map, IdMap)
        id_map.train(self.training and not frozen)
        rows: Tensor = id_map(ids.values if isinstance(ids, Ragged) else ids)
        if id_map.reassigned.numel():
            self.collection.reset_rows(f"table_{name}", id_map.reassigned)
        return ids._replace(values=rows) if isinstance(ids, Ragged) else rows


def _make_id_map(rows: int, data: DataConfig, device: torch.device | None) -> IdMap:
    eviction = None if data.eviction == "none" else data.eviction
    shards = max(1, min(64, rows // 4096))  # a shard may be full while others have room, so a small map has one
    return IdMap(rows, threshold=data.seen, eviction=eviction, shards=shards, device=device)
