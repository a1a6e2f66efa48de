"""TorchRec's tables as contenders: an EmbeddingBagCollection under DistributedModelParallel, with a fused optimizer."""

import logging
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.embedding.workload import DIM, EPS, FEATURES, LR, TABLES, Setting, Workload, fill

Plan = Literal["row", "table", "column"]


class TorchRecTables:
    """fbgemm's kernels apply row-wise Adagrad in the backward: on CPUs TorchRec would otherwise choose dense gradients."""

    plan = ""

    def __init__(self, work: Workload, plan: Plan, *, half_wire: bool = False, mean: bool = False) -> None:
        silence()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        self.work = work
        configs = [
            EmbeddingBagConfig(
                name=f"t{table}",
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[FEATURES[table]],
                pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            )
            for table, rows in enumerate(work.setting.rows)
        ]
        collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS},
            qcomm_codecs_registry=half_codecs() if half_wire else None,
        )
        size = dist.get_world_size()
        places = construct_module_sharding_plan(
            collection, shards(plan, work.setting, size), sharder=sharder, local_size=size, world_size=size, device_type="cpu"
        )
        self.model = DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"": places}),
            sharders=[sharder],
        )
        for name, weight in self.model.state_dict().items():  # embedding_bags.t0.weight and so on
            for shard in weight.local_shards():
                fill(shard.tensor, int(name.split(".")[1][1:]), *shard.metadata.shard_offsets)
        self.lengths = torch.cat([torch.full((work.setting.batch,), pooling) for pooling in work.setting.poolings])
        self.gradient: Tensor | None = None

    def prepare(self, step: int) -> Any:
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(self.work.ids[step]), self.lengths)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        pooled: dict[str, Tensor] = self.model(batch).to_dict()
        return pooled

    def step(self, batch: Any) -> None:
        pooled = self.model(batch)
        values = pooled.values()  # all features side by side, in TorchRec's order: the cheapest way to use its result
        if self.gradient is None:
            self.gradient = torch.cat([self.work.upstream[FEATURES.index(key)] for key in pooled.keys()], dim=1)  # noqa: SIM118
        values.backward(self.gradient)


def shards(plan: Plan, setting: Setting, size: int) -> dict[str, Any]:
    """Return how each table is sharded."""
    from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

    fused = {"compute_kernel": "fused"}
    if plan == "row":
        return {f"t{table}": row_wise(**fused) for table in range(TABLES)}
    if plan == "column":
        return {f"t{table}": column_wise(ranks=list(range(size)), **fused) for table in range(TABLES)}
    return {f"t{table}": table_wise(rank=rank, **fused) for table, rank in enumerate(place_tables(setting, size))}


def place_tables(setting: Setting, size: int) -> list[int]:
    """Return a rank for each table, so that ids and rows are nearly even. TorchRec's own planner is less even."""
    shares = [
        (pooling / sum(setting.poolings), rows / sum(setting.rows))
        for pooling, rows in zip(setting.poolings, setting.rows, strict=True)
    ]

    def place_greedily(weight: float) -> tuple[float, list[int]]:
        """Give the costliest table first to the rank with the least cost. Returns the largest share of ids or rows, too."""
        cost = [weight * ids + (1 - weight) * rows for ids, rows in shares]
        load = [0.0] * size
        ranks = [0] * TABLES
        for table in sorted(range(TABLES), key=lambda table: -cost[table]):
            ranks[table] = load.index(min(load))
            load[ranks[table]] += cost[table]
        held = [
            sum(s[kind] for s, r in zip(shares, ranks, strict=True) if r == rank) for kind in (0, 1) for rank in range(size)
        ]
        return max(held), ranks

    return min(place_greedily(step / 20) for step in range(21))[1]


def half_codecs() -> dict[str, Any]:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    codecs: dict[str, Any] = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    return codecs


def silence() -> None:
    """Silence TorchRec, which warns about what it does itself."""
    warnings.simplefilter("ignore")
    for name in ("torchrec", "torch.fx._symbolic_trace", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
