"""Features: which columns of the data a model sees, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["id", "ids", "number", "auto"]


@dataclass(frozen=True)
class Feature:
    """One column of the data as an input of a model.

    kind: "id": one value of many, which has a row in an embedding table. "ids": some of them, a bag. "number": a quantity.
    "auto": as the data says.
    rows: of its table; row 0 is that of values that are unknown. 0: as many as there are, which only data in memory can tell.

    Example:
        >>> Feature.parse("user_id"), Feature.parse("C7:id:100000")
        (Feature(name='user_id', kind='auto', rows=0), Feature(name='C7', kind='id', rows=100000))
    """

    name: str
    kind: Kind = "id"
    rows: int = 0

    def __post_init__(self) -> None:
        if not self.name or "." in self.name or "/" in self.name:
            raise ValueError(f"Feature {self.name!r}: a name must not be empty, or have a dot or a slash")
        if self.kind not in get_args(Kind):
            raise ValueError(f"Feature {self.name!r}: kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        if self.rows < 0 or self.rows == 1 or (self.rows and self.kind == "number"):
            raise ValueError(f"Feature {self.name!r}: rows={self.rows}: a table has at least 2 rows, and a number has none")

    @classmethod
    def parse(cls, text: str) -> Feature:
        """From "name", "name:kind" or "name:kind:rows", as on the command line."""
        name, _, rest = text.partition(":")
        kind, _, rows = rest.partition(":")
        if rows and not rows.isdecimal():
            raise ValueError(
                f"feature {text!r}: {rows!r} is not a number of rows; a feature is NAME, NAME:KIND or NAME:KIND:ROWS"
            )
        return cls(name, kind or "auto", int(rows or 0))  # type: ignore[arg-type]  # checked above

    def __str__(self) -> str:
        """What `parse` reads."""
        return f"{self.name}:{self.kind}" + (f":{self.rows}" if self.rows else "")

    def settle(self, kind: Kind) -> Feature:
        """With this kind, unless it has one."""
        return replace(self, kind=kind) if self.kind == "auto" else self


def parse_features(texts: Sequence[str]) -> tuple[Feature, ...]:
    """All features of a model, in order.

    Raises: ValueError that names one that is there twice, or is none.
    """
    features = tuple(Feature.parse(text) for text in texts)
    names = [feature.name for feature in features]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"features: {', '.join(twice)} more than once")
    return features
