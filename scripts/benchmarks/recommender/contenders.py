"""The training steps that the benchmark compares, built and measured on the ranks. Ours is built as its training builds it."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.embedding import contenders as tables
from benchmarks.embedding.contenders import TORCHREC_ROW, TORCHREC_TABLE
from benchmarks.embedding.torchrec import Plan, TorchRecTables
from benchmarks.embedding.workload import BATCHES, DIM, FEATURES, LR, TABLES, TINY, Setting
from benchmarks.embedding.workload import Workload as TableWorkload
from benchmarks.harness.measure import StepCosts, StepTimes, measure_costs, time_steps
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.heads import DLRM, HeadInputs, HeadShape

Optimizer = Literal["row-wise Adagrad", "Adagrad"]

AUTO = "unisono"
DENSE = "dense part alone"
NUMBERS = 13  # numeric features
CLICKS = 0.25  # of the rows
DENSE_LR = 1e-3
WIDTH = DIM - DLRM.linear  # of the vectors: if the head has linear terms, a row of a table also holds its weight
MODEL = ModelConfig(kind="dlrm", dim=WIDTH, bottom=(512, 256), hidden=(512, 256), dropout=0.0, input_dropout=0.0)
CHECKED_STEPS = BATCHES + 2  # the last two repeat batches whose rows have changed by then


class Workload(TableWorkload):
    """The batches of one process: ids, and for each step `numbers` and `labels`."""

    def __init__(self, setting: Setting, ranks: range, processes: int) -> None:
        super().__init__(setting, ranks, processes)
        self.numbers, self.labels = [], []
        for step in range(BATCHES):
            generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
            self.numbers.append(torch.cat([torch.randn(setting.batch, NUMBERS, generator=g) for g in generators]))
            self.labels.append(torch.cat([(torch.rand(setting.batch, generator=g) < CLICKS).float() for g in generators]))

    @property
    def has_bags(self) -> bool:
        return set(self.setting.poolings) != {1}

    def features(self) -> tuple[Feature, ...]:
        """Return the features as the recommender declares them."""
        kind: Any = "ids" if self.has_bags else "id"
        ids = [Feature(name, kind, rows) for name, rows in zip(FEATURES, self.setting.rows, strict=True)]
        return (*ids, *(Feature(f"n{number}", "number") for number in range(NUMBERS)))


class Contender(NamedTuple):
    make: Callable[[Workload], tables.TableStepper]  # whose step returns the loss, of this rank's rows or of all
    optimizer: Optimizer | None  # of the tables; contenders with the same one must have the same losses
    one_process: bool = False  # which computes the batches of all ranks


class Ours:
    """The training module of unisono_models.recommender, built and wrapped as its training does, and the body of its loop."""

    def __init__(self, work: Workload, *, optimizer: str = "rowwise_adagrad", prefetch: bool = False) -> None:
        from unisono_models.recommender.config import Config, DataConfig, TablesConfig
        from unisono_models.recommender.loss import build_training_module
        from unisono_models.training.config import RunConfig
        from unisono_models.training.distributed.launch import Ranks
        from unisono_models.training.distributed.parallel import parallelize

        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        self.work, self.prefetch = work, prefetch
        tables_config = TablesConfig(plan="auto", optimizer=cast(Any, optimizer), lr=LR)
        data = DataConfig(batch=work.setting.batch * ranks.world_size)
        config = Config(run=RunConfig(steps=1), data=data, model=MODEL, tables=tables_config)
        source: Any = SimpleNamespace(features=work.features(), sample=self._batch(0), mapped=False, ratings=None)
        module = build_training_module(config, source, dtype=torch.float32, device=ranks.device)
        cast(Any, module.model).head.load_state_dict(make_head().state_dict())
        tables.fill_collection(module.tables.collection, prefix="table_f")
        self.plan = tables.describe_plan(module.tables.collection)
        self.module = module.train()
        self.model = parallelize(module, config.parallel, ranks)
        self.optimizer = dense_optimizer(list(module.dense_parameters()))
        self.number = 0

    def prepare(self, step: int) -> Any:
        return self._batch(step), self._batch(step + 1) if self.prefetch else None

    def _batch(self, step: int) -> Any:
        from unisono_models.recommender.data.batch import Batch

        work = self.work
        step %= BATCHES
        ids = tables.ragged_ids(work, step) if work.has_bags else dict(zip(FEATURES, work.ids[step], strict=True))
        return Batch(ids, work.numbers[step], work.labels[step], torch.arange(work.setting.batch))

    def step(self, batch: Any) -> Tensor:
        batch, following = batch
        loss: Tensor = self.model(batch, step=self.number)["loss"]
        if following is not None:
            self.module.prefetch(following)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return loss.detach()


class Dense:
    """The head with its loss and optimizer; on two ranks in DDP, as TorchRec's DistributedModelParallel wraps it."""

    def __init__(self) -> None:
        self.head = make_head()
        self.model: nn.Module = self.head
        if dist.get_world_size() > 1:
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # TorchRec still passes it
            self.model = DistributedDataParallel(self.head, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.optimizer = dense_optimizer(list(self.head.parameters()))

    def step(self, fields: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
        """Run the step. The backward goes on into `fields`, (rows, tables, DIM), and what computed them."""
        first = int(self.head.linear)  # the weight of the linear term comes first, as in ClickModel.score
        weights = fields[..., 0] if first else fields.new_zeros(fields.shape[:2])
        logits = self.model(HeadInputs(fields[..., first:], weights, numbers))
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_head() -> DLRM:
    """Build the dense part: with the same first weights on every rank and for every contender."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DLRM(HeadShape(TABLES, WIDTH, NUMBERS, MODEL))


def dense_optimizer(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=DENSE_LR, weight_decay=0.0)


class TorchRec:
    """TorchRec's tables below the same head. They apply row-wise Adagrad in the backward."""

    plan = ""

    def __init__(self, work: Workload, plan: Plan) -> None:
        self.work = work
        self.tables = TorchRecTables(work, plan, mean=work.has_bags)
        self.dense = Dense()
        with torch.no_grad():
            keys = self.tables.model(self.tables.prepare(0)).keys()
        # TorchRec orders the features in its own way. Instead of copying them into ours, the head takes pairs where they are.
        places = torch.tensor([0, *(1 + keys.index(feature) for feature in FEATURES)])
        self.dense.head.pairs = places[self.dense.head.get_buffer("pairs")]

    def prepare(self, step: int) -> Any:
        return self.tables.prepare(step), self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        ids, numbers, labels = batch
        return self.dense.step(self.tables.model(ids).values().view(-1, TABLES, DIM), numbers, labels)


class OneProcess:
    """torch's own tables with sparse gradients and Adagrad: torch has no row-wise one, and SGD would do less work."""

    plan = ""

    def __init__(self, work: Workload, *, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; torch warns if it is not set
        self.work = work
        self.bags = tables.sparse_bags(work, mode="mean" if work.has_bags else "sum")
        self.dense = Dense()
        self.optimizer = torch.optim.Adagrad([bag.weight for bag in self.bags], lr=LR)

    def prepare(self, step: int) -> Any:
        return tables.bag_inputs(self.work, step), self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        inputs, numbers, labels = batch
        fields = torch.stack([bag(*ids) for bag, ids in zip(self.bags, inputs, strict=True)], 1)
        loss = self.dense.step(fields, numbers, labels)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class DenseAlone:
    """The dense part with fixed rows instead of a look-up. Their gradients are computed and dropped."""

    plan = ""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.dense = Dense()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.fields = 0.03 * torch.randn(work.setting.batch, TABLES, DIM, generator=generator)
        self.fields.requires_grad_()

    def prepare(self, step: int) -> Any:
        return self.work.numbers[step], self.work.labels[step]

    def step(self, batch: Any) -> Tensor:
        self.fields.grad = None
        return self.dense.step(self.fields, *batch)


CONTENDERS: dict[str, Contender] = {
    AUTO: Contender(Ours, "row-wise Adagrad"),
    "unisono, prefetched": Contender(lambda work: Ours(work, prefetch=True), "row-wise Adagrad"),
    TORCHREC_TABLE: Contender(lambda work: TorchRec(work, "table"), "row-wise Adagrad"),
    TORCHREC_ROW: Contender(lambda work: TorchRec(work, "row"), "row-wise Adagrad"),
    "unisono, Adagrad": Contender(lambda work: Ours(work, optimizer="adagrad"), "Adagrad"),
    "one process, Adagrad": Contender(OneProcess, "Adagrad", one_process=True),
    "one process, Adagrad, 2 threads": Contender(lambda work: OneProcess(work, threads=2), "Adagrad", one_process=True),
    DENSE: Contender(DenseAlone, None),
}


def make(name: str, setting: Setting) -> tables.TableStepper:
    contender = CONTENDERS[name]
    return contender.make(Workload.of_this_process(setting, one_process=contender.one_process))


def measure(name: str, setting: Setting) -> StepCosts:
    tiny = TINY._replace(poolings=setting.poolings)
    return measure_costs(partial(make, name), first_losses, setting=setting, tiny=tiny, batches=BATCHES)


def first_losses(stepper: tables.TableStepper) -> dict[str, Any]:
    """Return the losses of the global batch in the first steps."""
    found = [stepper.step(stepper.prepare(step % BATCHES)) for step in range(CHECKED_STEPS)]
    losses = torch.stack(found).double()
    dist.all_reduce(losses)  # for ours, which are those of all rows already, the mean changes nothing
    losses /= dist.get_world_size()
    return {"losses": losses.tolist(), "unique_ids": stepper.work.unique_ids(), "plan": stepper.plan}


def time(name: str, setting: Setting, steps: int) -> StepTimes:
    return time_steps(make(name, setting), batches=BATCHES, warm_up=tables.WARM_UP, steps=steps)
