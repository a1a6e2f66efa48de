"""Which rank holds which part of a table: rows and columns in chunks, each on one rank, or a copy on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Kind = Literal["row", "column", "table", "grid", "replicated"]
Answers = Literal["rows", "bags"]
KINDS = ("row", "column", "table", "grid", "replicated")


class Box(NamedTuple):
    """Part of a table: rows and columns from (included) and to (excluded)."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_end - self.row, self.column_end - self.column


@dataclass(frozen=True)
class Layout:
    """How one table lies on the ranks. Make one with `row`, `column`, `table`, `grid` or `replicated`.

    `ranks[i][j]` is the rank (of the group) that holds chunk i of the rows and chunk j of the columns, cut as torch.chunk cuts;
    None: all ranks in their order. `answers`: whether a look-up brings back the rows that a rank asked for, each once ("rows",
    always possible), or the sum of each bag ("bags": whole and column layouts, sums and means); None: "bags" where possible.

    Example:
        >>> Layout.row([2, 0, 1]).box(rank=0, rows=11, dim=4)
        Box(row=4, row_end=8, column=0, column_end=4)
    """

    kind: Kind
    ranks: tuple[tuple[int, ...], ...] | None = None
    answers: Answers | None = None

    @classmethod
    def row(cls, ranks: Sequence[int] | None = None) -> Layout:
        """Rows in chunks; chunk i lies on ranks[i]."""
        return cls("row", None if ranks is None else tuple((rank,) for rank in ranks))

    @classmethod
    def column(cls, ranks: Sequence[int] | None = None, *, answers: Answers | None = None) -> Layout:
        """Columns in chunks; chunk j lies on ranks[j]."""
        return cls("column", None if ranks is None else (tuple(ranks),), answers)

    @classmethod
    def table(cls, rank: int = 0, *, answers: Answers | None = None) -> Layout:
        """The whole table on one rank."""
        return cls("table", ((rank,),), answers)

    @classmethod
    def grid(cls, ranks: Sequence[Sequence[int]] | None = None) -> Layout:
        """Rows x columns; None: as square as the number of ranks allows."""
        return cls("grid", None if ranks is None else tuple(tuple(row) for row in ranks))

    @classmethod
    def replicated(cls) -> Layout:
        """A copy on every rank: for small tables. Nothing travels but gradients."""
        return cls("replicated")

    @property
    def placed(self) -> tuple[tuple[int, ...], ...]:
        if self.ranks is None:
            raise ValueError(f"Layout: {self.kind} has no ranks yet; settle(world_size) gives it some")
        return self.ranks

    def settle(self, world_size: int) -> Layout:
        """With ranks: those given, checked, or all of them."""
        if self.kind not in KINDS:
            raise ValueError(f"Layout: kind={self.kind!r} is not one of {', '.join(map(repr, KINDS))}")
        if self.answers not in (None, "rows", "bags"):
            raise ValueError(f"Layout: answers={self.answers!r} is neither 'rows' nor 'bags'")
        if self.answers == "bags" and self.kind not in ("table", "column"):
            raise ValueError(f"Layout: answers='bags' needs all rows of the table on one rank, which {self.kind!r} has not")
        if self.kind == "replicated":
            return self
        everyone = range(world_size)
        ranks = self.ranks
        if ranks is None and self.kind == "table":
            ranks = ((0,),)
        elif ranks is None and self.kind == "grid":
            columns = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * n <= world_size)
            ranks = tuple(tuple(everyone[i : i + columns]) for i in range(0, world_size, columns))
        elif ranks is None:
            ranks = (tuple(everyone),) if self.kind == "column" else tuple((rank,) for rank in everyone)
        flat = [rank for row in ranks for rank in row]
        if not flat or len({len(row) for row in ranks}) > 1:
            raise ValueError(f"Layout: ranks={ranks} must be rows of equal length, with one rank at least")
        if (self.kind in ("table", "column") and len(ranks) > 1) or (self.kind in ("table", "row") and len(ranks[0]) > 1):
            raise ValueError(
                f"Layout: ranks={ranks} does not fit kind={self.kind!r}; Layout.{self.kind}(...) makes ranks that do"
            )
        if len(set(flat)) < len(flat) or min(flat) < 0 or max(flat) >= world_size:
            raise ValueError(f"Layout: ranks={ranks} must be different ranks below {world_size}")
        return replace(self, ranks=ranks)

    def place(self, rank: int) -> tuple[int, int] | None:
        """Which chunk of rows and of columns lies on `rank`; None: nothing does."""
        if self.kind == "replicated":
            return 0, 0
        places = ((i, j) for i, row in enumerate(self.placed) for j, owner in enumerate(row) if owner == rank)
        return next(places, None)

    def box(self, *, rank: int, rows: int, dim: int) -> Box:
        """The part of a table of `rows` x `dim` that lies on `rank`."""
        if self.kind == "replicated":
            return Box(0, rows, 0, dim)
        place = self.place(rank)
        if place is None:
            return Box(0, 0, 0, dim)
        row, row_end = chunk(rows, len(self.placed), place[0])
        column, column_end = chunk(dim, len(self.placed[0]), place[1])
        return Box(row, row_end, column, column_end)

    def __str__(self) -> str:
        if self.kind == "replicated" or self.ranks is None:
            return self.kind
        if self.kind == "table":
            return f"table on {self.placed[0][0]}"
        if self.kind == "grid":
            return f"grid {len(self.placed)} x {len(self.placed[0])}"
        return self.kind


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Where chunk `index` begins and ends, as torch.chunk and DTensor cut: equal ones, then a shorter one, then empty ones."""
    size = chunk_size(length, parts)
    return min(index * size, length), min((index + 1) * size, length)


def chunk_size(length: int, parts: int) -> int:
    return max(1, -(-length // parts))


def as_layout(plan: object, function: str) -> Layout:
    """A Layout from what users write: its name, or itself."""
    if isinstance(plan, Layout):
        return plan
    if plan in KINDS:
        return Layout.table() if plan == "table" else Layout(plan)  # type: ignore[arg-type]
    raise ValueError(f"{function}: plan={plan!r} is neither a Layout nor one of {', '.join(map(repr, KINDS))}")
