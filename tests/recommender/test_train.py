"""Runs of the tiny recipe: the same numbers again, on other numbers of ranks and plans, and after a stop; and its commands."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.training.skip_plots import skip_plots
from unisono_models.recommender.commands import evaluate, export, recommend
from unisono_models.recommender.commands.evaluate import evaluate_run
from unisono_models.recommender.model.export import read_export
from unisono_models.recommender.model.serving import served_ids
from unisono_models.recommender.train import main
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.errors import UserError

SHORT = ["--run.steps", "12", "--run.evaluate-every", "6", "--data.batch", "512", "--checkpoint.every", "0"]
TOWERS = ["--data.source", "ml-100k", "--data.features", "user_id", "item_id", "class:ids", "--tables.lr", "0.02"]
TOWERS += ["--model.users", "user_id", "--model.items", "item_id", "class"]


def train_with_plots(directory, *args, recipe="tiny"):
    torch.manual_seed(hash(str(directory)) % 2**31)  # the state of the generator must not matter
    main([recipe, "--run.dir", str(directory), *SHORT, *args])


def train(directory, *args, recipe="tiny"):
    with skip_plots():
        train_with_plots(directory, *args, recipe=recipe)


def train_towers_with_plots(directory):
    train_with_plots(directory, *TOWERS, "--run.timeout", "60", recipe="two_tower")


def train_towers(directory):
    with skip_plots():
        train_towers_with_plots(directory)


def read_losses(directory):
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def read_summary(directory):
    return json.loads((Path(directory) / "summary.json").read_text())


def largest_difference(one, other):
    """Relative, over all values."""
    assert one.keys() == other.keys()
    return max(abs(one[name] - other[name]) / abs(one[name]) for name in one if other[name])


@pytest.fixture(scope="module")
def on_two(ranks, tmp_path_factory):
    """The directory of a finished run on two ranks."""
    directory = tmp_path_factory.mktemp("runs") / "two"
    ranks(train_with_plots, directory, world_size=2, timeout=120)
    return directory


def test_run_leaves_its_files(on_two):
    names = {path.name for path in on_two.iterdir()}
    assert {"config.json", "provenance.json", "metrics.jsonl", "tensorboard", "plots", "report.html", "summary.json"} <= names
    losses, summary = read_losses(on_two), read_summary(on_two)
    assert sorted(losses) == list(range(12)) and losses[11] < losses[0]
    assert summary["test/rows"] == 7285 and 0.6 < summary["test/auc"] < 1
    report = (on_two / "report.html").read_text()
    assert "table_user_id" in report and "rank 1" in report and "0 of 100,000 rows skipped" in report
    assert (on_two / "samples" / "items.png").stat().st_size > 10_000


def test_same_ranks_give_the_same_bits(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "again", world_size=2, timeout=120)
    assert read_losses(tmp_path / "again") == read_losses(on_two)
    assert (tmp_path / "again/export/model.safetensors").read_bytes() == (on_two / "export/model.safetensors").read_bytes()


def test_other_ranks_give_the_same_curve_and_metrics(ranks, on_two, tmp_path):
    for world_size in (1, 3):
        directory = tmp_path / str(world_size)
        ranks(train, directory, world_size=world_size, timeout=120)
        assert largest_difference(read_losses(directory), read_losses(on_two)) < 1e-5
        assert largest_difference(read_summary(directory), read_summary(on_two)) < 1e-4


@pytest.mark.parametrize(("plan", "batch"), [("row", 93), ("column", 93), ("table", 93), ("replicated", 93), ("row", 3)])
def test_ranks_and_plans_differ_by_rounding_alone(ranks, tmp_path, plan, batch):
    """In float64: with uneven shares, and with three rows, so that one of the four ranks has none."""
    options = ["--parallel.precision", "float64", "--data.batch", str(batch), "--run.steps", "8", "--run.stop-after", "7"]
    options += ["--tables.plan", plan, "--tables.l2", "0.02", "--model.embedding-dropout", "0.1"]
    ranks(train, tmp_path / "one", *options, world_size=1, timeout=120)
    ranks(train, tmp_path / "four", *options, world_size=4, timeout=120)
    one, four = read_losses(tmp_path / "one"), read_losses(tmp_path / "four")
    assert len(one) == 7 and largest_difference(one, four) < 1e-11


def test_stopped_run_continues_with_the_same_bits(ranks, tmp_path):
    """With three ranks sums depend on DDP's buckets, which it arranges in its first step. That step must not change tables."""
    options = ["--run.stop-after", "9"]
    ranks(train, tmp_path / "unbroken", *options, world_size=3, timeout=120)
    ranks(train, tmp_path / "run", "--run.stop-after", "4", world_size=3, timeout=120)
    assert sorted(read_losses(tmp_path / "run")) == list(range(4)) and not (tmp_path / "run/summary.json").exists()
    ranks(train, tmp_path / "run", *options, world_size=3, timeout=120)
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "unbroken")


def test_checkpoint_continues_with_other_ranks_and_another_plan(ranks, on_two, tmp_path):
    ranks(train, tmp_path / "run", "--tables.plan", "row", "--run.stop-after", "5", world_size=3, timeout=120)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    saved["config"]["tables"]["plan"] = "column"  # or the run directory would be of another config
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    ranks(train_with_plots, tmp_path / "run", "--tables.plan", "column", world_size=2, timeout=120)
    assert largest_difference(read_losses(tmp_path / "run"), read_losses(on_two)) < 1e-5
    assert largest_difference(read_summary(tmp_path / "run"), read_summary(on_two)) < 1e-4


