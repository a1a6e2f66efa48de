"""What the benchmark of the recommender compares. Made on the ranks; what is ours is made and called as its trainer does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from embedding_contenders import fill_sharded
from embedding_torchrec import Plan, TorchRecTables
from embedding_workload import DIM, LR, TABLES, Setting, feature, fill
from recommender_workload import MODEL, Workload, dense_optimizer, make_head
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Family = Literal["unisono", "TorchRec", "torch"]
Optimizer = Literal["row-wise Adagrad", "Adagrad"]

WORLD_SIZE = 2

AUTO, PREFETCH, ADAGRAD = "unisono", "unisono, prefetched", "unisono, Adagrad"
TORCHREC_TABLE, TORCHREC_ROW = "TorchRec, table-wise", "TorchRec, row-wise"
ONE_PROCESS, TWO_THREADS = "one process, Adagrad", "one process, Adagrad, 2 threads"
DENSE = "dense part alone"


class Learner(Protocol):
    """A contender on this rank, with its first weights."""

    chosen: str  # how the tables were sharded, if a planner chose

    def prepare(self, step: int) -> Any:
        """A batch in the contender's own form, as a loader would give it. Not timed."""
        ...

    def step(self, batch: Any) -> Tensor:
        """Look-up, forward, backward, the update of tables and of the rest. The loss, of this rank's rows or of all."""
        ...


class Contender(NamedTuple):
    family: Family
    make: Callable[[Workload], Learner]
    optimizer: Optimizer | None  # of the tables; contenders with the same one must have the same losses
    one_process: bool = False  # which takes the batches of all ranks

    @property
    def is_ours(self) -> bool:
        return self.family == "unisono"

    @property
    def ranks(self) -> int:
        return 1 if self.one_process else WORLD_SIZE

    def given(self, setting: Setting) -> Workload:
        """The rows of this rank, or those of all."""
        rank = dist.get_rank()
        return Workload(setting, range(WORLD_SIZE) if self.one_process else range(rank, rank + 1))


class Ours:
    """The learner of unisono_models.recommender, made and wrapped as its trainer does, and the body of its loop."""

    def __init__(self, work: Workload, *, optimizer: str = "rowwise_adagrad", prefetch: bool = False) -> None:
        from unisono_models.recommender.config import Config, DataConfig, TablesConfig
        from unisono_models.recommender.data.dataset import Datasets
        from unisono_models.recommender.loss import build_training_module
        from unisono_models.training.config import RunConfig
        from unisono_models.training.distributed.launch import Ranks
        from unisono_models.training.distributed.parallel import parallelize

        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        self.work, self.prefetch = work, prefetch
        size = work.setting.batch * ranks.size
        tables = TablesConfig(plan="auto", optimizer=cast(Any, optimizer), lr=LR)
        config = Config(run=RunConfig(steps=1), data=DataConfig(batch=size), model=MODEL, tables=tables)
        source = SimpleNamespace(features=work.features(), sample=self._batch(0), mapped=False, ratings=None)
        learner = build_training_module(config, cast(Datasets, source), dtype=torch.float32, device=ranks.device)
        model = cast(Any, learner.model)
        model.head.load_state_dict(make_head().state_dict())
        for key, weight in learner.tables.collection.state_dict().items():  # DTensors: tables.table_f0.weight and so on
            if key.endswith(".weight"):
                fill_sharded(weight, int(key.split(".")[-2].removeprefix("table_f")))
        planned = learner.tables.collection.plan
        kinds = Counter(layout.kind for layout in planned.layouts.values()) if planned else {}
        self.chosen = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        self.learner = learner.train()
        self.model = parallelize(learner, config.parallel, ranks)
        self.optimizer = dense_optimizer(list(learner.dense_parameters()))
        self.number = 0

    def prepare(self, step: int) -> Any:
        return self._batch(step), self._batch(step + 1) if self.prefetch else None

    def _batch(self, step: int) -> Any:
        from unisono.embedding import Ragged
        from unisono_models.recommender.data.batch import Batch

        work, bags = self.work, torch.arange(self.work.setting.batch + 1)
        step %= len(work.ids)
        ids: dict[str, Any] = {feature(table): x for table, x in enumerate(work.ids[step])}
        if work.has_bags:
            ids = {name: Ragged(x, bags * p) for (name, x), p in zip(ids.items(), work.setting.poolings, strict=True)}
        return Batch(ids, work.numbers[step], work.labels[step], bags[:-1])

    def step(self, batch: Any) -> Tensor:
        batch, following = batch
        loss: Tensor = self.model(batch, step=self.number)["loss"]
        if following is not None:
            self.learner.prefetch(following)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return loss.detach()


