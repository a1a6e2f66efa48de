"""Runs on one's own ratings, in CSV and parquet: what is said about them, early stopping, recommendations, mistakes."""

import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from tests.recommender.test_train import largest_difference, read_losses, read_summary
from tests.training.skip_plots import skip_plots
from unisono_models import recommender
from unisono_models.recommender.commands import evaluate, recommend
from unisono_models.recommender.early_stopping import EarlyStopping
from unisono_models.recommender.train import main
from unisono_models.training.errors import UserError

SHORT = ["--run.steps", "12", "--run.evaluate-every", "3", "--run.timeout", "60", "--checkpoint.every", "0"]


def write_ratings(path, rows=240, *, header="userId,movieId,rating,timestamp,title"):
    """Halves as ratings, ids with spaces, and three bad lines. Users like movies of their own parity."""
    random = torch.Generator().manual_seed(0)
    users, movies, times = (torch.randint(high, (rows,), generator=random).tolist() for high in (12, 15, 10_000))
    noise = torch.rand(rows, generator=random).tolist()
    lines = [header]
    for user, movie, time, other in zip(users, movies, times, noise, strict=True):
        likes = (user % 2 == movie % 2) != (other < 0.25)
        lines.append(f'anna {user},m{movie},{4.5 if likes else 2 + 0.5 * (time % 2)},{time},"Movie, the {movie}th"')
    path.write_text("\n".join([*lines, "anna 1,m2,good,5,x", "anna 2,,4,5,x", "anna 3"]) + "\n")
    return path


def write_parquet(csv, path):
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    kept = csv.with_name("good.csv")
    kept.write_text("\n".join(csv.read_text().splitlines()[:-3]))
    parquet.write_table(arrow_csv.read_csv(kept), path)
    return path


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("data") / "ratings.csv")


def train(directory, recipe, source, *args):
    """Return what the run says on stderr."""
    bad = ["--data.max-broken", "0.05"]
    with skip_plots(), redirect_stderr(io.StringIO()) as said:
        main([*recipe, "--data.source", str(source), "--run.dir", str(directory), *SHORT, *bad, *args])
    return said.getvalue()


@pytest.mark.parametrize("recipe", [[], ["two_tower"]], ids=["default", "two_tower"])
def test_own_ratings_train_on_any_ranks_and_recommend(ranks, csv, tmp_path, capsys, recipe):
    said, nothing = ranks(train, tmp_path / "two", recipe, csv, world_size=2, timeout=60)
    assert not nothing
    assert "240 ratings by 12 users of 15 items are used" in said and "user is 'userId', item is 'movieId'" in said
    assert "3 of 243 rows skipped" in said and "is larger than the data" in said and "the test has only" in said
    assert ("every rating counts as liked, from 2 to 4.5" if recipe else "a rating of at least 4.5 counts as liked") in said
    source = csv
    if recipe:  # the same rows as parquet
        source = write_parquet(csv, tmp_path / "ratings.parquet")
    ranks(train, tmp_path / "one", recipe, source, world_size=1, timeout=60)
    assert largest_difference(read_losses(tmp_path / "one"), read_losses(tmp_path / "two")) < 1e-5
    summary = read_summary(tmp_path / "two")
    assert largest_difference(read_summary(tmp_path / "one"), summary) < 1e-4
    capsys.readouterr()
    for run in (tmp_path / "one", tmp_path / "two"):
        evaluate.main([str(run)])
        name = "test/hit@10" if recipe else "test/auc"
        assert re.search(rf"{name} +{summary[name]:.6f}", capsys.readouterr().out)
        recommend.main([str(run), "--user", "anna 3", "--top", "3"])
        shown = capsys.readouterr().out
        assert "User anna 3 liked" in shown and "Movie, the" in shown
    with pytest.raises(UserError, match="--user nobody: there is no such user in the data; there are anna 0"):
        recommend.main([str(tmp_path / "one"), "--user", "nobody"])
    report = (tmp_path / "two" / "report.html").read_text()
    assert "3 of 243 rows skipped" in report and "are used" in report and "published" not in report
    assert not re.search(r"\d\.0000<", report)  # a count has no decimals


