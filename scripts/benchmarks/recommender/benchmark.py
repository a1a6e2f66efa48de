"""Is a training step of the recommender faster with our tables than with TorchRec's?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.embedding.benchmark import COST_COLUMNS, TableBenchmark, best_of_torchrec, speed
from benchmarks.embedding.workload import DIM, POOLINGS, TABLES, WORLD_SIZE
from benchmarks.harness.benchmark import Column, Section, Target
from benchmarks.harness.measure import StepCosts
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Ratio, Results
from benchmarks.recommender import contenders
from benchmarks.recommender.contenders import AUTO, CHECKED_STEPS, CONTENDERS, DENSE, DENSE_LR, MODEL, NUMBERS, WIDTH

CASES = {"one id": (1,) * TABLES, "bags": POOLINGS}
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
    contenders = CONTENDERS

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
                measure=contenders.measure,
                time=contenders.time,
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
