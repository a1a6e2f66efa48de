"""The command line: which recipe, what is changed, what is said of a mistake; and that every field it offers does something."""

import ast
import importlib
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, get_type_hints

import pytest

from unisono_models.clip.config import Config as ClipTraining
from unisono_models.clip.recipes import RECIPES
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config import recipes as recipes_module
from unisono_models.training.config.recipes import Recipes
from unisono_models.training.config.serialization import config_to_json
from unisono_models.training.config.validate import LearningRateWarning, warn_of_learning_rates

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "models/src/unisono_models"


@dataclass(frozen=True)
class Net:
    """The net."""

    width: int = 8
    """Of its layers."""
    norm: Literal["layer", "none"] = "layer"
    shape: tuple[int, ...] = (2, 3)


@dataclass(frozen=True)
class Toy:
    """A training of a toy."""

    run: RunConfig
    net: Net = field(default_factory=Net)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    batch: int = 8
    lr: float = 0.1


TOYS: Recipes[Toy] = Recipes("toy", Toy)


@TOYS.add
def small_one() -> Toy:
    """Fits
    everywhere."""
    return Toy(RunConfig(steps=5))


@TOYS.add
def large_one() -> Toy:
    """Fits nowhere."""
    return Toy(RunConfig(steps=50), Net(width=4000))


def kept_run(folder: Path, *, model: object = "toy", recipe: object = "small_one", **changes: object) -> Path:
    config = config_to_json(Toy(RunConfig(steps=7, seed=3), Net(width=77))) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": model, "recipe": recipe, "config": config}))
    return folder


def refusal(capsys: pytest.CaptureFixture[str], args: list[str], recipes: Recipes = TOYS) -> str:
    """What is said of a mistake: on stderr alone, with status 2."""
    with pytest.raises(SystemExit) as end:
        recipes.choose(args)
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out
    return " ".join(printed.err.replace("│", " ").split())  # tyro draws a frame, and breaks lines


def helped(capsys: pytest.CaptureFixture[str], args: list[str], recipes: Recipes = TOYS) -> str:
    with pytest.raises(SystemExit) as end:
        recipes.choose(args)
    printed = capsys.readouterr()
    assert not end.value.code and not printed.err
    return " ".join(printed.out.replace("│", " ").split())


def test_first_recipe_is_the_default(monkeypatch):
    assert TOYS.choose([]) == ("small_one", small_one())
    assert TOYS.choose(["--net.width", "9"]) == ("small_one", replace(small_one(), net=Net(width=9)))
    monkeypatch.setattr(sys, "argv", ["train.py", "large_one", "--run.seed", "4"])
    assert TOYS.choose() == ("large_one", Toy(RunConfig(steps=50, seed=4), Net(width=4000)))


def test_names_may_be_written_with_dashes():
    assert TOYS.choose(["large-one"]) == TOYS.choose(["large_one"]) == ("large_one", large_one())
    assert TOYS.choose(["small_one", "--run.log-every", "3"]) == TOYS.choose(["small-one", "--run.log_every=3"])


def test_overrides_change_what_they_name_and_nothing_else():
    args = ["large_one", "--run.seed", "8", "--net.norm", "none", "--net.shape", "5", "6", "7", "--run.dir", "/tmp/x"]
    run = RunConfig(steps=50, seed=8, dir=Path("/tmp/x"))
    assert TOYS.choose(args) == ("large_one", Toy(run, Net(width=4000, norm="none", shape=(5, 6, 7))))
    name, config = RECIPES.choose(["tiny", "--model.image.kwargs", '{"patch_size": 4}', "--loss.micro-batch", "6"])
    plain = RECIPES["tiny"]
    image = replace(plain.model.image, kwargs={"patch_size": 4})
    expected = replace(plain, model=replace(plain.model, image=image), loss=replace(plain.loss, micro_batch=6))
    assert (name, config) == ("tiny", expected)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["smal_one"], "no recipe 'smal_one'. Did you mean small_one? The recipes are: small_one, large_one"),
        (["zebra"], "no recipe 'zebra'. The recipes are: small_one, large_one"),
        (["small_one", "--net.widht", "9"], "--net.width"),
        (["--run.stepps", "9"], "--run.steps"),
        (["small_one", "--net.width", "nine"], "nine"),
        (["small_one", "--net.norm", "batch"], "batch"),
        (["small_one", "--config", "runs/x"], "--config replaces the name of a recipe: put it first"),
        (["small_one", "large_one"], "large_one"),
        (["--config"], "--config needs the directory of a run, or its config.json"),
        (["--config="], "--config needs the directory of a run, or its config.json"),
        (["--config", "/no/such/run"], "--config /no/such/run: "),
    ],
)
def test_rejects_and_says_what_would_be_right(capsys, args, words):
    said = refusal(capsys, args)
    assert words in said and "python -m unisono_models.toy train" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--run.steps", "0", "at least 1"),
        ("--run.steps", "-3", "at least 1"),
        ("--run.log-every", "-1", "at least 1"),
        ("--run.evaluate-every", "-1", "at least 0"),
        ("--run.stop-after", "0", "at least 1, or None"),
        ("--run.timeout", "0.0", "above 0, and at most a year"),
        ("--run.timeout", "nan", "above 0, and at most a year"),
        ("--checkpoint.every", "-1", "at least 0"),
        ("--checkpoint.keep", "0", "at least 1"),
        ("--batch", "0", "at least 1"),
        *(("--lr", value, "above 0 and finite") for value in ("0.0", "-0.1", "nan", "inf")),
    ],
)
def test_rejects_values_that_are_out_of_range_and_names_the_option_as_typed(capsys, option, value, rule):
    assert f"{option} {value}: must be {rule}" in refusal(capsys, ["small_one", option, value])


