"""Recipes: functions that return a frozen config, and the command line that comes from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import tyro

from unisono_models.training.config_json import config_from_json
from unisono_models.training.run_directory import read_config

Config = TypeVar("Config")


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

        `[RECIPE] [--field VALUE …]`, or `--config FILE [--field VALUE …]` with the config.json of a run. Only rank 0 prints.
        """
        args = list(sys.argv[1:] if args is None else args)
        aloud = os.environ.get("RANK", "0") == "0"
        prog = f"python -m unisono_models.{self.model}.train"
        if args and args[0] == "--config":
            if len(args) < 2:
                raise SystemExit(f"{prog}: --config: expected the config.json of a run after it")
            saved = read_config(Path(args[1]))
            default = config_from_json(self.kind, saved["config"])
            return saved["recipe"], tyro.cli(self.kind, prog=prog, default=default, args=args[2:], console_outputs=aloud)
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args.insert(0, next(iter(self.recipes)))
        choices: dict[str, tuple[str, Any]] = {name: (_summary(make), make()) for name, make in self.recipes.items()}
        about = f"Train {self.model}. RECIPE --help lists what can be changed. Without a name: {next(iter(self.recipes))}."
        config: Config = tyro.extras.overridable_config_cli(
            choices, prog=prog, description=about, args=args, console_outputs=aloud
        )
        return args[0], config


def _summary(recipe: Callable[[], Any]) -> str:
    return " ".join((recipe.__doc__ or "").split())
