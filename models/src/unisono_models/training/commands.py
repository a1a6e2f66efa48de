"""`python -m PACKAGE COMMAND ...`: the commands of a package, listed by --help and imported only when they run."""

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from unisono_models.training.errors import DEBUG, end_with_message


def run_command(package: str, commands: Mapping[str, tuple[str, str]], args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the first of `args` names, with the rest of them, and exit.

    A mistake of the user ends it with one message: see `end_with_message`. --debug, anywhere in `args`, adds the traceback.

    Args:
        package: What follows `python -m`.
        commands: From a command's name to its module, which has a `main(args)`, and a one-line summary. Only the module of
            the command that runs is imported.
        args: None takes the command line.

    Raises: SystemExit with what `main` returns; with 0 after --help; with 2 after a mistake.

    Example:
        >>> run_command("shop", {"open": ("shop.open", "Open the shop.")}, ["--help"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    given = list(sys.argv[1:] if args is None else args)
    if "--debug" in given:
        given.remove("--debug")
        os.environ[DEBUG] = "1"  # for the ranks that a command starts, too
    if given[:1] in (["-h"], ["--help"]):
        print(_usage(package, commands))
        raise SystemExit(0)
    if not given:
        print(_usage(package, commands), file=sys.stderr)
        raise SystemExit(2)
    name = given.pop(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        print(f"python -m {package}: there is no command {name!r}.{hint}\n\n{_usage(package, commands)}", file=sys.stderr)
        raise SystemExit(2)
    with end_with_message(name):
        status = importlib.import_module(commands[name][0]).main(given)
    raise SystemExit(status)


def _usage(package: str, commands: Mapping[str, tuple[str, str]]) -> str:
    width = max(map(len, commands)) + 4
    lines = [f"  {name}".ljust(width) + summary for name, (_, summary) in commands.items()]
    return "\n".join(
        [
            f"usage: python -m {package} COMMAND ...",
            "",
            "commands (COMMAND --help says more; --debug shows tracebacks):",
            *lines,
        ]
    )