@pytest.mark.parametrize("model", ["clip", "gan", "recommender"])
def test_every_model_rejects_learning_rates_and_batches_that_are_out_of_range(capsys, model):
    recipes = importlib.import_module(f"unisono_models.{model}.recipes").RECIPES
    for option, value in (("--optimizer.lr", "-1.0"), ("--data.batch", "0")):
        said = refusal(capsys, [option, value], recipes)
        assert f"{option} {value}" in said or f"{option[2:]}={value}" in said


def test_a_very_large_learning_rate_is_warned_of_by_name():
    with pytest.warns(LearningRateWarning, match=r"--lr 11 is very large"):
        warn_of_learning_rates(Toy(RunConfig(steps=1), lr=11.0))
    with warnings.catch_warnings(action="error"):
        warn_of_learning_rates(Toy(RunConfig(steps=1), lr=10.0))
        warnings.simplefilter("ignore", LearningRateWarning)
        warn_of_learning_rates(Toy(RunConfig(steps=1), lr=11.0))


def test_unknown_recipe_is_an_error_in_code():
    with pytest.raises(KeyError, match=r"toy has no recipe 'zebra'; it has small_one, large_one"):
        TOYS["zebra"]


def test_config_of_a_run_takes_the_place_of_a_recipe(tmp_path):
    run = kept_run(tmp_path / "run")
    kept = Toy(RunConfig(steps=7, seed=3), Net(width=77))
    for args in (["--config", str(run)], ["--config", str(run / "config.json")], [f"--config={run}"]):
        assert TOYS.choose(args) == ("small_one", kept)
        changed = replace(kept, net=replace(kept.net, width=5))
        assert TOYS.choose([*args, "--net.width", "5"]) == ("small_one", changed)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"model": "clip"}, "a run of clip, not of toy"),
        ({"recipe": "../../etc"}, "'../../etc' is not the name of a recipe"),
        ({"recipe": 3}, "3 is not the name of a recipe"),
        ({"net": {"width": "wide"}}, "net.width: 'wide' is not int"),
        ({"net": {"widht": 3}}, "net.widht: Net has no such field, only width, norm, shape"),
    ],
)
def test_config_that_does_not_fit_is_rejected(capsys, tmp_path, how, words):
    run = kept_run(tmp_path / "run", **how)
    assert words in refusal(capsys, ["--config", str(run)])
    (run / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(capsys, ["--config", str(run)])


def test_help_lists_the_recipes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    said = helped(capsys, ["--help"])
    assert "small_one (default) Fits everywhere." in said and "large_one Fits nowhere." in said
    assert "[RECIPE | --config RUN] [--field VALUE ...]" in said
    assert helped(capsys, ["-h"]) == said
    clip = helped(capsys, ["--help"], RECIPES)
    assert all(name in clip for name in RECIPES.recipes)


def test_help_of_a_recipe_lists_every_field_with_its_value(capsys, tmp_path):
    said = helped(capsys, ["large_one", "--help"])
    assert "Fits nowhere." in said and "Of its layers. (default: 4000)" in said
    assert all(f"--{name}" in said for name in ("run.steps", "run.log-every", "net.width", "net.norm", "net.shape"))
    kept = helped(capsys, ["--config", str(kept_run(tmp_path / "run")), "--help"])
    assert "Of its layers. (default: 77)" in kept


def test_every_field_of_clip_is_an_option_that_is_explained(capsys):
    said = helped(capsys, ["tiny", "--help"], RECIPES)
    found = {f"{section}.{name}" for section, cls in sections(ClipTraining) for name in plain_fields(cls)}
    assert {name for name in found if f"--{name.replace('_', '-')} " not in said.replace(",", " ")} == set()


def test_recipes_survive_their_config_file(tmp_path):
    for name in RECIPES.recipes:
        saved = {"model": "clip", "recipe": name, "config": config_to_json(RECIPES[name])}
        (tmp_path / "config.json").write_text(json.dumps(saved))
        assert RECIPES.choose(["--config", str(tmp_path)]) == (name, RECIPES[name])


@pytest.mark.parametrize(
    "args",
    [
        ["smal_one"],
        ["small_one", "--net.widht", "9"],
        ["--help"],
        ["small_one", "--help"],
        ["--run.steps", "0"],
        ["--lr", "-1"],
    ],
)
def test_only_rank_0_prints(capsys, monkeypatch, args):
    monkeypatch.setattr(recipes_module, "_RANK_0_FIRST", 0.0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        TOYS.choose(args)
    printed = capsys.readouterr()
    assert not printed.out and not printed.err


# The guard: a field that nothing reads is a promise that is not kept.


def sections(cls: type, path: str = "") -> list[tuple[str, type]]:
    """The dataclasses of a config, by the dotted names that they have in it."""
    below = [(name, hint) for name, hint in get_type_hints(cls).items() if is_dataclass(hint)]
    return [(path, cls), *(found for name, hint in below for found in sections(hint, f"{path}.{name}".strip(".")))]


def plain_fields(cls: type) -> list[str]:
    hints = get_type_hints(cls)
    return [each.name for each in fields(cls) if not is_dataclass(hints[each.name])]


def attributes(source: str) -> set[tuple[str, str]]:
    """What is read of what: ("config", "lr") of `config.lr`, ("image", "size") of `self.config.image.size`."""
    read = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {(ast.unparse(node.value).rpartition(".")[2], node.attr) for node in read}


def unread(cls: type, sources: list[str]) -> list[str]:
    """Fields of a config that no source reads, of a `config` or of what has the name of its section."""
    found = set().union(*map(attributes, sources))
    return [
        f"{path}.{name}"
        for path, section in sections(cls)
        for name in plain_fields(section)
        if not {("config", name), (path.rpartition(".")[2], name)} & found
    ]


def test_every_field_of_clip_is_read_somewhere():
    files = [path for path in SOURCES.rglob("*.py") if path.name not in ("config.py", "recipes.py")]
    assert unread(ClipTraining, [path.read_text() for path in files]) == []


def test_the_guard_sees_a_field_that_nothing_reads():
    source = "use(config.run.steps, config.dir, net.width, self.config.net.norm, config.net.shape, other.seed)"
    missing = {f"run.{each.name}" for each in fields(RunConfig)} - {"run.steps", "run.dir"}
    assert set(unread(Toy, [source])) == missing | {"checkpoint.every", "checkpoint.keep", ".batch", ".lr"}


# scripts/train


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / "scripts/train"), *args], capture_output=True, text=True, timeout=120, cwd="/")


