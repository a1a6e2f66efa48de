"""The command that computes the metrics of a finished run again."""

import pytest

from tests.gan.small_runs import ALONE, SEED
from unisono_models.gan.commands.evaluate import EvaluateOptions, evaluate_run
from unisono_models.gan.commands.evaluate import main as evaluate
from unisono_models.gan.commands.sample import main as sample
from unisono_models.training.errors import UserError


def test_evaluate_gives_the_metrics_of_the_summary(finished_run):
    rows = evaluate_run(EvaluateOptions(finished_run[0]), ALONE)
    assert [row["generated"] for row in rows] == [row["run"] for row in rows] == list(finished_run[2].values())
    for changed in ({"samples": 20}, {"seed": SEED + 1}):
        others = evaluate_run(EvaluateOptions(finished_run[0], **changed), ALONE)
        assert others[0]["generated"] != rows[0]["generated"] and others[0]["run"] == rows[0]["run"]


def test_unfinished_run_is_rejected(finished_run, tmp_path):
    with pytest.raises(UserError, match=r"no such directory.*scripts/train gan"):
        sample([str(tmp_path / "none")])
    (tmp_path / "config.json").write_bytes((finished_run[0] / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"export/model.safetensors is not there yet"):
        evaluate([str(tmp_path)])
