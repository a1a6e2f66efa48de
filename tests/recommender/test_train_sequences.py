"""Runs of sasrec on one's own ratings: the same on other ranks and after a stop, its commands, and mistakes."""

import json
import re

import pytest
import torch

from tests.recommender.test_train import largest_difference, read_losses, read_summary
from tests.recommender.test_train_ratings import train
from unisono_models.recommender.commands import evaluate, export, recommend
from unisono_models.recommender.config import ModelConfig
from unisono_models.recommender.model.export import read_export
from unisono_models.training.errors import UserError

OPTIONS = ["--data.batch", "3", "--model.dim", "8", "--model.hidden", "8", "--model.length", "4", "--run.log-every", "1"]
OPTIONS += ["--parallel.precision", "float64", "--model.dropout", "0.2", "--run.steps", "16"]


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """Ten users who take one movie after the other, in a circle of twelve, and two who rated one movie each."""
    path = tmp_path_factory.mktemp("data") / "ratings.csv"
    rows = [(f"u{user}", f"m{(user + step) % 12}", step) for user in range(10) for step in range(5 + 3 * user)]
    lines = [f"{user},{movie},{1_000 + time}" for user, movie, time in [*rows, ("x", "m1", 0), ("y", "m50", 0)]]
    path.write_text("\n".join(["user,movie,timestamp", *reversed(lines)]) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(ranks, csv, tmp_path_factory):
    """A run of one rank."""
    directory = tmp_path_factory.mktemp("runs") / "one"
    ranks(train, directory, ["sasrec"], csv, *OPTIONS, world_size=1, timeout=120)
    return directory


@pytest.mark.parametrize("plan", ["row", "column"])
def test_ranks_differ_by_rounding_alone_also_after_a_stop(ranks, csv, finished, tmp_path, plan):
    """Three windows in a step: one of the four ranks has none."""
    options = [*OPTIONS, "--tables.plan", plan]
    for stop in ("5", "16"):
        ranks(train, tmp_path / "run", ["sasrec"], csv, *options, "--run.stop-after", stop, world_size=4, timeout=120)
    assert len(read_losses(finished)) == 16 and read_losses(finished)[15] < read_losses(finished)[0]
    assert largest_difference(read_losses(finished), read_losses(tmp_path / "run")) < 1e-11
    assert largest_difference(read_summary(finished), read_summary(tmp_path / "run")) < 1e-9


def test_finished_run_is_evaluated_and_recommends(finished, csv, tmp_path, capsys):
    assert read_summary(finished)["test/users"] == 10
    evaluate.main([str(finished)])
    assert f"test/ndcg@10             {read_summary(finished)['test/ndcg@10']:.6f}" in capsys.readouterr().out
    recommend.main([str(finished), "--user", "u1", "--top", "3"])
    assert "User u1 liked" in capsys.readouterr().out
    exported = read_export(finished / "export")
    ratings = recommend.read_all_ratings(finished / "export", exported, seed=0)
    found = recommend.recommend(exported, ratings, "u1", top=20, titles={})
    assert {each.item for each in found} == {"m9", "m10", "m11", "m0", "m50"}  # u1 has rated m1 to m8

    export.main([str(finished), "--bits", "32", "--out", str(tmp_path), "--split", "valid"])
    shown = capsys.readouterr().out
    before, after = map(float, re.search(r"valid/recall@10 +([\d.]+) before, ([\d.]+) after", shown).groups())
    assert before == after
    users, items = (torch.export.load(tmp_path / f"{side}.pt2").module() for side in ("users", "items"))
    rated = exported.vocabularies["movie"].rows([f"m{item}" for item in range(1, 9)])
    chosen = exported.vocabularies["movie"].rows([each.item for each in found])
    scores = items({"movie": chosen}) @ users({"movie": (rated, torch.tensor([0, 8]))})[0]
    assert users({"movie": (rated, torch.tensor([0, 2, 2, 8]))}).shape == (3, 8)
    torch.testing.assert_close(scores, torch.tensor([each.score for each in found]).double())


def test_a_core_of_users_and_items_is_left(csv, tmp_path):
    said = train(tmp_path / "run", ["sasrec"], csv, *OPTIONS, "--data.k-core", "4", "--run.steps", "2")
    assert "--data.k-core 4 leaves out 2 ratings, by users or of items that have fewer" in said
    assert "185 ratings by 10 users of 12 items are used" in said
    assert json.loads((tmp_path / "run/config.json").read_text())["config"]["data"]["k_core"] == 4
    with pytest.raises(UserError, match=r"--data.k-core 100: no user and no item of .* has so many interactions"):
        train(tmp_path / "none", ["sasrec"], csv, "--data.k-core", "100")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data.split", "rows"], "--data.split rows: sasrec would learn from what comes after the test"),
        (["--model.items", "movie", "user"], "--model.items movie user: sasrec knows items by their ids alone"),
        (["--data.threshold", "4"], "--data.threshold 4: sasrec has no use for it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings_raise(csv, tmp_path, args, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        train(tmp_path / "run", ["sasrec"], csv, *args)


def test_ratings_without_times_and_heads_that_do_not_divide_raise(tmp_path):
    with pytest.raises(ValueError, match=r"the heads must divide --model.dim 64"):
        ModelConfig("sasrec", dim=64, heads=3)
    (tmp_path / "r.csv").write_text("user,movie\na,x\na,y\na,z\n")
    with pytest.raises(ValueError, match=r"--data.timestamp: r.csv has no column of times.*two_tower --data.source"):
        train(tmp_path / "run", ["sasrec"], tmp_path / "r.csv")
