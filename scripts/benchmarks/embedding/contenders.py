"""The tables that the benchmark compares, built and measured on the ranks. Ours are called as a user would call them."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.embedding import workload
from benchmarks.embedding.torchrec import TorchRecTables
from benchmarks.embedding.workload import BATCHES, CHECKED_STEPS, DIM, EPS, FEATURES, LR, POOLINGS, Setting, Workload, fill
from benchmarks.harness.measure import StepCosts, Stepper, StepTimes, measure_costs, run_steps, time_steps

AUTO = "unisono, auto"
ROW = "unisono, row"
TORCHREC_ROW = "TorchRec, row-wise"
TORCHREC_TABLE = "TorchRec, table-wise"
TORCHREC_COLUMN = "TorchRec, column-wise"
WARM_UP = 3


class TableStepper(Stepper, Protocol):
    """A contender on this rank, its tables filled. A step is forward, backward and the update."""

    work: Workload
    plan: str  # how the tables are sharded, if a planner chose it


class Contender(NamedTuple):
    make: Callable[[Workload], TableStepper]
    optimizer: workload.Optimizer = "row-wise Adagrad"
    half_wire: bool = False
    column_states: bool = False  # each rank's columns have their own optimizer state, so the updates differ
    one_process: bool = False  # which computes the batches of all ranks
    is_slow: bool = False

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.half_wire else 1e-5


class OurTables:
    def __init__(self, work: Workload, plan: str, wire_dtype: torch.dtype | None = None) -> None:
        from unisono.embedding import EmbeddingCollection, RowwiseAdagrad, Table

        self.work = work
        tables = [
            Table(f"t{table}", rows, DIM, features=[FEATURES[table]], mode="sum")
            for table, rows in enumerate(work.setting.rows)
        ]
        self.collection = EmbeddingCollection(
            tables,
            plan=plan,
            optimizer=RowwiseAdagrad(lr=LR, eps=EPS),
            batch_size=work.setting.batch,
            sample=self.prepare(0),
            wire_dtype=wire_dtype,
        )
        self.plan = describe_plan(self.collection)
        fill_collection(self.collection, prefix="t")

    def prepare(self, step: int) -> Any:
        return ragged_ids(self.work, step)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        pooled: dict[str, Tensor] = self.collection(batch)
        return pooled

    def step(self, batch: Any) -> None:
        pooled = self.collection(batch)
        torch.autograd.backward([pooled[feature] for feature in FEATURES], self.work.upstream)


def ragged_ids(work: Workload, step: int) -> dict[str, Any]:
    from unisono.embedding import Ragged

    bags = torch.arange(work.setting.batch + 1)
    return {f: Ragged(ids, bags * p) for f, ids, p in zip(FEATURES, work.ids[step], work.setting.poolings, strict=True)}


def describe_plan(collection: Any) -> str:
    """Return how many tables have each layout, if the planner chose the layouts."""
    layouts = collection.plan.layouts.values() if collection.plan else ()
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(layout.kind for layout in layouts).items())


def fill_collection(collection: Any, prefix: str) -> None:
    """Fill this rank's part of every table. Their names are the prefix and a number."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for key, weight in collection.state_dict().items():  # DTensors: tables.t0.weight and so on, and optimizer states
        local = weight.to_local() if key.endswith(".weight") else torch.empty(0)
        if local.numel():
            _, places = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            fill(local, int(key.split(".")[-2].removeprefix(prefix)), *places)


