"""Are the sharded tables faster than TorchRec's, and do they send and hold less?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.embedding.contenders import AUTO, CONTENDERS, ROW, TORCHREC_COLUMN, TORCHREC_ROW, TORCHREC_TABLE, measure, time
from benchmarks.embedding.workload import EXPONENT, LR, POOLINGS, WORLD_SIZE, Setting
from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, choose_contenders, require_at_least
from benchmarks.harness.measure import StepCosts, StepTimes
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Ratio, Results, combine_steps

FASTER = 1.8
FLAT = 1.25
SLOW_STEPS = 3
SCALED = (AUTO, ROW, TORCHREC_ROW, TORCHREC_TABLE, TORCHREC_COLUMN)
STEP = "a step"  # the case of the comparison on two ranks; the others are called after their number of ranks
# Columns that benchmarks with tables share.
COST_COLUMNS = [
    Column("CPU ms", lambda m: m.cpu_ms, "{:.1f}", plot="CPU ms of each rank in a step"),
    Column("MB sent", lambda m: m["mb_sent"], "{:.2f}", plot="MB sent by each rank in a step"),
    Column("payload", lambda m: m["mb_payload"], "{:.2f}"),
    Column("peak MiB", lambda m: m["peak_mib"], "{:.0f}", plot="peak memory of each rank, MiB"),
    Column("no code", lambda m: m["peak_without_code_mib"], "{:.0f}"),
    Column("plain malloc", lambda m: m["peak_plain_malloc_mib"], "{:.0f}"),
]


@dataclass(frozen=True)
class TableBenchmark(Benchmark):
    """What the benchmarks beside TorchRec's tables share."""

    batch: int = 2048
    """Samples on each rank."""
    rounds: int = 3
    """How often each contender is timed."""
    steps: int = 8
    """Steps that are timed in each round, after 3 to warm up."""
    only: tuple[str, ...] = ()
    """Parts of names: run only the contenders whose names contain one of them."""

    peers = ("torchrec", "fbgemm-gpu-cpu")
    needs_torchrec = True
    contenders: ClassVar[Mapping[str, Any]]

    def validate(self) -> None:
        choose_contenders(list(self.contenders), self.only)
        require_at_least(1, batch=self.batch, rounds=self.rounds, steps=self.steps)

    @property
    def setting(self) -> Setting:
        return Setting(128, 100) if self.quick else Setting(self.batch)

    @property
    def repeats(self) -> tuple[int, int]:
        """Return the rounds and the steps in a round."""
        return (1, 3) if self.quick else (self.rounds, self.steps)

    @property
    def ranks_of(self) -> dict[str, int]:
        """Return the contenders that run, and the number of ranks of each."""
        names = choose_contenders(list(self.contenders), self.only)
        return {name: 1 if self.contenders[name].one_process else WORLD_SIZE for name in names}

    def values(self, results: Results) -> dict[str, Any]:
        plans = [f"`{m.contender}` chose {m['plan']} ({m.case})" for m in results.measurements if m.numbers.get("plan")]
        rounds = len(results.measurements[0].wall)
        return {"setting": self.setting, "exponent": EXPONENT, "lr": LR, "rounds": rounds, "plans": "; ".join(plans) or "none"}

    def unique_ids(self, found: Sequence[Measurement]) -> int | None:
        """Return the unique ids of one rank. Result files from before 18 November 2026 do not have them."""
        on_ranks = [m for m in found if not self.contenders[m.contender].one_process] or found
        return on_ranks[0].numbers.get("unique_ids")

    def speed_target(self, results: Results, case: str, ours: str, limit: float, text: str) -> list[Target]:
        mine = results.find(case, ours)
        fastest = best_of_torchrec(results, case, lambda m: m.wall_ms)
        ratio = speed(results, mine) if mine else None
        if not ratio or not fastest:
            return []
        where = f"{fastest.contender}; rounds {ratio.least:.2f}x to {ratio.most:.2f}x"
        return [Target.at_least(limit, f"{text}, against TorchRec's fastest plan", ratio.median, where, "{:.2f}x")]


