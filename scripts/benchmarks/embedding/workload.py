"""What every contender with tables receives: tables, batches, gradients; and the outputs that they must compute from it."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

Optimizer = Literal["row-wise Adagrad", "SGD"]

WORLD_SIZE = 2
DIM = 64
POOLINGS = (*range(1, 11), *range(1, 11), *range(3, 9))  # ids in each bag of a table: 5.5 on average
TABLES = len(POOLINGS)
FEATURES = [f"f{table}" for table in range(TABLES)]
EXPONENT = 1.05  # of Zipf's law, by which ids are drawn
BATCHES = 4  # made before the clock runs, and used in turn
CHECKED_STEPS = 2
LR = 0.02
EPS = 1e-8
BLOCK = 2**14  # rows that are filled at a time


class Setting(NamedTuple):
    batch: int  # samples on each rank
    divisor: int = 1  # of the rows of all tables
    poolings: tuple[int, ...] = POOLINGS

    @property
    def rows(self) -> list[int]:
        """Rows of each table: 100,000 to 500,000, 7.6 million in all. Large and small ones in no order."""
        places = [(7 * table % TABLES) / (TABLES - 1) for table in range(TABLES)]
        return [round((100_000 + 400_000 * place**1.075) / self.divisor) for place in places]

    @property
    def gigabytes(self) -> float:
        return 4e-9 * DIM * sum(self.rows)

    def __str__(self) -> str:
        rows = f"{min(self.rows):,} to {max(self.rows):,} rows, {sum(self.rows):,} in all"
        return f"{TABLES} tables of {rows}, of width {DIM}: {self.gigabytes:.2f} GB"


TINY = Setting(batch=16, divisor=1000)


class Workload:
    """The batches of one process: `ids[step][table]` has batch x pooling ids, those of a bag side by side.

    Args:
        setting: What one rank receives. The attribute `setting` says what this process receives.
        ranks: The ranks whose batches this process computes: its own, or those of all ranks if it is the only process.
        processes: How many processes there are.
    """

    def __init__(self, setting: Setting, ranks: range, processes: int) -> None:
        self.setting = setting._replace(batch=setting.batch * len(ranks))
        self.per_rank = setting
        self.ranks = ranks
        self.processes = processes
        self.ids: list[list[Tensor]] = [[] for _ in range(BATCHES)]
        for table in range(TABLES):
            draw = Popularity(setting, table)
            for step, tables in enumerate(self.ids):
                tables.append(torch.cat([draw.ids(step, rank) for rank in ranks]))

    @cached_property
    def upstream(self) -> list[Tensor]:
        """The gradients of the pooled outputs of each table."""
        return [torch.cat([upstream(self.per_rank, table, rank) for rank in self.ranks]) for table in range(TABLES)]

    @classmethod
    def of_this_process(cls, setting: Setting, *, one_process: bool) -> Self:
        """Make the batches of this rank; or of all ranks, if one process computes them all."""
        own = range(WORLD_SIZE) if one_process else range(dist.get_rank(), dist.get_rank() + 1)
        return cls(setting, own, dist.get_world_size())

    def unique_ids(self) -> int:
        return round(sum(len(ids.unique()) for tables in self.ids for ids in tables) / BATCHES)


class Popularity:
    """How often each row of a table is looked up. Popular rows are scattered over the table, as by a hash."""

    def __init__(self, setting: Setting, table: int) -> None:
        rows = setting.rows[table]
        self.table, self.count = table, setting.batch * setting.poolings[table]
        self.cumulated = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
        self.places = torch.randperm(rows, generator=torch.Generator().manual_seed(table))

    def ids(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * (100 * step + rank) + self.table)
        chance = torch.rand(self.count, dtype=torch.float64, generator=generator) * self.cumulated[-1]
        return self.places[torch.searchsorted(self.cumulated, chance).clamp_(max=len(self.places) - 1)]


def upstream(setting: Setting, table: int, rank: int) -> Tensor:
    """Return the gradient of the pooled output, batch x DIM. It is the same in every step."""
    return torch.randn(setting.batch, DIM, generator=torch.Generator().manual_seed(100 * rank + table))


def initial_rows(table: int, rows: Tensor, first_column: int = 0, columns: int = DIM) -> Tensor:
    """Return what rows of a table hold before the first step. Any rank can compute any row without having it."""
    places = torch.arange(first_column, first_column + columns, dtype=torch.float64)
    x = (rows.double() * 0.6180339887 + table * 0.7548776662)[:, None] + places * 0.5698402910
    return ((x - x.floor() - 0.5) * 0.1).float()


@torch.no_grad()
def fill(shard: Tensor, table: int, first_row: int = 0, first_column: int = 0) -> None:
    """Write the initial values into a shard of a table, in place and a block at a time."""
    for start in range(0, len(shard), BLOCK):
        block = shard[start : start + BLOCK]
        rows = torch.arange(first_row + start, first_row + start + len(block))
        block.copy_(initial_rows(table, rows, first_column, shard.shape[1]))


def expected_outputs(work: Workload, table: int, optimizer: Optimizer, parts: int) -> list[Tensor]:
    """Return what this process's bags of batch 0 pool to at first, and those of both batches after two steps.

    Computed in float64 without sharding, from the ids of all ranks; gradients are averaged over processes. `parts`: into how
    many groups of columns row-wise Adagrad cuts the table, each with its own state. One is exact.
    """
    setting, pooling = work.per_rank, POOLINGS[table]
    world = range(work.processes * len(work.ranks))
    draw = Popularity(setting, table)
    drawn = torch.cat([draw.ids(step, rank) for step in range(CHECKED_STEPS) for rank in world])
    known, places = drawn.unique(return_inverse=True)
    by_step = [step.chunk(len(world)) for step in places.chunk(CHECKED_STEPS)]
    weight = initial_rows(table, known).double()
    state = torch.zeros(len(known), parts, 1, dtype=torch.float64)

    def pool(ranks: Sequence[Tensor]) -> Tensor:
        own = torch.cat([ranks[rank] for rank in work.ranks])
        return weight[own].view(-1, pooling, DIM).sum(1)

    outputs = [pool(by_step[0])]
    gradients = [upstream(setting, table, rank).double().repeat_interleave(pooling, dim=0) for rank in world]
    for ranks in by_step:
        gradient = torch.zeros_like(weight)
        for ids, incoming in zip(ranks, gradients, strict=True):
            gradient.index_add_(0, ids, incoming, alpha=1 / work.processes)
        if optimizer == "row-wise Adagrad":
            by_part = gradient.view(len(known), parts, -1)
            state += by_part.square().mean(-1, keepdim=True)
            gradient = (by_part / (state.sqrt() + EPS)).view_as(weight)
        weight = weight - LR * gradient
    return outputs + [pool(ranks) for ranks in by_step]


def output_deviations(
    found: Sequence[Sequence[Tensor]], work: Workload, optimizer: Optimizer, parts: int
) -> tuple[float, float]:
    """Compare outputs, by step and table, with the expected ones: those of the first step, and those after two steps.

    Returns the norm of the difference as a fraction of the norm, the largest over ranks.
    """
    expected = [expected_outputs(work, table, optimizer, parts) for table in range(TABLES)]
    away = []
    for step, tables in enumerate(found):
        difference = sum(float((a.double() - b[step]).square().sum()) for a, b in zip(tables, expected, strict=True))
        away.append((difference / sum(float(b[step].square().sum()) for b in expected)) ** 0.5)
    worst = torch.tensor([away[0], max(away[1:])])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    first, after_steps = worst.tolist()
    return first, after_steps
