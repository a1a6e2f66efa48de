"""Is a training step of the recommender faster with our tables than with TorchRec's?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.embedding import contenders as tables
from benchmarks.embedding.benchmark import COST_COLUMNS, TableBenchmark, best_of_torchrec, speed
from benchmarks.embedding.contenders import TORCHREC_ROW, TORCHREC_TABLE, WARM_UP, own_ranks
from benchmarks.embedding.torchrec import Plan, TorchRecTables
from benchmarks.embedding.workload import BATCHES, DIM, FEATURES, LR, POOLINGS, TABLES, TINY, WORLD_SIZE, Setting
from benchmarks.embedding.workload import Workload as TableWorkload
from benchmarks.harness.benchmark import Column, Section, Target
from benchmarks.harness.measure import StepCosts, StepTimes, measure_costs, time_steps
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Ratio, Results
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.data.features import Feature
from unisono_models.recommender.model.heads import Dlrm, HeadInputs, HeadShape

Optimizer = Literal["row-wise Adagrad", "Adagrad"]

AUTO = "unisono"
PREFETCH = "unisono, prefetched"
ADAGRAD = "unisono, Adagrad"
ONE_PROCESS = "one process, Adagrad"
TWO_THREADS = "one process, Adagrad, 2 threads"
DENSE = "dense part alone"
CASES = {"one id": (1,) * TABLES, "bags": POOLINGS}
NUMBERS = 13  # numeric features
CLICKS = 0.25  # of the rows
DENSE_LR = 1e-3
WIDTH = DIM - Dlrm.linear  # of the vectors: if the head has linear terms, a row of a table also holds its weight
MODEL = ModelConfig(kind="dlrm", dim=WIDTH, bottom=(512, 256), hidden=(512, 256), dropout=0.0, input_dropout=0.0)
CHECKED_STEPS = BATCHES + 2  # the last two repeat batches whose rows have changed by then
TOLERANCE = 1e-4
FASTER = 1.5


@dataclass(frozen=True)
class Recommender(TableBenchmark):
    """Measure samples per second of a whole training step of the recommender, against the same model on TorchRec's tables.

    DLRM on rows like Criteo's: 13 numbers, 26 tables of 100,000 to 500,000 rows of 64 (1.95 GB); look-up, forward,
    backward and all updates of a batch that is in memory, on two gloo ranks of this machine, one thread each. Against
    TorchRec's sharded EmbeddingBagCollection below the same dense part, and torch's own tables in one process. First fresh
    processes for each contender compute the losses of 6 steps, which must agree, and measure its traffic and peak memory;
    then all take turns in every round, each time in fresh processes. All contenders use the torch that TorchRec needs, in
    .venv-torchrec, which is made the first time. Takes about 25 minutes on two cores and 8 GB: leave the machine alone.
    --quick runs one round of 3 steps with a hundredth of the rows, in processes that stay.
    """

    rounds: int = 5
    """How often each contender is timed."""
    steps: int = 12
    """Steps that are timed in each round, after 3 to warm up."""
    cases: tuple[str, ...] = ()
    """"one id" for each feature, like Criteo; "bags" of 1 to 10 ids. [default: both; with --quick the first]"""

    title = "the recommender"
    plot_title = "A training step of DLRM on 26 sharded tables, on two ranks (more samples/s, less of the others is better)"

    @property
    def contenders(self) -> Mapping[str, Contender]:  # type: ignore[override]
        return CONTENDERS

    def validate(self) -> None:
        super().validate()
        if unknown := set(self.cases) - set(CASES):
            raise SystemExit(f"--cases {' '.join(map(repr, unknown))}: the cases are {', '.join(map(repr, CASES))}")

    def run(self, ranks: Ranks) -> list[Measurement]:
        rounds, steps = self.repeats
        cases = [case for case in CASES if case in self.cases or not self.cases]
        if self.quick and not self.cases:
            cases = cases[:1]
        ranks.expect(len(cases) * len(self.ranks_of) * (1 + rounds))
        measurements = []
        for case in cases:
            measurements += ranks.compare_steps(
                case,
                self.ranks_of,
                self.setting._replace(poolings=CASES[case]),
                measure=measure,
                time=time,
                check=partial(check_losses, case),
                rounds=rounds,
                steps=dict.fromkeys(self.ranks_of, steps),
                fresh=not self.quick,
            )
        return measurements

    def values(self, results: Results) -> dict[str, Any]:
        layers = f"bottom {' '.join(map(str, (NUMBERS, *MODEL.bottom, WIDTH)))}, top {' '.join(map(str, (*MODEL.hidden, 1)))}"
        linear = ", linear terms in the tables" if WIDTH < DIM else ""
        return {**super().values(results), "layers": layers + linear, "dense_lr": DENSE_LR}

    def sections(self, results: Results) -> list[Section]:
        columns = [
            Column("contender", lambda m: m.contender),
            Column("samples/s", self.samples_per_second, "{:,.0f}", "samples_per_second", plot="samples/s"),
            Column("x TorchRec", lambda m: speed(results, m), "{:.2fx}", "times_torchrec"),
            Column("wall ms", lambda m: m.wall_ms, "{:.1f}"),
            Column("dense share", lambda m: median_of(dense_share(results, m)), "{:.0%}"),
            Column("table ms", lambda m: table_ms(results, m), "{:.1f}", "table_ms"),
            *COST_COLUMNS,
        ]
        return [
            Section(
                case.capitalize(),
                columns,
                results.of(case),
                before=self.describe(case, results),
                after=agreement(case, results),
            )
            for case in results.cases
        ]

    def samples_per_second(self, m: Measurement) -> Ratio:
        return Ratio.of(1e3 * self.setting.batch * WORLD_SIZE / m.wall)

    def describe(self, case: str, results: Results) -> str:
        unique = self.unique_ids(results.of(case))
        text = "One id for each feature, like Criteo" if case == "one id" else "Bags of 1 to 10 ids, their mean"
        text += f": {self.setting.batch * sum(CASES[case]):,} ids on each rank"
        text += f", {unique:,} of them unique." if unique else "."
        ours = results.find(case, AUTO)
        fastest = best_of_torchrec(results, case, lambda m: m.wall_ms)
        if not (ours and fastest and results.find(case, DENSE)):
            return text
        shares = [share.median for m in (ours, fastest) if (share := dense_share(results, m))]
        return (
            f"{text} The dense part alone, which is the same for both, takes {shares[0]:.0%} of our step and {shares[1]:.0%} "
            f"of that of `{fastest.contender}`: {table_ms(results, ours):.1f} ms and {table_ms(results, fastest):.1f} ms are "
            f"left for tables. Even with tables that cost nothing the ratio of whole steps would be {1 / shares[1]:.2f}x."
        )

    def targets(self, results: Results) -> list[Target]:
        targets = []
        for case in results.cases:
            targets += self.speed_target(results, case, AUTO, FASTER, f"{case}: samples/s at world size {WORLD_SIZE}")
        return targets


def dense_share(results: Results, m: Measurement) -> Ratio | None:
    """Return the fraction of a step that the dense part alone takes in the same round, if it runs on as many ranks."""
    dense = results.find(m.case, DENSE)
    return Ratio.of(dense.wall / m.wall) if dense and not CONTENDERS[m.contender].one_process else None


def table_ms(results: Results, m: Measurement) -> float | None:
    """Return what a step takes beyond the dense part alone."""
    dense = results.find(m.case, DENSE)
    is_apart = dense is None or dense is m or CONTENDERS[m.contender].one_process
    return None if is_apart or dense is None else float(np.median(m.wall - dense.wall))


def median_of(ratio: Ratio | None) -> float | None:
    return ratio.median if ratio else None


def deviations(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compare each contender's losses with those of the first one with the same optimizer, as a fraction of them.

    The first loss, which no update precedes, is compared with that of all.
    """
    known = {name: np.array(losses[name]) for name in losses if CONTENDERS[name].optimizer}
    first_of: dict[str | None, str] = {}
    found = {}
    for name, mine in known.items():
        peer = known[first_of.setdefault(CONTENDERS[name].optimizer, name)]
        start = next(iter(known.values()))[0]
        found[name] = float(max(np.abs(mine / peer - 1).max(), abs(mine[0] / start - 1)))
    return found


