"""Runs on streamed clicks with bad lines: stopped, continued on other ranks, evaluated, and read back."""

import json
import random
import re
import shutil

import pytest
import torch

from tests.recommender.test_train import largest_difference, read_losses, read_summary
from tests.training.skip_plots import skip_plots
from unisono_models.recommender.commands.evaluate import Options, evaluate_run
from unisono_models.recommender.model.export import read_export
from unisono_models.recommender.train import main
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.errors import UserError

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
FEATURES = ["I1", "I2", "C1:id:60", "C2:id:40", "C3:id:9"]
SETTINGS = {"model.dim": 4, "model.hidden": 8, "model.bottom": 4, "tables.lr": 0.1, "run.steps": 12, "run.evaluate-every": 6}
SETTINGS |= {"data.batch": 150, "data.chunk_rows": 32, "data.max-broken": 0.05, "run.timeout": 60, "checkpoint.every": 0}


def write_day(path, lines, seed, *, bad=()):
    draw = random.Random(seed)
    with path.open("w") as file:
        for line in range(lines):
            ids = [draw.randrange(50) for _ in range(26)]
            label = int(draw.random() < (0.8 if ids[0] % 3 else 0.2))
            row = [label, *(draw.randrange(9) for _ in range(13)), *(f"{x:08x}" if x % 7 else "" for x in ids)]
            file.write("\t".join(map(str, row if line not in bad else row[:-1])) + "\n")
    return path


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """A day with ten bad lines, and one to test on, with five."""
    folder = tmp_path_factory.mktemp("days")
    write_day(folder / "day_0", 1000, 0, bad=range(0, 1000, 100))
    write_day(folder / "day_1", 400, 1, bad=range(3, 400, 80))
    return folder


def train_with_plots(directory, days, *args):
    torch.manual_seed(hash(str(directory)) % 2**31)
    settings = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    data = ["--data.source", str(days / "day_0"), "--data.test", str(days / "day_1"), "--data.parts", "0.8", "0.1", "0.1"]
    main(["criteo", "--run.dir", str(directory), *data, "--data.features", *FEATURES, *settings, *args])


def train(directory, days, *args):
    with skip_plots():
        train_with_plots(directory, days, *args)


MAPPED = ["--data.ids", "mapped", "--data.seen", "2", "--data.eviction", "least_recent"]


@pytest.mark.parametrize("ids", [["--data.ids", "hashed"], MAPPED], ids=["hashed", "mapped"])
def test_streamed_runs_obey_the_law_and_continue_after_a_stop(ranks, days, tmp_path, ids):
    ranks(train, tmp_path / "one", days, *ids, world_size=1, timeout=60)
    ranks(train, tmp_path / "many", days, *ids, "--run.stop-after", "5", world_size=3, timeout=60)
    ranks(train, tmp_path / "many", days, *ids, world_size=2, timeout=60)  # another number of ranks
    assert largest_difference(read_losses(tmp_path / "many"), read_losses(tmp_path / "one")) < 1e-5
    assert largest_difference(read_summary(tmp_path / "many"), read_summary(tmp_path / "one")) < 1e-4
    assert read_summary(tmp_path / "one")["test/rows"] == 395 and read_summary(tmp_path / "one")["test/bad_rows"] == 5
    reports = [(tmp_path / name / "report.html").read_text() for name in ("one", "many")]
    pattern = r"(\d+ of [\d,]+) rows skipped. wrong number of columns: \d+, such as day_0 \(line"
    counted = [re.search(pattern, text)[1] for text in reports]
    assert (
        counted[0] == counted[1] and int(counted[0].split()[0]) > 10
    )  # the rows that each rank has read, in both starts, count once

    metrics, saved = evaluate_run(Options(tmp_path / "many"), ALONE)
    assert largest_difference(metrics, {name: saved[name] for name in metrics}) < 1e-5
    exported = read_export(tmp_path / "many/export")
    assert bool(exported.model.tables.maps) == (ids == MAPPED)


def test_mapped_ids_have_rows_of_their_own(days, tmp_path):
    """All of them get one."""
    train_with_plots(tmp_path / "run", days, "--data.ids", "mapped", "--data.seen", "1")
    maps = read_export(tmp_path / "run/export").model.tables.maps
    rows = maps.maps["map_C1"].eval()(torch.tensor([x for x in range(50) if x % 7] + [-1]))
    assert len(rows.unique()) == 43 and int(rows.min()) > 0  # 0 to 49 without multiples of 7, and the blank


def train_and_catch(directory, days, *args):
    with pytest.raises(Exception) as error:
        train(directory, days, *args)
    return str(error.value)


def test_bad_lines_stop_a_run_on_all_ranks(ranks, days, tmp_path):
    found = ranks(
        train_and_catch, tmp_path / "run", days, "--data.max-broken", "0.001", "--run.log-every", "2", world_size=2, timeout=60
    )
    assert (
        found[0] == found[1]
        and "wrong number of columns" in found[0]
        and "This is more than the allowed fraction of 0.001" in found[0]
    )


def test_test_files_without_labels_raise(days, tmp_path):
    other = tmp_path / "days"
    shutil.copytree(days, other)
    write_day(other / "day_1", 100, 2, bad=range(100))
    assert "100 of 100 rows of test skipped" in train_and_catch(tmp_path / "run", other)


def test_run_does_not_continue_on_changed_data(days, tmp_path):
    other = tmp_path / "days"
    shutil.copytree(days, other)
    train(tmp_path / "run", other, "--run.stop-after", "3")
    write_day(other / "day_0", 1200, 5)
    assert "has changed since the run began" in train_and_catch(tmp_path / "run", other)


def test_too_few_lines_say_what_to_do(days, tmp_path):
    assert "make smaller chunks (--data.chunk-rows)" in train_and_catch(tmp_path / "run", days, "--data.chunk-rows", "2000")
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["config"]["data"]["chunk_rows"] == 2000


@pytest.mark.parametrize("option", [("--data.threshold", "4.0"), ("--data.keep", "[4,inf)")], ids=lambda option: option[0])
def test_options_of_ratings_are_refused_for_clicks(days, tmp_path, option):
    """They were ignored, and nothing said so."""
    with pytest.raises(UserError, match=re.escape(f"{option[0]} {option[1]}: click logs have labels")):
        train(tmp_path / "run", days, *option)
