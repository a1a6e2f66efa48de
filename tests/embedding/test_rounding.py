"""Stochastic rounding: the right mean, and the same bits on any number of ranks, in any plan, and after a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from unisono.embedding import SGD, Adam, EmbeddingCollection, RowwiseAdagrad, ShardedEmbedding, Table
from unisono.embedding.rounding import round_stochastically

TYPES = [torch.bfloat16, torch.float16]
TABLES = [Table("a", 23, 4, ["a", "a2"]), Table("b", 11, 6, mode="mean"), Table("c", 9, 4, padding_idx=2)]
RULES = {"a": SGD(lr=2**-9), "b": Adam(lr=2**-9), "c": RowwiseAdagrad(lr=2**-9, weight_decay=2**-6)}
PLANS: dict[str, Any] = {
    "row": "row",
    "column": "column",
    "table": "table",
    "mixed": {"a": "replicated", "b": "row", "c": "column"},
}


def round_rows(x: Tensor, dtype: torch.dtype, *, step: int = 0, seed: int = 1, first_row: int = 0) -> Tensor:
    rows = torch.arange(len(x))
    return round_stochastically(x, dtype, rows, seed=seed, step=step, first_row=first_row, first_column=0, dim=x.shape[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_become_a_neighbour_with_the_right_mean(dtype):
    info = torch.finfo(dtype)
    numbers = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-7, 4, 40)
    numbers[-3:] = torch.tensor([info.max - 1.0, 1 - 2.0**-20, -(2.0**-14) / 3])  # float16 is subnormal below 2^-14
    count = 20_000
    rounded = round_rows(numbers.expand(count, -1).contiguous(), dtype).double()
    for k, number in enumerate(numbers.double()):
        low, high = rounded[:, k].unique()[[0, -1]]
        assert low <= number <= high
        assert high - low <= info.eps * max(abs(number), info.tiny), "not the neighbours"
        chance = (number - low) / (high - low) if high > low else torch.ones(())
        deviation = (chance * (1 - chance) / count) ** 0.5
        assert abs((rounded[:, k] == high).double().mean() - chance) <= 5 * deviation, float(number)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_16_bits_hold_stays(dtype):
    info = torch.finfo(dtype)
    exact = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact[0] = torch.tensor([0.0, info.max, info.min, 2**-14, -(2**-24), 1.0, -1.0, info.eps]).to(dtype)
    assert torch.equal(round_rows(exact.float(), dtype), exact)
    odd = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38 if dtype is torch.float16 else 3.4e38]])
    torch.testing.assert_close(round_rows(odd, dtype), odd.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_bits_of_steps_rows_columns_and_seeds_have_nothing_in_common():
    half = torch.full((400, 50), 1 + 2**-8)  # in the middle of two numbers of bfloat16
    flips = [round_rows(half, torch.bfloat16, step=step, seed=seed) > 1 for step, seed in [(1, 1), (2, 1), (1, 2)]]
    flips.append(flips[0].roll(1, 0))
    flips.append(flips[0].roll(1, 1))
    signs = torch.stack([x.flatten() for x in flips]).double() * 2 - 1
    correlations = signs @ signs.T / signs.shape[1] - torch.eye(len(flips))
    assert correlations.abs().max() < 5 / signs.shape[1] ** 0.5
    shifted = round_rows(half[100:], torch.bfloat16, step=1, first_row=100) > 1
    assert torch.equal(shifted, flips[0][100:])


@pytest.mark.parametrize("dtype", TYPES)
def test_small_updates_add_up_where_the_nearest_number_stays(dtype):
    """Each step is a 32nd of the distance between two numbers."""
    steps, rows, dim = 96, 40, 32
    change = torch.finfo(dtype).eps / 32
    weights = {}
    for stochastic in (False, True):
        torch.manual_seed(0)
        table = ShardedEmbedding(
            rows,
            dim,
            optimizer=SGD(lr=1.0),
            dtype=dtype,
            stochastic_rounding=stochastic,
            initialize=lambda x, generator: x.fill_(1.0),
        )
        for _ in range(steps):
            (table(torch.arange(rows)).float().sum() * -change).backward()
        weights[stochastic] = table.full_weight().double() - 1
    assert not weights[False].any()
    deviation = (steps * change * (32 * change) / (rows * dim)) ** 0.5  # at most: of a sum of independent steps
    assert abs(weights[True].mean() - steps * change) < 5 * deviation


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, n, (8, 2), generator=draw) for name, n in {"a": 23, "a2": 23, "b": 11, "c": 9}.items()}


def train(plan: str, dtype: torch.dtype, steps: range, load: Path | None = None, save: Path | None = None) -> dict[str, Tensor]:
    """Train with gradients whose sums are exact in any order."""
    torch.manual_seed(steps.start)
    collection = EmbeddingCollection(
        TABLES, plan=PLANS[plan], optimizer=RULES, dtype=dtype, stochastic_rounding=True, grad_reduce="sum"
    )
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if load:
        state = collection.state_dict()
        dcp.load(state, checkpoint_id=load)
        collection.load_state_dict(state)
    for step in steps:
        cuts = [0, *sorted((3 * step + 5 * r) % 9 for r in range(1, world)), 8]  # uneven, and some ranks have nothing
        found = collection({name: x[cuts[rank] : cuts[rank + 1]] for name, x in batch(step).items()})
        names = [name for name in found if name != "c" or step % 2]
        sum((found[name] * torch.arange(1, found[name].shape[1] + 1, dtype=dtype)).sum() for name in names).backward()
    if save:
        dcp.save(collection.state_dict(), checkpoint_id=save)
    return {name: collection.full_weight(name) for name in "abc"}


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_ranks_plan_or_checkpoints(ranks, tmp_path, dtype):
    first, second = range(4), range(4, 8)
    halfway, expected = train("row", dtype, first), train("row", dtype, range(8))
    runs = [(2, "column", first, None), (3, "mixed", second, 2), (3, "table", first, None), (4, "row", second, 3)]
    for world, plan, steps, loaded in runs:
        load = tmp_path / str(loaded) if loaded else None
        save = None if loaded else tmp_path / str(world)
        for found in ranks(train, plan, dtype, steps, load, save, world_size=world):
            for name, reference in (expected if loaded else halfway).items():
                assert torch.equal(found[name], reference), (world, plan, name)
