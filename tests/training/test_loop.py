"""The loop that all models share: resume, stop, cadence, and saves that fail."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import global_mean
from unisono_models.training.checkpoint import manifest
from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.errors import UserError
from unisono_models.training.loop import TrainingLoop, explain_divergence, explain_new_steps, start_session
from unisono_models.training.randomness import normal
from unisono_models.training.run.run_directory import read_config


@dataclass(frozen=True)
class Config:
    run: RunConfig
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=3, keep=9))


def train(
    directory,
    *,
    steps=10,
    stop_after=None,
    signal_at=None,
    evaluate_every=4,
    every=3,
    save=True,
    break_saves_at=None,
    early_at=None,
    fingerprint=None,
    nan_at=None,
    vanish_at=None,
    init_from=None,
    width=3,
    seed=0,
):
    """Train a line by DDP for 10 steps. Returns what the body of the loop saw in each step, and whether the run finished."""
    run = RunConfig(steps=steps, dir=directory, log_every=5, evaluate_every=evaluate_every, stop_after=stop_after, timeout=60)
    run = replace(run, init_from=init_from, seed=seed)
    config = Config(run, CheckpointConfig(every=every, keep=9))
    events = []
    with start_session(config, model="line", recipe="tiny") as session:
        ranks = session.ranks
        torch.manual_seed(seed)
        net = nn.Linear(width, 1)
        model = DistributedDataParallel(net) if dist.is_initialized() else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        average = nn.Linear(width, 1)
        with TrainingLoop(session, model, optimizer, extra={"average": average}) as loop:
            seen = loop.state.get("seen", 0)
            if fingerprint is not None:
                session.directory.check_fingerprint("data", fingerprint)
            for step in loop:
                x = normal(0, "x", step, torch.arange(7).tensor_split(ranks.world_size)[ranks.rank], (width,))
                loss = global_mean(model(x).square().mean(1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.weight.data.lerp_(net.weight.data, 0.5)
                seen += 7
                if step == signal_at and ranks.rank == ranks.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if step == break_saves_at:
                    loop._checkpoints.wait()  # so that it is known which saves fail
                    manifest.write_manifest = fail
                if step == vanish_at and ranks.first:
                    directory.rename(directory.with_name("elsewhere"))
                resumed = loop.just_resumed
                loop.log({"loss": loss * (math.nan if step == nan_at else 1)}, samples=7)
                if loop.evaluation_due:
                    loop.record({"accuracy": 0.1 * loop.done})
                if loop.done == early_at:
                    loop.finish_early("accuracy is high enough")
                events.append([step, resumed, loop.log_due, loop.evaluation_due, loop.checkpoint_due])
                if loop.checkpoint_due and save:
                    loop.save({"seen": seen}, score=loop.first_metric)
            if loop.finished:
                metrics = loop.final_metrics(lambda: {"accuracy": -1.0})
                session.directory.finish({**metrics, "seen": seen, "average": average.weight.sum().item()})
            return events, loop.finished


def fail(*args):
    raise OSError("no space in this test")


def train_and_catch(directory, **options):
    write = manifest.write_manifest
    try:
        return train(directory, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        manifest.write_manifest = write


def lines(directory):
    found = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] != "speed"]


def summary(directory):
    return json.loads((Path(directory) / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A run that was never interrupted, and what its steps saw."""
    directory = tmp_path_factory.mktemp("loop") / "whole"
    return directory, ranks(train, directory, world_size=2, timeout=120)[0]


def test_cadence_of_logs_evaluations_and_checkpoints(whole):
    directory, (events, finished) = whole
    assert finished and [step for step, *_ in events] == list(range(10))
    assert not any(resumed for _, resumed, *_ in events)
    for column, expected in ((2, [5, 10]), (3, [4, 8, 10]), (4, [3, 4, 6, 8, 9, 10])):
        assert [event[0] + 1 for event in events if event[column]] == expected
    steps = [path.name for path in reversed(manifest.list_steps(directory / "checkpoints"))]
    assert steps == [f"step-{step:08}" for step in (3, 4, 6, 8, 9, 10)]
    scores = [manifest.read_manifest(directory / "checkpoints" / name).score for name in steps]
    assert scores == [None, 0.4, None, 0.8, None, 1.0]
    assert [line["step"] for line in lines(directory) if line["kind"] == "evaluation"] == [3, 7, 9]