def test_exported_model_is_evaluated_and_recommends(on_two, capsys):
    exported = read_export(on_two / "export")
    assert len(exported.vocabularies["user_id"].values) == 943 and not exported.model.training
    weights = load_file(on_two / "export/model.safetensors")
    assert weights["tables.collection.tables.table_user_id.weight"].shape == (944, 9)
    assert not any("square" in name for name in weights)  # the state of the optimizer is not exported

    evaluate.main([str(on_two)])
    assert f"test/auc                 {read_summary(on_two)['test/auc']:.6f}" in capsys.readouterr().out
    recommend.main([str(on_two), "--user", "13", "--top", "3"])
    shown = capsys.readouterr().out
    assert "User 13 liked" in shown and "might like" in shown and shown.count("0.") >= 3
    with pytest.raises(UserError, match="--user nobody: there is no such user in the data"):
        recommend.main([str(on_two), "--user", "nobody"])
    with pytest.raises(UserError, match="no such directory"):
        recommend.main([str(on_two / "absent")])


def test_exported_programs_lose_little(on_two, tmp_path, capsys):
    for bits, loss in (("32", 1e-7), ("8", 1e-3), ("4", 1e-2)):
        export.main([str(on_two), "--bits", bits, "--out", str(tmp_path / bits), "--split", "valid"])
        shown = capsys.readouterr().out
        before, after = map(float, re.search(r"valid/auc +([\d.]+) before, ([\d.]+) after", shown).groups())
        assert before > 0.5 and abs(after - before) < loss
        assert ("1.00 times smaller" in shown) == (bits == "32") and (tmp_path / bits / "vocabularies.json").exists()
    exported = read_export(on_two / "export")
    batch = recommend.read_all_ratings(on_two / "export", exported, seed=0).join(torch.arange(1, 6), torch.arange(2, 7))
    program = torch.export.load(tmp_path / "32/model.pt2").module()
    scores = program(served_ids(batch.ids), batch.numbers)
    torch.testing.assert_close(scores, torch.sigmoid(exported.model(batch)).detach())


def test_items_that_a_user_has_rated_are_not_recommended(on_two):
    """Those with a rating of 3, which the recipe does not train on, neither."""
    config = json.loads((on_two / "config.json").read_text())["config"]["data"]
    exported = read_export(on_two / "export")
    ratings = recommend.read_all_ratings(on_two / "export", exported, seed=0)
    found = recommend.recommend(exported, ratings, "13", top=2000, titles={})
    row = ratings.vocabularies["user_id"].row("13")
    rated = {ratings.vocabularies["item_id"].value(int(item)) for item in ratings.items[ratings.users == row]}
    assert config["source"] == "ml-100k" and len(rated) == 636 and not rated & {each.item for each in found}
    assert len(found) == 1682 - 636 and [x.score for x in found] == sorted((x.score for x in found), reverse=True)


def evaluate_on_all_ranks(directory):
    return evaluate_run(evaluate.Options(directory), Ranks(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu")))


def test_towers_give_the_same_curve_and_ranking(ranks, tmp_path):
    ranks(train_towers_with_plots, tmp_path / "2", world_size=2, timeout=120)
    for world_size in (1, 3):
        directory = tmp_path / str(world_size)
        ranks(train_towers, directory, world_size=world_size, timeout=120)
        assert largest_difference(read_losses(directory), read_losses(tmp_path / "2")) < 1e-5
    summary = read_summary(tmp_path / "2")
    assert {"test/ndcg@10", "test/recall@10", "test/hit@10", "test/mrr@10", "test/users"} <= summary.keys()
    assert largest_difference(read_summary(tmp_path / "3"), summary) < 1e-3
    assert 0 < summary["test/ndcg@10"] < summary["test/hit@10"]
    for metrics, saved in ranks(evaluate_on_all_ranks, tmp_path / "2", world_size=3):
        assert largest_difference(metrics, {name: saved[name] for name in metrics}) < 1e-3
    exported = read_export(tmp_path / "2/export")
    ratings = recommend.read_all_ratings(tmp_path / "2/export", exported, seed=0)
    assert len(recommend.recommend(exported, ratings, "13", top=3, titles={})) == 3


def train_and_catch(directory, *args):
    with pytest.raises(Exception) as error:
        train(directory, *args)
    return str(error.value)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data.features", "user_id", "shoe_size"], r"no column 'shoe_size'.*ml-100k.user: user_id, age"),
        (["--data.features", "user_id", "user_id"], "user_id more than once"),
        (["--data.keep", "[7,9]"], "no interaction of .* is left"),
        (["--data.source", "/nowhere/day_*"], "/nowhere/day_"),
        (["--data.features", "user_id", "rating"], "rating is the label that the model predicts"),
        (["--data.features", "timestamp"], "at least one has to be of ids"),
        (["--data.test", "elsewhere"], "--data.test elsewhere: only click logs can have another test set"),
        (["--parallel.kind", "fsdp"], "must be ddp"),
        (["--model.kind", "two_tower", "--model.users", "age"], "the first has to be user_id and item_id"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_settings_raise_on_all_ranks(ranks, tmp_path, args, expected):
    for message in ranks(train_and_catch, tmp_path / "run", *args, world_size=2, timeout=60):
        assert re.search(expected, message), message