class Dense:
    """The head, in DDP on two ranks as TorchRec's DistributedModelParallel wraps it, its loss and its optimizer."""

    def __init__(self) -> None:
        self.head = make_head()
        self.model: nn.Module = self.head
        if dist.get_world_size() > 1:
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # TorchRec has not heard of it
            self.model = DistributedDataParallel(self.head, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.optimizer = dense_optimizer(list(self.head.parameters()))

    def step(self, fields: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
        """The backward goes on into `fields`, (rows, tables, DIM), and what made them."""
        from unisono_models.recommender.model.heads import HeadInputs

        first = int(self.head.linear)  # before it the weight of the linear term, as in ClickModel.score
        weights = fields[..., 0] if first else fields.new_zeros(fields.shape[:2])
        logits = self.model(HeadInputs(fields[..., first:], weights, numbers))
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class TorchRec:
    """TorchRec's tables below the same head. They apply row-wise Adagrad in the backward."""

    chosen = ""

    def __init__(self, work: Workload, plan: Plan) -> None:
        self.work = work
        self.tables = TorchRecTables(cast(Any, work), plan, mean=work.has_bags)
        self.dense = Dense()
        with torch.no_grad():
            keys = self.tables.model(self.tables.prepare(0)).keys()
        # Its features come in an order of its own. Instead of a copy in ours, the head takes the pairs where they are.
        places = torch.tensor([0, *(1 + keys.index(feature(table)) for table in range(TABLES))])
        self.dense.head.pairs = places[self.dense.head.get_buffer("pairs")]

    def prepare(self, step: int) -> Any:
        return self.tables.prepare(step), self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        ids, numbers, labels = batch
        return self.dense.step(self.tables.model(ids).values().view(-1, TABLES, DIM), numbers, labels)


class OneProcess:
    """torch's own tables with sparse gradients and Adagrad: torch has no row-wise one, and SGD would do less."""

    chosen = ""

    def __init__(self, work: Workload, *, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, which torch else warns of
        self.work, mode = work, "mean" if work.has_bags else "sum"
        rows = work.setting.rows
        self.bags = [nn.EmbeddingBag(n, DIM, mode=mode, sparse=True, _weight=torch.empty(n, DIM)) for n in rows]
        for table, bag in enumerate(self.bags):
            fill(bag.weight.detach(), table)
        self.dense = Dense()
        self.optimizer = torch.optim.Adagrad([bag.weight for bag in self.bags], lr=LR)

    def prepare(self, step: int) -> Any:
        starts = torch.arange(self.work.setting.batch)
        bags = [(ids, starts * pooling) for ids, pooling in zip(self.work.ids[step], self.work.setting.poolings, strict=True)]
        return bags, self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        bags, numbers, labels = batch
        fields = torch.stack([bag(*ids) for bag, ids in zip(self.bags, bags, strict=True)], 1)
        loss = self.dense.step(fields, numbers, labels)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class DenseAlone:
    """Fixed rows instead of a look-up. Their gradients are formed, and dropped."""

    chosen = ""

    def __init__(self, work: Workload) -> None:
        self.work, self.dense = work, Dense()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.fields = 0.03 * torch.randn(work.setting.batch, TABLES, DIM, generator=generator)
        self.fields.requires_grad_()

    def prepare(self, step: int) -> Any:
        return self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        self.fields.grad = None
        return self.dense.step(self.fields, *batch)


CONTENDERS: dict[str, Contender] = {
    AUTO: Contender("unisono", Ours, "row-wise Adagrad"),
    PREFETCH: Contender("unisono", lambda work: Ours(work, prefetch=True), "row-wise Adagrad"),
    TORCHREC_TABLE: Contender("TorchRec", lambda work: TorchRec(work, "table"), "row-wise Adagrad"),
    TORCHREC_ROW: Contender("TorchRec", lambda work: TorchRec(work, "row"), "row-wise Adagrad"),
    ADAGRAD: Contender("unisono", lambda work: Ours(work, optimizer="adagrad"), "Adagrad"),
    ONE_PROCESS: Contender("torch", OneProcess, "Adagrad", one_process=True),
    TWO_THREADS: Contender("torch", lambda work: OneProcess(work, threads=2), "Adagrad", one_process=True),
    DENSE: Contender("torch", DenseAlone, None),
}
