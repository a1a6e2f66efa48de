"""The cheap parts of scripts/benchmarks: command lines, and the report and plot of a committed results file."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _import_path():
    sys.path.insert(0, str(FOLDER.parent))
    yield
    sys.path.remove(str(FOLDER.parent))


@pytest.mark.parametrize(
    "name", ["collectives", "contrastive", "dataparallel", "embedding", "id-maps", "recommender", "gpu-ledger", "clip"]
)
def test_command_line_has_a_class_options_and_a_text(name, capsys):
    from benchmarks.__main__ import BENCHMARKS, benchmark_class, main

    assert name in BENCHMARKS
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert "--quick" in shown and "--out" in shown
    benchmark = benchmark_class(name)(quick=True)
    benchmark.validate()
    assert all(f"--{option.replace('_', '-')}" in shown for option in benchmark.options())


def test_what_the_ranks_import_exists():
    """Imports inside of functions run only in a benchmark, so a renamed module would go unnoticed."""
    missing = []
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("unisono", "unisono_models", "tests"):
                found = importlib.import_module(node.module)
                missing += [f"{path.name}: {node.module}.{a.name}" for a in node.names if not has_name(found, a.name)]
    assert missing == []


def has_name(module, name):
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def test_every_benchmark_is_in_the_readme_with_its_report_and_plot():
    from benchmarks.__main__ import BENCHMARKS

    text = (FOLDER / "README.md").read_text()
    for name in BENCHMARKS:
        assert f"`./scripts/bench {name}`" in text
        assert re.search(rf"\[report\]\(results/[0-9-]+-{name}\.md\)", text)
        assert re.search(rf"\(results/[0-9-]+-{name}\.png\)", text)
    assert [link for link in re.findall(r"\((results/[^)]+)\)", text) if not (FOLDER / link).exists()] == []
    assert [path for path in re.findall(r"`(harness/[\w.]+)`", text) if not (FOLDER / path).exists()] == []


def test_report_command_writes_the_table_of_a_committed_report(tmp_path):
    from benchmarks.__main__ import main

    path = sorted((FOLDER / "results").glob("*-recommender.json"))[-1]
    main(["report", str(path), "--out", str(tmp_path)])
    written, committed = (
        [
            line
            for line in folder.joinpath(f"{path.stem}.md").read_text().splitlines()
            if line.startswith(("| **unisono", "| Torch"))
        ]
        for folder in (tmp_path, path.parent)
    )
    assert len(written) > 3
    assert written == committed
    assert (tmp_path / f"{path.stem}.png").stat().st_size > 10_000


GPU_LEDGER = [
    ("CLIP loss", "64 rows of 512", "open_clip ClipLoss, local"),
    ("Gather of a tree", "2 leaves, 1,024 rows of 1,024", "torch.distributed.nn.functional.all_gather, cat"),
    ("Gradients", "ResNet-50", "torch DDP"),
    ("Batch normalization", "32 images, 256 channels of 56 x 56", "torch SyncBatchNorm"),
]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
@pytest.mark.parametrize(("job", "size", "peer"), GPU_LEDGER)
def test_gpu_ledger_counts_the_same_again(job, size, peer):
    """The peer's counts are the committed ones, and ours are the same twice."""
    from benchmarks.gpu_ledger.contenders import JOBS, count

    def row(name):
        found = count(JOBS[job].contenders[name], JOBS[job].sizes[size], world_size=8)
        found.pop("host_sync_lines")  # they name lines of the benchmark
        return found

    path = sorted((FOLDER / "results").glob("*-gpu-ledger.json"))[-1]
    committed = json.loads(path.read_text())["cases"][f"{job}, {size}, W = 8"]
    found = row(peer)
    assert {key: committed[peer][key] for key in found} == found
    ours = [name for name in JOBS[job].contenders if name.startswith("unisono")]
    assert ours
    for name in ours:
        assert row(name) == row(name)


def test_results_survive_json(tmp_path):
    from benchmarks.harness.results import Measurement, Ratio, Results

    found = [Measurement("a case", name, np.array([1.0, 2.0, 4.0]), np.array([0.5, 1.5, 2.5]), {"n": 3}) for name in ("a", "b")]
    path = tmp_path / "2026-01-01-collectives.json"
    Results(found, {"benchmark": "collectives", "torch": "2"}).save(path, {("a case", "a"): {"ratio": Ratio(1.0, 0.5, 2.0)}})
    again = Results.load(path)
    assert again.about == {"benchmark": "collectives", "torch": "2"}
    assert again.cases == ["a case"]
    assert [m.contender for m in again.measurements] == ["a", "b"]
    assert again.measurements[1].wall.tolist() == [1.0, 2.0, 4.0]
    assert again.measurements[0]["ratio"] == {"median": 1.0, "least": 0.5, "most": 2.0}


def test_rounds_are_combined_over_ranks():
    from benchmarks.harness.measure import Seconds
    from benchmarks.harness.results import combine_rounds

    ranks = [
        {"a": [Seconds(1.0, 2.0), Seconds(3.0, 4.0)], "untimed": []},
        {"a": [Seconds(2.0, 4.0), Seconds(1.0, 0.0)], "untimed": []},
    ]
    found = combine_rounds("a case", "a", ranks, size=7)
    assert found.wall.tolist() == [2000.0, 3000.0]  # ms of the slowest rank
    assert found.cpu.tolist() == [3000.0, 2000.0]  # ms, the mean
    assert found["size"] == 7
    assert not combine_rounds("a case", "untimed", ranks).is_timed


def test_turns_put_every_contender_first_and_after_each_other():
    from benchmarks.harness.measure import order_of_turns

    orders = [order_of_turns("abc", turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert {(order[0], order[1]) for order in orders} == {(a, b) for a in "abc" for b in "abc" if a != b}


def test_a_ratio_shows_its_range():
    from benchmarks.harness.results import Ratio

    assert f"{Ratio.of(np.array([1.0, 2.0, 4.0])):.2fx}" == "2.00x (1.00-4.00)"
    assert f"{Ratio.of(np.array([1.0, 1.0])):.2fx}" == "1x"
    assert f"{Ratio.of(np.array([1500.0])):,.0f}" == "1,500"
