"""Whole runs of the tiny recipe: the same numbers again, on other numbers of ranks, and after a stop."""

import json
from pathlib import Path

import pytest
import torch

from tests.gan.data.image_files import write_image
from tests.training.skip_plots import skip_plots
from unisono_models.gan.commands.evaluate import main as evaluate
from unisono_models.gan.commands.sample import main as sample
from unisono_models.gan.config import LossConfig
from unisono_models.gan.recipes import RECIPES
from unisono_models.gan.train import main, penalty_weight
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import derive_seed
from unisono_models.training.run.compare import compare_runs

SHORT = ["--run.steps", "12", "--run.evaluate-every", "6", "--checkpoint.every", "0", "--evaluation.images-every", "4"]
SHORT += ["--evaluation.feature-extractor-steps", "10", "--evaluation.samples", "60", "--data.batch", "21"]
LITTLE = ["--run.stop-after", "5", "--evaluation.images-every", "0", "--evaluation.feature-extractor-steps", "1"]
EXACT = ["--precision", "float64", "--loss.matching", "0.5", "--loss.contrast", "0.1", "--loss.kind", "all_pairs"]


def train_and_draw(directory, *args):
    torch.manual_seed(derive_seed(0, str(directory)) % 2**31)  # torch's global generator must not matter
    main(["tiny", "--run.dir", str(directory), *SHORT, *args])


def train(directory, *args):
    with skip_plots():
        train_and_draw(directory, *args)


def metrics(directory, kind="train"):
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: x for name, x in line.items() if name not in ("kind", "step")}
        for line in lines
        if line["kind"] == kind
    }


def furthest(one, other):
    assert one.keys() == other.keys() and all(one[step].keys() == other[step].keys() for step in one)
    return max(abs(one[step][name] - other[step][name]) / max(1e-3, abs(one[step][name])) for step in one for name in one[step])


@pytest.fixture(scope="module")
def on_two(ranks, tmp_path_factory):
    """A finished run on two ranks."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    ranks(train_and_draw, directory, world_size=2, timeout=120)
    return directory


def test_run_writes_all_files(on_two):
    names = {path.name for path in on_two.iterdir()}
    assert {
        "config.json",
        "provenance.json",
        "metrics.jsonl",
        "plots",
        "report.html",
        "summary.json",
        "feature_extractor.safetensors",
    } <= names
    frames = {path.name for path in (on_two / "samples").iterdir()}
    assert {"samples.png", "real.png", "training.webp", "interpolation.png", "step-00000004.png", "step-00000012.png"} <= frames
    trained = metrics(on_two)
    assert sorted(trained) == list(range(12)) and {"loss/discriminator", "loss/generator", "lr"} <= trained[0].keys()
    assert [step for step in trained if "discriminator/penalty" in trained[step]] == [0, 2, 4, 6, 8, 10]
    summary = json.loads((on_two / "summary.json").read_text())
    assert {
        "frechet_distance",
        "relative_kernel_distance",
        "precision",
        "recall",
        "label_accuracy",
        "class_coverage",
        "real/frechet_distance",
    } <= summary.keys()
    assert summary["frechet_distance"] > summary["real/frechet_distance"] > 0
    report = (on_two / "report.html").read_text()
    assert "data:image/webp" in report and "not FID" in report


def test_same_ranks_give_the_same_bits_also_after_a_stop(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "run", "--run.stop-after", "7", world_size=2, timeout=120)
    assert sorted(metrics(tmp_path / "run")) == list(range(7)) and not (tmp_path / "run/summary.json").exists()
    ranks(train, tmp_path / "run", world_size=2, timeout=120)
    assert metrics(tmp_path / "run") == metrics(on_two)
    assert metrics(tmp_path / "run", "evaluation") == metrics(on_two, "evaluation")
    for name in ("export/model.safetensors", "feature_extractor.safetensors", "samples/samples.png", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (on_two / name).read_bytes()


def test_other_ranks_give_the_same_curve_also_after_a_stop(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "run", "--run.stop-after", "5", world_size=3, timeout=120)
    ranks(train, tmp_path / "run", world_size=1, timeout=120)
    verdict = compare_runs(on_two, tmp_path / "run")
    assert verdict.good and "within 1e-05" in verdict.text, verdict.text
    assert furthest(metrics(tmp_path / "run"), metrics(on_two)) < 1e-3
    assert furthest(metrics(tmp_path / "run", "evaluation"), metrics(on_two, "evaluation")) < 1e-2


def test_ranks_differ_by_rounding_alone(ranks, tmp_path):
    """In float64, with all terms and an uneven split: 21 images on four ranks, so that groups of four straddle ranks."""
    for world in (1, 4):
        ranks(train, tmp_path / str(world), *EXACT, *LITTLE, world_size=world, timeout=120)
    assert len(metrics(tmp_path / "1")) == 5
    assert furthest(metrics(tmp_path / "1"), metrics(tmp_path / "4")) < 1e-9


def test_finished_run_can_be_evaluated_and_sampled(on_two, tmp_path, capsys):
    kept = json.loads((on_two / "summary.json").read_text())
    evaluate([str(on_two)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "frechet" in line)
    assert line.count(f" {kept['frechet_distance']:.4g} ") == 2  # computed again, and in the summary
    sample([str(on_two), "--labels", "3", "1", "4", "--out", str(tmp_path / "grid.png")])
    assert (tmp_path / "grid.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten photos in two classes, and a file that is none."""
    folder = tmp_path_factory.mktemp("data") / "my photos"
    for number in range(10):
        write_image(folder / ("big cat", "dog")[number % 2] / f"{number}.jpg", 20 * number, mode="RGB", size=(20, 24))
    (folder / "dog" / "x.jpg").write_text("no image")
    return folder