def check_losses(case: str, costs: Mapping[str, Sequence[StepCosts]]) -> None:
    losses = {name: ranks[0].numbers["losses"] for name, ranks in costs.items()}
    away = deviations(losses)
    if wrong := [name for name in away if not away[name] <= TOLERANCE]:
        texts = [f"\n  {name}: {' '.join(f'{loss:.6f}' for loss in losses[name])}" for name in away]
        raise SystemExit(
            f"recommender, {case}: {', '.join(wrong)} has other losses, so it computes something else:{''.join(texts)}"
        )


def agreement(case: str, results: Results) -> str:
    known = [m for m in results.of(case) if CONTENDERS[m.contender].optimizer]
    if not known:
        return ""
    away = deviations({m.contender: m["losses"] for m in known})
    curves = {CONTENDERS[m.contender].optimizer: m["losses"] for m in reversed(known)}
    texts = [f"{' '.join(f'{loss:.5f}' for loss in losses)} with {optimizer}" for optimizer, losses in curves.items()]
    return (
        f"All start from the same weights and have the same rows. Losses of the first {CHECKED_STEPS} steps, of which the last "
        f"two repeat batches: {'; '.join(texts)}. Contenders with the same optimizer agree to {max(away.values()):.1e} of the "
        f"loss (at most {TOLERANCE:g}, or nothing is timed); the first loss is the same for all."
    )


