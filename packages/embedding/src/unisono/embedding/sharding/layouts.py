"""Which rank holds which part of a table. A layout is a class that owns its boxes, its placement and its part of the cost.

To add a layout, write one class in this file and add it to LAYOUTS; no other file tests which layout it has. For example,
rows in chunks over two ranks only:

    class PairLayout(Layout):
        kind = "pair"                # what users type: plan="pair"
        cut_dim = 0                  # chunks of rows; 1: of columns; None: the table is whole

        @classmethod
        def chunk_counts(cls, table, world_size):    # what the planner should weigh
            return [2] if world_size > 1 else []

        def default_ranks(self, world_size):         # where the chunks lie if the user does not say
            return (0, min(1, world_size - 1))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

if TYPE_CHECKING:
    from unisono.embedding.table import Table

Answers = Literal["rows", "bags"]


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
class HostMemory:
    """What Layout.in_host_memory says."""

    cache: float = 0.1
    directory: str | None = field(default=None, repr=False, compare=False)  # ranks may have different ones, with equal groups

    def __post_init__(self) -> None:
        is_number = isinstance(self.cache, int | float) and not isinstance(self.cache, bool)
        if not is_number or not self.cache > 0 or (isinstance(self.cache, float) and self.cache > 1):
            raise ValueError(
                f"Layout.in_host_memory: cache={self.cache!r} must be a number of rows, such as 100_000, or a fraction of "
                "them, such as 0.1"
            )

    def slots(self, rows: int) -> int:
        """How many of a rank's `rows` are in the cache."""
        return min(rows, self.cache if isinstance(self.cache, int) else math.ceil(self.cache * rows))

    def __str__(self) -> str:
        size = f"{self.cache:,} rows" if isinstance(self.cache, int) else f"{100 * self.cache:g} %"
        return f"in host memory, cache {size}"


