"""Comparing runs: two by their numbers, several in a table."""

import copy
import json

import pytest

from unisono_models.training.errors import UserError
from unisono_models.training.run.compare import compare_runs, main, relative_difference, tabulate_runs

START = {
    "world_size": 2,
    "threads": 1,
    "environment": {},
    "versions": {"torch": "2.15.0"},
    "machine": {"cpu": "A", "device": "cpu"},
    "git": {"commit": "abc", "dirty": False},
}


def make_run(path, losses, *, start=START, starts=None, precision="float32", evaluations=(), finished=True):
    path.mkdir()
    config = {"run": {"steps": len(losses)}, "parallel": {"precision": precision}}
    (path / "config.json").write_text(json.dumps({"model": "clip", "recipe": "tiny", "config": config}))
    (path / "provenance.json").write_text(json.dumps({"seed": 0, "starts": starts or [start]}))
    lines = [{"kind": "train", "step": s, "loss": loss, "samples": 8} for s, loss in enumerate(losses)]
    lines += [{"kind": "evaluation", "step": s, "recall": value} for s, value in evaluations]
    lines.append({"kind": "speed", "step": 0, "samples_per_second": hash(path) % 1000 / 7})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "summary.json").write_text("{}")
    return path


def other(**changes):
    return copy.deepcopy(START) | changes


LOSSES = [1 / 3, float("nan"), 0.1, *(2.0 / k for k in range(1, 20))]


def test_same_numbers_are_bitwise_equal(tmp_path):
    runs = [make_run(tmp_path / name, LOSSES, evaluations=[(5, 0.5)]) for name in "ab"]
    verdict = compare_runs(*runs)
    assert verdict.good and "Reproduced: bitwise equal." in verdict.text and "22 steps" in verdict.text


def test_first_difference_is_named_with_both_values(tmp_path):
    changed = [*LOSSES[:4], 1.0000000000000002, *LOSSES[5:-1], 9.0]
    verdict = compare_runs(make_run(tmp_path / "a", LOSSES), make_run(tmp_path / "b", changed))
    assert not verdict.good
    assert "first difference is at step 4 (train): loss was 1.0, is 1.0000000000000002." in verdict.text
    assert "bitwise equal numbers were expected" in verdict.text
    assert compare_runs(tmp_path / "a", tmp_path / "b", steps=4).good


def test_negative_zero_is_not_zero_and_evaluations_count(tmp_path):
    a = make_run(tmp_path / "a", [0.0], evaluations=[(0, 0.5)])
    assert "loss was 0.0, is -0.0" in compare_runs(a, make_run(tmp_path / "b", [-0.0], evaluations=[(0, 0.5)])).text
    assert (
        "(evaluation): recall was 0.5, is 0.25"
        in compare_runs(a, make_run(tmp_path / "c", [0.0], evaluations=[(0, 0.25)])).text
    )
    missing = compare_runs(a, make_run(tmp_path / "d", [0.0]))
    assert not missing.good and "the evaluation line of step 0 is missing" in missing.text
    assert compare_runs(a, tmp_path / "d", steps=1).good, "a run that stops early need not evaluate where it stops"


def test_uncommitted_changes_are_pointed_out(tmp_path):
    dirty = other(git={"commit": "abc", "dirty": True})
    verdict = compare_runs(make_run(tmp_path / "a", [1.0], start=dirty), make_run(tmp_path / "b", [2.0]))
    assert "uncommitted changes" in verdict.text


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (other(world_size=1), "world_size 2 and 1"),
        (other(threads=4), "threads 1 and 4"),
        (other(versions={"torch": "2.16.0"}), "torch 2.15.0 and 2.16.0"),
        (other(machine={"cpu": "B", "device": "cpu"}), "machine.cpu A and B"),
        (other(git={"commit": "def", "dirty": False}), "git.commit abc and def"),
        (other(git=None), "git.commit abc and None"),
    ],
)
def test_other_environments_allow_for_rounding(tmp_path, start, words):
    old = make_run(tmp_path / "a", LOSSES)
    near = [loss * (1 + 1e-7) for loss in LOSSES[:10]] + [loss * 1.01 for loss in LOSSES[10:]]
    verdict = compare_runs(old, make_run(tmp_path / "b", near, start=start))
    assert verdict.good and words in verdict.text and "Reproduced: within 1e-06" in verdict.text
    assert "1.0e-07 in the first 10 steps" in verdict.text and "9.9e-03 in all 22" in verdict.text
    far = [*near[:9], near[9] * 1.00001]
    assert not compare_runs(old, make_run(tmp_path / "c", far + near[10:], start=start)).good


def test_threads_that_came_of_different_variables_are_the_same(tmp_path):
    runs = [make_run(tmp_path / "a", [1.0]), make_run(tmp_path / "b", [2.0], start=other(environment={"OMP_NUM_THREADS": "1"}))]
    assert "environments" not in compare_runs(*runs).text