def test_script_explains_itself():
    for flag in ("--help", "-h"):
        done = run_script(flag)
        assert done.returncode == 0 and not done.stderr
        assert "./scripts/train MODEL [RECIPE] [--nproc N]" in done.stdout and "Models: clip" in done.stdout
        assert "#" not in done.stdout and "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "which model?"),
        (["cilp"], "there is no model cilp"),
        (["training"], "there is no model training"),
        (["../clip"], "there is no model ../clip"),
        (["clip", "--nproc", "two"], "--nproc needs a number of ranks, not two"),
        (["clip", "tiny", "--nproc=0"], "--nproc needs a number of ranks, not 0"),
        (["clip", "--nproc", "-1"], "--nproc needs a number of ranks, not -1"),
        (["clip", "--nproc"], "--nproc needs a number of ranks, not nothing"),
    ],
)
def test_script_rejects_before_it_starts_anything(args, words):
    done = run_script(*args)
    assert done.returncode == 2 and not done.stdout
    assert f"train: {words}\n" in done.stderr and "Models: clip" in done.stderr
    assert len(done.stderr.splitlines()) < 8 and "Traceback" not in done.stderr


def test_script_leaves_mistakes_to_the_recipes_and_not_to_torchrun():
    done = run_script("clip", "tny", "--nproc", "2")
    assert done.returncode == 2 and "Did you mean tiny?" in done.stderr
    assert "torch" not in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2


def test_ranks_of_torchrun_say_a_mistake_once(tmp_path):
    (tmp_path / "train.py").write_text("from unisono_models.clip.recipes import RECIPES\nRECIPES.choose()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(tmp_path / "train.py"), "tny"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and done.stderr.count("Did you mean tiny?") == 1
