"""Features: the columns of the data that a model takes as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from unisono_models.training.errors import UserError

FeatureKind = Literal["id", "ids", "number", "auto"]


@dataclass(frozen=True)
class Feature:
    """One column of the data as an input of a model.

    Args:
        kind: "id": one categorical value, which has a row in an embedding table. "ids": a bag of such values. "number": a
            float. "auto": the file's header decides.
        rows: The number of rows of the embedding table. Row 0 is for unknown values. 0: one row for each value in the data,
            which only data in memory can tell.

    Example:
        >>> Feature.parse("user_id"), Feature.parse("C7:id:100000")
        (Feature(name='user_id', kind='auto', rows=0), Feature(name='C7', kind='id', rows=100000))
    """

    name: str
    kind: FeatureKind = "id"
    rows: int = 0

    def __post_init__(self) -> None:
        if not self.name or "." in self.name or "/" in self.name:
            raise UserError(
                f"--data.features: feature {self.name!r}: a name must not be empty and must not contain a dot or a slash"
            )
        if self.kind not in get_args(FeatureKind):
            raise UserError(
                f"--data.features: feature {self.name!r}: kind {self.kind!r} is not one of {', '.join(get_args(FeatureKind))}"
            )
        if self.rows < 0 or self.rows == 1 or (self.rows and self.kind == "number"):
            raise UserError(
                f"--data.features: feature {self.name!r}: rows={self.rows}: a table has at least 2, a number has none"
            )

    @classmethod
    def parse(cls, text: str) -> Feature:
        """Parse "name", "name:kind" or "name:kind:rows", as on the command line."""
        name, _, rest = text.partition(":")
        kind, _, rows = rest.partition(":")
        if rows and not rows.isdecimal():
            raise UserError(
                f"--data.features: feature {text!r}: {rows!r} is not a number of rows: write NAME, NAME:KIND or NAME:KIND:ROWS"
            )
        return cls(name, kind or "auto", int(rows or 0))  # type: ignore[arg-type]  # __post_init__ checks it

    def __str__(self) -> str:
        """Write the text that `parse` reads."""
        return f"{self.name}:{self.kind}" + (f":{self.rows}" if self.rows else "")

    def with_default_kind(self, kind: FeatureKind) -> Feature:
        """Replace the kind "auto" by `kind`."""
        return replace(self, kind=kind) if self.kind == "auto" else self


def parse_features(texts: Sequence[str]) -> tuple[Feature, ...]:
    """Parse all features of a model, in order.

    Raises: UserError for a feature that cannot be parsed or that is listed twice.
    """
    features = tuple(Feature.parse(text) for text in texts)
    names = [feature.name for feature in features]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--data.features: {', '.join(repeated)} more than once")
    return features
