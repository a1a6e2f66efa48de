"""Datasets by name: built-in ones and a user's own are registered in the same way."""

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """The functions that build datasets for one model, by name.

    Example:
        >>> DATASETS = Registry("clip")
        >>> @DATASETS.register("emoji")
        ... def build_emoji(size):
        ...     return f"emoji at {size} pixels"
        >>> DATASETS["emoji"](32)
        'emoji at 32 pixels'
        >>> "/data/{000..123}.tar" in DATASETS
        False
        >>> DATASETS["emojy"]
        Traceback (most recent call last):
        ValueError: clip has no dataset 'emojy'. Did you mean 'emoji'? The datasets are: emoji
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._builders: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Register the decorated function under `name`. Raises: ValueError if the name is taken."""
        if name in self._builders:
            raise ValueError(f"{self.model} has a dataset {name!r} already")

        def add(build: F) -> F:
            self._builders[name] = build
            return build

        return add

    def names(self) -> tuple[str, ...]:
        return tuple(self._builders)

    def __contains__(self, name: object) -> bool:
        return name in self._builders

    def __getitem__(self, name: str) -> F:
        if name not in self._builders:
            close = difflib.get_close_matches(name, self._builders, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{self.model} has no dataset {name!r}.{hint} The datasets are: {', '.join(self._builders)}")
        return self._builders[name]
