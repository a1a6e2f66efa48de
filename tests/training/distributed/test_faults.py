"""Ranks and hosts that die, hang or are told to stop, under real torchrun: the run gives the same numbers, or says why not.

The scenarios start together, three at a time, for most of their time is waiting.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.training.torchrun import Launch, alone, free_port, losses, on_one_host, torchrun

STEPS = 12


@dataclass(frozen=True)
class Ended:
    """What a scenario left."""

    status: int
    output: str
    losses: list[dict]


def ended(launch: Launch) -> Ended:
    status = launch.end()
    return Ended(status, launch.output, losses(launch.directory))


def unbroken(directory: Path) -> Ended:
    with on_one_host(directory) as launch:
        return ended(launch)


def killed_twice(directory: Path) -> Ended:
    with on_one_host(directory, "--fault=kill:1:6", "--fault=commit:0:7", restarts=3) as launch:
        return ended(launch)


def killed_for_good(directory: Path) -> Ended:
    with on_one_host(directory, "--fault=kill:1:6", "--patience=60", "--linger") as launch:
        return ended(launch)


def stopped(directory: Path) -> Ended:
    with on_one_host(directory, "--fault=stop:1:6", "--timeout=8", "--patience=60") as launch:
        launch.wait_for("missing: ")
        os.kill(int((directory / "stop.pid").read_text()), signal.SIGKILL)  # torchrun gives it 30 s, which no option changes
        return ended(launch)


def asleep(directory: Path) -> Ended:
    with on_one_host(directory, "--fault=sleep:1:6", "--timeout=100", "--patience=8") as launch:
        return ended(launch)


def told_to_stop(directory: Path) -> list[Ended]:
    """2 ranks until torchrun gets SIGTERM, 2 until one rank does, 3 until torchrun is killed, then 1 without torchrun."""
    seen = []
    with on_one_host(directory, "--pace=1", "--every=100") as launch:
        launch.wait_for_step(2)
        launch.process.send_signal(signal.SIGTERM)
        seen.append(ended(launch))
    step = seen[-1].losses[-1]["step"] + 1
    with on_one_host(directory, f"--fault=terminate:1:{step}", "--every=100") as launch:
        seen.append(ended(launch))
    with on_one_host(directory, "--pace=1", "--every=100", "--steps=100", "--patience=10", ranks=3) as launch:
        launch.wait_for_step(step + 1)
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.wait_until(lambda: "ends after step" in launch.output, "the ranks to stop by themselves")
        seen.append(ended(launch))
    with alone(directory, f"--steps={STEPS}") as launch:
        seen.append(ended(launch))
    return seen


def lost_a_node(directory: Path) -> Ended:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    quick = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, "--rdzv-id=small"),
        *("--local-addr=127.0.0.1", "--max-restarts=3"),
    ]
    with (
        torchrun(directory, "--pace=0.8", options=[*options, f"--rdzv-conf=is_host=true,{quick}"], name="stays") as stays,
        torchrun(directory, "--pace=0.8", options=[*options, f"--rdzv-conf=is_host=false,{quick}"], name="dies") as dies,
    ):
        stays.wait_until(lambda: any(line["ranks"] == 2 and line["step"] >= 5 for line in losses(directory)), "2 ranks")
        dies.kill()
        return ended(stays)


SCENARIOS: list[Callable[[Path], Ended | list[Ended]]] = [
    *(unbroken, told_to_stop, lost_a_node, killed_twice, killed_for_good, stopped, asleep),
]


@pytest.fixture(scope="module")
def scenario(request, tmp_path_factory):
    """How a scenario ended, given its function. Those that the selected tests speak of are started together."""
    here = [item for item in request.session.items if item.module is request.module]
    wanted = {name for item in here for name in item.function.__code__.co_names}
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(3) as pool:
        results = {body: pool.submit(body, folder / body.__name__) for body in SCENARIOS if body.__name__ in wanted}
        yield lambda body: results[body].result()
        pool.shutdown(cancel_futures=True)


def by_step(lines: list[dict]) -> dict[int, float]:
    """The loss of each step. One that was done again on as many ranks must have given the same."""
    found: dict[tuple[int, int], float] = {}
    for line in lines:
        assert found.setdefault((line["step"], line["ranks"]), line["loss"]) == line["loss"], line
    return {step: loss for (step, _), loss in found.items()}


def test_killed_ranks_restart_with_the_same_losses(scenario):
    run, reference = scenario(killed_twice), scenario(unbroken)
    assert run.status == reference.status == 0, run.output
    assert run.output.count("starts at step 0 on 2 ranks") == 1
    # First rank 1 dies. Then rank 0 dies within the checkpoint of step 8, whose data is there but not its COMMIT.
    assert run.output.count("starts at step 4 on 2 ranks") == 2
    assert "step-00000008 skipped: unfinished" in run.output
    assert len(reference.losses) == STEPS < len(run.losses)
    assert by_step(run.losses) == by_step(reference.losses)


def test_killed_rank_without_restarts_ends_the_run_and_is_named(scenario):
    run = scenario(killed_for_good)
    assert run.status == 1
    assert "missing: rank 1 on " in run.output
    assert "silent for" in run.output
    assert "gives up" not in run.output  # the others did not have to wait for the watchdog
    assert "SIGALRM" in run.output  # nor for a thread that hangs
    assert run.losses[-1]["step"] == 5


def test_stopped_rank_is_named_at_the_timeout(scenario):
    run = scenario(stopped)
    assert run.status == 1
    assert "missing: rank 1 on " in run.output
    assert "last seen at step" in run.output
    assert "8000ms" in run.output  # what gloo says: the error came by its timeout


def test_watchdog_prints_the_stacks_of_every_rank(scenario):
    run = scenario(asleep)
    assert run.status == 1
    for rank, where in ((0, "global_mean"), (1, "time.sleep(600)")):
        after = run.output.partition(f"rank {rank} on ")[2]
        assert "Its stacks:" in after and where in after, run.output
    assert "no progress for 8 s" in run.output
    assert "gives up" in run.output
    assert "no progress: rank 1 on " in run.output or "no progress: rank 0 on " in run.output


def test_run_told_to_stop_saves_and_goes_on_at_that_very_step(scenario):
    (first, second, _, _), reference = scenario(told_to_stop), scenario(unbroken)
    assert "after SIGTERM" in first.output
    done = first.losses[-1]["step"] + 1
    assert f"starts at step {done} on 2 ranks" in second.output
    assert second.status == 0, second.output
    assert [line["step"] for line in second.losses] == list(range(len(second.losses)))  # none twice
    assert by_step(second.losses).items() <= by_step(reference.losses).items()


def test_world_size_changes_across_restarts(scenario):
    runs, reference = scenario(told_to_stop), by_step(scenario(unbroken).losses)
    assert [run.status for run in runs[1:]] == [0, -signal.SIGKILL, 0], runs[-1].output
    assert [line["step"] for line in runs[-1].losses] == list(range(STEPS))
    assert [line["ranks"] for line in runs[-1].losses] == sorted(
        (line["ranks"] for line in runs[-1].losses), key=[2, 3, 1].index
    )
    assert {line["ranks"] for line in runs[-1].losses} == {1, 2, 3}
    assert by_step(runs[-1].losses) == pytest.approx(reference, rel=1e-6)


def test_lost_node_leaves_the_other_one_at_work(scenario):
    run, reference = scenario(lost_a_node), by_step(scenario(unbroken).losses)
    assert run.status == 0, run.output
    assert run.losses[-1] == {"step": STEPS - 1, "loss": run.losses[-1]["loss"], "ranks": 1}
    assert by_step(run.losses) == pytest.approx(reference, rel=1e-6)
