"""Runs side by side."""

import json

import pytest

from unisono_models.training.run.compare import main, tabulate_runs


@pytest.fixture
def runs(tmp_path):
    def make(name, recipe, seed, summary, width=8):
        folder = tmp_path / name
        folder.mkdir()
        config = {"run": {"seed": seed}, "width": width}
        (folder / "config.json").write_text(json.dumps({"model": "clip", "recipe": recipe, "config": config}))
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


def test_seeds_are_one_column_and_recipes_several(runs):
    paths = [
        runs("a", "emoji", 0, {"vendor/recall@1": 0.4, "vendor/rows": 10.0}),
        runs("b", "emoji", 1, {"vendor/recall@1": 0.5, "vendor/rows": 10.0}),
        runs("c", "other", 0, {"vendor/recall@1": 0.1}),
        runs("d", "emoji", 0, {"vendor/recall@1": 0.9}, width=9),
    ]
    assert tabulate_runs(paths, ["*recall*"]).splitlines() == [
        "| metric | clip emoji, 2 seeds | clip other | clip emoji |",
        "|---|---|---|---|",
        "| vendor/recall@1 | 0.450 ± 0.050 | 0.100 | 0.900 |",
    ]
    assert "| 0.45000 ± 0.05000 |" in tabulate_runs(paths, ["*recall*"], digits=5)


def test_unfinished_run_is_named(runs):
    with pytest.raises(SystemExit, match="b: not a finished run"):
        main([str(runs("b", "emoji", 0, None))])
