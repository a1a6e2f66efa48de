"""The report carries all it shows, escapes all it is given, and a real browser shows it."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from PIL import Image

from unisono_models.training.run.plots import collect_panels, draw_plots, smoothed, write_plots
from unisono_models.training.run.report import ReportImage, format_number, html_table, key_value_table, write_report
from unisono_models.training.run.run_directory import RunDirectory

EVIL = "<script>alert('x')</script>\"&"
START = {
    "time": "2026-11-16T08:00:00+00:00",
    "command": f"python -m {EVIL}",
    "torchrun": True,
    "world_size": 2,
    "hosts": {"node": 2},
    "machine": {"cpu": "A CPU", "device": "cpu"},
    "versions": {"torch": "2.15"},
    "git": {"commit": "0123456789abcdef", "dirty": True},
}


def make_run(path):
    saved = {"model": "clip", "recipe": "emoji", "config": {"run": {"steps": 60, "seed": 3}, "text": {"name": EVIL}}}
    (path / "config.json").write_text(json.dumps(saved))
    (path / "provenance.json").write_text(json.dumps({"seed": 3, "starts": [START, START]}))
    lines = [{"kind": "train", "step": s, "loss": 1 / (s + 1) + 0.01 * (s % 3), "rate": 0.1, "samples": 4} for s in range(60)]
    lines += [{"kind": "evaluation", "step": s, "t/recall@1": 0.125, "t/recall@10": s / 60, "loss": 0.5} for s in (29, 59)]
    lines += [{"kind": "speed", "step": s, "samples_per_second": 1000.0 + s} for s in range(9, 60, 10)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Image.new("RGB", (32, 16), "red").save(path / "grid.png")
    return RunDirectory(path, resumes=False, first=True)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run with its report, which takes a while to draw."""
    run = make_run(tmp_path_factory.mktemp("run"))
    report(run, summary={f"recall {EVIL}": 0.375})
    return run


@pytest.fixture
def run(tmp_path):
    """One without curves."""
    run = make_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text(next(line for line in reversed(lines) if "recall" in line))
    return run


def report(run, **options):
    path = write_report(
        run,
        title=f"Words to emoji {EVIL}",
        intro=f"First {EVIL}.\n\nSecond.",
        images=[ReportImage(run.path / "grid.png", f"a grid {EVIL}")],
        tables={f"Splits {EVIL}": [{"split": EVIL, "R@1": 0.25}, {"split": "b", "R@1": 0.5, "more": None}]},
        notes=[f"Licence {EVIL}"],
        **options,
    )
    assert path == run.path / "report.html"
    return path.read_text()


class Tags(HTMLParser):
    VOID = ("meta", "img", "source")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "srcset", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_report_is_whole_in_itself_and_escapes_everything(shown):
    page = (shown.path / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and "script" not in tags.seen and "link" not in tags.seen
    assert len(tags.links) > 4 and all(link.startswith("data:image/png;base64,") for link in tags.links)
    assert EVIL not in page and "alert('x')" not in page
    assert not re.search(r"https?://|url\(|@import", page)
    text = " ".join(tags.text)
    assert text.count(EVIL) >= 8, "it is all there, as text"
    for wanted in ("0.375", "Second.", "run.seed", "2.15", "start 2 of 2", "0123456789 with changes"):
        assert wanted in text


def test_report_says_how_to_run_again(run):
    page = report(run)
    assert f"python -m unisono_models.training reproduce {run.path}" in page
    assert f"torchrun --standalone --nproc-per-node 2 -m unisono_models.clip train --config {run.path}/config.json" in page


def test_final_metrics_are_the_summary_or_the_last_evaluation(run):
    page = report(run)
    assert "t: recall@10" in page and "0.9833" in page and "Curves" not in page
    (run.path / "summary.json").write_text('{"best": 0.123456}')
    page = report(run)
    assert "0.1235" in page and "best" in page
    page = report(run, summary={"a": 1.0, "b": 2.0}, highlights=["b"])
    assert page.count("<dt>") == 1 and "<dt>b</dt><dd>2</dd>" in page


def test_report_of_a_run_without_metrics_images_or_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "clip", "recipe": "tiny", "config": {}}')
    (tmp_path / "metrics.jsonl").touch()
    page = write_report(RunDirectory(tmp_path, False, True), title="Empty", intro="").read_text()
    assert "Curves" not in page and "Samples" not in page and "reproduce" in page