class OneProcess:
    """torch's own tables with sparse gradients. torch has no row-wise Adagrad; SGD does less work."""

    plan = ""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.bags = sparse_bags(work, mode="sum")
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LR)

    def prepare(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return bag_inputs(self.work, step)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {feature: bag(*inputs) for feature, bag, inputs in zip(FEATURES, self.bags, batch, strict=True)}

    def step(self, batch: Any) -> None:
        torch.autograd.backward(list(self.forward(batch).values()), self.work.upstream)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sparse_bags(work: Workload, mode: str) -> list[nn.EmbeddingBag]:
    bags = [nn.EmbeddingBag(n, DIM, mode=mode, sparse=True, _weight=torch.empty(n, DIM)) for n in work.setting.rows]
    for table, bag in enumerate(bags):
        fill(bag.weight.detach(), table)
    return bags


def bag_inputs(work: Workload, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the ids and the offsets of each table's bags."""
    starts = torch.arange(work.setting.batch)
    return [(ids, starts * pooling) for ids, pooling in zip(work.ids[step], work.setting.poolings, strict=True)]


class DTensorTables:
    """nn.Embedding's function on a DTensor sharded by rows, as RowwiseParallel calls it; then the sum of each bag.

    SGD runs on each table as soon as its gradient, a dense one, is there; then the gradient is freed.
    """

    plan = ""

    def __init__(self, work: Workload) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self.work = work
        self.weights = []
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.by_rank = (Shard(0),)
        for table, rows in enumerate(work.setting.rows):
            shard = -(-rows // dist.get_world_size())
            first = min(shard * dist.get_rank(), rows)
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
            pooled[FEATURES[table]] = rows.view(-1, POOLINGS[table], DIM).sum(1)
        return pooled

    def step(self, batch: Any) -> None:
        torch.autograd.backward(list(self.forward(batch).values()), self.work.upstream)


@torch.no_grad()
def update_and_free(weight: Any) -> None:
    own_rows = weight.grad.redistribute(placements=weight.placements).to_local()  # each rank has a gradient of all rows
    weight.to_local().sub_(own_rows, alpha=LR / dist.get_world_size())
    weight.grad = None


CONTENDERS: dict[str, Contender] = {
    AUTO: Contender(lambda work: OurTables(work, "auto")),
    ROW: Contender(lambda work: OurTables(work, "row")),
    "unisono, table": Contender(lambda work: OurTables(work, "table")),
    "unisono, column": Contender(lambda work: OurTables(work, "column")),
    "unisono, auto, bf16 on the wire": Contender(lambda work: OurTables(work, "auto", torch.bfloat16), half_wire=True),
    TORCHREC_ROW: Contender(lambda work: TorchRecTables(work, "row")),
    TORCHREC_TABLE: Contender(lambda work: TorchRecTables(work, "table")),
    TORCHREC_COLUMN: Contender(lambda work: TorchRecTables(work, "column"), column_states=True),
    "TorchRec, table-wise, fp16 on the wire": Contender(  # on gloo it has no bf16
        lambda work: TorchRecTables(work, "table", half_wire=True), half_wire=True
    ),
    "nn.EmbeddingBag, sparse, one process": Contender(OneProcess, optimizer="SGD", one_process=True),
    "DTensor, row-wise": Contender(DTensorTables, optimizer="SGD", is_slow=True),
}


def make(name: str, setting: Setting) -> TableStepper:
    contender = CONTENDERS[name]
    return contender.make(Workload.of_this_process(setting, one_process=contender.one_process))


def measure(name: str, setting: Setting) -> StepCosts:
    return measure_costs(partial(make, name), partial(check, name), setting=setting, tiny=workload.TINY, batches=BATCHES)


def time(name: str, setting: Setting, steps: int, count_bytes_sent: bool = False) -> StepTimes:
    return time_steps(make(name, setting), batches=BATCHES, warm_up=WARM_UP, steps=steps, count_bytes_sent=count_bytes_sent)


def check(name: str, tables: Any) -> dict[str, Any]:
    """Run two steps, and compare the outputs before and after them with a computation without sharding."""
    contender = CONTENDERS[name]

    def outputs(step: int) -> list[Tensor]:
        with torch.no_grad():
            pooled = tables.forward(tables.prepare(step))
        return [pooled[feature].clone() for feature in FEATURES]

    found = [outputs(0)]
    run_steps(tables, CHECKED_STEPS)
    found += [outputs(step) for step in range(CHECKED_STEPS)]
    parts = tables.work.processes if contender.column_states else 1
    outputs_away, updates_away = workload.output_deviations(found, tables.work, contender.optimizer, parts)
    return {
        "outputs_deviation": outputs_away,
        "updates_deviation": updates_away,
        "unique_ids": tables.work.unique_ids(),
        "plan": tables.plan,
    }
