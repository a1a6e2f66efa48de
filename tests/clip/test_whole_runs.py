"""Whole runs on a folder of tars, some of whose pictures are broken: every way to spread the work gives the same numbers."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.clip.pictures import noise, write_tars
from tests.clip.test_train import furthest, losses, train, train_and_draw
from tests.training.torchrun import Launch, _children
from unisono_models.clip.data.files import open_pairs, split_pairs
from unisono_models.clip.evaluate import evaluate
from unisono_models.clip.model import Clip
from unisono_models.training.checkpoint.manifest import list_steps, read_manifest
from unisono_models.training.run.run_directory import read_provenance

KINDS = ("cat", "dog", "fish", "bird", "tree", "house", "boat", "cup", "hat", "star")
LOOKS = ("red", "green", "blue", "small", "large", "old", "new", "sad", "happy")
BROKEN = {3, 17, 30, 44, 62, 80}  # of which two are held out
STEPS = 6  # an epoch has four of 18 pairs, and one of 9
SHORT = ("--run.stop-after", "5")  # without the end of a run, which takes longer than the steps


def pair(number):
    caption = f"a {LOOKS[number % 9]} {KINDS[number // 9]}"
    picture = b"junk" if number in BROKEN else noise((40, 36), seed=number)
    return {"__key__": f"{number:09d}", "png": picture, "txt": caption}


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, (40, 30, 20), pair)
    return folder


@pytest.fixture(scope="module")
def data(tars):
    return ["--data.source", str(tars), "--data.held-out", "0.2", "--data.max-broken", "0.2", "--data.batch", "18"]


@pytest.fixture(scope="module")
def run(ranks, data, tmp_path_factory):
    """Trains, on two ranks by default; gives the run directory, and what the ranks returned if it is not None."""

    def run(*args, directory=None, body=train, world=2):
        directory = directory or tmp_path_factory.mktemp("runs") / "run"
        results = ranks(body, directory, *data, "--run.steps", str(STEPS), *args, world_size=world, timeout=240)
        return directory if results[0] is None else (directory, results)

    return run


@pytest.fixture(scope="module")
def plain(run):
    """A finished run with DDP in float32."""
    return run(body=train_and_draw)


def until(step, found):
    return {each: found[each] for each in range(step)}


def same_numbers(one, other):
    """Up to rounding, which grows from step to step."""
    assert furthest(until(3, one), until(3, other)) < 1e-6
    assert furthest(one, other) < 1e-5


def test_broken_pictures_are_skipped_and_counted(tars, plain):
    trained, held_out = (set(part.rows.tolist()) for part in split_pairs(open_pairs(tars), 0.2, seed=0))
    assert len(trained & BROKEN) == 4 and len(held_out & BROKEN) == 2
    assert sorted(losses(plain)) == list(range(STEPS)) and losses(plain)[STEPS - 1] < losses(plain)[0]
    found = re.search(r"(\d+) of (\d+) pairs skipped. broken image: \d+, such as (\S+)", (plain / "report.html").read_text())
    assert int(found[2]) == 18 * 5 + 9 and 4 <= int(found[1]) <= 8 and "tar" in found[3]
    assert json.loads((plain / "summary.json").read_text())["held_out/rows"] == len(held_out - BROKEN)
    assert Clip.from_pretrained(plain / "export").encode_texts(["a red cat", "an old boat"]).isfinite().all()


def complaint(directory, *args):
    """Of a run that has to fail, on all ranks alike."""
    with pytest.raises(Exception) as error:
        train(directory, *args)
    return str(error.value)


def test_too_many_broken_pictures_stop_the_run(run):
    _, found = run("--data.max-broken", "0.02", body=complaint)
    assert found[0] == found[1] and "This is more than the allowed fraction of 0.02" in found[0]


@pytest.mark.parametrize(
    "args",
    [
        ["--objective.micro-batch", "4"],
        ["--parallel.kind", "hybrid", "--parallel.checkpoint-activations", "--objective.micro-batch", "4"],
    ],
    ids=" ".join,
)
def test_smaller_parts_give_the_same_numbers(run, plain, args):
    same_numbers(losses(run(*args, *SHORT)), until(5, losses(plain)))


def test_sharded_model_gives_the_same_numbers_and_is_exported_whole(run, plain):
    sharded = run("--parallel.kind", "fsdp")
    same_numbers(losses(sharded), losses(plain))
    one, other = (load_file(each / "export/model.safetensors") for each in (sharded, plain))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_bfloat16_comes_close(run, plain):
    """At first: these pictures are noise, and what is learned of noise soon differs."""
    rounded = [losses(run("--parallel.kind", kind, "--parallel.precision", "bfloat16", *SHORT)) for kind in ("ddp", "fsdp")]
    for found in rounded:
        assert 1e-6 < furthest(until(2, found), until(2, losses(plain))) < 5e-3
    assert furthest(*rounded) < 1e-2


def train_compiled(directory, *args):
    """With graphs that are taken as they are: their compilation is tested elsewhere, and takes minutes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_default_backend("eager")
    try:
        train(directory, *args)
    finally:
        torch.compiler.set_default_backend(None)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], dict(torch._dynamo.utils.counters["graph_break"])