def test_restarts_with_other_ranks_are_other_environments(tmp_path):
    a = make_run(tmp_path / "a", LOSSES, starts=[START, other(world_size=3)])
    verdict = compare_runs(a, make_run(tmp_path / "b", [loss * (1 + 1e-8) for loss in LOSSES]))
    assert verdict.good and "world_size 2, then 3 and 2" in verdict.text


@pytest.mark.parametrize(
    ("precision", "error", "good"), [("float64", 1e-8, False), ("float64", 1e-10, True), ("bfloat16", 5e-3, True)]
)
def test_tolerance_goes_with_the_precision(tmp_path, precision, error, good):
    a = make_run(tmp_path / "a", [1.0] * 60, precision=precision)
    b = make_run(tmp_path / "b", [1.0] * 40 + [1.0 + error] * 20, precision=precision, start=other(world_size=1))
    assert compare_runs(a, b).good is good


def test_losses_that_are_not_finite_on_one_side_only_differ():
    assert relative_difference(float("inf"), float("inf")) == 0 and relative_difference(float("nan"), 1.0) == float("inf")
    assert relative_difference(0.0, -0.0) == 0


@pytest.fixture
def runs(tmp_path):
    def make(name, recipe, seed, summary, model="clip", steps=(), **config):
        folder = tmp_path / name
        folder.mkdir()
        config = {"run": {"seed": seed, "steps": 100}, "width": 8} | config
        (folder / "config.json").write_text(json.dumps({"model": model, "recipe": recipe, "config": config}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


def test_seeds_are_one_column_and_configs_several(runs):
    paths = [
        runs("a", "emoji", 0, {"vendor/recall@1": 0.4, "vendor/rows": 10.0}),
        runs("b", "emoji", 1, {"vendor/recall@1": 0.5, "vendor/rows": 10.0}),
        runs("c", "other", 0, {"vendor/recall@1": 0.1}),
        runs("d", "emoji", 0, {"vendor/recall@1": 0.9}, width=9),
    ]
    assert tabulate_runs(paths, ["*recall*"]).splitlines() == [
        "| metric | clip emoji, width=8, 2 seeds | clip other | clip emoji, width=9 |",
        "|---|---|---|---|",
        "| vendor/recall@1 | 0.450 ± 0.050 | 0.100 | 0.900 |",
    ]
    assert "| vendor/rows | 10 |  |  |" in tabulate_runs(paths), "a count has no decimals"
    assert "| 0.45000 ± 0.05000 |" in tabulate_runs(paths, ["*recall*"], digits=5)
    with pytest.raises(UserError, match=r"--metrics \*auc: no metric has such a name\. There are vendor/recall@1, vendor/rows"):
        tabulate_runs(paths, ["*auc"])


def test_rows_are_those_of_all_runs_of_any_model(runs):
    paths = [
        runs("a", "emoji", 0, {"recall": 0.4}),
        runs("b", "deepfm", 0, {"auc": 0.9, "ended_early": "after step 4"}, "recommender"),
    ]
    assert tabulate_runs(paths).splitlines() == [
        "| metric | clip emoji | recommender deepfm |",
        "|---|---|---|",
        "| recall | 0.400 |  |",
        "| auc |  | 0.900 |",
        "",
        f"- {paths[1]}: ended early after step 4",
    ]


def test_a_run_that_repeats_another_is_not_a_seed(runs):
    paths = [runs(name, "emoji", 0, {"recall": value}) for name, value in (("a", 0.4), ("b", 0.4), ("c", 0.5))]
    table = tabulate_runs(paths)
    assert "| metric | clip emoji |" in table and "| recall | 0.400 |" in table
    assert f"- {paths[1]}: repeats {paths[0]}, with the same metrics; it is not counted again" in table
    assert f"- {paths[2]}: repeats {paths[0]}, with other metrics" in table


def test_unfinished_and_unreadable_runs_are_marked(runs, tmp_path, capsys):
    steps = [{"kind": "train", "step": step, "loss": 1.0} for step in range(30)]
    steps += [{"kind": "evaluation", "step": 9, "recall": 0.1}, {"kind": "evaluation", "step": 19, "recall": 0.2}]
    paths = [runs("a", "emoji", 0, {"recall": 0.4}), runs("b", "emoji", 0, None, steps=steps), runs("c", "emoji", 0, None)]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    main([*map(str, paths), str(tmp_path / "broken"), str(tmp_path / "nothing")])
    said = capsys.readouterr().out
    assert "| clip emoji | clip emoji, unfinished: 30 of 100 steps | clip emoji, unfinished: 0 of 100 steps |" in said
    assert "| recall | 0.400 | 0.200 |  |" in said
    assert (
        f"- {tmp_path}/broken: cannot be read as a run: " in said and f"- {tmp_path}/nothing: cannot be read as a run: " in said
    )
    with pytest.raises(UserError, match=r"^there is no run to compare"):
        main([str(tmp_path / "broken")])


def test_columns_that_no_field_tells_apart_are_named_by_their_paths(runs):
    paths = [runs(name, "emoji", seed, None) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    titles = tabulate_runs(paths).splitlines()[0].split(" | ")[1:]
    assert len(set(titles)) == 3 and str(paths[0]) in titles[0] and "run.seed=1" in titles[2]
