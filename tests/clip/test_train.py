"""Whole runs: the same numbers again, on other numbers of ranks, after a stop, and for every way to split the work."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.clip.image_files import noise_image, write_tars
from tests.training.skip_plots import skip_plots
from tests.training.torchrun import Launch, _children
from unisono_models.clip.data import pairs as pairs_module
from unisono_models.clip.data.emoji import EmojiDataset
from unisono_models.clip.data.files import open_pairs, split_pairs
from unisono_models.clip.evaluate import evaluate
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import ImageFeatures
from unisono_models.clip.train import main
from unisono_models.training.checkpoint.manifest import list_steps, read_manifest
from unisono_models.training.run.run_directory import read_provenance

FEW_PIXELS = ["--model.image.size", "32", "--model.image.views", "2", "--data.batch", "64", "--run.steps", "6"]


def train_with_report(directory, *args, recipe="tiny"):
    torch.manual_seed(hash(str(directory)) % 2**31)  # the state of the generator must not matter
    main([recipe, "--run.dir", str(directory), *args])


def train(directory, *args, recipe="tiny"):
    """Without what people look at: the report has no curves and no searches."""
    with skip_plots(), mock.patch.object(EmojiDataset, "example_queries", ()):
        train_with_report(directory, *args, recipe=recipe)


build_emoji = EmojiDataset.build_datasets


def build_fewer(*args, **options):
    """Some of the emoji: more than four steps take, in several parts for each rank. Features of all take 20 seconds a run."""
    data = build_emoji(*args, **options)
    few = replace(data.train, rows=data.train.rows[:320])
    tests = {
        name: replace(test, pairs=replace(test.pairs, rows=test.pairs.rows[:90]), queries=None)
        for name, test in data.tests.items()
    }
    return replace(data, train=few, captions=[caption for _, caption in few.rows], tests=tests)


def train_default(directory, *args):
    """The default recipe, whose features are cached before training, with few pixels, pairs and steps."""
    with mock.patch.object(EmojiDataset, "build_datasets", build_fewer):
        train(directory, *FEW_PIXELS, *args, recipe="emoji")


def losses(directory):
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


@pytest.fixture(scope="module")
def on_two(ranks, tmp_path_factory):
    """A finished run on two ranks."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    ranks(train_with_report, directory, world_size=2, timeout=120)
    return directory


def test_run_directory_has_everything(on_two):
    names = {path.name for path in on_two.iterdir()}
    assert {"config.json", "provenance.json", "metrics.jsonl", "tensorboard", "plots", "report.html", "summary.json"} <= names
    assert sorted(losses(on_two)) == list(range(12))
    summary = json.loads((on_two / "summary.json").read_text())
    assert summary["vendor/rows"] == 1632 and 0 < summary["vendor/text_to_image/recall@10"] < 1
    assert (on_two / "samples" / "search.png").stat().st_size > 10_000
    clip = Clip.from_pretrained(on_two / "export")
    found = clip.encode_texts(["red heart", "dog"]) @ clip.encode_images(torch.zeros(3, 3, 40, 50, dtype=torch.uint8)).T
    assert found.shape == (2, 3) and clip.scale > 1


def test_other_ranks_give_the_same_numbers(ranks, on_two, tmp_path):
    expected = {step: loss for step, loss in losses(on_two).items() if step < 10}
    for world in (1, 3):
        ranks(train, tmp_path / str(world), "--run.stop-after", "10", world_size=world, timeout=120)
        assert furthest(losses(tmp_path / str(world)), expected) < 1e-6


def test_other_ranks_differ_by_rounding_alone(ranks, tmp_path):
    small = ["--parallel.precision", "float64", "--run.steps", "60", "--data.batch", "11", "--optimizer.lr", "1e-3"]
    small += ["--checkpoint.every", "60"]
    for world in (1, 3):
        ranks(train, tmp_path / str(world), *small, "--run.stop-after", "50", world_size=world, timeout=180)
    assert len(losses(tmp_path / "1")) == 50 and furthest(losses(tmp_path / "1"), losses(tmp_path / "3")) < 1e-9


def test_same_ranks_give_the_same_bits(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "again", world_size=2, timeout=120)
    assert losses(tmp_path / "again") == losses(on_two)
    assert (tmp_path / "again/export/model.safetensors").read_bytes() == (on_two / "export/model.safetensors").read_bytes()