def test_photos_of_any_folder_can_be_trained(photos, tmp_path, capsys):
    """The terminal and the report speak of the user's own images, with and without classes."""
    small = ["--data.source", str(photos), "--data.size", "16", "--data.max-broken", "0.1", "--model.generator", "8", "8"]
    small += ["--model.discriminator", "8", "8", "--run.steps", "2", "--evaluation.feature-extractor-steps", "2"]
    small += ["--evaluation.samples", "8"]
    for condition in ("none", "class"):
        directory = tmp_path / condition
        with skip_plots():
            main(["photos", *small, "--model.condition", condition, "--run.dir", str(directory)])
        said = "".join(capsys.readouterr())
        assert "1 of 11 images skipped. broken image: 1, such as dog/x.jpg (file 10): not an image" in said
        assert "10 of 10 images are not square: their centre square is used." in said
        assert "--data.batch 64 is more than the 8 images to train on" in said and "only 8 images to train on" in said
        assert "only 2 images: too few for the metrics of real images, which are left out" in said
        assert ("The 2 classes (big cat, dog) are not used" in said) is (condition == "none")
        assert ("--labels 'big cat' dog --out" in said) is (condition == "class")
        page = (directory / "report.html").read_text()
        assert "<h1>Images like those of my photos</h1>" in page and "1 of 11 images skipped" in page
    with pytest.raises(UserError, match="'cow' is not a class; the classes are big cat, dog"):
        sample([str(directory), "--labels", "cow"])


def test_penalty_weight_makes_up_for_steps_without_penalty():
    config = RECIPES["tiny"]
    every = LossConfig.penalty_every
    assert penalty_weight(config, 0) == every * config.loss.gamma and penalty_weight(config, 1) == 0
    assert every * config.loss.gamma_final < penalty_weight(config, 58) < every * config.loss.gamma_final * 1.1


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--data.batch", "0", "--data.batch 0: must be at least 1"),
        ("--model.generator", "", "--model.generator: must be one or more numbers"),
        ("--loss.penalty-every", "0", "--loss.penalty-every 0: must be at least 1"),
        ("--optimizer.half-life", "0", "--optimizer.half-life 0.0: must be above 0"),
        ("--evaluation.neighbours", "60", "--evaluation.samples 60: must be greater than --evaluation.neighbours"),
        (
            "--model.generator",
            "16 8 4 2 1",
            "--data.size 16: networks with 5 resolutions and --model.patch 2 make images whose size is a multiple of 32",
        ),
        ("--model.condition", "none --loss.contrast 1", "--loss.contrast 1.0: must be 0 with --model.condition none"),
        ("--augment.shift", "0.6", "--augment.shift 0.6: must be from 0 to 0.5"),
        ("--optimizer.warmup", "2", "--optimizer.warmup 2.0: must be from 0 to 1"),
    ],
)
def test_wrong_options_are_rejected(option, value, says, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["tiny", "--run.dir", str(tmp_path / "run"), *SHORT, option, *value.split()])
    assert says in " ".join((str(error.value) + capsys.readouterr().err).replace("│", " ").split())


def test_changed_images_are_rejected(tmp_path):
    train(tmp_path / "run", "--run.stop-after", "2")
    saved = json.loads((tmp_path / "run/config.json").read_text())
    saved["config"]["data"]["test_part"] = 0.3
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"--data\.source has other images now than when the run began"):
        train(tmp_path / "run", "--data.test-part", "0.3")
    (tmp_path / "run/feature_extractor.safetensors").unlink()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:  # a step after the newest checkpoint
        file.write('{"kind": "train", "step": 2, "loss": 1.0, "samples": 64}\n')
    logged = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"--data\.source mnist-5k has other images now than when the run began"):
        train(tmp_path / "run", "--data.test-part", "0.3")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == logged, "a start that is refused changes nothing"


def test_divergence_ends_the_run(tmp_path):
    with pytest.raises(UserError, match=r"is (nan|-?inf): the training has diverged\. .* lower --optimizer\.lr"):
        train(tmp_path / "run", "--optimizer.lr", "1e18")
    assert not (tmp_path / "run/summary.json").exists() and not list((tmp_path / "run/checkpoints").glob("step-*"))


def test_too_few_images_are_rejected_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"must be less than --evaluation\.samples 5000 and less than the 4,000 images"):
        train(tmp_path / "run", "--evaluation.samples", "5000", "--evaluation.neighbours", "4500")
    assert not (tmp_path / "run/feature_extractor.safetensors").exists()
