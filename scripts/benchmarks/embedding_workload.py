"""What every contender of the benchmark of the tables is given: tables, batches, gradients; and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Optimizer = Literal["row-wise Adagrad", "SGD"]

DIM = 64
POOLINGS = (*range(1, 11), *range(1, 11), *range(3, 9))  # ids in each bag of a table: 5.5 on average
TABLES = len(POOLINGS)
EXPONENT = 1.05  # of the frequencies of ids, by Zipf's law
BATCHES = 4  # made before the clock runs, and taken in turn
CHECKED_STEPS = 2
LR, EPS = 0.02, 1e-8
BLOCK = 2**14  # rows, filled at a time


class Setting(NamedTuple):
    batch: int  # samples on each rank
    divisor: int = 1  # of all tables' rows
    poolings: tuple[int, ...] = POOLINGS

    @property
    def rows(self) -> list[int]:
        """Of each table: 100,000 to 500,000, 7.6 million in all. Large and small ones in no order."""
        places = [(7 * table % TABLES) / (TABLES - 1) for table in range(TABLES)]
        return [round((100_000 + 400_000 * place**1.075) / self.divisor) for place in places]

    @property
    def gigabytes(self) -> float:
        return 4e-9 * DIM * sum(self.rows)


TINY = Setting(batch=16, divisor=1000)


class Workload:
    """The batches of one rank, or of some: `ids[step][table]` has batch * pooling ids, those of a bag together."""

    def __init__(self, setting: Setting, rank: int, world_size: int) -> None:
        self.setting, self.rank, self.world_size = setting, rank, world_size
        self.ids: list[list[Tensor]] = [[] for _ in range(BATCHES)]
        for table in range(TABLES):
            draw = Popularity(setting, table)
            for step, tables in enumerate(self.ids):
                tables.append(draw.ids(step, rank))
        self.upstream = [upstream(setting, table, rank) for table in range(TABLES)]

    def unique_ids(self) -> int:
        return round(sum(len(ids.unique()) for tables in self.ids for ids in tables) / BATCHES)


class Popularity:
    """How often each row of a table is asked for: the popular ones are scattered over the table, as by a hash."""

    def __init__(self, setting: Setting, table: int) -> None:
        rows = setting.rows[table]
        self.table, self.count = table, setting.batch * setting.poolings[table]
        self.cumulated = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
        self.places = torch.randperm(rows, generator=torch.Generator().manual_seed(table))

    def ids(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * (100 * step + rank) + self.table)
        chance = torch.rand(self.count, dtype=torch.float64, generator=generator) * self.cumulated[-1]
        return self.places[torch.searchsorted(self.cumulated, chance).clamp_(max=len(self.places) - 1)]


def feature(table: int) -> str:
    return f"f{table}"


def upstream(setting: Setting, table: int, rank: int) -> Tensor:
    """The gradient of the pooled output, batch x DIM: the same in every step."""
    return torch.randn(setting.batch, DIM, generator=torch.Generator().manual_seed(100 * rank + table))


def initial_rows(table: int, rows: Tensor, first_column: int = 0, columns: int = DIM) -> Tensor:
    """What is in the table before the first step: any rank can tell the value of any row without having it."""
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


def expected_outputs(work: Workload, optimizer: Optimizer, parts: int) -> dict[str, list[Tensor]]:
    """For each feature, what this rank's bags of batch 0 pool to at first, and those of both batches after two steps.

    Formed plainly, in float64, from the ids of all ranks; the gradients are averaged over ranks. `parts`: into how many
    groups of columns row-wise Adagrad cuts the table, each with its own state. One is exact.
    """
    return {feature(table): expected_of_table(work, table, optimizer, parts) for table in range(TABLES)}


def expected_of_table(work: Workload, table: int, optimizer: Optimizer, parts: int) -> list[Tensor]:
    setting, world = work.setting, range(work.world_size)
    draw = Popularity(setting, table)
    drawn = [[draw.ids(step, rank) for rank in world] for step in range(CHECKED_STEPS)]
    known, places = torch.cat([ids for ranks in drawn for ids in ranks]).unique(return_inverse=True)
    by_step = [step.chunk(work.world_size) for step in places.chunk(CHECKED_STEPS)]
    weight = initial_rows(table, known).double()
    state = torch.zeros(len(known), parts, 1, dtype=torch.float64)
    outputs = [pool(weight, by_step[0][work.rank], table)]
    gradients = [upstream(setting, table, rank).double().repeat_interleave(POOLINGS[table], dim=0) for rank in world]
    for ranks in by_step:
        gradient = torch.zeros_like(weight)
        for ids, incoming in zip(ranks, gradients, strict=True):
            gradient.index_add_(0, ids, incoming, alpha=1 / work.world_size)
        if optimizer == "row-wise Adagrad":
            by_part = gradient.view(len(known), parts, -1)
            state += by_part.square().mean(-1, keepdim=True)
            gradient = (by_part / (state.sqrt() + EPS)).view_as(weight)
        weight -= LR * gradient
    return outputs + [pool(weight, ranks[work.rank], table) for ranks in by_step]


def pool(weight: Tensor, places: Tensor, table: int) -> Tensor:
    return weight[places].view(-1, POOLINGS[table], DIM).sum(1)


def deviation(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference, as a part of the norm."""
    difference = sum(float((a.double() - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return float((difference / sum(float(b.square().sum()) for b in expected)) ** 0.5)