def test_compiled_blocks_give_the_same_numbers(run, plain):
    compiled, found = run("--parallel.compile", body=train_compiled)
    assert all(graphs > 1 and not breaks for graphs, breaks in found), found
    same_numbers(losses(compiled), losses(plain))


def test_sigmoid_loss_gives_the_same_numbers_however_it_is_spread(run, plain):
    sigmoid = ["--objective.loss", "sigmoid", *SHORT]
    one = run(*sigmoid)
    other = run(*sigmoid, "--parallel.kind", "fsdp", "--objective.micro-batch", "3", "--objective.exchange", "ring")
    same_numbers(losses(other), losses(one))
    assert abs(losses(one)[0] - losses(plain)[0]) > 0.1


SCORES = (0.1, 0.9, 0.3, 0.2, 0.4, 0.5)  # after each step; the second is the best


def train_with_scores(directory, *args):
    """The real evaluation, but for the first figure, by which checkpoints are compared."""
    scores = iter(SCORES)

    def scored(*given):
        figures = evaluate(*given)
        assert next(iter(figures)) == "held_out/text_to_image/recall@1"
        return figures | {"held_out/text_to_image/recall@1": next(scores)}

    with mock.patch("unisono_models.clip.train.evaluate", scored):
        train_and_draw(directory, *args)


def test_evaluations_disturb_nothing_and_the_best_checkpoint_is_kept(run, plain):
    scored = run("--run.evaluate-every", "1", "--checkpoint.keep", "1", body=train_with_scores)
    assert losses(scored) == losses(plain)
    lines = [json.loads(line) for line in (scored / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["held_out/text_to_image/recall@1"] for line in lines if line["kind"] == "evaluation"}
    assert found == dict(enumerate(SCORES))
    kept = {commit.step: commit.score for commit in map(read_manifest, list_steps(scored / "checkpoints"))}
    assert kept == {2: 0.9, STEPS: 0.5}


def test_checkpoint_of_fsdp_goes_on_with_ddp(run, plain):
    directory = run("--parallel.kind", "fsdp", "--run.stop-after", "3")
    _, found = run(directory=directory, body=complaint)
    assert "parallel.kind" in found[0] and found[0] == found[1]  # another config is another run, unless one insists
    saved = json.loads((directory / "config.json").read_text())
    saved["config"]["parallel"]["kind"] = "ddp"
    (directory / "config.json").write_text(json.dumps(saved))
    run(directory=directory)
    assert len(read_provenance(directory)["starts"]) == 2
    same_numbers(losses(directory), losses(plain))


def test_stopped_run_of_three_ranks_goes_on_with_the_same_bits(run):
    """With two ranks sums have one order only. With three it depends on the buckets, which DDP arranges in its first step."""
    unbroken, stopped = run(*SHORT, world=3), run("--run.stop-after", "2", world=3)
    run(*SHORT, directory=stopped, world=3)
    assert losses(stopped) == losses(unbroken)
    one, other = (read_manifest(list_steps(each / "checkpoints")[0]).files for each in (stopped, unbroken))
    assert one == other  # the sha256 of all weights, and of the optimizer's moments


def pid_of_rank(launch, rank):
    """The process of a rank among those that torchrun has started."""
    for pid in _children(launch.process.pid):
        with suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError(f"no rank {rank}; output:\n{launch.output}")


def test_killed_rank_leaves_no_trace_in_the_numbers(run, data, tmp_path):
    # The rank that is left waits for an eighth of the timeout, to see who is missing.
    options = ["--run.steps", "28", "--checkpoint.every", "4", "--run.log-every", "1", "--run.timeout", "24"]
    unbroken = run(*options)
    broken = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [
        sys.executable,
        *torchrun,
        "-m",
        "unisono_models.clip",
        "train",
        "tiny",
        "--run.dir",
        str(broken),
        *data,
        *options,
    ]
    with Launch(command, tmp_path) as launch:
        metrics = broken / "metrics.jsonl"
        launch.wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') > 9, "ten steps")
        os.kill(pid_of_rank(launch, 0), signal.SIGKILL)
        assert launch.end() == 0, launch.output
    assert len(read_provenance(broken)["starts"]) == 2 and "continuing at step" in launch.output
    assert losses(broken) == losses(unbroken)
    assert (broken / "export/model.safetensors").read_bytes() == (unbroken / "export/model.safetensors").read_bytes()
