"""`python -m PACKAGE COMMAND`."""

import sys

import pytest

from unisono_models.training.commands import run_command

COMMANDS = {
    "recommend": ("tests.training.no_such_module", "Recommend items."),
    "echo": (__name__, "Return the number of arguments as the exit code."),
}


def main(args):
    print(*args)
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
