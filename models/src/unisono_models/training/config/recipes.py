"""Recipes: functions that return a config, and the command line that changes its fields."""

import difflib
import io
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import tyro

from unisono_models.training.config.serialization import config_from_json
from unisono_models.training.config.validate import validate_config
from unisono_models.training.errors import UserError, process_rank
from unisono_models.training.run.run_directory import read_config

Config = TypeVar("Config")
_RANK_0_FIRST = 30.0  # seconds that the other ranks wait so that rank 0 prints the error


class Recipes(Generic[Config]):
    """The recipes of one model, by name. The first one is the default.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Small:
        ...     width: int = 8
        >>> recipes = Recipes("small", Small)
        >>> @recipes.add
        ... def narrow() -> Small:
        ...     "Fits everywhere."
        ...     return Small(width=4)
        >>> recipes.choose(["narrow", "--width", "5"])
        ('narrow', Small(width=5))
        >>> recipes.choose([])
        ('narrow', Small(width=4))
    """

    def __init__(
        self, model: str, kind: type[Config], *, adapt: Callable[[Config, Config, Collection[str]], Config] | None = None
    ) -> None:
        """`adapt`: from the recipe's config, the config with the changed fields, and the dotted names of the fields that were
        typed, to the config of the run. It may take back what the recipe has chosen for something that was replaced."""
        self.model, self.kind, self.adapt = model, kind, adapt
        self.recipes: dict[str, Callable[[], Config]] = {}
        self._prog = ""  # the command that help and errors name

    def add(self, recipe: Callable[[], Config]) -> Callable[[], Config]:
        """Register `recipe` under its function name. --help shows its docstring."""
        self.recipes[recipe.__name__] = recipe
        return recipe

    def __getitem__(self, name: str) -> Config:
        if name not in self.recipes:
            raise KeyError(f"{self.model} has no recipe {name!r}; it has {', '.join(self.recipes)}")
        return self.recipes[name]()

    def choose(self, args: Sequence[str] | None = None, *, prog: str | None = None) -> tuple[str, Config]:
        """Return the name of the recipe that the command line chooses, and its config with the fields that it changes.

        The command line is `[RECIPE] [--field VALUE …]`, or `--config RUN [--field VALUE …]` with the directory of a run or its
        config.json. `prog`: the command that help and errors name, if it is not that of training.

        Raises: SystemExit with status 2, after rank 0 has printed what is wrong with the command line.
        """
        is_rank_0 = process_rank() == 0
        self._prog = prog or f"python -m unisono_models.{self.model} train"
        try:
            return self._parse(list(sys.argv[1:] if args is None else args), is_rank_0)
        except SystemExit as end:
            # torchrun ends all ranks when one fails: rank 0 has to be the one that prints
            if end.code and not is_rank_0 and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_RANK_0_FIRST)
            raise

    def _parse(self, args: list[str], verbose: bool) -> tuple[str, Config]:
        if args[:1] in (["-h"], ["--help"]):
            print(self._help() if verbose else "", end="")
            raise SystemExit(0)
        if args and args[0].partition("=")[0] == "--config":
            args[:1] = args[0].split("=", 1)
            path = args[1] if len(args) > 1 else ""
            name, config = self._read(path, verbose)
            prog = f"{self._prog} --config {path}"
            description = f"Train with the config of a run of the recipe {name}."
            fields = args[2:]
        else:
            named = bool(args) and not args[0].startswith("-")
            name = args[0].replace("-", "_") if named else next(iter(self.recipes))
            fields = args[1:] if named else args
            if name not in self.recipes:
                near = difflib.get_close_matches(name, self.recipes, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                self._exit(f"there is no recipe {name!r}.{hint} The recipes are: {', '.join(self.recipes)}", verbose)
            if any(arg.partition("=")[0] == "--config" for arg in fields):
                self._exit("--config replaces the name of a recipe: put it first", verbose)
            prog = f"{self._prog} {name}"
            description = _summary(self.recipes[name])
            config = self[name]
        with nullcontext() if verbose else redirect_stderr(io.StringIO()):  # tyro prints some errors in any case
            changed = tyro.cli(
                self.kind, prog=prog, description=description, default=config, args=fields, console_outputs=verbose
            )
        if self.adapt is not None:
            changed = self.adapt(config, changed, _typed_fields(fields))
        try:
            validate_config(changed)
        except UserError as error:
            self._exit(str(error), verbose)
        return name, changed

    def _read(self, path: str, verbose: bool) -> tuple[str, Config]:
        """Read the recipe's name and the config of a run."""
        if not path:
            self._exit("--config needs the directory of a run, or its config.json", verbose)
        try:
            saved = read_config(Path(path))
            if saved["model"] != self.model:
                raise ValueError(f"it is a run of {saved['model']}, not of {self.model}")
            if not isinstance(saved["recipe"], str) or not re.fullmatch(r"\w+", saved["recipe"]):  # it names a directory
                raise ValueError(f"{saved['recipe']!r} is not the name of a recipe")
            return saved["recipe"], config_from_json(self.kind, saved["config"])
        except (OSError, ValueError) as error:
            self._exit(f"--config {path}: {error}", verbose)

    def _help(self) -> str:
        width = min(shutil.get_terminal_size().columns, 120)
        names = {name: name + (" (default)" if name == next(iter(self.recipes)) else "") for name in self.recipes}
        room = max(map(len, names.values())) + 4
        lines = [
            f"usage: {self._prog} [RECIPE | --config RUN] [--field VALUE ...]",
            "",
            "RECIPE --help explains every field and shows its value in that recipe. --config RUN takes the config of a run",
            "instead of a recipe: RUN is its directory, or its config.json.",
            "",
            "recipes:",
        ]
        for name, shown in names.items():
            start = f"  {shown}".ljust(room)
            text = _summary(self.recipes[name])
            lines.append(textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * room, break_on_hyphens=False))
        return "\n".join(lines) + "\n"

    def _exit(self, text: str, verbose: bool) -> NoReturn:
        if verbose:
            print(f"{self._prog}: {text}\nFor help: {self._prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _typed_fields(args: Sequence[str]) -> set[str]:
    """Return the dotted names of the fields in a command line: model.image.frozen of --model.image.no-frozen, too."""
    names = [arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    return {re.sub(r"(^|\.)no_(\w+)$", r"\1\2", name) for name in names}


def _summary(recipe: Callable[[], Any]) -> str:
    return " ".join((recipe.__doc__ or "").split())