@dataclass(frozen=True)
class Layout(ABC):
    """How one table lies on the ranks. Make one with Layout.row, Layout.column, Layout.table or Layout.replicated.

    Args:
        ranks: ranks[i] is the rank (of the group) that holds chunk i, cut as torch.chunk cuts. None: all ranks in order.
        answers: What a look-up brings back: the rows that a rank requested, each once ("rows", always possible), or the sum
            of each bag ("bags": table and column layouts, sums and means). None: "bags" where possible.
        host_memory: See in_host_memory. None: all rows are on the device.

    Example:
        >>> Layout.row([2, 0, 1]).box(rank=0, rows=11, dim=4)
        Box(row=4, row_end=8, column=0, column_end=4)
    """

    ranks: tuple[int, ...] | None = None
    answers: Answers | None = None
    host_memory: HostMemory | None = None

    kind: ClassVar[str]
    cut_dim: ClassVar[int | None] = None
    is_replicated: ClassVar[bool] = False
    weight_is_dtensor: ClassVar[bool] = True  # False: `weight` is this rank's plain tensor
    owners_can_pool: ClassVar[bool] = False  # every owner has all rows of a bag, so it can sum the bag

    @staticmethod
    def row(ranks: Sequence[int] | None = None) -> RowLayout:
        """Cut the rows into chunks; chunk i lies on ranks[i]."""
        return RowLayout(None if ranks is None else tuple(ranks))

    @staticmethod
    def column(ranks: Sequence[int] | None = None, *, answers: Answers | None = None) -> ColumnLayout:
        """Cut the columns into chunks; chunk j lies on ranks[j]."""
        return ColumnLayout(None if ranks is None else tuple(ranks), answers)

    @staticmethod
    def table(rank: int = 0, *, answers: Answers | None = None) -> TableLayout:
        """Put the whole table on one rank."""
        return TableLayout((rank,), answers)

    @staticmethod
    def replicated() -> ReplicatedLayout:
        """Put a copy on every rank: for small tables. Only gradients travel."""
        return ReplicatedLayout()

    def in_host_memory(self, cache: float = 0.1, *, directory: str | None = None) -> Self:
        """Keep the rows and the optimizer's state in host memory, and only the rows that are used most often on the device.

        Results do not change. A step copies the rows that it needs and that are not in the cache to the device, and those that
        were not used for the longest time back. Training needs `optimizer=` without `sparse=True`.

        Args:
            cache: How many rows each rank has on the device: a number (100_000), or a fraction of its rows (0.1). One that is
                too small for a look-up grows.
            directory: The rows lie in a memory-mapped file in this directory, which vanishes with the process, so that they
                need not fit into the host's memory. It may be another one on each rank. Tables of one table group lie in one
                file, in the directory of the first of them that has one.

        Example:
            >>> str(Layout.row().in_host_memory(cache=0.05))
            'row, in host memory, cache 5 %'
        """
        return replace(self, host_memory=HostMemory(cache, directory))

    # Placement

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of each chunk, once `assign_ranks` has been called."""
        if self.ranks is None:
            raise ValueError(f"Layout: {self.kind} has no ranks yet; assign_ranks(world_size) gives it some")
        return self.ranks

    def assign_ranks(self, world_size: int) -> Self:
        """Return the layout with ranks: those given, validated, or the default ones."""
        if self.answers not in (None, "rows", "bags"):
            raise ValueError(f"Layout: answers={self.answers!r} is neither 'rows' nor 'bags'")
        if self.answers == "bags" and not self.owners_can_pool:
            raise ValueError(f"Layout: answers='bags' needs all rows of the table on one rank, which {self.kind!r} has not")
        if self.is_replicated and self.host_memory is not None:
            raise ValueError("Layout: a replicated table cannot be in host memory; choose Layout.row().in_host_memory()")
        ranks = self.default_ranks(world_size) if self.ranks is None else self.ranks
        if not ranks:
            raise ValueError(f"Layout: ranks={ranks} must have one rank at least")
        if self.cut_dim is None and not self.is_replicated and len(ranks) > 1:
            raise ValueError(f"Layout: ranks={ranks} does not fit kind={self.kind!r}, which lies on one rank")
        if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
            raise ValueError(f"Layout: ranks={ranks} must be different ranks below {world_size}")
        return replace(self, ranks=ranks)

    def default_ranks(self, world_size: int) -> tuple[int, ...]:
        return tuple(range(world_size))

    def for_table_number(self, number: int, world_size: int) -> Layout:
        """The layout of table `number` of a collection whose plan is one name for all tables."""
        return self

    def placements(self, ndim: int) -> list[Placement]:
        """The DTensor placements of a tensor of shape (rows, dim), or (rows,), on a mesh of `owners`."""
        cut_dim = self.cut_dim or 0
        return [Shard(cut_dim) if cut_dim < ndim else Replicate()]

    # Boxes

    @property
    def row_chunks(self) -> int:
        return len(self.owners) if self.cut_dim == 0 else 1

    def box(self, *, rank: int, rows: int, dim: int) -> Box:
        """The part of a table of `rows` x `dim` that lies on `rank`."""
        if self.is_replicated:
            return Box(0, rows, 0, dim)
        if rank not in self.owners:
            return Box(0, 0, 0, dim)
        first, end = chunk((rows, dim)[self.cut_dim or 0], len(self.owners), self.owners.index(rank))
        return Box(0, rows, first, end) if self.cut_dim == 1 else Box(first, end, 0, dim)

    def column_widths(self, dim: int) -> tuple[int, ...]:
        """The widths of the chunks of columns; (dim,) if rows are whole."""
        if self.cut_dim != 1:
            return (dim,)
        edges = [chunk(dim, len(self.owners), j) for j in range(len(self.owners))]
        return tuple(end - first for first, end in edges)

    def __str__(self) -> str:
        return self.describe_ranks() if self.host_memory is None else f"{self.describe_ranks()}, {self.host_memory}"

    def describe_ranks(self) -> str:
        return self.kind

    # Cost

    @classmethod
    @abstractmethod
    def chunk_counts(cls, table: Table, world_size: int) -> Iterable[int]:
        """The numbers of chunks that the planner should weigh for this table. Empty: the layout is never cheaper."""

    @classmethod
    def may_send_rows(cls, table: Table, world_size: int) -> bool:
        """Whether the planner should weigh answers="rows", too."""
        return True

    @classmethod
    def chunk_shapes(cls, rows: int, dim: int, chunks: int) -> tuple[Tensor, Tensor]:
        """The numbers of rows and of columns of each chunk."""
        heights = _chunk_lengths(rows, chunks if cls.cut_dim == 0 else 1).expand(chunks)
        widths = _chunk_lengths(dim, chunks if cls.cut_dim == 1 else 1).expand(chunks)
        return heights, widths


class RowLayout(Layout):
    """The rows in chunks."""

    kind = "row"
    cut_dim = 0

    @classmethod
    def chunk_counts(cls, table: Table, world_size: int) -> Iterable[int]:
        return [world_size] if world_size > 1 and table.rows > 1 else []


class ColumnLayout(Layout):
    """The columns in chunks."""

    kind = "column"
    cut_dim = 1
    owners_can_pool = True

    def describe_ranks(self) -> str:
        return self.kind if self.ranks is None else f"column on {len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}"

    @classmethod
    def chunk_counts(cls, table: Table, world_size: int) -> Iterable[int]:
        if world_size == 1 or (table.max_norm is not None and table.norm_type == float("inf")):
            return []  # the maximum norm needs whole rows
        counts = sorted({world_size, *(2**k for k in range(1, world_size.bit_length()))})
        return [n for n in counts if n <= table.dim and -(-table.dim // chunk_size(table.dim, n)) == n]  # none is empty

    @classmethod
    def may_send_rows(cls, table: Table, world_size: int) -> bool:
        return table.rows < world_size  # otherwise the row layout sends the same rows and fewer ids


class TableLayout(Layout):
    """The whole table on one rank."""

    kind = "table"
    weight_is_dtensor = False
    owners_can_pool = True

    def default_ranks(self, world_size: int) -> tuple[int, ...]:
        return (0,)

    def for_table_number(self, number: int, world_size: int) -> Layout:
        return replace(self, ranks=(number % world_size,))

    def describe_ranks(self) -> str:
        return self.kind if self.ranks is None else f"table on {self.ranks[0]}"

    @classmethod
    def chunk_counts(cls, table: Table, world_size: int) -> Iterable[int]:
        return [1]


class ReplicatedLayout(Layout):
    """A copy on every rank."""

    kind = "replicated"
    is_replicated = True
    weight_is_dtensor = False

    def placements(self, ndim: int) -> list[Placement]:
        return [Replicate()]

    @classmethod
    def chunk_counts(cls, table: Table, world_size: int) -> Iterable[int]:
        return []  # in the backward, copies send world_size / 2 times as much as the row layout sends in a step


LAYOUTS: dict[str, type[Layout]] = {layout.kind: layout for layout in (RowLayout, ColumnLayout, TableLayout, ReplicatedLayout)}


def as_layout(plan: object, function: str) -> Layout:
    """Make a Layout of what users write: its name, or a Layout."""
    if isinstance(plan, Layout):
        return plan
    if isinstance(plan, str) and plan in LAYOUTS:
        return LAYOUTS[plan]()
    names = ", ".join(map(repr, LAYOUTS))
    if plan == "grid":
        raise ValueError(f"{function}: plan='grid' is gone, since it never sent less than 'row'; choose one of {names}")
    raise ValueError(f"{function}: plan={plan!r} is neither a Layout nor one of {names}")


def chunk(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Where chunk `index` begins and ends, as torch.chunk and DTensor cut: equal ones, then a shorter one, then empty ones."""
    size = chunk_size(length, chunks)
    return min(index * size, length), min((index + 1) * size, length)


def chunk_size(length: int, chunks: int) -> int:
    return max(1, -(-length // chunks))


def _chunk_lengths(length: int, chunks: int) -> Tensor:
    edges = torch.arange(chunks + 1, device="cpu") * chunk_size(length, chunks)
    return edges.clamp_(max=length).diff()
