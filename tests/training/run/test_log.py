"""Metrics as exact lines that a restart continues, few host syncs, and what is shown."""

import errno
import io
import math
import os
import pty
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unisono_models.training.run import log as log_module
from unisono_models.training.run.log import MetricsFile, Progress, RunLog, read_metrics
from unisono_models.training.run.run_directory import RunDirectory

ALONE = SimpleNamespace(rank=0, world_size=1, first=True)
LOSSES = torch.tensor([0.1, 1 / 3, math.pi, math.inf, math.nan, 1e-45, 7.0])


def open_log(path, *, steps=7, first_step=0, log_every=3, ranks=ALONE):
    return RunLog(
        RunDirectory(path, first_step > 0, ranks.first), ranks, steps=steps, first_step=first_step, log_every=log_every
    )


def train(path, first=0, last=7, **options):
    with open_log(path, first_step=first, **options) as log:
        for step in range(first, last):
            log.step(step, {"loss": LOSSES[step], "double": LOSSES[step].double() / 3, "rate": 0.1 * step}, samples=8)
            if step % 2:
                log.evaluation(step, {"recall": step / 10})


def steady(path):
    """The lines that the clock has no part in, in full precision."""
    return [repr(line) for line in read_metrics(path) if line["kind"] != "speed"]


def test_every_step_is_kept_exactly(tmp_path):
    train(tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(7)) and {line["samples"] for line in lines} == {8}
    torch.testing.assert_close(torch.tensor([line["loss"] for line in lines]), LOSSES, rtol=0, atol=0, equal_nan=True)
    doubles = torch.tensor([line["double"] for line in lines], dtype=torch.float64)
    torch.testing.assert_close(doubles, LOSSES.double() / 3, rtol=0, atol=0, equal_nan=True)
    assert set(lines[0]) == {"kind", "step", "loss", "double", "rate", "samples"}, "nothing that depends on the clock"


@pytest.mark.parametrize(("killed_at", "first"), [(3, 3), (5, 2), (6, 0), (7, 7)])
def test_resumed_file_is_that_of_an_unbroken_run(tmp_path, killed_at, first):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train(tmp_path / "a")
    train(tmp_path / "b", 0, killed_at)
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1, "lo')  # torn by a kill
    train(tmp_path / "b", first, 7)
    assert steady(tmp_path / "b") == steady(tmp_path / "a")
    assert b'"lo' not in (tmp_path / "b/metrics.jsonl").read_bytes().replace(b'"loss', b"")


def test_final_evaluation_made_again_is_kept_once(tmp_path):
    for first in (0, 7):
        train(tmp_path, first, 7)
        with open_log(tmp_path, first_step=7) as log:
            log.evaluation(6, {"recall": 0.5})
            log.evaluation(6, {"other": 0.25})
    found = [line for line in read_metrics(tmp_path) if line["kind"] == "evaluation" and line["step"] == 6]
    assert found == [{"kind": "evaluation", "step": 6, "recall": 0.5}, {"kind": "evaluation", "step": 6, "other": 0.25}]