# What follows runs on the ranks.


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


class Trainer(Protocol):
    """A contender on this rank, with its first weights."""

    work: Workload
    plan: str  # how the tables are sharded, if a planner chose it

    def prepare(self, step: int) -> Any: ...

    def step(self, batch: Any) -> Tensor:
        """Run look-up, forward, backward and all updates. Returns the loss, of this rank's rows or of all."""
        ...


class Contender(NamedTuple):
    make: Callable[[Workload], Trainer]
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
        data = DataConfig(batch=work.setting.batch * ranks.size)
        config = Config(run=RunConfig(steps=1), data=data, model=MODEL, tables=tables_config)
        source: Any = SimpleNamespace(features=work.features(), sample=self._batch(0), mapped=False, ratings=None)
        learner = build_training_module(config, source, dtype=torch.float32, device=ranks.device)
        cast(Any, learner.model).head.load_state_dict(make_head().state_dict())
        tables.fill_collection(learner.tables.collection, prefix="table_f")
        self.plan = tables.describe_plan(learner.tables.collection)
        self.learner = learner.train()
        self.model = parallelize(learner, config.parallel, ranks)
        self.optimizer = dense_optimizer(list(learner.dense_parameters()))
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
            self.learner.prefetch(following)
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


def make_head() -> Dlrm:
    """Build the dense part: with the same first weights on every rank and for every contender."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Dlrm(HeadShape(TABLES, WIDTH, NUMBERS, MODEL))


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
    PREFETCH: Contender(lambda work: Ours(work, prefetch=True), "row-wise Adagrad"),
    TORCHREC_TABLE: Contender(lambda work: TorchRec(work, "table"), "row-wise Adagrad"),
    TORCHREC_ROW: Contender(lambda work: TorchRec(work, "row"), "row-wise Adagrad"),
    ADAGRAD: Contender(lambda work: Ours(work, optimizer="adagrad"), "Adagrad"),
    ONE_PROCESS: Contender(OneProcess, "Adagrad", one_process=True),
    TWO_THREADS: Contender(lambda work: OneProcess(work, threads=2), "Adagrad", one_process=True),
    DENSE: Contender(DenseAlone, None),
}


def make(name: str, setting: Setting) -> Trainer:
    contender = CONTENDERS[name]
    return contender.make(Workload(setting, own_ranks(contender.one_process), dist.get_world_size()))


def measure(name: str, setting: Setting) -> StepCosts:
    tiny = TINY._replace(poolings=setting.poolings)
    return measure_costs(partial(make, name), first_losses, setting=setting, tiny=tiny, batches=BATCHES)


def first_losses(trainer: Trainer) -> dict[str, Any]:
    """Return the losses of the global batch in the first steps."""
    found = [trainer.step(trainer.prepare(step % BATCHES)) for step in range(CHECKED_STEPS)]
    losses = torch.stack(found).double()
    dist.all_reduce(losses)  # for ours, which are those of all rows already, the mean changes nothing
    losses /= dist.get_world_size()
    return {"losses": losses.tolist(), "unique_ids": trainer.work.unique_ids(), "plan": trainer.plan}


def time(name: str, setting: Setting, steps: int) -> StepTimes:
    return time_steps(make(name, setting), batches=BATCHES, warm_up=WARM_UP, steps=steps)