def test_image_of_unknown_type_is_rejected(run):
    with pytest.raises(ValueError, match=r"notes\.txt is none of \.png"):
        write_report(run, title="", intro="", images=[ReportImage(run.path / "notes.txt", "")])


def test_other_ranks_write_nothing(tmp_path):
    write_report(RunDirectory(tmp_path, False, False), title="", intro="")
    assert list(tmp_path.iterdir()) == []


def test_plots_are_images_named_after_their_values(shown, tmp_path):
    names = {path.name for path in shown.plots.iterdir()}
    assert names == {"loss.png", "rate.png", "samples-per-second.png", "t-recall.png"}
    assert {Image.open(shown.plots / name).size for name in names} == {(1024, 544)}
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0, "a b/c": 1}\n')
    assert write_plots(tmp_path, tmp_path / "plots") == {"a b/c": tmp_path / "plots/a-b-c.png"}


def test_evaluations_of_a_family_share_a_panel_and_those_of_the_loss_go_with_it():
    lines = [{"kind": "train", "step": s, "loss": 1.0, "other": 2.0} for s in range(3)]
    lines += [{"kind": "evaluation", "step": s, "a/r@1": 0.1, "a/r@5": 0.2, "b": 1.0, "loss": 0.5} for s in (1, 2)]
    panels = {panel.name: panel for panel in collect_panels(lines)}
    assert list(panels) == ["loss", "other", "a/r", "b"]
    assert list(panels["a/r"].marks) == ["@1", "@5"] and list(panels["loss"].marks) == ["evaluation"]
    assert panels["loss"].lines["loss"] == ([0, 1, 2], [1.0, 1.0, 1.0])


def test_curves_that_are_not_finite_or_single_are_drawn():
    values = [float("nan"), float("inf"), 1.0] + [2.0] * 60
    lines = [{"kind": "train", "step": s, "loss": value, "$bad^": value} for s, value in enumerate(values)]
    for some, theme in ((lines, "dark"), (lines[:1], "light"), (lines[2:3], "light")):
        assert all(image.startswith(b"\x89PNG") for image in draw_plots(some, theme=theme).values())
    assert draw_plots([]) == {}


def test_smoothing_keeps_a_straight_line_straight():
    assert smoothed([float(i) for i in range(9)], 3)[1:-1] == [float(i) for i in range(1, 8)]


def test_numbers_are_short_and_columns_aligned():
    assert [format_number(x) for x in (0.20483, 0.5, 7, 7.0, 999.96, 1234567, True, None, float("nan"))] == [
        *("0.2048", "0.5000", "7", "7", "1000", "1,234,567", "True", "None", "nan")
    ]
    html = html_table([{"a": 0.25, "b": "x"}, {"a": 0.5, "b": 3}, {"b": "y"}])
    assert '<td data-column="a" class="number"></td><td data-column="b">y</td>' in html
    assert '<td data-column="a" class="number">0.5000</td>' in html and '<td data-column="b">x</td>' in html
    assert '<td data-column="a" class="number">2.500</td>' in html_table([{"a": 12.345}, {"a": 2.5}])
    assert '<td data-column="a" class="number">0.0006</td>' in html_table([{"a": 0.2}, {"a": 0.0006127}])
    mixed = html_table([{"a": 139.4088}, {"a": 0.25}, {"a": 4.0}])
    assert all(f">{text}</td>" in mixed for text in ("139.4", "0.2500", "4")), "metrics of one table can differ in scale"
    assert '<td class="code">1e-05</td>' in key_value_table({"lr": 1e-05}, code=True)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_it(shown, tmp_path):
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--window-size=900,1200", f"--screenshot={shot}", f"file://{shown.path}/report.html"]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run([CHROMIUM, *options], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert shot.exists(), done.stderr
    image = Image.open(shot).convert("RGB")
    assert image.getpixel((5, 5)) == (246, 247, 249), "the style is let through by the page's own policy"
    assert any(colour == (255, 0, 0) for _, colour in image.getcolors(10**6)), "and so are its images"


def body(path):
    from pathlib import Path

    import torch.distributed as dist

    run = RunDirectory(Path(path), False, dist.get_rank() == 0)
    try:
        write_report(run, title="", intro="")
    except Exception as error:
        return type(error).__name__
    return None


def test_errors_reach_every_rank(ranks, tmp_path):
    assert ranks(body, str(tmp_path), world_size=2) == ["RanksError"] * 2, "no config.json there"
