"""The command simulate: all models, what it writes, and a stranger's mistakes."""

import json

import pytest
import torch

from unisono_models.training.errors import UserError
from unisono_models.training.simulate.command import main

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")


def run(tmp_path, *args: str) -> dict:
    main([*args, "--no-growth", "--out", str(tmp_path)])
    page = (tmp_path / "index.html").read_text()
    assert "a model, not a measurement" in page and "<script" not in page
    return json.loads((tmp_path / "simulation.json").read_text())


@pytest.mark.parametrize(
    "args",
    [
        ("clip", "tiny"),
        ("clip", "emoji"),  # frozen towers of packages, whose weights are not loaded
        ("clip", "tiny", "--model.image.model", "resnet18", "--loss.kind", "sigmoid", "--loss.view-weight", "0.1"),
        ("clip", "tiny", "--parallel.kind", "fsdp", "--parallel.precision", "bfloat16", "--parallel.checkpoint-activations"),
        ("clip", "tiny", "--loss.micro-batch", "2"),
        ("gan", "emoji_text", "--data.batch", "48"),
        ("gan", "images64", "--data.source", "/no/such/folder", "--data.batch", "32"),
        ("recommender", "tiny"),
        ("recommender", "two_tower"),
        ("recommender", "sasrec"),
        ("recommender", "criteo", "--tables.plan", "column"),
        ("recommender", "fm", "--data.source", "/no/table.csv", "--data.features", "user:id:100000", "item:id:20000"),
    ],
    ids=lambda args: " ".join(args[:2]) if isinstance(args, tuple) else None,
)
def test_every_model_takes_a_step(tmp_path, args, capsys):
    found = run(tmp_path, *args, "--hosts", "2", "--gpus", "4")
    seconds, memory = found["modelled_seconds"], found["memory"]
    assert found["ranks"] == 8 and found["kernels"] > 50 and found["bytes_touched"] > 0
    assert seconds["estimate"] >= seconds["lower_bound"] > 0
    assert memory["optimizer"] + memory["tables"] > 0 and memory["weights"] + memory["tables"] > 0
    assert found["collectives"] > 0 and found["link_bytes"] > 0 and found["nic_bytes"] > 0
    said = capsys.readouterr().out
    assert "It fits" in said
    assert args[0] == "recommender" or "The host waits" not in said, said  # tables wait for the numbers of ids


def test_figures_of_the_hardware_can_be_replaced(tmp_path, capsys):
    seconds = run(tmp_path, "gan", "tiny")["modelled_seconds"]["estimate"]
    slower = run(tmp_path, "gan", "tiny", "--hardware.launch", "50", "--hardware.network-bandwidth=25")
    assert slower["modelled_seconds"]["estimate"] > 5 * seconds  # launches take most of the time of a tiny model
    assert "launch 50," in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert "--hardware.launch 50" in page and "--hardware.network-bandwidth 25" in page and "<img" not in page


def test_growth_is_shown_from_1_to_4096_ranks(tmp_path):
    main(["gan", "tiny", "--gpus", "8", "--out", str(tmp_path), "--scaling", "weak"])
    growth = json.loads((tmp_path / "simulation.json").read_text())["growth"]
    assert [row["ranks"] for row in growth] == [1, 2, 4, 8, 16, 64, 256, 1024, 4096]
    assert [row["batch"] for row in growth] == [8 * row["ranks"] for row in growth]
    assert {row["rows"] for row in growth} == {8}
    assert growth[0]["nic_bytes"] == growth[3]["nic_bytes"] == 0 < growth[4]["nic_bytes"] < growth[8]["nic_bytes"]
    assert len({row["kernels"] for row in growth[1:]}) == 1
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("memory", "time", "bytes"))


def test_a_setting_that_makes_it_fit_is_found_by_trying(tmp_path, capsys):
    run(tmp_path, "clip", "tiny", "--data.batch", "4096", "--gpus", "4", "--hardware.memory", "0.2")
    said = capsys.readouterr().out
    assert "do not fit into 180 MB, 90% of the device: trying other settings" in said
    assert "It does not fit" in said and "Most of it is activations" in said
    settings = [line for line in said.splitlines() if line.startswith("With --")]
    assert len(settings) == 3 and any("--loss.micro-batch" in line for line in settings)
    options = settings[0].removeprefix("With ").partition(" it fits: ")[0].split()
    run(tmp_path, "clip", "tiny", "--data.batch", "4096", "--gpus", "4", "--hardware.memory", "0.2", *options)
    assert "It fits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["clap"], "there is no model 'clap': take clip, gan or recommender"),
        (["clip", "tiny", "--hosts", "0"], "--hosts 0: must be a number, at least 1"),
        (["clip", "tiny", "--gpus", "many"], "--gpus many: must be a number, at least 1"),
        (["clip", "tiny", "--hardware", "tpu"], "--hardware tpu: must be one of h100, a100"),
        (["clip", "tiny", "--hardware.memory", "-1"], "--hardware.memory -1: must be a number above 0"),
        (
            ["clip", "tiny", "--hardware.lunch", "1"],
            "--hardware.lunch: there is no such figure; take one of --hardware.float64",
        ),
        (["clip", "tiny", "--hardware", "a100", "--hardware.float8-e5m2", "1"], "--hardware.float8-e5m2: there is no such"),
        (["clip", "tiny", "--out", "/proc/none"], "--out /proc/none: the folder cannot be made"),
        (["clip", "tiny", "--hosts"], "--hosts needs a value"),
        (["clip", "tiny", "--hosts", "100000"], "--hosts 100000 --gpus 8: 800,000 ranks are more than 65,536"),
        (["recommender", "fm", "--data.source", "mine.csv"], "--data.source mine.csv: the simulation reads no data"),
        (["recommender", "fm", "--data.features", "colour"], "--data.features: colour: the simulation reads no data"),
        (["clip", "tiny", "--model.image.model", "vit_bse"], "--model.image.model vit_bse: timm has no such model"),
    ],
)
def test_a_mistake_is_one_message(args, message):
    with pytest.raises(UserError) as error:
        main(args)
    assert message in str(error.value)


def test_a_wrong_recipe_names_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["clip", "tinny"])
    assert "./scripts/simulate clip: there is no recipe 'tinny'. Did you mean tiny?" in capsys.readouterr().err