def test_same_ranks_give_the_same_bits_after_a_stop(ranks, on_two, tmp_path):
    for _ in range(2):  # the second time there is nothing to do
        ranks(train, tmp_path / "run", "--run.stop-after", "7", world_size=2, timeout=120)
        assert losses(tmp_path / "run") == {step: loss for step, loss in losses(on_two).items() if step < 7}
        assert not (tmp_path / "run/summary.json").exists()
    ranks(train, tmp_path / "run", world_size=2, timeout=120)
    assert losses(tmp_path / "run") == losses(on_two)
    assert (tmp_path / "run/export/model.safetensors").read_bytes() == (on_two / "export/model.safetensors").read_bytes()


def test_run_continues_on_other_numbers_of_ranks(ranks, on_two, tmp_path):
    for world, last in ((3, 4), (1, 8), (2, 11)):
        ranks(train, tmp_path / "run", "--run.stop-after", str(last), world_size=world, timeout=120)
    expected = {step: loss for step, loss in losses(on_two).items() if step < 11}
    assert furthest(losses(tmp_path / "run"), expected) < 1e-5


def test_default_recipe_continues_with_the_same_bits_and_gives_the_same_numbers_on_other_ranks(ranks, tmp_path):
    for name, world, last in (("one", 1, 4), ("two", 2, 4), ("again", 2, 2), ("again", 2, 4)):
        ranks(train_default, tmp_path / name, "--run.stop-after", str(last), world_size=world, timeout=180)
    assert len(losses(tmp_path / "two")) == 4 and losses(tmp_path / "again") == losses(tmp_path / "two")
    assert furthest(losses(tmp_path / "one"), losses(tmp_path / "two")) < 1e-6


KINDS = ("cat", "dog", "fish", "bird", "tree", "house", "boat", "cup", "hat", "star")
LOOKS = ("red", "green", "blue", "small", "large", "old", "new", "sad", "happy")
BROKEN = {3, 17, 30, 44, 62, 80}  # two of them are held out
STEPS = 6  # an epoch has four steps of 18 pairs, and one of 9
SHORT = ("--run.stop-after", "5")  # without the end of a run, which takes longer than the steps


def pair(number):
    caption = f"a {LOOKS[number % 9]} {KINDS[number // 9]}"
    image = b"junk" if number in BROKEN else noise_image((40, 36), seed=number)
    return {"__key__": f"{number:09d}", "png": image, "txt": caption}


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
    """Train, on two ranks by default; returns the run directory, and what the ranks returned if it is not None."""

    def run(*args, directory=None, body=train, world=2):
        directory = directory or tmp_path_factory.mktemp("runs") / "run"
        results = ranks(body, directory, *data, "--run.steps", str(STEPS), *args, world_size=world, timeout=240)
        return directory if results[0] is None else (directory, results)

    return run


@pytest.fixture(scope="module")
def plain(run):
    """A finished run with DDP in float32."""
    return run(body=train_with_report)


def until(step, found):
    return {each: found[each] for each in range(step)}


def same_numbers(one, other):
    """Up to rounding, which grows from step to step."""
    assert furthest(until(3, one), until(3, other)) < 1e-6
    assert furthest(one, other) < 1e-5


def test_broken_images_are_skipped_and_counted(tars, plain):
    trained, held_out = (set(part.indices.tolist()) for part in split_pairs(open_pairs(tars), 0.2, seed=0))
    assert len(trained & BROKEN) == 4 and len(held_out & BROKEN) == 2
    assert sorted(losses(plain)) == list(range(STEPS)) and losses(plain)[STEPS - 1] < losses(plain)[0]
    found = re.search(r"(\d+) of (\d+) pairs skipped. broken image: \d+, such as (\S+)", (plain / "report.html").read_text())
    # by rows: in the second epoch some of them are read again
    assert int(found[2]) == len(trained) and int(found[1]) == 4 and "tar" in found[3]
    assert f"2 of {len(held_out)} pairs of the test held_out skipped" in (plain / "report.html").read_text()
    assert json.loads((plain / "summary.json").read_text())["held_out/rows"] == len(held_out - BROKEN)
    assert Clip.from_pretrained(plain / "export").encode_texts(["a red cat", "an old boat"]).isfinite().all()


CACHED = ("--model.image.frozen", "--model.image.views", "2")


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """The options of cached features, with weights for the frozen tower."""
    torch.manual_seed(3)
    weights = tmp_path_factory.mktemp("weights") / "tower.safetensors"
    save_file(timm.create_model("test_convnext", patch_size=2).state_dict(), weights)
    return (*CACHED, "--model.image.pretrained", str(weights))


def train_and_count_decodes(directory, *args):
    """How many images this rank decodes in a run."""
    with mock.patch.object(pairs_module, "decode_image", wraps=pairs_module.decode_image) as decode:
        train(directory, *args)
    return decode.call_count