@pytest.mark.parametrize("how", [{"stop_after": 5}, {"signal_at": 4}], ids=["stop_after", "signal"])
def test_a_stopped_run_goes_on_with_the_same_bits(ranks, whole, tmp_path, how):
    events, finished = ranks(partial(train, **how), tmp_path / "run", world_size=2, timeout=120)[1]
    assert not finished and [step for step, *_ in events] == list(range(5)) and events[-1][4]
    assert not (tmp_path / "run/summary.json").exists()
    events, finished = ranks(train, tmp_path / "run", world_size=2, timeout=120)[1]
    assert finished and [(step, resumed) for step, resumed, *_ in events] == [(step, step == 5) for step in range(5, 10)]
    assert lines(tmp_path / "run") == lines(whole[0]) and summary(tmp_path / "run") == summary(whole[0])


def test_a_run_whose_last_step_was_taken_is_only_evaluated(tmp_path):
    train(tmp_path / "run", evaluate_every=0)
    before = lines(tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    events, finished = train(tmp_path / "run", evaluate_every=0)
    assert finished and events == [] and summary(tmp_path / "run")["accuracy"] == -1 and summary(tmp_path / "run")["seen"] == 70
    assert lines(tmp_path / "run") == before


def test_a_save_that_fails_does_not_end_training_but_a_stop_that_is_not_saved_is_an_error(ranks, whole, tmp_path):
    failed = ranks(partial(train_and_catch, stop_after=5, break_saves_at=4), tmp_path / "a", world_size=2, timeout=120)
    assert failed == ["UserError: stopped after step 5 of 10, which could not be saved"] * 2
    events, finished = ranks(partial(train_and_catch, break_saves_at=6), tmp_path / "a", world_size=2, timeout=120)[0]
    assert finished and [step for step, *_ in events] == [4, 5, 6, 7, 8, 9]  # from the checkpoint of the evaluation
    assert lines(tmp_path / "a") == lines(whole[0])


def test_a_run_that_is_finished_early_is_finished_and_no_later_start_goes_on(ranks, whole, tmp_path):
    events, finished = ranks(partial(train, early_at=8, signal_at=7), tmp_path / "run", world_size=2, timeout=120)[1]
    assert finished and [step for step, *_ in events] == list(range(8)) and events[-1][4]
    reason = "after step 8 of 10: accuracy is high enough"
    assert summary(tmp_path / "run") | {"average": 0} == {"accuracy": 0.8, "seen": 56, "average": 0, "ended_early": reason}
    assert lines(tmp_path / "run") == [line for line in lines(whole[0]) if line["step"] < 8]
    (tmp_path / "run/summary.json").unlink()  # as if it had been killed before its report
    before = lines(tmp_path / "run")
    assert ranks(train, tmp_path / "run", world_size=1, timeout=120)[0] == ([], True)
    assert summary(tmp_path / "run")["ended_early"] == reason and lines(tmp_path / "run") == before


def test_a_run_whose_last_step_is_also_an_early_end_has_all_its_steps(tmp_path):
    assert train(tmp_path / "run", early_at=10)[1] and "ended_early" not in summary(tmp_path / "run")


def test_a_fingerprint_that_has_changed_is_refused_unless_the_run_begins_anew(ranks, tmp_path):
    start = partial(train_and_catch, stop_after=5, every=0, evaluate_every=0)
    ranks(partial(start, fingerprint="a", save=False), tmp_path / "run", world_size=2, timeout=120)  # it has no checkpoint
    events, _ = ranks(partial(start, fingerprint="b"), tmp_path / "run", world_size=2, timeout=120)[0]
    assert len(events) == 5
    refused = ranks(partial(start, fingerprint="c"), tmp_path / "run", world_size=2, timeout=120)
    words = "the data has changed since the run began (its fingerprint was b, now it is c)"
    assert all(text.startswith("UserError: --run.dir") and words in text for text in refused)
    again = partial(train, fingerprint="b", every=0, evaluate_every=0)
    assert ranks(again, tmp_path / "run", world_size=2, timeout=120)[0][1]


@pytest.mark.parametrize(("options", "steps"), [({}, 5), ({"evaluate_every": 3}, 3), ({"every": 3}, 3)])
def test_a_loss_that_is_not_finite_ends_the_run_at_the_next_log_evaluation_or_save(ranks, tmp_path, options, steps):
    start = partial(train_and_catch, nan_at=2, **({"evaluate_every": 0, "every": 0} | options))
    said = ranks(start, tmp_path / "run", world_size=2, timeout=120)
    assert all(text.startswith("UserError: step 2: loss is nan: the training has diverged. Look for") for text in said)
    assert [math.isnan(line["loss"]) for line in lines(tmp_path / "run")] == [step == 2 for step in range(steps)]
    assert not manifest.list_steps(tmp_path / "run/checkpoints")


def test_divergence_names_the_learning_rates_to_lower():
    @dataclass(frozen=True)
    class Section:
        lr: float = 1e9

    @dataclass(frozen=True)
    class Two:
        optimizer: Section = field(default_factory=Section)
        tables: Section = field(default_factory=lambda: Section(0.5))

    text = explain_divergence("step 3: loss is inf", Two())
    assert "with a lower --optimizer.lr (it is 1e+09) and --tables.lr (it is 0.5), or look" in text


@pytest.mark.parametrize("options", [{"vanish_at": 1}, {"vanish_at": 9, "every": 0}])
def test_a_run_whose_directory_vanishes_ends_with_an_error(ranks, tmp_path, options):
    said = ranks(partial(train_and_catch, **options), tmp_path / "run", world_size=2, timeout=120)
    assert all("UserError: --run.dir" in text and "have vanished while it ran" in text for text in said)
    assert not (tmp_path / "run/summary.json").exists()


def provenance(directory):
    return json.loads((Path(directory) / "provenance.json").read_text())["starts"]


def trained(directory):
    return [line for line in lines(directory) if line["kind"] == "train"]


@pytest.mark.parametrize("stop_after", [None, 7])
def test_an_extended_run_equals_one_that_was_longer_from_the_beginning(ranks, tmp_path, stop_after):
    """Samples are a function of (seed, step), and the learning rate is constant here: the law is equality of all bits."""
    ranks(partial(train, steps=14), tmp_path / "long", world_size=2, timeout=120)
    ranks(partial(train, stop_after=stop_after), tmp_path / "run", world_size=2, timeout=120)
    assert (tmp_path / "run/summary.json").exists() == (stop_after is None)
    events, finished = ranks(partial(train, steps=14), tmp_path / "run", world_size=2, timeout=120)[0]
    first = stop_after or 10
    assert finished and [step for step, *_ in events] == list(range(first, 14))
    assert trained(tmp_path / "run") == trained(tmp_path / "long") and summary(tmp_path / "run") == summary(tmp_path / "long")
    assert read_config(tmp_path / "run") == read_config(tmp_path / "long")
    starts = provenance(tmp_path / "run")
    assert [start["first_step"] for start in starts] == [0, first]
    assert starts[1]["changed_steps"] == {"from": 10, "to": 14} and "changed_steps" not in starts[0]


def test_an_extension_says_what_happens_to_the_learning_rate():
    config = SimpleNamespace(optimizer=SimpleNamespace(warmup=0.0, final=0.1))
    text = explain_new_steps(100, 200, first_step=100, config=config)
    assert "--run.steps is 200 now, not 100" in text and "rate was 10% of its peak in the last step, and is 55% in the" in text


def test_a_run_cannot_have_fewer_steps_than_it_has_taken_nor_go_on_after_an_early_end(tmp_path, whole, capfd):
    train(tmp_path / "stopped", stop_after=7)
    with pytest.raises(UserError, match=r"has taken 7 steps: --run\.steps 6 is less than that"):
        train(tmp_path / "stopped", steps=6)
    assert train(tmp_path / "stopped", steps=8)[1] and len(trained(tmp_path / "stopped")) == 8, "it may be shortened"
    capfd.readouterr()
    with pytest.raises(UserError, match=r"has taken 10 steps: --run\.steps 9 is less than that"):
        train(whole[0], steps=9)
    with pytest.raises(UserError, match=r"holds a finished run: .* A larger --run\.steps extends it"):
        train(whole[0])
    train(tmp_path / "early", early_at=4)
    with pytest.raises(UserError, match=r"ended early after step 4 of 10: .* --run\.init-from .*early"):
        train(tmp_path / "early", steps=20)


def test_an_extension_that_is_refused_leaves_the_run_finished(tmp_path):
    train(tmp_path / "run", fingerprint="a")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json") if path.name != "provenance.json"}
    assert "UserError" in train_and_catch(tmp_path / "run", steps=14, fingerprint="b")
    assert {path: path.read_bytes() for path in before} == before and len(before) == 2


def test_a_run_starts_from_the_weights_of_another_and_goes_on_from_its_own(ranks, whole, tmp_path):
    source = whole[0]
    start = partial(train, init_from=source, seed=5, stop_after=5)
    ranks(start, tmp_path / "run", world_size=2, timeout=120)
    ranks(partial(start, stop_after=None), tmp_path / "whole", world_size=1, timeout=120)
    assert trained(tmp_path / "run")[0]["loss"] < 0.8 * trained(source)[0]["loss"], "not the weights of its own seed"
    record = provenance(tmp_path / "run")[0]["init_from"]
    assert (
        record["checkpoint"] == str(source / "checkpoints/step-00000010")
        and record["step"] == 10
        and len(record["sha256"]) == 64
    )
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    ranks(partial(train, init_from=moved / "checkpoints/step-00000010", seed=5), tmp_path / "copy", world_size=3, timeout=120)
    shutil.rmtree(moved)
    assert read_config(tmp_path / "copy")["config"]["run"]["init_from"] == str(moved / "checkpoints/step-00000010")
    for path in ("whole", "copy"):  # rounding differs with the number of ranks
        losses = zip(trained(tmp_path / "run"), trained(tmp_path / path), strict=False)
        assert all(math.isclose(a["loss"], b["loss"], rel_tol=1e-5) for a, b in losses)
    assert math.isclose(summary(tmp_path / "whole")["average"], summary(tmp_path / "copy")["average"], rel_tol=1e-4)


def test_a_run_that_is_continued_does_not_need_the_weights_that_it_started_from(tmp_path):
    train(tmp_path / "source")
    train(tmp_path / "run", init_from=tmp_path / "source", stop_after=5)
    shutil.rmtree(tmp_path / "source")
    assert train(tmp_path / "run", init_from=tmp_path / "source")[1] and "init_from" not in provenance(tmp_path / "run")[1]


def weights_before_the_loop(directory, source):
    config, net = Config(RunConfig(steps=10, dir=directory, init_from=source)), nn.Linear(3, 1)
    with start_session(config, model="line", recipe="tiny") as session:
        session.load_initial_weights(net)
        with TrainingLoop(session, model := nn.Linear(3, 1), torch.optim.AdamW(model.parameters(), lr=0.1)) as loop:
            for _ in loop:
                loop.log({}, samples=1)
                net.weight.data += 1
                model.weight.data.copy_(net.weight)
                loop.save({})
                break
        return net.weight.detach().clone() - 1


def test_weights_can_be_loaded_before_the_loop_begins(whole, tmp_path):
    """A frozen tower is evaluated before the loop: with the weights that it starts from, or with the run's own ones."""
    source = nn.Linear(3, 1)
    with Checkpoints(whole[0] / "checkpoints") as checkpoints:
        checkpoints.load_weights(whole[0], source)
    first = weights_before_the_loop(tmp_path / "run", whole[0])
    assert torch.equal(first, source.weight + 1 - 1)
    assert torch.equal(weights_before_the_loop(tmp_path / "run", whole[0]), first + 1 + 1 - 1)


def test_weights_that_do_not_fit_or_are_not_there_are_refused(ranks, whole, tmp_path):
    start = partial(train_and_catch, init_from=whole[0], width=4)
    said = ranks(start, tmp_path / "run", world_size=2, timeout=120)
    words = (
        "the checkpoint does not fit: extra/average/weight is float32[1, 3] in the checkpoint, float32[1, 4] here; model/weight"
    )
    assert all(text.startswith(f"UserError: --run.init-from {whole[0]}: {words}") for text in said)
    for path, words in (
        (tmp_path, "not the directory of a run"),
        (tmp_path / "step-00000003", "no checkpoint that can be loaded"),
    ):
        assert f"UserError: --run.init-from {path}: it is {words}" in train_and_catch(tmp_path / "new", init_from=path)


def test_a_body_that_forgets_to_save_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="step 2 was not saved: call save if checkpoint_due"):
        train(tmp_path / "run", save=False)


def test_a_body_that_forgets_to_log_is_told(tmp_path):
    config, net = Config(RunConfig(steps=2, dir=tmp_path / "run")), nn.Linear(1, 1)
    with (
        start_session(config, model="line", recipe="tiny") as session,
        TrainingLoop(session, net, torch.optim.SGD(net.parameters())) as loop,
        pytest.raises(RuntimeError, match="step 0 was not logged: call log once in each step"),
    ):
        list(loop)


def test_the_end_of_a_session_releases_the_run_whoever_still_refers_to_it(tmp_path):
    """The lock was held until the garbage collector came: now and then, the next start found the run in use."""
    config = Config(RunConfig(steps=2, dir=tmp_path / "run"))
    with start_session(config, model="line", recipe="tiny") as session:
        lock = tmp_path / "run" / ".lock"
        assert not can_lock(lock)
    assert session.directory.path == tmp_path / "run"  # the session is still referred to
    assert can_lock(lock)


def can_lock(path):
    """Whether another process can lock the file: a lock of this process would not stop this one."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, str(path)], stderr=subprocess.DEVNULL).returncode == 0
