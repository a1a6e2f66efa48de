"""What the benchmark of the tables compares. Made on the ranks; what is ours is called as a user would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from embedding_torchrec import TorchRecTables
from embedding_workload import DIM, EPS, LR, POOLINGS, TABLES, Optimizer, Setting, Workload, feature, fill
from torch import Tensor, nn

Family = Literal["unisono", "TorchRec", "torch"]

WORLD_SIZE = 2

AUTO = "unisono, auto"
AUTO_HALF = "unisono, auto, bf16 on the wire"
ROW, TABLE, COLUMN = "unisono, row", "unisono, table", "unisono, column"
TORCHREC_ROW, TORCHREC_TABLE, TORCHREC_COLUMN = "TorchRec, row-wise", "TorchRec, table-wise", "TorchRec, column-wise"
TORCHREC_HALF = "TorchRec, table-wise, fp16 on the wire"  # on gloo it has no bf16
ONE_PROCESS = "nn.EmbeddingBag, sparse, one process"
DTENSOR = "DTensor, row-wise"


class Tables(Protocol):
    """A contender on this rank, its tables filled."""

    chosen: str  # how the tables were sharded, if a planner chose

    def prepare(self, step: int) -> Any:
        """A batch in the contender's own form, as a loader would give it. Not timed."""
        ...

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The pooled rows of each feature, batch x DIM."""
        ...

    def step(self, batch: Any) -> None:
        """Forward, backward from the workload's upstream gradient, and the update."""
        ...


class Contender(NamedTuple):
    family: Family
    make: Callable[[Workload], Tables]
    optimizer: Optimizer = "row-wise Adagrad"
    half_wire: bool = False
    column_states: bool = False  # each rank's columns have a state of their own, so the updates are other ones
    one_process: bool = False  # which takes the batches of all ranks
    is_slow: bool = False

    @property
    def is_ours(self) -> bool:
        return self.family == "unisono"

    def world(self, setting: Setting) -> tuple[int, Setting]:
        """How many ranks, and what each is given."""
        return (1, setting._replace(batch=setting.batch * WORLD_SIZE)) if self.one_process else (WORLD_SIZE, setting)

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.half_wire else 1e-5


