"""Rows split over ranks, and metrics by plain loops to compare with."""

import math
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

ROWS = {1: [[40]], 2: [[13, 27], [0, 40]], 3: [[9, 0, 31], [0, 40, 0]], 4: [[0, 6, 13, 21], [0, 0, 40, 0], [10] * 4]}


fuzz = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def same(got: float, expected: float) -> bool:
    return got == expected or (math.isnan(got) and math.isnan(expected))


@st.composite
def splits_of(draw: Any, row: Any) -> tuple[list[int], list[Any]]:
    """Rows of each rank, and all rows."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    return sizes, draw(st.lists(row, min_size=sum(sizes), max_size=sum(sizes)))


def own(sizes: list[int], rows: list[Any]) -> list[Any]:
    start = sum(sizes[: dist.get_rank()])
    return rows[start : start + sizes[dist.get_rank()]]


def plain_area(scores: list[float], labels: list[int]) -> float:
    """Every pair of a click and no click."""
    clicks, others = ([s for s, y in zip(scores, labels, strict=True) if y == label] for label in (1, 0))
    twice = sum(2 * (a > b) + (a == b) for a, b in product(clicks, others))
    return twice / (2 * len(clicks) * len(others)) if clicks and others else math.nan


def rows_of(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    labels = torch.rand(40, generator=generator) < 0.3
    scores = torch.randn(40, generator=generator, dtype=torch.float64) + labels
    if kind == "ties":
        scores = scores.round()  # has both zeros
    elif kind == "all ties":
        scores = torch.full_like(scores, -0.1)
    elif kind == "one class":
        labels = torch.ones_like(labels)
    elif kind == "infinite":
        scores[::3], scores[1::5] = torch.inf, -torch.inf
    return scores.to(dtype), labels


def plain_ranking(lists: list[list[int]], relevant: list[list[int]], ks: tuple[int, ...]) -> dict[str, float]:
    pairs = [(found, set(right)) for found, right in zip(lists, relevant, strict=True) if right]
    means: dict[str, float] = {}
    for k in ks:
        sums = dict.fromkeys(("recall", "ndcg", "hit", "precision", "mrr"), 0.0)
        for found, right in pairs:
            hits = [i for i, item in enumerate(found[:k]) if item in right]
            sums["recall"] += len(hits) / len(right)
            best = sum(1 / math.log2(i + 2) for i in range(min(k, len(right))))
            sums["ndcg"] += sum(1 / math.log2(i + 2) for i in hits) / best
            sums["hit"] += bool(hits)
            sums["precision"] += len(hits) / k
            sums["mrr"] += 1 / (hits[0] + 1) if hits else 0
        means |= {f"{name}@{k}": total / len(pairs) if pairs else math.nan for name, total in sums.items()}
    return means | {"users": float(len(pairs))}


LISTS = [[4, 2, 7], [1, 3, 5], [0, 9, -1], [-1, -1, -1], [6, 5, 4], [8, 0, 1], [2, 3, 4]]


RELEVANT = [[2, 9], [], [9, 9, 0], [1], [4, 6, 5, 1, 0], [7], [4]]