@dataclass(frozen=True)
class Embedding(TableBenchmark):
    """Measure a training step of unisono.embedding's sharded tables against TorchRec's and torch's own.

    26 tables of 100,000 to 500,000 rows of 64 (1.95 GB), bags of 1 to 10 ids, row-wise Adagrad: forward, backward and
    update on two gloo ranks of this machine, one thread each. First fresh processes for each contender check its outputs
    and updates and measure its traffic and peak memory; then all take turns in every round, each time in fresh processes.
    Last, the cost on 1, 2 and 4 ranks. All contenders use the torch that TorchRec needs, in .venv-torchrec, which is made
    the first time. Takes about 15 minutes on two cores and 4 GB: leave the machine alone. --quick runs one round of 3 steps
    with a hundredth of the rows, in processes that stay.
    """

    worlds: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks whose costs are compared. Give none to skip this."""
    scale_batch: int = 512
    """Samples on each rank in that comparison."""

    title = "the sharded tables"
    plot_title = "A training step of 26 sharded tables on two ranks (shorter is better)"
    contenders = CONTENDERS

    def validate(self) -> None:
        super().validate()
        require_at_least(1, worlds=self.worlds, scale_batch=self.scale_batch)

    @property
    def scale_setting(self) -> Setting:
        return Setting(64, 100) if self.quick else Setting(self.scale_batch)

    def run(self, ranks: Ranks) -> list[Measurement]:
        rounds, steps = self.repeats
        scaled = [name for name in SCALED if name in self.ranks_of]
        sizes = self.worlds[:2] if self.quick else self.worlds
        ranks.expect(len(self.ranks_of) * (1 + rounds) + len(scaled) * len(sizes) * min(rounds, 2))
        measurements = ranks.compare_steps(
            STEP,
            self.ranks_of,
            self.setting,
            measure=measure,
            time=time,
            check=check_deviations,
            rounds=rounds,
            steps={name: min(steps, SLOW_STEPS) if CONTENDERS[name].is_slow else steps for name in self.ranks_of},
            fresh=not self.quick,
        )
        times: dict[tuple[int, str], list[list[StepTimes]]] = {(size, name): [] for name in scaled for size in sizes}
        for _ in range(min(rounds, 2)):
            for size, name in times:
                args = (size, time, name, self.scale_setting, steps, True)
                found = ranks.run(f"{size} ranks: {name}", *args, fresh=not self.quick)
                times[size, name].append(found)
        return measurements + [combine_steps(f"on {size}", name, found) for (size, name), found in times.items()]

    def values(self, results: Results) -> dict[str, Any]:
        found = results.of(STEP)
        return {
            **super().values(results),
            "ids": self.setting.batch * sum(POOLINGS),
            "unique": self.unique_ids(found),
            "exact": worst_deviation(found, half_wire=False),
            "half_wire": worst_deviation(found, half_wire=True),
        }

    def sections(self, results: Results) -> list[Section]:
        columns = [
            Column("contender", lambda m: m.contender),
            Column("wall ms", lambda m: m.wall_ms, "{:.1f}", plot="ms of a step, wall time"),
            Column("best", lambda m: m["best_wall_ms"], "{:.1f}"),
            Column("x TorchRec", lambda m: speed(results, m), "{:.2fx}", "times_torchrec"),
            *COST_COLUMNS,
        ]
        scale_columns = [
            Column("contender", lambda m: m.contender),
            Column("ranks", world_size),
            Column("CPU ms", lambda m: m.cpu.min(), "{:.1f}"),
            Column("ns per id", self.nanoseconds_per_id, "{:.0f}", "cpu_ns_per_id", plot="CPU ns per id (flat is ideal)"),
            Column("MB sent", lambda m: m["mb_sent"], "{:.2f}", plot="MB sent by each rank in a step"),
        ]
        sections = [Section("All results", columns, results.of(STEP))]
        if scaled := [m for m in results.measurements if m.case != STEP]:
            text = (
                f"The same tables, a batch of {self.scale_setting.batch} on each rank. CPU ms and MB sent of one rank in a "
                "step; CPU: the median of a round's steps, the least of the rounds. Ranks beyond the number of cores share "
                "them, so wall times would say nothing."
            )
            label = lambda m: f"{m.contender} {m.case}"  # noqa: E731
            sections.append(Section("More ranks", scale_columns, scaled, before=text, label=label))
        return sections

    def nanoseconds_per_id(self, m: Measurement) -> float:
        return float(1e6 * m.cpu.min() / (self.scale_setting.batch * sum(POOLINGS)))

    def targets(self, results: Results) -> list[Target]:
        targets = self.speed_target(results, STEP, AUTO, FASTER, "speed of a step")

        def no_more(text: str, case: str, key: str, form: str) -> None:
            mine = results.find(case, AUTO)
            least = best_of_torchrec(results, case, lambda m: m[key])
            if mine and least:
                where = f"{form.format(mine[key], least[key])}, {least.contender}"
                targets.append(Target.at_most(1, text, mine[key] / least[key], where))

        no_more("bytes sent, to TorchRec's least", STEP, "mb_sent", "{:.2f} of {:.2f} MB")
        no_more("peak memory, to TorchRec's least", STEP, "peak_mib", "{:.0f} of {:.0f} MiB")
        no_more("peak memory without the code, to TorchRec's least", STEP, "peak_without_code_mib", "{:.0f} of {:.0f} MiB")
        scaled = [m for m in results.by(AUTO) if m.case != STEP]
        if len(scaled) > 1:
            first, last = scaled[0], scaled[-1]
            worst = max(scaled[1:], key=lambda m: m.cpu.min())
            growth = float(worst.cpu.min() / first.cpu.min())
            costs = [f"{self.nanoseconds_per_id(m):.0f} ns {m.case}" for m in (first, worst)]
            text = f"growth of CPU time per id, from {world_size(first)} to {world_size(last)} ranks"
            targets.append(Target.at_most(FLAT, text, growth, f"{', '.join(costs)} ranks"))
            text = f"bytes sent on {world_size(last)} ranks, to TorchRec's least"
            no_more(text, last.case, "mb_sent", "{:.2f} of {:.2f} MB")
        return targets


def world_size(m: Measurement) -> int:
    return int(m.case.removeprefix("on "))


def best_of_torchrec(results: Results, case: str, value: Callable[[Measurement], float]) -> Measurement | None:
    """Return the best of TorchRec's plans with float32 on the wire."""
    plans = (TORCHREC_ROW, TORCHREC_TABLE, TORCHREC_COLUMN)
    return min((m for m in results.of(case) if m.contender in plans), key=value, default=None)


def speed(results: Results, m: Measurement) -> Ratio | None:
    """Return how many times as fast as TorchRec's fastest plan it is, in the same round."""
    fastest = best_of_torchrec(results, m.case, lambda m: m.wall_ms)
    return Ratio.of(fastest.wall / m.wall) if fastest else None


def check_deviations(costs: Mapping[str, Sequence[StepCosts]]) -> None:
    for name, ranks in costs.items():
        outputs, updates = (ranks[0].numbers[f"{key}_deviation"] for key in ("outputs", "updates"))
        if not max(outputs, updates) <= CONTENDERS[name].tolerance:
            raise SystemExit(
                f"{name}: its first outputs deviate by {outputs:.1e} from those computed without sharding, those after two "
                f"steps by {updates:.1e}, so it computes something else"
            )


def worst_deviation(found: Sequence[Measurement], *, half_wire: bool) -> str:
    chosen = [m for m in found if CONTENDERS[m.contender].half_wire == half_wire]
    outputs, updates = (max((m[f"{key}_deviation"] for m in chosen), default=0) for key in ("outputs", "updates"))
    return f"{outputs:.1e} in the first outputs and {updates:.1e} after two steps"
