"""`python -m PACKAGE COMMAND`."""

import socket
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from unisono_models.training.commands import run_command
from unisono_models.training.distributed import torchrun
from unisono_models.training.errors import DEBUG, UserError, note_run_directory

COMMANDS = {
    "recommend": ("tests.training.no_such_module", "Recommend items."),
    "echo": (__name__, "Return the number of arguments as the exit code."),
}


def main(args):
    print(*args)
    if args[:1] == ["mistake"]:
        with note_run_directory(args[1]):
            raise UserError("--data.caption title: the table has no such column") from KeyError("title")
    if args == ["fault"]:
        raise ValueError("a fault of ours")
    if args == ["ctrl-c"]:
        raise KeyboardInterrupt
    return len(args)


def run(args):
    with pytest.raises(SystemExit) as end:
        run_command("tests.shop", COMMANDS, args)
    return end.value.code


def test_the_command_gets_the_rest_of_the_arguments(capsys, monkeypatch):
    assert run(["echo", "--a", "b"]) == 2 and capsys.readouterr().out == "--a b\n"
    monkeypatch.setattr(sys, "argv", ["shop", "echo"])
    assert run(None) == 0


def test_help_lists_every_command(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: python -m tests.shop COMMAND" in out and "recommend  Recommend items." in out and "echo " in out


def test_unknown_and_absent_commands_are_errors(capsys):
    assert run(["recomend"]) == 2
    error = capsys.readouterr().err
    assert "there is no command 'recomend'. Did you mean recommend?" in error and "echo" in error
    assert run([]) == 2 and "usage" in capsys.readouterr().err


def test_only_the_module_of_the_command_is_imported():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_command("tests.shop", COMMANDS, ["recommend"])


MESSAGE = "echo: --data.caption title: the table has no such column"


@pytest.fixture
def no_debug(monkeypatch):
    monkeypatch.setenv(DEBUG, "")  # restored at the end, whatever --debug sets


def test_a_mistake_is_one_line_and_its_traceback_goes_into_the_run_directory(capsys, tmp_path, no_debug):
    assert run(["echo", "mistake", tmp_path]) == 2
    assert capsys.readouterr().err == f"{MESSAGE}\n"
    assert "KeyError: 'title'" in (log := (tmp_path / "errors.log").read_text()) and "UserError: --data.caption" in log
    assert run(["echo", "mistake", tmp_path / "gone"]) == 2 and capsys.readouterr().err == f"{MESSAGE}\n"


def test_debug_anywhere_shows_the_traceback(capsys, tmp_path, no_debug):
    assert run(["echo", "mistake", "--debug", tmp_path]) == 2
    printed = capsys.readouterr()
    assert "--debug" not in printed.out and "Traceback" in printed.err and printed.err.endswith(f"\n{MESSAGE}\n")


def test_a_fault_is_raised_and_an_interruption_is_one_line(capsys, no_debug):
    with pytest.raises(ValueError, match="a fault of ours"):
        run_command("tests.shop", COMMANDS, ["echo", "fault"])
    assert run(["echo", "ctrl-c"]) == 130 and capsys.readouterr().err == "echo: interrupted\n"


def test_the_report_of_torchrun_ends_with_the_mistake(capsys, tmp_path, no_debug, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run(["echo", "mistake", tmp_path]) == 2
    report = str(ChildFailedError("echo", {0: ProcessFailure(0, 47, 2, str(tmp_path / "error.json"))}))
    assert report.splitlines()[-2] == f"  traceback : {MESSAGE.removeprefix('echo: ')}" and "Traceback" not in report


def test_only_rank_0_prints_a_mistake_of_all_ranks(capsys, tmp_path, no_debug, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run(["echo", "mistake", tmp_path]) == 2 and run(["echo", "ctrl-c"]) == 130
    assert capsys.readouterr().err == "" and not (tmp_path / "errors.log").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "there is no model ''"),
        (["training"], "there is no model 'training'"),
        (["cilp", "--nproc", "2"], "there is no model 'cilp'"),
        (["clip", "tiny", "--nproc", "two"], "--nproc needs a number of ranks, not two"),
        (["clip", "tiny", "--nproc"], "--nproc needs a number of ranks, not nothing"),
        (["clip", "tiny", "--nproc=3"], "--nproc 3: this machine has 2 devices, one for each rank. Give at most 2"),
    ],
)
def test_launch_refuses_what_cannot_start(args, words, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(UserError, match=words):
        torchrun.main(args)


def test_launch_finds_a_stranger_at_the_port_where_hosts_meet(monkeypatch):
    monkeypatch.setattr(torchrun, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        endpoint = f"127.0.0.1:{stranger.getsockname()[1]}"
        options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--nproc-per-node", "1"]
        with pytest.raises(UserError, match=f"{endpoint}: another program uses this port. Give torchrun a free one"):
            torchrun.main([*options, "clip", "tiny"])
