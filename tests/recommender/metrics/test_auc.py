"""The metrics of click models are those of plain loops over all rows, on any number of ranks and any split."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.recommender.metrics.metric_cases import (
    ROWS,
    fuzz,
    own,
    plain_area,
    rows_of,
    same,
    splits_of,
)
from unisono.collectives import checked
from unisono.collectives.testing import run_ranks
from unisono_models.recommender.metrics.auc import _send_to_ranges, area_under_curve, click_metrics

AREAS = [
    *product(["random", "ties"], [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    *product(["all ties", "one class", "infinite"], [torch.float32]),
]


def areas(splits: list[list[int]]) -> list[float]:
    found = []
    for (kind, dtype), rows in product(AREAS, splits):
        scores, labels = (x.split(rows)[dist.get_rank()] for x in rows_of(kind, dtype))
        with checked():
            found.append(area_under_curve(scores, labels))
    return found


def test_area_matches_counting_pairs(ranks, world_size):
    splits = ROWS[world_size]
    expected = [plain_area(*(x.tolist() for x in rows_of(*case))) for case, _ in product(AREAS, splits)]
    for found in ranks(areas, splits, world_size=world_size):
        assert all(map(same, found, expected)), list(zip(found, expected, strict=True))


def area_of(sizes: list[int], rows: list[tuple[float, int]]) -> float:
    mine = own(sizes, rows)
    return area_under_curve(torch.tensor([s for s, _ in mine], dtype=torch.float64), torch.tensor([y for _, y in mine]))


@fuzz
@given(splits_of(st.tuples(st.integers(-4, 4) | st.floats(allow_nan=False), st.integers(0, 1))))
def test_area_of_random_rows_matches_counting_pairs(case):
    sizes, rows = case
    expected = plain_area([s for s, _ in rows], [y for _, y in rows])
    assert all(same(found, expected) for found in run_ranks(area_of, sizes, rows, world_size=len(sizes)))


def received(skewed: bool, tied: bool) -> int:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    scores = torch.randn(20000 * (rank == 1) if skewed else 5000, generator=generator).sort().values
    scores = torch.zeros(1) if tied else scores + rank
    return len(_send_to_ranges(scores, torch.ones(len(scores), 2, dtype=torch.int64), None)[0])


def test_no_rank_holds_all_scores(ranks):
    for skewed in (False, True):
        found = ranks(received, skewed, False, world_size=4)
        assert sum(found) == 20000 and max(found) <= 5000 * (1 + 6 / 256) + 4
    assert sorted(ranks(received, False, True, world_size=4)) == [0, 0, 0, 4]


def plain_clicks(logits: list[float], labels: list[int]) -> dict[str, float]:
    chances = [1 / (1 + math.exp(-x)) for x in logits]
    losses = [-math.log(p if y else 1 - p) for p, y in zip(chances, labels, strict=True)]
    right = [(p > 0.5) == bool(y) for p, y in zip(chances, labels, strict=True)]
    means = {"log_loss": losses, "accuracy": right, "rate": labels, "predicted_rate": chances}
    found = {name: math.fsum(x) / len(x) for name, x in means.items()}
    return {"auc": plain_area(logits, labels), **found, "rows": float(len(labels))}


def clicks_of(splits: list[list[int]], dtype: torch.dtype) -> list[dict[str, float]]:
    whole = rows_of("random", dtype)
    return [click_metrics(*(x.split(rows)[dist.get_rank()] for x in whole)) for rows in splits]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_click_metrics_match_plain_formulas(ranks, world_size, dtype):
    logits, labels = rows_of("random", dtype)
    expected = plain_clicks(logits.tolist(), labels.int().tolist())
    results = ranks(clicks_of, ROWS[world_size], dtype, world_size=world_size)
    assert all(result == results[0] for result in results)  # the same bits
    for found in results[0]:
        assert list(found) == list(expected) and found == pytest.approx(expected, rel=1e-12)
        assert all(type(value) is float for value in found.values())
        assert found["auc"] == expected["auc"]


def test_log_loss_of_large_logits_is_precise():
    found = click_metrics(torch.tensor([-800.0, 30.0, torch.inf], dtype=torch.float64), torch.tensor([1, 1, 1]))
    assert found["log_loss"] == pytest.approx((800 + math.exp(-30)) / 3, rel=1e-15)
    right = click_metrics(torch.tensor([30.0, torch.inf, -torch.inf]), torch.tensor([1, 1, 0]))
    assert right["log_loss"] == pytest.approx(math.exp(-30) / 3, rel=1e-12)
