"""One case of the benchmark of the recommender: contenders checked and weighed, then timed in turn."""

from __future__ import annotations

from collections.abc import Sequence

from embedding_workload import Setting
from recommender_contenders import CONTENDERS, WORLD_SIZE
from recommender_measures import Weight, time_steps, weigh
from recommender_results import TOLERANCE, Results, combine, deviations
from recommender_workload import Case
from shared_measuring import order_of_turns
from shared_ranks import FreshRanks
from shared_stepping import Timing


def run_case(
    fresh: FreshRanks, case: Case, names: Sequence[str], setting: Setting, *, rounds: int, warm_up: int, steps: int
) -> Results:
    weights: dict[str, list[Weight]] = {}
    for name in names:
        text = f"{case}: losses, traffic and memory of {name}"
        weights[name] = fresh.run(text, CONTENDERS[name].ranks, weigh, name, setting)
    check(case, weights)
    timings: dict[str, list[list[Timing]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in order_of_turns(names, turn):
            text = f"{case}: time, round {turn + 1} of {rounds}: {name}"
            timings[name].append(fresh.run(text, CONTENDERS[name].ranks, time_steps, name, setting, warm_up, steps))
    samples = setting.batch * WORLD_SIZE
    return Results(combine(name, samples, weights[name], timings[name]) for name in names)


def check(case: Case, weights: dict[str, list[Weight]]) -> None:
    """Before anything is timed: whoever has other losses computes something else."""
    losses = {name: found[0].losses for name, found in weights.items()}
    away = deviations(losses)
    if wrong := {name: deviation for name, deviation in away.items() if not deviation <= TOLERANCE}:
        texts = [f"\n  {name}: {' '.join(f'{loss:.6f}' for loss in losses[name])}" for name in away]
        raise SystemExit(f"recommender, {case}: other losses, so other work, of {', '.join(wrong)}:{''.join(texts)}")