def test_flush_before_a_checkpoint_saves_what_waits(tmp_path):
    log = open_log(tmp_path, log_every=100)
    for step in range(5):
        log.step(step, {"loss": float(step)}, samples=1)
    assert read_metrics(tmp_path) == []
    log.flush()
    assert [line["loss"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == [0, 1, 2, 3, 4]
    log.__exit__(None, None, None)


def test_lines_that_an_earlier_start_never_wrote_are_counted(tmp_path, capsys):
    train(tmp_path, 0, 3)
    train(tmp_path, 5, 7)
    assert "metrics.jsonl lacks 2 of the 5 steps before this start" in capsys.readouterr().err


def test_values_are_copied_and_read_back_together(tmp_path, monkeypatch):
    reads = []
    read_back = log_module._read_back
    monkeypatch.setattr(log_module, "_read_back", lambda rows: reads.append(len(rows)) or read_back(rows))
    scale = torch.nn.Parameter(torch.zeros(1))
    with open_log(tmp_path, steps=10, log_every=4) as log:
        for step in range(10):
            log.step(step, {"scale": scale}, samples=1)
            with torch.no_grad():
                scale.add_(1)  # as an optimizer does
    assert reads == [4, 4, 2]
    assert [line["scale"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == list(range(10))


def test_step_does_not_wait_for_the_device(tmp_path, monkeypatch):
    """Between looks, no tensor is turned into numbers."""
    with open_log(tmp_path, log_every=3) as log:
        for name in ("item", "tolist", "__float__", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a host sync"))
        log.step(0, {"loss": torch.ones(())}, samples=1)
        log.step(1, {"loss": torch.ones(1, 1)}, samples=1)
        monkeypatch.undo()


def test_rejects_values_that_are_no_numbers_and_names_that_are_taken(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(ValueError, match=r"'loss' has shape \(2,\): it must have one element"):
            log.step(0, {"loss": torch.ones(2)}, samples=1)
        with pytest.raises(ValueError, match="cannot be called 'step'"):
            log.evaluation(0, {"step": 1.0})
    with pytest.raises(ValueError, match="log_every=0"):
        open_log(tmp_path, log_every=0)


def test_error_inside_keeps_the_lines_and_goes_through(tmp_path):
    def fail():
        with open_log(tmp_path) as log:
            log.step(0, {"loss": 1.0}, samples=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == [0]


class FullDisk(io.FileIO):
    """Takes half of what it is given and then nothing, for as long as `room` is."""

    room = 30

    def write(self, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken


def test_full_disk_is_said_once_and_lines_are_written_when_there_is_room(tmp_path, capsys):
    with open_log(tmp_path, log_every=1) as log:
        log._file._file = disk = FullDisk(tmp_path / "metrics.jsonl", "r+")
        for step in range(4):
            log.step(step, {"loss": 1.0}, samples=1)
        assert (tmp_path / "metrics.jsonl").stat().st_size == 0, "no line cut in the middle"
        disk.room = 10**6
    assert capsys.readouterr().err.count("cannot be written") == 1
    assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == [0, 1, 2, 3]


def test_disk_that_stays_full_is_an_error_at_the_end(tmp_path):
    log = open_log(tmp_path)
    log._file._file = FullDisk(tmp_path / "metrics.jsonl", "r+")
    log.step(0, {"loss": 1.0}, samples=1)
    with pytest.raises(OSError, match="No space left"):
        log.__exit__(None, None, None)


def test_tensorboard_has_the_values_of_the_last_start(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, 0, 5)
    with open_log(tmp_path, first_step=2) as log:
        log.step(2, {"loss": 100.0}, samples=1)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 2)) for event in board.Scalars("train/loss")] == [(0, 0.1), (1, 0.33), (2, 100.0)]
    assert "evaluation/recall" in board.Tags()["scalars"]


def body(path):
    import torch.distributed as dist

    ranks = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size(), first=dist.get_rank() == 0)
    train(Path(path), ranks=ranks)
    return steady(Path(path))


def test_only_rank_0_writes(ranks, tmp_path):
    (tmp_path / "alone").mkdir()
    train(tmp_path / "alone")
    assert ranks(body, str(tmp_path), world_size=2)[0] == steady(tmp_path / "alone")


def test_broken_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\n[]\n{"kind": "train"}\n{"kind": "train", "step": 0, "loss": 1.5}\nnull\n{"kin')
    assert read_metrics(path) == [{"kind": "train", "step": 0, "loss": 1.5}]
    MetricsFile(path, first_step=1).close()
    assert path.read_bytes() == b'{"kind": "train", "step": 0, "loss": 1.5}\n'


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_on_a_terminal_shows_loss_rate_and_time_left():
    stream = Terminal()
    bar = Progress(steps=4, stream=stream)
    bar.advance()
    bar.show({"loss": 2.5}, 1234.0)
    bar.say("evaluating")
    bar.advance()
    bar.close()
    shown = stream.getvalue()
    assert "loss 2.5, 1,234 samples/s" in shown and "left" in shown and "2/4" in shown and "evaluating\n" in shown


def test_terminal_without_room_gets_plain_lines():
    ours, theirs = pty.openpty()  # as it comes, it has no lines and no columns
    with os.fdopen(theirs, "w") as stream:
        assert stream.isatty()
        shown = Progress(steps=1, stream=stream)
        shown.advance()
        shown.show({"loss": 2.5}, 10.0)
        assert os.read(ours, 1000).startswith(b"step 1/1, loss 2.5, 10 samples/s")
    os.close(ours)


def test_plain_lines_come_at_parts_of_the_run_and_after_some_time(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stream = io.StringIO()
    shown = Progress(steps=1000, stream=stream)
    for step in range(1000):
        clock.now += 0.001 if step < 500 else 2.0
        shown.advance()
        shown.show({"loss": 1.0}, 10.0)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 50/1000, loss 1, 10 samples/s, ") and lines[0].endswith("00:01 left")
    assert lines[-1].startswith("step 1000/1000") and lines[-1].endswith("00:00 left")
    assert sum(int(line.split("/")[0].split()[1]) <= 500 for line in lines) == 10
    assert 50 < len(lines) < 110


def test_watched_shows_plain_lines_or_a_bar_or_nothing(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    plain, terminal, silent = io.StringIO(), Terminal(), io.StringIO()
    for item in log_module.show_progress(range(6), "drawings", stream=plain):
        clock.now += 4.0
        assert item == clock.now / 4 - 1
    assert plain.getvalue().splitlines() == ["drawings: 6 to do", "drawings: 3/6, 00:12 left"]
    assert list(log_module.show_progress("ab", "drawings", stream=terminal)) == ["a", "b"]
    assert "drawings" in terminal.getvalue() and "2/2" in terminal.getvalue()
    assert list(log_module.show_progress("ab", "drawings", stream=silent, aloud=False)) == ["a", "b"]
    assert silent.getvalue() == ""