def train_on_read_images(directory, *args):
    """Cached features, but the images are read in each step all the same."""
    with mock.patch.object(ImageFeatures, "without_images", lambda _, pairs: pairs):
        return train_and_count_decodes(directory, *args)


def test_cached_image_features_are_trained_on_without_decoding_images_again(tars, run, cached):
    """Each step read, decoded and moved images that were then dropped: for JPEGs of users a full decode for nothing."""
    looked_up, decodes = run(*cached, *SHORT, body=train_and_count_decodes)
    train_pairs, _ = split_pairs(open_pairs(tars), 0.2, seed=0)
    assert sum(decodes) == len(train_pairs)  # each once, for all views
    read, more_decodes = run(*cached, *SHORT, body=train_on_read_images)
    assert sum(more_decodes) == len(train_pairs) + 18 * 4 + 9
    assert losses(looked_up) == losses(read)
    one, other = (read_manifest(list_steps(each / "checkpoints")[0]).files for each in (looked_up, read))
    assert one == other
    with_workers, decodes = run(*cached, *SHORT, "--data.workers", "1", body=train_and_count_decodes)
    assert sum(decodes) == len(train_pairs) and losses(with_workers) == losses(looked_up)


def error_of(directory, *args):
    """The error of a run that must fail on all ranks alike."""
    with pytest.raises(Exception) as error:
        train(directory, *args)
    return str(error.value)


def test_too_many_broken_images_stop_the_run(run):
    _, found = run("--data.max-broken", "0.02", body=error_of)
    assert found[0] == found[1] and "This is more than the allowed fraction of 0.02" in found[0]


@pytest.mark.parametrize(
    "args",
    [
        ["--loss.micro-batch", "4"],
        ["--parallel.kind", "hybrid", "--parallel.checkpoint-activations", "--loss.micro-batch", "4"],
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
    """In the first steps only: these images are noise, and what is learned from noise soon differs."""
    rounded = [losses(run("--parallel.kind", kind, "--parallel.precision", "bfloat16", *SHORT)) for kind in ("ddp", "fsdp")]
    for found in rounded:
        assert 1e-6 < furthest(until(2, found), until(2, losses(plain))) < 5e-3
    assert furthest(*rounded) < 1e-2


def train_compiled(directory, *args):
    """With the eager backend: test_loss.py tests real compilation, which takes minutes."""
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
    sigmoid = ["--loss.kind", "sigmoid", *SHORT]
    one = run(*sigmoid)
    other = run(*sigmoid, "--parallel.kind", "fsdp", "--loss.micro-batch", "3", "--loss.exchange", "ring")
    same_numbers(losses(other), losses(one))
    assert abs(losses(one)[0] - losses(plain)[0]) > 0.1


SCORES = (0.1, 0.9, 0.3, 0.2, 0.4, 0.5)  # after each step; the second is the best


def train_with_scores(directory, *args):
    """With the real evaluation, except for the first metric, by which checkpoints are compared."""
    scores = iter(SCORES)

    def scored(*given):
        metrics = evaluate(*given)
        assert next(iter(metrics)) == "held_out/text_to_image/recall@1"
        return metrics | {"held_out/text_to_image/recall@1": next(scores)}

    with mock.patch("unisono_models.clip.train.evaluate", scored):
        train_with_report(directory, *args)


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
    _, found = run(directory=directory, body=error_of)
    assert "parallel.kind" in found[0] and found[0] == found[1]  # another config is another run, unless one insists
    saved = json.loads((directory / "config.json").read_text())
    saved["config"]["parallel"]["kind"] = "ddp"
    (directory / "config.json").write_text(json.dumps(saved))
    run(directory=directory)
    assert len(read_provenance(directory)["starts"]) == 2
    same_numbers(losses(directory), losses(plain))


def test_stopped_run_of_three_ranks_goes_on_with_the_same_bits(run):
    """The order of a sum over two ranks is fixed. Over three it depends on the buckets that DDP arranges in its first step."""
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
    module = ["-m", "unisono_models.clip", "train", "tiny"]
    command = [sys.executable, *torchrun, *module, "--run.dir", str(broken), *data, *options]
    with Launch(command, tmp_path) as launch:
        metrics = broken / "metrics.jsonl"
        launch.wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') > 9, "ten steps")
        os.kill(pid_of_rank(launch, 0), signal.SIGKILL)
        assert launch.end() == 0, launch.output
    assert len(read_provenance(broken)["starts"]) == 2 and "continuing at step" in launch.output
    assert losses(broken) == losses(unbroken)
    assert (broken / "export/model.safetensors").read_bytes() == (unbroken / "export/model.safetensors").read_bytes()