def test_implicit_ratings_of_a_few_rows_train_two_towers(tmp_path):
    """Users with one row, fewer items than a list has places."""
    path = tmp_path / "clicks.tsv"
    path.write_text("uid\tsku\n" + "".join(f"{user}\t{user % 4}\n" for user in range(9)) + "0\t1\n0\t2\n")
    train(tmp_path / "run", ["two_tower"], path, "--data.split", "leave_one_out")
    assert read_summary(tmp_path / "run")["test/users"] == 1


def early(directory, csv, *args):
    options = ["--evaluation.patience", "2", "--run.steps", "60", "--tables.lr", "0.5", "--run.evaluate-every", "2"]
    train(directory, [], csv, *options, *args)


def read_evaluations(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"] + 1: line["valid/auc"] for line in lines if line["kind"] == "evaluation" and "valid/auc" in line}


def test_early_stopping_tests_and_exports_the_best_weights(ranks, csv, tmp_path, capsys):
    ranks(early, tmp_path / "two", csv, world_size=2, timeout=60)
    found, summary = read_evaluations(tmp_path / "two"), read_summary(tmp_path / "two")
    steps = list(found)
    best = max(steps, key=lambda step: (found[step], step))
    assert steps[-1] < 60 and summary["best_step"] == best and summary["valid/auc"] == found[best]
    assert max(found[step] for step in steps[-2:]) <= max(found[step] for step in steps[:-2])
    assert "has not improved in 2 evaluations" in summary["ended_early"]
    evaluate.main([str(tmp_path / "two"), "--split", "valid"])
    assert f"valid/auc                {found[best]:.6f}" in capsys.readouterr().out
    # Stopped and continued on another number of ranks, with the count of evaluations that it had.
    ranks(early, tmp_path / "one", csv, "--run.stop-after", str(steps[-2]), world_size=1, timeout=60)
    ranks(early, tmp_path / "one", csv, world_size=3, timeout=60)
    assert list(read_evaluations(tmp_path / "one")) == steps and read_summary(tmp_path / "one")["best_step"] == best


def test_a_nan_is_no_improvement():
    stopping = EarlyStopping(2)
    assert [stopping.update(x) for x in (float("nan"), 0.5, float("nan"), 0.5)] == [False, False, False, True]
    assert EarlyStopping(3, state=stopping.state).update(0.4) and not EarlyStopping(0, state=stopping.state).update(0.4)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data.user", "usr"], "--data.user usr: ratings.csv has no such column. Did you mean userId"),
        (["--data.threshold", "5"], r"--data.threshold 5: no rating counts as liked: rating goes from 2 to 4\.5"),
        (["--evaluation.patience", "2", "--run.evaluate-every", "0"], "--evaluation.patience 2 counts evaluations"),
        (["--model.kind", "two_tower", "--data.threshold", "4"], "--data.threshold 4: two_tower has no use for it"),
        (
            ["--data.source", "rating.csv"],
            "--data.source rating.csv: there is no such file or folder. The datasets with a name are ml-1m, ml-100k",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_errors_of_the_user(csv, tmp_path, args, expected):
    with pytest.raises(UserError, match=expected):
        train(tmp_path / "run", [], csv, *args)


def test_click_models_need_ratings(tmp_path):
    (tmp_path / "r.csv").write_text("user,item\na,x\nb,y\n")
    with pytest.raises(ValueError, match=r"r.csv has no column of ratings.*two_tower --data.source"):
        train(tmp_path / "run", [], tmp_path / "r.csv")


def test_the_lines_of_the_readme_work(csv, tmp_path, monkeypatch, capsys):
    """As they are written, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    text = (Path(recommender.__file__).parent / "README.md").read_text()
    block = text.split("## Train on your own ratings")[1].split("These lines train")[1].split("\n- **Columns**")[0]
    lines = [line.split() for line in block.splitlines() if line.startswith("    ")]
    table = csv.read_text().replace("anna 3", "anna").splitlines()[:-3]
    Path("ratings.csv").write_text("\n".join(table))
    commands = {"recommend": recommend.main, "evaluate": evaluate.main}
    ran = []
    for line in lines:
        if line[0] == "./scripts/train":
            assert line[1] == "recommender"
            with skip_plots():
                main([*line[2:], "--run.steps", "6", "--run.evaluate-every", "2"])
            ran.append("train")
        else:
            assert line[:3] == ["python", "-m", "unisono_models.recommender"]
            commands[line[3]](line[4:])
            ran.append(line[3])
    assert ran == ["train", "train", "recommend", "evaluate"]
    assert "User anna liked" in capsys.readouterr().out
