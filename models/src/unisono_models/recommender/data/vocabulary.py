"""Vocabulary: rows of an embedding table for the values of a column that is known as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNKNOWN = 0  # the row of all values that are not in the vocabulary, and of missing ones


class Vocabulary:
    """The different values of a column, sorted, from row 1 on; row 0 is that of all others. Empty values are none.

    Example:
        >>> genres = Vocabulary(["Drama", "Comedy", "Drama", ""])
        >>> genres.rows(["Comedy", "Western", "Drama", ""]), len(genres)
        (tensor([1, 0, 2, 0]), 3)
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = sorted({value for value in values if value})
        self._rows = {value: row for row, value in enumerate(self.values, UNKNOWN + 1)}

    def __len__(self) -> int:
        """Rows that a table needs."""
        return len(self.values) + 1

    def row(self, value: str) -> int:
        return self._rows.get(value, UNKNOWN)

    def rows(self, values: Sequence[str]) -> Tensor:
        find = self._rows.get
        return torch.tensor([find(value, UNKNOWN) for value in values], dtype=torch.int64)

    def value(self, row: int) -> str:
        """The value of a row; of row 0, nothing."""
        return self.values[row - 1] if row > UNKNOWN else ""
