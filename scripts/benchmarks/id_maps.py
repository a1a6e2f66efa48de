"""What do 26 maps of dynamic ids cost in a step, in one exchange and one by one?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, require_at_least
from benchmarks.harness.measure import Prepared, Seconds, take_turns
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Results, combine_rounds
from unisono.collectives import count_bytes
from unisono.embedding import IdMap, IdMapCollection

TOGETHER, ALONE = "unisono, IdMapCollection", "unisono, IdMaps one by one"
LIMIT = 15.0  # CPU ms of a rank
VOCABULARY = 10**6  # ids of each map


class Case(NamedTuple):
    name: str
    options: dict[str, Any]
    training: bool = True


CASES = (
    Case("look up (eval mode)", {"capacity": 100_000}, training=False),
    Case("admit new ids", {"capacity": 100_000}),
    Case("admit ids seen twice", {"capacity": 100_000, "threshold": 2}),
    Case("full, least recent evicted", {"capacity": 4_000, "eviction": "least_recent"}),
)


@dataclass(frozen=True)
class IdMaps(Benchmark):
    """Time IdMapCollection against its maps one by one, on two gloo ranks of one thread each.

    Ids follow Zipf's law, so that new ones come in every step. Both take turns in every round, with the same ids.
    """

    maps: int = 26
    """The number of maps."""
    ids: int = 2048
    """The ids of each map on each rank."""
    rounds: int = 40

    title = "maps of dynamic ids"
    plot_title = "26 maps of 2,048 ids on each of two ranks: CPU time and messages of a step (shorter is better)"
    needs_linux = False

    def validate(self) -> None:
        require_at_least(1, maps=self.maps, ids=self.ids, rounds=self.rounds)

    def run(self, ranks: Ranks) -> list[Measurement]:
        rounds = max(2, self.rounds // 10) if self.quick else self.rounds
        ranks.expect(len(CASES))
        measurements = []
        for case in CASES:
            found = ranks.run(case.name, 2, measure, case, self.maps, self.ids, rounds, fresh=False)
            seconds = [rank_seconds for rank_seconds, _ in found]
            for name in seconds[0]:
                calls = max(sent[name][0] for _, sent in found)
                bytes_sent = max(sent[name][1] for _, sent in found)
                measurements.append(combine_rounds(case.name, name, seconds, calls=calls, bytes_sent=bytes_sent))
        return measurements

    def sections(self, results: Results) -> list[Section]:
        columns = [
            Column("case", lambda m: m.case),
            Column("contender", lambda m: m.contender),
            Column("CPU ms, median", lambda m: m.cpu_ms, "{:.1f}", "cpu_ms", plot="CPU ms of a rank"),
            Column("CPU ms, least", lambda m: float(m.cpu.min()), "{:.1f}", "least_cpu_ms"),
            Column("wall ms, median", lambda m: m.wall_ms, "{:.1f}"),
            Column("sends and receives", lambda m: m["calls"], "{:,}", "calls", plot="sends and receives"),
            Column("bytes sent", lambda m: m["bytes_sent"], "{:,}"),
        ]
        rows = list(results.measurements)
        return [Section("A step", columns, rows, label=lambda m: f"{m.case}: {m.contender}")]

    def targets(self, results: Results) -> list[Target]:
        worst = max((m.cpu_ms, m.case) for m in results.by(TOGETHER) if m.case in (CASES[0].name, CASES[1].name))
        text = f"CPU time of a rank, with neither threshold nor eviction: ≤ {LIMIT:.0f} ms"
        return [Target(text, worst[0], worst[0] <= LIMIT, worst[1], "{:.1f} ms")]


# What follows runs on the ranks.


def measure(case: Case, maps: int, ids: int, rounds: int) -> tuple[dict[str, list[Seconds]], dict[str, tuple[int, int]]]:
    names = [f"map_{number}" for number in range(maps)]
    together = IdMapCollection({name: IdMap(**case.options) for name in names}).train()
    alone = {name: IdMap(**case.options).train() for name in names}

    def map_alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: alone[name](x) for name, x in batch.items()}

    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):  # most of the frequent ids are known when the clock starts
        batch = draw_ids(names, ids, draw)
        if any(not torch.equal(x, y) for x, y in zip(together(batch).values(), map_alone(batch).values(), strict=True)):
            raise RuntimeError(f"{case.name}: the rows differ on rank {dist.get_rank()}")
    together.train(case.training)
    for id_map in alone.values():
        id_map.train(case.training)
    sent = {}
    batch = draw_ids(names, ids, draw)
    for name, call in ((TOGETHER, together), (ALONE, map_alone)):
        with count_bytes() as traffic:
            call(batch)
        sent[name] = traffic.calls, traffic.sent
    batches: dict[str, list[dict[str, Tensor]]] = {TOGETHER: [], ALONE: []}
    for _ in range(rounds + 2):
        batch = draw_ids(names, ids, draw)
        for waiting in batches.values():
            waiting.append(batch)
    calls = {
        TOGETHER: Prepared(lambda: batches[TOGETHER].pop(), together),
        ALONE: Prepared(lambda: batches[ALONE].pop(), map_alone),
    }
    return take_turns(calls, range(rounds), warm_up=2), sent


def draw_ids(names: Sequence[str], ids: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw ids by Zipf's law (the k-th most frequent one has a probability of about 1/k), other ones for each map."""
    return {
        name: (VOCABULARY ** torch.rand(ids, generator=draw, dtype=torch.float64)).long() * 7919 + number
        for number, name in enumerate(names)
    }