class OurTables:
    def __init__(self, work: Workload, plan: str, wire_dtype: torch.dtype | None = None) -> None:
        from unisono.embedding import EmbeddingCollection, RowwiseAdagrad, Table

        self.work = work
        self.collection = EmbeddingCollection(
            [
                Table(f"t{table}", rows, DIM, features=[feature(table)], mode="sum")
                for table, rows in enumerate(work.setting.rows)
            ],
            plan=plan,
            optimizer=RowwiseAdagrad(lr=LR, eps=EPS),
            batch_size=work.setting.batch,
            sample=self.prepare(0),
            wire_dtype=wire_dtype,
        )
        planned = self.collection.plan
        kinds = Counter(layout.kind for layout in planned.layouts.values()) if planned else {}
        self.chosen = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        for key, weight in self.collection.state_dict().items():  # DTensors: tables.t0.weight and so on, and states
            if key.endswith(".weight"):
                fill_sharded(weight, int(key.split(".")[-2][1:]))

    def prepare(self, step: int) -> Any:
        from unisono.embedding import Ragged

        bags = torch.arange(self.work.setting.batch + 1)
        ids = self.work.ids[step]
        return {feature(table): Ragged(ids[table], bags * POOLINGS[table]) for table in range(TABLES)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        pooled: dict[str, Tensor] = self.collection(batch)
        return pooled

    def step(self, batch: Any) -> None:
        pooled = self.collection(batch)
        torch.autograd.backward([pooled[feature(table)] for table in range(TABLES)], self.work.upstream)


def fill_sharded(weight: Any, table: int) -> None:
    """Fill this rank's part of a DTensor, if it has one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = weight.to_local()
    if local.numel():
        _, places = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        fill(local, table, *places)


class OneProcess:
    """torch's own tables with sparse gradients. Row-wise Adagrad is not among torch's optimizers: SGD does less."""

    chosen = ""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.bags = [
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=torch.empty(rows, DIM)) for rows in work.setting.rows
        ]
        for table, bag in enumerate(self.bags):
            fill(bag.weight.detach(), table)
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LR)

    def prepare(self, step: int) -> list[tuple[Tensor, Tensor]]:
        starts = torch.arange(self.work.setting.batch)
        return [(ids, starts * pooling) for ids, pooling in zip(self.work.ids[step], POOLINGS, strict=True)]

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {feature(table): bag(*batch[table]) for table, bag in enumerate(self.bags)}

    def step(self, batch: Any) -> None:
        torch.autograd.backward(list(self.forward(batch).values()), self.work.upstream)
        self.optimizer.step()
        self.optimizer.zero_grad()


class DTensorTables:
    """nn.Embedding's function on a DTensor sharded by rows, as RowwiseParallel calls it; bags are summed after it.

    SGD on each table as soon as its gradient, a dense one, is there; then that is freed.
    """

    chosen = ""

    def __init__(self, work: Workload) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self.work, self.weights = work, []
        self.mesh, self.by_rank = init_device_mesh("cpu", (dist.get_world_size(),)), (Shard(0),)
        for table, rows in enumerate(work.setting.rows):
            shard = -(-rows // work.world_size)
            first = min(shard * work.rank, rows)
            local = torch.empty(min(shard, rows - first), DIM)
            fill(local, table, first)
            made = DTensor.from_local(local, self.mesh, self.by_rank, run_check=False, shape=(rows, DIM), stride=(DIM, 1))
            weight = nn.Parameter(made)
            weight.register_post_accumulate_grad_hook(update_and_free)
            self.weights.append(weight)

    def prepare(self, step: int) -> list[Tensor]:
        return self.work.ids[step]

    def forward(self, batch: Any) -> dict[str, Tensor]:
        from torch.distributed.tensor import DTensor, Replicate

        pooled = {}
        for table, (ids, weight) in enumerate(zip(batch, self.weights, strict=True)):
            all_ids = DTensor.from_local(ids, self.mesh, self.by_rank, run_check=False).redistribute(placements=(Replicate(),))
            rows = F.embedding(all_ids, weight).redistribute(placements=self.by_rank).to_local()
            pooled[feature(table)] = rows.view(-1, POOLINGS[table], DIM).sum(1)
        return pooled

    def step(self, batch: Any) -> None:
        torch.autograd.backward(list(self.forward(batch).values()), self.work.upstream)


@torch.no_grad()
def update_and_free(weight: Any) -> None:
    own_rows = weight.grad.redistribute(placements=weight.placements).to_local()  # each rank has a gradient of all rows
    weight.to_local().sub_(own_rows, alpha=LR / dist.get_world_size())
    weight.grad = None


def ours(plan: str, wire_dtype: torch.dtype | None = None) -> Callable[[Workload], Tables]:
    return lambda work: OurTables(work, plan, wire_dtype)


CONTENDERS: dict[str, Contender] = {
    AUTO: Contender("unisono", ours("auto")),
    ROW: Contender("unisono", ours("row")),
    TABLE: Contender("unisono", ours("table")),
    COLUMN: Contender("unisono", ours("column")),
    AUTO_HALF: Contender("unisono", ours("auto", torch.bfloat16), half_wire=True),
    TORCHREC_ROW: Contender("TorchRec", lambda work: TorchRecTables(work, "row")),
    TORCHREC_TABLE: Contender("TorchRec", lambda work: TorchRecTables(work, "table")),
    TORCHREC_COLUMN: Contender("TorchRec", lambda work: TorchRecTables(work, "column"), column_states=True),
    TORCHREC_HALF: Contender("TorchRec", lambda work: TorchRecTables(work, "table", half_wire=True), half_wire=True),
    ONE_PROCESS: Contender("torch", OneProcess, optimizer="SGD", one_process=True),
    DTENSOR: Contender("torch", DTensorTables, optimizer="SGD", is_slow=True),
}
