"""Recipes: functions that return a frozen config, and the command line that comes from it."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import tyro

from unisono_models.training.config.serialization import config_from_json
from unisono_models.training.run.run_directory import read_config

Config = TypeVar("Config")
_FIRST_WORD = 30.0  # seconds that the other ranks leave to rank 0 to say what is wrong


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

    def __init__(self, model: str, kind: type[Config]) -> None:
        self.model, self.kind = model, kind
        self.recipes: dict[str, Callable[[], Config]] = {}

    def add(self, recipe: Callable[[], Config]) -> Callable[[], Config]:
        """Register `recipe` under its own name. Its docstring is what --help shows."""
        self.recipes[recipe.__name__] = recipe
        return recipe

    def __getitem__(self, name: str) -> Config:
        if name not in self.recipes:
            raise KeyError(f"{self.model} has no recipe {name!r}; it has {', '.join(self.recipes)}")
        return self.recipes[name]()

    def choose(self, args: Sequence[str] | None = None) -> tuple[str, Config]:
        """The recipe that the command line names, and its config with what the command line changes.

        `[RECIPE] [--field VALUE …]`, or `--config FILE [--field VALUE …]` with the config.json of a run, or its directory.

        Raises: SystemExit, with status 2 and an explanation if something is wrong with it. Only rank 0 prints.
        """
        first = os.environ.get("RANK", "0") == "0"
        try:
            return self._parse(list(sys.argv[1:] if args is None else args), first)
        except SystemExit as end:
            if end.code and not first:  # torchrun ends all ranks when the first one fails: that has to be the one that speaks
                time.sleep(_FIRST_WORD)
            raise

    def _parse(self, args: list[str], aloud: bool) -> tuple[str, Config]:
        if args[:1] in (["-h"], ["--help"]):
            print(self._help() if aloud else "", end="")
            raise SystemExit(0)
        if args and args[0].partition("=")[0] == "--config":
            args[:1] = args[0].split("=", 1)
            name, config, title = self._read(args[1] if len(args) > 1 else "", aloud)
            prog, about, args = f"{self._prog} {title}", f"The run of {name} that is kept there.", args[2:]
        else:
            name = args.pop(0).replace("-", "_") if args and not args[0].startswith("-") else next(iter(self.recipes))
            if name not in self.recipes:
                near = difflib.get_close_matches(name, self.recipes, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                self._refuse(f"there is no recipe {name!r}.{hint} The recipes: {', '.join(self.recipes)}", aloud)
            if any(arg.partition("=")[0] == "--config" for arg in args):
                self._refuse("--config stands in place of the name of a recipe: put it first", aloud)
            prog, about, config = f"{self._prog} {name}", _summary(self.recipes[name]), self[name]
        return name, tyro.cli(self.kind, prog=prog, description=about, default=config, args=args, console_outputs=aloud)

    def _read(self, path: str, aloud: bool) -> tuple[str, Config, str]:
        """The recipe's name and the config of a run, and how it was asked for."""
        if not path:
            self._refuse("--config: the config.json of a run, or its directory, has to follow", aloud)
        try:
            saved = read_config(Path(path))
            if saved["model"] != self.model:
                raise ValueError(f"a run of {saved['model']}, not of {self.model}")
            if not isinstance(saved["recipe"], str) or not re.fullmatch(r"\w+", saved["recipe"]):  # it names a directory
                raise ValueError(f"{saved['recipe']!r} is no name of a recipe")
            return saved["recipe"], config_from_json(self.kind, saved["config"]), f"--config {path}"
        except (OSError, ValueError) as error:
            self._refuse(f"--config {path}: {error}", aloud)

    def _help(self) -> str:
        width = min(shutil.get_terminal_size().columns, 120)
        names = {name: name + (" (default)" if name == next(iter(self.recipes)) else "") for name in self.recipes}
        room = max(map(len, names.values())) + 4
        lines = [
            f"usage: {self._prog} [RECIPE | --config RUN] [--field VALUE ...]",
            "",
            "RECIPE --help lists every field, what it means and what it is in that recipe. RUN: the directory of a run, or its",
            "config.json; its config is taken instead of a recipe's.",
            "",
            "recipes:",
        ]
        for name, shown in names.items():
            start = f"  {shown}".ljust(room)
            text = _summary(self.recipes[name])
            lines.append(textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * room, break_on_hyphens=False))
        return "\n".join(lines) + "\n"

    def _refuse(self, text: str, aloud: bool) -> NoReturn:
        if aloud:
            print(f"{self._prog}: {text}\nMore by: {self._prog} --help", file=sys.stderr)
        raise SystemExit(2)

    @property
    def _prog(self) -> str:
        return f"python -m unisono_models.{self.model}.train"


def _summary(recipe: Callable[[], Any]) -> str:
    return " ".join((recipe.__doc__ or "").split())
